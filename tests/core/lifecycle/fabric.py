"""The model's transport: bytes land one item at a time, in any order, late, or never.

A read sees whatever lies at the address when the item lands, so a producer that was restarted under
a connection that did not break answers with its new life's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvferry.core.errors import PeerLostError, TransferCancelledError, TransportError
from kvferry.core.lifecycle.loads import LoadAction, LoadId
from kvferry.core.transport import State


class Violation(AssertionError):
    """The protocol was broken."""


def require(holds: bool, what: str, *details: object) -> None:
    """Raise ``Violation`` unless ``holds``."""
    if not holds:
        raise Violation(" ".join((what, *map(str, details))))


class Content(NamedTuple):
    """What a page holds: which request computed it, which of its pages, and whether all of it."""

    owner: int
    number: int
    final: bool


@dataclass(slots=True, eq=False)
class Link:
    """A consumer rank's connection to the producer."""

    broken: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Message:
    """A notification on its way to a producer rank.

    ``origins`` names, per release in it, the consumer's request that it is about: the wire does
    not, and the model wants to know who ended a hold.
    """

    sender: str
    rank: int
    payload: bytes
    origins: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """A read of one or more items from one producer rank.

    Attributes:
        op: what it is for; ``None`` for a renewal.
        wanted: the loads that still want it; it is cancelled when nobody does.
        loads: all loads that it serves, or renewals.
        items: what has not landed.
        take: reads one item from the producer rank that lives there now.
        words: the slot words that have landed, by what they were read for.
        message: bound to it.
    """

    op: LoadAction | None
    link: Link
    rank: int
    loads: tuple[Any, ...]
    items: list[Any]
    take: Callable[[Any, int], None]
    words: dict[Any, int] = field(default_factory=dict)
    message: Message | None = None
    wanted: set[Any] = field(init=False)
    state: State = State.PENDING
    error: TransportError | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.wanted = set(self.loads)

    def cancel(self, load: LoadId) -> None:
        """One load wants it no more."""
        self.wanted.discard(load)
        self.cancelled = not self.wanted


class Fabric:
    """Everything that is on its way.

    Attributes:
        transfers: those that are not final.
        messages: those that have not arrived.
    """

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.messages: list[Message] = []

    def post(self, transfer: Transfer) -> None:
        """Start a transfer. Raises ``PeerLostError`` where the link is broken."""
        if transfer.link.broken:
            raise PeerLostError("the connection is broken")
        self.transfers.append(transfer)
        if not transfer.items:
            self._finish(transfer, State.DONE)

    def land(self, transfer: Transfer, pick: int) -> None:
        """One item lands, or a transfer that must end ends."""
        failing = transfer.state is State.FAILING
        if failing and (pick % 2 or not transfer.items):
            self._finish(transfer, State.FAILED)
        elif transfer.cancelled and pick % 2:
            self.fail(transfer, TransferCancelledError("cancelled"))
        else:
            transfer.take(transfer.items.pop(pick % len(transfer.items)), transfer.rank)
            if not transfer.items and not failing:
                self._finish(transfer, State.DONE)

    def fail(self, transfer: Transfer, error: TransportError, *, failing: bool = False) -> None:
        """It fails; ``failing``: not yet quiet."""
        transfer.error = transfer.error or error
        if failing:
            transfer.state = State.FAILING
        else:
            self._finish(transfer, State.FAILED)

    def sever(self, link: Link, *, failing: bool = False) -> None:
        """A connection breaks, and what is under way on it fails."""
        link.broken = True
        for transfer in [t for t in self.transfers if t.link is link]:
            self.fail(transfer, PeerLostError("the producer is gone"), failing=failing)

    def drop(self, transfer: Transfer) -> None:
        """Its process is gone, and so is the transfer."""
        if transfer in self.transfers:
            self.transfers.remove(transfer)

    def _finish(self, transfer: Transfer, state: State) -> None:
        transfer.state = state
        self.transfers.remove(transfer)
        if state is State.DONE and transfer.message is not None:
            self.messages.append(transfer.message)
