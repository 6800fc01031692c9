"""A peer, and what NIXL's agents know of it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Mapping
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
        regions: the regions that it has registered, as far as this side knows.
        metadata: the metadata of its agent, which NIXL reads.
        connections: how its agent is reached, by the names of NIXL's backends; empty if the
            metadata cannot be read without NIXL.
        keys: the keys of the spans in the metadata.
        loaded: the keys of the spans that each agent of this side has loaded.
        lost: whether NIXL has dropped it.
        failed: whether a transfer with it has failed.
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

    @property
    def identity(self) -> Hashable:
        """The name: NIXL knows agents by it."""
        return self.name

    def load_metadata(self, agent: Agent) -> None:
        """Let an agent load the metadata, unless it has.

        Raises:
            ConnectError: NIXL does not take the metadata, or it is another peer's, whom the agent
                still knows as before.
        """
        if self.itself or self.loaded.get(agent) == self.keys:
            return
        try:
            name = agent.add(self.metadata)
        except TransportError as exc:
            if agent not in self.loaded:
                # It may have got half of it, and would take nothing else of this name.
                with contextlib.suppress(TransportError):
                    agent.remove(self.name)
            raise ConnectError(f"NIXL does not connect to {self.name}: {exc}") from exc
        if name != self.name:
            raise ConnectError(f"an address of {self.name} that holds NIXL's metadata of {name}")
        self.loaded[agent] = self.keys

    def mark_lost(self) -> None:
        """Remember that NIXL has dropped the peer.

        It does not drop itself: then only memory is gone.
        """
        self.lost = not self.itself

    def remove_remote(self) -> list[TransportError]:
        """Let all agents forget the peer, which closes their connections.

        Returns:
            What went wrong.
        """
        failed = []
        for agent in self.loaded:
            try:
                agent.remove(self.name)
            except TransportError as exc:
                failed.append(exc)
        self.loaded.clear()
        return failed


def check_backend(theirs: NixlAddress, backend: str) -> None:
    """Refuse a peer whose agent has another backend than this side's.

    Raises:
        ConnectError: it has.
    """
    if theirs.backend != backend:
        raise ConnectError(
            f"{theirs.name} has NIXL backend {theirs.backend}, and this side {backend}: both need "
            "the same (driver_options: backend)"
        )
