"""The simulated transport: bytes land one item at a time, in any order, late, or never.

A read returns what is at the address when the item lands. So if a producer restarts and its
connection does not break, the read returns memory of the new incarnation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from kvferry.core.errors import PeerLostError, TransferCancelledError, TransportError
from kvferry.core.lifecycle.load_machine import LoadAction
from kvferry.core.messages import Note
from kvferry.core.transport import State

T = TypeVar("T")


class ProtocolViolation(AssertionError):
    """The protocol was broken.

    Args:
        what: the invariant that does not hold.
        details: what it does not hold for.
    """

    def __init__(self, what: str, *details: object) -> None:
        super().__init__(" ".join((what, *map(str, details))))
        self.what = what


def require(holds: bool, what: str, *details: object) -> None:
    if not holds:
        raise ProtocolViolation(what, *details)


class Components:
    """The classes that a simulation is made of; a planted fault replaces one of them.

    Without ``strict``, nothing is compared with the protocol table.
    """

    def __init__(
        self, original: type | None = None, planted: type | None = None, *, strict: bool = True
    ) -> None:
        self._original, self._planted, self.strict = original, planted, strict

    def of(self, original: type[T]) -> type[T]:
        """Return the class to use in place of this one."""
        return cast(type[T], self._planted) if original is self._original else original


class Content(NamedTuple):
    """The content of a page."""

    owner: int  # the request that computed it
    number: int  # its index
    final: bool  # whether the request's steps, and its drafter, are over with it
    # Whether it has the token that a step under way computes when an answer has ended.
    late: bool = False
    weights: int = 0  # the version of the weights that computed it


@dataclass(slots=True, eq=False)
class Link:
    broken: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Message:
    """A notification on its way to a rank of engine ``to``.

    ``origin`` is the consumer's request that caused it. Real messages do not have that; the
    checks need it to know which request ended a hold.
    """

    sender: str
    to: str
    rank: int
    note: Note
    origin: int


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """A read of one or more items from one producer rank."""

    op: LoadAction | None  # the action that it performs; ``None`` for a renewal
    link: Link
    rank: int
    load: Any  # the load, or renewal, that it serves
    items: list[Any]  # the items that have not landed
    take: Callable[[Any, int], None]  # reads one item from the producer rank that runs now
    word: int = 0  # the slot word that has landed
    message: Message | None = None  # the notification that is bound to it
    state: State = State.PENDING
    error: TransportError | None = None
    cancelled: bool = False


class Fabric:
    """All transfers and notifications under way.

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
        """Let one item land, or let a failing or cancelled transfer end."""
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
        """Let a transfer fail; with ``failing``, it is ``FAILING`` and bytes may still land."""
        transfer.error = transfer.error or error
        if failing:
            transfer.state = State.FAILING
        else:
            self._finish(transfer, State.FAILED)

    def sever(self, link: Link, *, failing: bool = False) -> None:
        link.broken = True
        for transfer in [t for t in self.transfers if t.link is link]:
            self.fail(transfer, PeerLostError("the producer is gone"), failing=failing)

    def drop(self, transfer: Transfer) -> None:
        if transfer in self.transfers:
            self.transfers.remove(transfer)

    def _finish(self, transfer: Transfer, state: State) -> None:
        transfer.state = state
        self.transfers.remove(transfer)
        if state is State.DONE and transfer.message is not None:
            self.messages.append(transfer.message)
