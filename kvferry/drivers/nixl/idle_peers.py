"""Peers that were disconnected without a failure, and whose metadata NIXL keeps loaded (ADR 18)."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvferry.core.errors import ConnectError
from kvferry.drivers.nixl.agent import Agent
from kvferry.drivers.nixl.peer import NixlPeer

MAX_IDLE = 64
"""The most idle peers of a transport."""


class IdlePeers:
    """The last peers that were disconnected without a failure. Threads may share it."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, NixlPeer] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, peer: NixlPeer) -> None:
        """Keep a disconnected peer known to NIXL, in place of the oldest if there are too many."""
        with self._lock:
            self._peers[peer.name] = peer
            if len(self._peers) > MAX_IDLE:
                self._peers.popitem(last=False)[1].remove_remote()

    def connect(self, peer: NixlPeer, agent: Agent) -> None:
        """Have an agent load a peer's metadata. After a ``ConnectError`` no agent knows it."""
        with self._lock:
            known = self._peers.pop(peer.name, None)
            if known is not None:
                if not known.keys <= peer.keys:
                    # NIXL adds spans to a known peer, but does not remove any.
                    known.remove_remote()
                # The agents know the peer, but load its metadata again: NIXL may have dropped the
                # peer meanwhile.
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
