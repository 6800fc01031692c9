"""What the model's decode engine knows of its requests: its scheduler, its ranks, and the world."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.loads import RemoteRank
from kvferry.core.lifecycle.ticket import Ticket
from tests.core.lifecycle.fabric import Content, Link, Transfer
from tests.core.lifecycle.producer import PAGES, Issue, tokens_digest
from tests.core.proving import altered

STALE = "stale"
LATE = "late"


class Stage(enum.Enum):
    """Where a request stands in its scheduler."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    ABORTED = enum.auto()
    READY = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Decode:
    """A request to the decode engine, with a ticket.

    Attributes:
        cached: how many leading pages are there already; if all, nothing is read.
        prompt_fits: whether it is the prompt that the ticket is about.
        forged: whether its ticket names other pages than the producer's.
        sample: whether more requests with its ticket may be on their way, unknown to the scheduler.
        pulls: rank to its part, where the rank has heard of it.
    """

    uid: int
    id: RequestId
    issue: Issue
    cached: int
    prompt_fits: bool
    forged: bool = False
    sample: bool = False
    stage: Stage = Stage.WAITING
    pages: tuple[int, ...] = ()
    reports: dict[int, KVFerryError | None] = field(default_factory=dict)
    pulls: dict[int, Pull] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        tokens = self.issue.prompt.tokens
        return tokens if self.prompt_fits else [*tokens[:-1], -1]

    @property
    def ticket(self) -> Ticket:
        """The ticket that it came with."""
        ticket = self.issue.ticket
        if not self.forged:
            return ticket
        others = tuple(tuple(page % PAGES + 1 for page in ids) for ids in ticket.pages)
        return altered(ticket, pages=others)

    @property
    def admitted(self) -> bool:
        """Whether its scheduler finds that the ticket is about this prompt."""
        return tokens_digest(self.tokens) == self.issue.ticket.digest


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """One rank's part of a request: what the world knows of a load.

    Attributes:
        pulling: whether pages are read, and the outcome reported; if not, the producer is told.
        shared: whether nobody is told anything about it.
        wants: destination page and source page and what must come to lie there.
        causes: why it must fail, in order: errors that it was told, or ``STALE``, ``LATE``.
        reads: producer rank to the transfer of its pages.
        told: producer ranks that were told by a message of its own, not one bound to a fence.
    """

    request: Decode
    pulling: bool
    shared: bool
    deadline: float
    wants: list[tuple[int, int, Content]]
    parties: tuple[RemoteRank, ...] = ()
    link: Link | None = None
    causes: list[KVFerryError | str] = field(default_factory=list)
    reads: dict[int, Transfer] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """What the ranks are to do about a request whose ticket was accepted.

    Attributes:
        pulling: whether its pages are read; if not, the producer is told, unless it is shared.
        shared: whether the producer is told nothing.
        prepared: whether the ranks have heard of the request before; not of a "done" that is
            ordered by itself.
    """

    request: Decode
    pulling: bool
    shared: bool
    prepared: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class Meta:
    """A step's metadata, what the ranks hear, and what they report with it."""

    prepares: list[Decode]
    begins: list[Order]
    aborts: list[Decode]
    refusals: list[tuple[Decode, KVFerryError]]
    outputs: dict[int, list[tuple[Decode, KVFerryError | None]]] = field(default_factory=dict)
