"""A peer, which of its metadata NIXL's agents have loaded, and idle peers that NIXL still knows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.agent import Agent
from kvferry.drivers.nixl.descriptor_lists import PreparedStrips

MAX_IDLE = 64
"""The most idle peers of a transport."""


@dataclass(slots=True, kw_only=True, eq=False)
class NixlPeer:
    """A peer: what its last address says, and the state of its connection."""

    name: str
    itself: bool  # this transport, of which NIXL needs no metadata
    regions: Collection[Region] = frozenset()
    metadata: bytes = b""
    # How the agent is reached; empty if this driver does not know the format of the metadata.
    connection: bytes = b""
    keys: frozenset[int] = frozenset()  # of the spans in ``metadata``
    # The keys of the spans in the metadata that each agent loaded last.
    loaded: dict[Agent, frozenset[int]] = field(default_factory=dict)
    lost: bool = False  # NIXL drops a peer when the connection breaks
    failed: bool = False  # whether a transfer with the peer has failed
    prepared: PreparedStrips = field(default_factory=PreparedStrips)

    @property
    def identity(self) -> str:
        """The peer's name, by which NIXL knows agents."""
        return self.name

    def load_metadata(self, agent: Agent) -> None:
        """Have an agent load ``metadata`` unless it has the spans; ``ConnectError`` if refused."""
        if self.itself or self.loaded.get(agent) == self.keys:
            return
        self.prepared.release()
        try:
            name = agent.add(self.metadata)
        except TransportError as exc:
            if agent not in self.loaded:
                # NIXL may have loaded a part, and would then refuse other metadata of this name.
                agent.remove(self.name)
            raise ConnectError(f"NIXL does not connect to {self.name}: {exc}") from exc
        if name != self.name:
            raise ConnectError(f"an address of {self.name} that holds NIXL's metadata of {name}")
        self.loaded[agent] = self.keys

    def mark_lost(self) -> None:
        """Record that NIXL has dropped the peer, unless it is this transport, which NIXL keeps."""
        self.lost = not self.itself

    def remove_remote(self) -> None:
        """Close all agents' connections to the peer."""
        self.prepared.release()
        for agent in self.loaded:
            agent.remove(self.name)
        self.loaded.clear()


class IdlePeers:
    """The last peers that were disconnected without a failure. Threads may share it.

    NIXL keeps their metadata: to forget a peer and load it again leaks descriptors (ADR 18).
    """

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
