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
    """A peer: what its last address says, and the state of its connection.

    A *span* is a range of the peer's memory that is registered with NIXL, and its *key* a number
    that changes when the range is registered anew (see ``registrations``).

    Attributes:
        name: the name of the peer's transport, and of its NIXL agent.
        itself: whether the peer is this transport; NIXL then needs no metadata.
        regions: the regions that the peer has registered, according to its last address.
        metadata: the metadata of the peer's agent, which NIXL reads.
        connections: the data for connecting to the peer's agent, by NIXL's names of backends; empty
            if NIXL writes metadata in a format that this driver cannot read.
        keys: the keys of the spans in ``metadata``.
        loaded: for each agent of this side that has loaded metadata of the peer, the keys of the
            spans that were in the metadata it loaded last.
        lost: whether NIXL has dropped the peer, as it does when the connection breaks.
        failed: whether a transfer with the peer has failed.
        prepared: the descriptors that NIXL has prepared for reads from the peer by pages.
    """

    name: str
    itself: bool
    regions: Collection[Region] = frozenset()
    metadata: bytes = b""
    connections: Mapping[str, bytes] = field(default_factory=dict)
    keys: frozenset[int] = frozenset()
    loaded: dict[Agent, frozenset[int]] = field(default_factory=dict)
    lost: bool = False
    failed: bool = False
    prepared: PreparedStrips = field(default_factory=PreparedStrips)

    @property
    def identity(self) -> Hashable:
        """The peer's name, by which NIXL knows agents."""
        return self.name

    def load_metadata(self, agent: Agent) -> None:
        """Have an agent of this side load ``metadata``.

        Does nothing if the metadata that the agent loaded last has the same spans, or if the peer
        is this transport.

        Raises:
            ConnectError: NIXL refuses the metadata, or it is the metadata of another agent.
        """
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
        """Record that NIXL has dropped the peer, so that no transfer with it is prepared.

        Does nothing if the peer is this transport: NIXL never drops its own agent.
        """
        self.lost = not self.itself

    def remove_remote(self) -> list[TransportError]:
        """Have all agents of this side forget the peer, which closes their connections to it.

        Returns:
            The errors of the agents that did not forget the peer; empty if all did.
        """
        failed = self.prepared.release()
        for agent in self.loaded:
            try:
                agent.remove(self.name)
            except TransportError as exc:
                failed.append(exc)
        self.loaded.clear()
        return failed


def check_backend(theirs: NixlAddress, backend: str) -> None:
    """Refuse a peer whose agent has another backend than this side's.

    Args:
        theirs: the peer's address.
        backend: NIXL's name of the backend of this side.

    Raises:
        ConnectError: the backends differ.
    """
    if theirs.backend != backend:
        raise ConnectError(
            f"{theirs.name} has NIXL backend {theirs.backend}, and this side {backend}: both need "
            "the same (driver_options: backend)"
        )
