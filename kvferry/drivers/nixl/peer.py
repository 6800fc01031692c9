"""A peer, and letting NIXL get to know it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.address import Address
from kvferry.drivers.nixl.agent import Agent


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """A peer that is connected.

    Attributes:
        name: its transport's, and its agent's.
        itself: whether it is this very transport, which NIXL knows without being told.
        regions: what it has registered, as far as is known.
        keys: of its spans that NIXL has been told of since it was connected.
        lost: whether NIXL has dropped it.
    """

    name: str
    itself: bool
    regions: frozenset[Region]
    keys: frozenset[int]
    lost: bool = False


def check_backend(theirs: Address, backend: str) -> None:
    """Refuse a peer that no connection can lead to.

    Raises:
        ConnectError: it has another backend.
    """
    if theirs.backend != backend:
        raise ConnectError(
            f"{theirs.name} has NIXL backend {theirs.backend}, and this side {backend}: both need "
            "the same (driver_options: backend)"
        )


def load(agent: Agent, theirs: Address) -> None:
    """Let NIXL get to know a peer, or what it has registered since.

    Raises:
        ConnectError: it does not take the metadata, or this is another's.
    """
    try:
        name = agent.add(theirs.metadata)
    except TransportError as exc:
        raise ConnectError(f"NIXL does not connect to {theirs.name}: {exc}") from exc
    if name != theirs.name:
        agent.remove(name)
        raise ConnectError(f"an address of {theirs.name} that holds NIXL's metadata of {name}")
