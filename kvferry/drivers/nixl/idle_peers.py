"""Peers that were disconnected in good order, and that NIXL goes on knowing (ADR 21)."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvferry.core.errors import ConnectError
from kvferry.drivers.nixl.agent import Agent
from kvferry.drivers.nixl.peer import NixlPeer

MAX_IDLE = 64


class IdlePeers:
    """The ``MAX_IDLE`` peers that were disconnected last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, NixlPeer] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, peer: NixlPeer) -> None:
        """Keep a peer whose transfers all ended well.

        NIXL would close neither end's sockets while both processes live, whatever it is told: each
        time that it forgets a peer and loads it again, both processes have some more of them.
        """
        with self._lock:
            self._peers[peer.name] = peer
            if len(self._peers) > MAX_IDLE:
                self._peers.popitem(last=False)[1].remove_remote()

    def connect(self, peer: NixlPeer, agent: Agent) -> None:
        """Let an agent load a peer, which may be an idle one and is none any more.

        Raises:
            ConnectError: NIXL does not take it; nothing of it is left.
        """
        with self._lock:
            known = self._peers.pop(peer.name, None)
            if known is not None:
                if not known.keys <= peer.keys:
                    known.remove_remote()
                # The agents know it and load it again: NIXL may have dropped it meanwhile.
                peer.loaded.update(dict.fromkeys(known.loaded, frozenset()))
            try:
                peer.load_metadata(agent)
            except ConnectError:
                peer.remove_remote()
                raise

    def clear(self) -> None:
        """Let NIXL forget all of them."""
        with self._lock:
            while self._peers:
                self._peers.popitem()[1].remove_remote()
