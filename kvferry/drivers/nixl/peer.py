"""A peer, and letting NIXL's agents get to know it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.address import NixlAddress
from kvferry.drivers.nixl.agent import Agent


@dataclass(slots=True, kw_only=True, eq=False)
class NixlPeer:
    """A peer that is connected.

    Attributes:
        name: its transport's, and its agent's.
        itself: whether it is this very transport, which NIXL knows without being told.
        regions: what it has registered, as far as is known.
        metadata: its agent's, which NIXL reads.
        connections: by NIXL's backends, how its agent is reached; empty if that cannot be read.
        keys: of the spans in it.
        told: of which spans each agent of ours has been told since it was connected.
        lost: whether NIXL has dropped it.
        failed: whether a transfer with it has.
    """

    name: str
    itself: bool
    regions: frozenset[Region] = frozenset()
    metadata: bytes = b""
    connections: Mapping[str, bytes] = field(default_factory=dict)
    keys: frozenset[int] = frozenset()
    told: dict[Agent, frozenset[int]] = field(default_factory=dict)
    lost: bool = False
    failed: bool = False

    def tell(self, agent: Agent) -> None:
        """Let an agent get to know it, or what it has registered since.

        Raises:
            ConnectError: NIXL does not take the metadata, or it is another's. Whoever else it
                names is still known.
        """
        if self.itself or self.told.get(agent) == self.keys:
            return
        try:
            name = agent.add(self.metadata)
        except TransportError as exc:
            if agent not in self.told:
                # It may have got half of it, and would take nothing else of this name.
                with contextlib.suppress(TransportError):
                    agent.remove(self.name)
            raise ConnectError(f"NIXL does not connect to {self.name}: {exc}") from exc
        if name != self.name:
            raise ConnectError(f"an address of {self.name} that holds NIXL's metadata of {name}")
        self.told[agent] = self.keys

    def lose(self) -> None:
        """NIXL has dropped it, which it does not do with itself: then only memory is gone."""
        self.lost = not self.itself

    def part(self) -> list[TransportError]:
        """Let all agents forget it, which closes their connections; what went wrong."""
        failed = []
        for agent in self.told:
            try:
                agent.remove(self.name)
            except TransportError as exc:
                failed.append(exc)
        self.told.clear()
        return failed


def check_backend(theirs: NixlAddress, backend: str) -> None:
    """Refuse a peer that no connection can lead to.

    Raises:
        ConnectError: it has another backend.
    """
    if theirs.backend != backend:
        raise ConnectError(
            f"{theirs.name} has NIXL backend {theirs.backend}, and this side {backend}: both need "
            "the same (driver_options: backend)"
        )
