"""The host pages of a staging engine, given out by its scheduler (docs/protocol.md, "Staging")."""

from __future__ import annotations

import enum
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.holds import RequestId


class Reservation(enum.Enum):
    """Whether a request has the host pages that it needs."""

    GRANTED = "granted"
    WAITING = "waiting"  # too few are free, or an earlier request waits: ask again later
    REFUSED = "refused"  # it waited too long, needs too many, or an earlier one of its id has some


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWait:
    """The end of a request's wait for host pages: after how long, and whether it got them."""

    seconds: float
    granted: bool


@dataclass(slots=True, kw_only=True)
class _Wish:
    count: int
    since: float
    pages: tuple[int, ...] = ()
    state: Reservation = Reservation.WAITING


class HostPages:
    """Give host pages to requests, in the order in which they ask.

    A request reserves as many as it may need (``reserve``), and takes what it needs (``take``).
    What was taken returns when ``ranks`` ranks are ``over``, or with ``give_back`` where the caller
    knows. Serving and loading need one of these each: loads that wait for holds, whose consumer
    waits for loads, could otherwise wait for each other.

    A request waits ``patience`` seconds at most, from its first ``reserve``. The hole must not be
    among the ids (``ValueError``).
    """

    def __init__(
        self, ids: range, *, patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if HOLE in ids:
            raise ValueError(f"host pages {ids}: {HOLE} is the hole, so begin with {HOLE + 1}")
        self.ranks = 1
        self.total = len(ids)
        self._free = list(ids)
        """A heap: lowest ids first, so that a request's pages are neighbours, for few copies."""
        self.patience = patience
        self._clock = clock
        self._wishes: dict[RequestId, _Wish] = {}
        # Those of ``_wishes`` that wait, the first to ask first.
        self._waiting: dict[RequestId, _Wish] = {}
        self._taken: dict[RequestId, tuple[tuple[int, ...], set[int]]] = {}
        """Request to its pages, and to the ranks that have said that it is over."""
        self._waits: list[PageWait] = []

    @property
    def used(self) -> int:
        """Number of pages that are reserved or taken."""
        return self.total - len(self._free)

    @property
    def taken(self) -> int:
        """Number of requests whose pages the workers use. Steps must go on while there are any."""
        return len(self._taken)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for pages."""
        return len(self._waiting)

    @property
    def lacking(self) -> int:
        """Number of pages that the first request that waits lacks; 0 if none waits."""
        first = next(iter(self._waiting.values()), None)
        return 0 if first is None else max(0, first.count - len(self._free))

    def reserve(self, request: RequestId, count: int) -> Reservation:
        """Reserve pages for a request, or wait for them; call it again while it waits."""
        if request in self._taken:
            return Reservation.REFUSED
        wish = self._wishes.get(request)
        if wish is None:
            wish = self._wishes[request] = _Wish(count=count, since=self._clock())
            self._waiting[request] = wish
        # It needs more than it has: it waits anew.
        elif count > wish.count and wish.state is not Reservation.REFUSED:
            self._return(wish.pages)
            wish.count, wish.pages, wish.state = count, (), Reservation.WAITING
            self._waiting[request] = wish
        self._grant(asked=request)
        if wish.state is Reservation.WAITING and self._is_hopeless(wish):
            self._settle(request, Reservation.REFUSED)
            self._grant()  # those behind it may need fewer
        return wish.state

    def cancel(self, request: RequestId) -> None:
        """End a request's reservation or wait, when it ends; pages that were taken stay taken."""
        wish = self._wishes.pop(request, None)
        self._waiting.pop(request, None)
        if wish is not None:
            self._return(wish.pages)
            self._grant()

    def take(self, request: RequestId, count: int) -> tuple[int, ...] | None:
        """Take pages, return their ascending ids, and end the reservation; ``None`` if too few."""
        if request in self._taken:
            return None
        wish = self._wishes.get(request, _Wish(count=0, since=0.0))
        if len(wish.pages) >= count:
            pages, wish.pages = wish.pages[:count], wish.pages[count:]
        # It has reserved too few, but nobody else waits for those that are free.
        elif self._waiting.keys() <= {request} and count <= len(self._free):
            pages = self._draw(count)
        else:
            return None
        self._taken[request] = pages, set()
        self.cancel(request)
        return pages

    def over(self, request: RequestId, rank: int) -> bool:
        """Record that a rank is done with a request's pages; return whether it was the last."""
        if request not in self._taken:
            return False
        _, ranks = self._taken[request]
        ranks.add(rank)
        if len(ranks) < self.ranks:
            return False
        self.give_back(request)
        return True

    def give_back(self, request: RequestId) -> None:
        """Free the pages that a request has taken. No rank may use them any more."""
        pages, _ = self._taken.pop(request, ((), None))
        self._return(pages)
        self._grant()

    def take_waits(self) -> list[PageWait]:
        """Return how requests' waits have ended since the last call, also those of no time."""
        waits, self._waits = self._waits, []
        return waits

    def _is_hopeless(self, wish: _Wish) -> bool:
        return wish.count > self.total or self._clock() >= wish.since + self.patience

    def _grant(self, asked: RequestId | None = None) -> None:
        """Give pages to the requests that wait, until too few are left for the first of them."""
        while self._waiting:
            request, wish = next(iter(self._waiting.items()))
            # One that waited too long gets none, unless it is just asked about: nobody may ask
            # again.
            is_hopeless = self._is_hopeless(wish) and request != asked
            if wish.count <= len(self._free) and not is_hopeless:
                wish.pages = self._draw(wish.count)
                self._settle(request, Reservation.GRANTED)
            elif is_hopeless:
                self._settle(request, Reservation.REFUSED)
            else:
                return

    def _settle(self, request: RequestId, state: Reservation) -> None:
        wish = self._waiting.pop(request)
        wish.state = state
        granted = state is Reservation.GRANTED
        self._waits.append(PageWait(seconds=self._clock() - wish.since, granted=granted))

    def _draw(self, count: int) -> tuple[int, ...]:
        return tuple(heapq.heappop(self._free) for _ in range(count))

    def _return(self, pages: Sequence[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)
