"""Peers that were disconnected without a failure, and that NIXL keeps loaded (ADR 21)."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvferry.core.errors import ConnectError
from kvferry.drivers.nixl.agent import Agent
from kvferry.drivers.nixl.peer import NixlPeer

MAX_IDLE = 64


class IdlePeers:
    """The last ``MAX_IDLE`` peers that were disconnected. Several threads may use it at once."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, NixlPeer] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, peer: NixlPeer) -> None:
        """Keep a peer whose transfers all ended well; forget the oldest if there are too many.

        Forgetting a peer at once would leak: NIXL closes its sockets on neither side while both
        processes live, so each time it forgets a peer and loads it again, both have some more.
        """
        with self._lock:
            self._peers[peer.name] = peer
            if len(self._peers) > MAX_IDLE:
                self._peers.popitem(last=False)[1].remove_remote()

    def connect(self, peer: NixlPeer, agent: Agent) -> None:
        """Have an agent load a peer's metadata. If the peer was idle, it no longer is.

        Raises:
            ConnectError: NIXL refuses the metadata; all agents have forgotten the peer.
        """
        with self._lock:
            known = self._peers.pop(peer.name, None)
            if known is not None:
                if not known.keys <= peer.keys:
                    known.remove_remote()
                # The agents know the peer, but load it again: NIXL may have dropped it meanwhile.
                peer.loaded.update(dict.fromkeys(known.loaded, frozenset()))
            try:
                peer.load_metadata(agent)
            except ConnectError:
                peer.remove_remote()
                raise

    def clear(self) -> None:
        """Have NIXL forget all idle peers."""
        with self._lock:
            while self._peers:
                self._peers.popitem()[1].remove_remote()
