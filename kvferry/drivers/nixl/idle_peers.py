"""Peers that were disconnected while all was well, and that NIXL goes on knowing (ADR 21)."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvferry.core.errors import ConnectError
from kvferry.drivers.nixl.agent import Agent
from kvferry.drivers.nixl.peer import NixlPeer

MAX_PARKED = 64


class IdlePeers:
    """The last few of them. Whoever connects or disconnects may do so beside other calls."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, NixlPeer] = OrderedDict()
        self._lock = threading.Lock()

    def park(self, peer: NixlPeer) -> None:
        """Let NIXL go on knowing a peer with which all is well.

        While both ends live, NIXL closes neither end's sockets, whatever it is told: each time that
        it forgets a peer and gets to know it again, both processes have some more of them.
        """
        with self._lock:
            self._peers[peer.name] = peer
            if len(self._peers) > MAX_PARKED:
                self._peers.popitem(last=False)[1].part()

    def meet(self, peer: NixlPeer, agent: Agent) -> None:
        """Let an agent get to know a peer, which may be one of these; it is none any more.

        Raises:
            ConnectError: NIXL does not take it, and knows nothing of it.
        """
        with self._lock:
            known = self._peers.pop(peer.name, None)
            if known is not None:
                if not known.keys <= peer.keys:
                    known.part()
                # They know it, and are told again: NIXL may have dropped it meanwhile.
                peer.told.update(dict.fromkeys(known.told, frozenset()))
            try:
                peer.tell(agent)
            except ConnectError:
                peer.part()
                raise

    def clear(self) -> None:
        """Let NIXL forget them all."""
        with self._lock:
            while self._peers:
                self._peers.popitem()[1].part()
