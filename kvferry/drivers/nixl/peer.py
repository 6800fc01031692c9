"""A peer, and which of its metadata NIXL's agents have loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.address import NixlAddress
from kvferry.drivers.nixl.agent import Agent
from kvferry.drivers.nixl.prepared_strips import PreparedStrips


@dataclass(slots=True, kw_only=True, eq=False)
class NixlPeer:
    """A peer: what its last address says, and the state of its connection."""

    name: str
    itself: bool  # this transport, of which NIXL needs no metadata
    regions: Collection[Region] = frozenset()
    metadata: bytes = b""
    # By backend; empty if NIXL writes metadata in a format that this driver cannot read.
    connections: Mapping[str, bytes] = field(default_factory=dict)
    keys: frozenset[int] = frozenset()  # of the spans in ``metadata``
    # The keys of the spans in the metadata that each agent loaded last.
    loaded: dict[Agent, frozenset[int]] = field(default_factory=dict)
    lost: bool = False  # NIXL drops a peer when the connection breaks
    failed: bool = False  # whether a transfer with the peer has failed
    prepared: PreparedStrips = field(default_factory=PreparedStrips)

    @property
    def identity(self) -> Hashable:
        """The peer's name, by which NIXL knows agents."""
        return self.name

    def load_metadata(self, agent: Agent) -> None:
        """Have an agent load ``metadata`` unless it has the spans; ``ConnectError`` if refused."""
        if self.itself or self.loaded.get(agent) == self.keys:
            return
        try:
            self.prepared.release()
            name = agent.add(self.metadata)
        except TransportError as exc:
            if agent not in self.loaded:
                # NIXL may have loaded a part, and would then refuse other metadata of this name.
                with contextlib.suppress(TransportError):
                    agent.remove(self.name)
            raise ConnectError(f"NIXL does not connect to {self.name}: {exc}") from exc
        if name != self.name:
            raise ConnectError(f"an address of {self.name} that holds NIXL's metadata of {name}")
        self.loaded[agent] = self.keys

    def mark_lost(self) -> None:
        """Record that NIXL has dropped the peer, unless it is this transport, which NIXL keeps."""
        self.lost = not self.itself

    def remove_remote(self) -> list[TransportError]:
        """Close all agents' connections to the peer; return the errors of those that did not."""
        failed = self.prepared.release()
        for agent in self.loaded:
            try:
                agent.remove(self.name)
            except TransportError as exc:
                failed.append(exc)
        self.loaded.clear()
        return failed


def check_backend(theirs: NixlAddress, backend: str) -> None:
    """Refuse, by ``ConnectError``, a peer whose agent has another backend than this side's."""
    if theirs.backend != backend:
        raise ConnectError(
            f"{theirs.name} has NIXL backend {theirs.backend}, and this side {backend}: both need "
            "the same (driver_options: backend)"
        )
