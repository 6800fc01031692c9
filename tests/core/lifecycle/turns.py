"""The requests of simulated engines, and what is passed on about them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import EndedHold, Hold, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.silent_holds import Silence
from kvferry.core.lifecycle.ticket import Ticket
from tests.core.lifecycle.fabric import Content

if TYPE_CHECKING:
    from tests.core.lifecycle.engine import Engine

PAGES = 4
"""Blocks of each engine's cache, without the null block."""
BLOCK = 4
"""Tokens of a block."""
LEASE = 10.0
TTL = 15.0
"""How long a conversation's hold is kept until it is claimed; longer than a lease."""
LOAD_TIMEOUT = 25.0
"""Longer than a lease, so that holds of waiting loads need renewal."""
PATIENCE = LEASE / 2
"""Seconds that a request waits for host pages."""

STALE = "stale"
LATE = "late"
"""Why a load must fail, where the error is made by the load itself."""
ABORTED = "aborted"


class Leaves(enum.Enum):
    """What is held when a request has ended."""

    NOTHING = "nothing"
    PROMPT = "prompt"
    ANSWER = "answer"
    """If a step more was scheduled when it ends, its ticket covers the token of that step, too."""


class Stage(enum.Enum):
    """The state of a request in its engine's scheduler; ``ABORTED`` means while it was loading."""

    WAITING = "waiting"
    LOADING = "loading"
    ABORTED = "aborted"
    RUNNING = "running"
    HELD = "held"
    OVER = "over"


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """A request."""

    uid: int  # unique in a run; values of ``id`` are reused
    id: RequestId
    size: int  # how many blocks it needs
    chunks: int = 1  # how many steps it takes
    leaves: Leaves = Leaves.NOTHING
    # Whether a drafter writes the blocks of each step again, after its results.
    drafter: bool = False
    errs: bool = False  # whether it ends with an error, so that nothing is held
    # The ticket with which it came, or its newest part; ``None`` if all is computed.
    source: Issue | None = None
    fits: bool = True  # whether it has the prompt that the ticket is about
    forged: bool = False  # whether its ticket names other blocks than the producer's
    # Whether more requests with its ticket may be on their way, unknown to the scheduler.
    sample: bool = False
    # The request of the producer whose parts it loads, while that one is computed.
    follows: Turn | None = None
    heard: Issue | str | None = None  # what was heard last of that
    news: Issue | str | None = None  # the same until it is used
    is_last: bool = True  # whether ``source`` is the ticket, not a part of it
    stage: Stage = Stage.WAITING
    epoch: int = 0
    chunk: int = 0
    late: bool = False  # whether a step was under way when it ended, which computes its last token
    loaded: int = 0  # how many of its blocks hold what was loaded
    weights: int = 0  # the version of the weights that compute the others
    pages: tuple[int, ...] = ()
    host: tuple[int, ...] = ()
    """The host pages to which it loads, where the cache is staged."""
    hold: Hold | None = None
    # Its ticket, or newest part, or ``ABORTED``: what its followers hear.
    part: Issue | str | None = None
    # Each rank's report of its load.
    outcomes: dict[int, KVFerryError | None] = field(default_factory=dict)

    @property
    def has_news(self) -> bool:
        """Return whether there is more to hear of the request that it follows."""
        return self.follows is not None and self.follows.part is not self.heard

    @property
    def wanted(self) -> int:
        """Return how many of its blocks its ticket covers."""
        if self.source is None:
            return 0
        return min(self.size, self.source.turn.size)

    def contents(self) -> list[Content]:
        """Return what its blocks contain when everything is computed."""
        source = self.source.contents if self.source is not None else ()
        own = [Content(self.uid, i, final=True, weights=self.weights) for i in range(self.size)]
        all_ = [*source[: self.loaded], *own[self.loaded :]]
        return [*all_[:-1], all_[-1]._replace(late=self.late or all_[-1].late)]

    def next_chunk(self) -> Work:
        """Return the work of the next step: what is not loaded, or a token more of an answer."""
        self.chunk += 1
        self.late = self.chunk > self.chunks
        contents, chunks = self.contents(), self.chunks
        first = self.size * (self.chunk - 1) // chunks
        until = -(-self.size * self.chunk // chunks)
        indices = [self.size - 1] if self.late else range(max(first, self.loaded), until)
        writes = {
            self.pages[i]: contents[i]._replace(final=(i + 1) * chunks <= self.size * self.chunk)
            for i in indices
        }
        return Work(self, self.epoch, writes, self.chunk == chunks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Issue:
    """A ticket, or a part of one, and what the pages that it names contain."""

    ticket: Ticket
    producer: Engine
    turn: Turn
    contents: tuple[Content, ...]
    made: float
    is_last: bool


class Work(NamedTuple):
    """A request's part in a step; ``writes`` is what its blocks contain then."""

    turn: Turn
    epoch: int
    writes: dict[int, Content]
    last: bool


class LoadOrder(NamedTuple):
    """The order to the ranks to load with a ticket, or with a newer part of it.

    ``pulls`` is false for a "done" of a request that reads nothing; ``shared`` means that no "done"
    or "abandon" is sent; ``is_prepared``, that the ranks know of the request.
    """

    turn: Turn
    issue: Issue
    pulls: bool
    shared: bool = False
    is_last: bool = True
    is_prepared: bool = True


class Report(NamedTuple):
    """What a rank reports with a step."""

    sent: list[RequestId]
    ended: list[EndedHold]
    received: list[tuple[Turn, KVFerryError | None]]


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """What the scheduler sends to every rank, and what the ranks report."""

    orders: HoldOrders = field(default_factory=HoldOrders)
    prepares: list[tuple[Turn, Issue]] = field(default_factory=list)
    begins: list[LoadOrder] = field(default_factory=list)
    aborts: list[Turn] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    asks: bool = False  # whether the ranks are to report silent holds
    silent: dict[int, list[Silence]] = field(default_factory=dict)
    # The ages of each rank's holds at that time, by the protocol table.
    ages: dict[int, dict[Hold, float]] = field(default_factory=dict)
    outputs: dict[int, Report] = field(default_factory=dict)
