"""Requests of the simulated decode engine, as its scheduler and its ranks see them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.load_machine import RemoteRank
from kvferry.core.lifecycle.ticket import Ticket
from tests.core.lifecycle.fabric import Content, Link, Transfer
from tests.core.lifecycle.producer import PAGES, IssuedTicket, tokens_digest
from tests.core.messages import altered

STALE = "stale"
LATE = "late"


class DecodeState(enum.Enum):
    WAITING = enum.auto()
    LOADING = enum.auto()
    ABORTED = enum.auto()
    READY = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """A request to the decode engine, with a ticket.

    Attributes:
        cached: how many leading pages are in the prefix cache; if all are, nothing is read.
        prompt_fits: whether it is the prompt that the ticket is about.
        forged: whether its ticket names other pages than the producer's.
        sample: whether more requests with its ticket may be on their way, unknown to the scheduler.
        pulls: rank to its part of the load, once the rank has begun it.
    """

    uid: int
    id: RequestId
    issue: IssuedTicket
    cached: int
    prompt_fits: bool
    forged: bool = False
    sample: bool = False
    stage: DecodeState = DecodeState.WAITING
    pages: tuple[int, ...] = ()
    reports: dict[int, KVFerryError | None] = field(default_factory=dict)
    pulls: dict[int, RankLoad] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        tokens = self.issue.prompt.tokens
        return tokens if self.prompt_fits else [*tokens[:-1], -1]

    @property
    def ticket(self) -> Ticket:
        """Return the ticket that the request came with."""
        ticket = self.issue.ticket
        if not self.forged:
            return ticket
        others = tuple(tuple(page % PAGES + 1 for page in ids) for ids in ticket.pages)
        return altered(ticket, pages=others)

    @property
    def admitted(self) -> bool:
        return tokens_digest(self.tokens) == self.issue.ticket.digest


@dataclass(slots=True, kw_only=True, eq=False)
class RankLoad:
    """One rank's part of a request, with what the checks need to know of it.

    Attributes:
        pulling: whether pages are read and the outcome is reported; if not, "done" is sent.
        shared: whether no "done" or "abandon" is sent.
        wants: destination page, source page and expected content of each page.
        causes: why it must fail, in order: errors, or ``STALE``, ``LATE``.
        reads: producer rank to the transfer of its pages.
        told: producer ranks to which a "done" or "abandon" was sent that is not bound to a fence.
    """

    request: DecodeRequest
    pulling: bool
    shared: bool
    deadline: float
    wants: list[tuple[int, int, Content]]
    remote_ranks: tuple[RemoteRank, ...] = ()
    link: Link | None = None
    causes: list[KVFerryError | str] = field(default_factory=list)
    reads: dict[int, Transfer] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadOrder:
    """The order to the ranks for a request whose ticket was accepted.

    Attributes:
        pulling: whether its pages are read; if not, "done" is sent, unless it is shared.
        shared: whether no "done" or "abandon" is sent.
        prepared: whether the ranks were told of the request before; false for a "done" that is
            ordered by itself.
    """

    request: DecodeRequest
    pulling: bool
    shared: bool
    prepared: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class StepMetadata:
    """The metadata of a step for the ranks, and what they report with it."""

    prepares: list[DecodeRequest]
    begins: list[LoadOrder]
    aborts: list[DecodeRequest]
    refusals: list[tuple[DecodeRequest, KVFerryError]]
    outputs: dict[int, list[tuple[DecodeRequest, KVFerryError | None]]] = field(
        default_factory=dict
    )
