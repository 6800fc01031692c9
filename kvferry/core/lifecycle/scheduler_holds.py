"""The holds of a producer, as its scheduler process keeps them.

A hold stands for the pages of one request that another engine will decode. It occupies one slot, at
the same index in the slot table of every worker; the word in that slot tells consumers whether the
hold still stands. The scheduler process shares no memory with the workers: once per engine step, it
sends them ``HoldOrders``, which say what to do with which holds. The workers report a request as
sent when its hold has ended; then its pages may be freed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from kvferry.core.lifecycle.holds import Hold, HoldEnd, RequestId, random_generation
from kvferry.core.lifecycle.reclamation import Silence
from kvferry.core.lifecycle.staging import HoldCopy, PageCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOrders:
    """What the scheduler process tells every worker to do with holds in one engine step.

    A worker goes through the attributes in the sequence below.

    Attributes:
        drops: holds to end that never got a ticket. Their requests are not reported as sent.
        take_ons: holds to start, as (request, hold), for requests that another engine will decode
            and that are computed from this step on. A hold may have the slot of one of ``drops``.
        watermarks: holds without a ticket whose request is still computed, as (hold, tokens). The
            pages of this many first tokens are computed once the device has finished all work
            enqueued before this step.
        ready: holds whose ticket was made, as (hold, lease in seconds). Their pages may be read
            once the device has finished all work enqueued before this step.
        ttls: for the holds of conversations among ``ready``, as (hold, seconds): how long to keep
            the hold until a consumer claims it by a renewal. The lease applies from then on.
        copies: where the cache is staged, the copy for each of ``ready``, which makes its pages
            readable (docs/protocol.md, "Staging"); otherwise none.
        ends: holds with a ticket that are to end now (because of ``SchedulerHolds.reset``, because
            too many pages are held, or because the consumer is gone). Their requests are reported
            as sent.
    """

    drops: tuple[Hold, ...] = ()
    take_ons: tuple[tuple[RequestId, Hold], ...] = ()
    watermarks: tuple[tuple[Hold, int], ...] = ()
    ready: tuple[tuple[Hold, float], ...] = ()
    ttls: tuple[tuple[Hold, float], ...] = ()
    copies: tuple[HoldCopy, ...] = ()
    ends: tuple[Hold, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.drops or self.take_ons or self.ready or self.ends or self.watermarks)

    @property
    def needs_device(self) -> bool:
        """Return whether the worker must say when the device has finished its earlier work."""
        return bool(self.ready or self.watermarks)


@dataclass(slots=True, kw_only=True)
class _Entry:
    """The hold of a request, whether its ticket was made, and whether it is a conversation's."""

    hold: Hold
    ticketed: bool = False
    is_conversation: bool = False
    pages: frozenset[int] = frozenset()
    """Ids of the pages that count against ``max_pages``; empty before the ticket is made, and after
    the ticket was given up."""
    given_up: HoldEnd | None = None
    """Why the ticket was given up; ``None`` if it was not."""


class SchedulerHolds:
    """Give holds to requests, limit the pages that tickets hold, and collect ``HoldOrders``.

    To give up a ticket means to end its hold early, so that consumers cannot load from it any more.

    A ticket with a time to live is a conversation's: its consumer comes only with the next turn, if
    ever, and can do without the pages. These tickets are the first to be given up.

    Args:
        slots: number of slots in each worker's table; as many as the engine has blocks.
        draw: returns a random generation for a new hold.
        max_pages: how many pages may be kept for all tickets together; ``None`` for no limit.
            Without a limit, clients could use up the engine's pages by requests for tickets.
    """

    def __init__(
        self,
        slots: int,
        draw: Callable[[], int] = random_generation,
        *,
        max_pages: int | None = None,
    ) -> None:
        self._max_pages = max_pages
        self._pages = Counter[int]()
        """Page id to the number of tickets that hold the page: requests with a common prefix share
        pages."""
        self._firm_pages = Counter[int]()
        """The same, without the tickets of conversations."""
        self._evicted: list[RequestId] = []
        self._oldest: dict[RequestId, None] = {}
        """Requests with a ticket that was not given up, the oldest first."""
        self._conversations: dict[RequestId, None] = {}
        """Those of ``_oldest`` whose ticket is a conversation's, the oldest first."""
        self._free = deque(range(slots))
        self._draw = draw
        self._entries: dict[RequestId, _Entry] = {}
        self._drops: list[Hold] = []
        self._replaced: list[Hold] = []
        """Holds to drop whose slot another hold of the same request has."""
        self._take_ons: list[tuple[RequestId, Hold]] = []
        self._watermarks: dict[RequestId, int] = {}
        self._ready: list[tuple[Hold, float]] = []
        self._ttls: list[tuple[Hold, float]] = []
        self._copies: list[HoldCopy] = []
        self._ends: list[Hold] = []
        self._ending: set[RequestId] = set()
        """Requests whose tickets were given up and that are not reported as sent yet."""

    @property
    def held(self) -> int:
        """Number of requests that have a hold, whether or not their ticket was made."""
        return len(self._entries)

    @property
    def held_pages(self) -> int:
        """Number of pages that are kept for tickets; a page of several tickets counts once."""
        return len(self._pages)

    @property
    def reclaimable_pages(self) -> int:
        """Number of pages that are kept for tickets of conversations only (see ``reclaim``)."""
        return len(self._pages) - len(self._firm_pages)

    @property
    def conversations(self) -> int:
        """Number of conversations whose ticket was made, and not given up or reported as sent."""
        return len(self._conversations)

    @property
    def ticketed(self) -> int:
        """Number of requests whose ticket was made, and neither given up nor reported as sent.

        A ticket is given up if its hold is ended early, so that consumers cannot load from it.
        """
        return len(self._oldest)

    @property
    def ending(self) -> bool:
        """Whether a request whose hold was ended early is not reported as sent yet."""
        return bool(self._ending)

    @property
    def reclaiming(self) -> bool:
        """Whether a request whose hold ``reclaim`` has ended is not reported as sent yet."""
        return any(self._entries[each].given_up is HoldEnd.RECLAIMED for each in self._ending)

    def take_on(self, request: RequestId) -> Hold | None:
        """Give a hold to a request that another engine will decode.

        Called when the request gets its blocks. A request that comes back after a preemption gets a
        new hold, in the same slot, because its pages are others, or were others' meanwhile.

        Returns:
            The hold; ``None`` if no slot is free, or if an earlier request with this id has a
            ticket and is not reported as sent. If ``None``, the request is served like any other,
            without a ticket.
        """
        entry = self._entries.get(request)
        if entry is not None:
            return None if entry.ticketed else self._replace(request, entry)
        if not self._free:
            return None
        hold = Hold(slot=self._free.popleft(), generation=self._draw())
        self._entries[request] = _Entry(hold=hold)
        self._take_ons.append((request, hold))
        return hold

    def _replace(self, request: RequestId, entry: _Entry) -> Hold:
        """Give a request a new hold for one that it has lost its pages of, and return it."""
        old, entry.hold = entry.hold, Hold(slot=entry.hold.slot, generation=self._draw())
        if (request, old) in self._take_ons:  # the workers never heard of it
            self._take_ons.remove((request, old))
        else:
            self._replaced.append(old)
        self._take_ons.append((request, entry.hold))
        self._watermarks.pop(request, None)
        return entry.hold

    def mark(self, request: RequestId, tokens: int) -> Hold | None:
        """Order the watermark of a request that is still computed.

        The workers write it when their devices have finished all work that was enqueued before the
        step of the next ``drain``. So call this method one step after the one that computes the
        tokens, and not for the last ones: the ticket is for these.

        Args:
            request: the request.
            tokens: the number of first tokens whose pages are computed then.

        Returns:
            The request's hold; ``None`` if it has none, or if its ticket was made.
        """
        entry = self._entries.get(request)
        if entry is None or entry.ticketed:
            return None
        self._watermarks[request] = tokens
        return entry.hold

    def ticket(
        self,
        request: RequestId,
        lease: float,
        pages: frozenset[int] = frozenset(),
        *,
        ttl: float | None = None,
        copy: PageCopy | None = None,
    ) -> Hold | None:
        """Return the hold to put into the ticket of a computed request.

        The workers will be told to start the lease. The caller must not free the request's pages
        until ``sent`` is called for it. If more than ``max_pages`` pages are then kept for tickets,
        others are given up, the oldest first and conversations before all others: their holds end
        early.

        Args:
            request: the request.
            lease: its lease in seconds.
            pages: ids of its pages; where the cache is staged, of its host pages.
            ttl: for a conversation's ticket, how many seconds to keep the hold until a consumer
                claims it, which starts the lease; ``None`` for other tickets.
            copy: where the cache is staged, the copy that fills the host pages. The request's
                blocks may be freed when it is reported as sent, and ``sent`` is called when it is
                over. The ticket must not say ``computed``: a fence would accept host pages that
                are not copied yet.

        Returns:
            The hold; ``None`` if ``take_on`` gave the request no hold, if the request has its
            ticket already, if it has more than ``max_pages`` pages, or if a conversation has no
            room (``has_room``).
        """
        entry = self._entries.get(request)
        if entry is None or entry.ticketed or not self.fits(len(pages)):
            return None
        if ttl is not None and not self.has_room(pages):
            return None
        self._watermarks.pop(request, None)
        entry.ticketed, entry.pages = True, pages
        self._ready.append((entry.hold, lease))
        if copy is not None:
            self._copies.append(HoldCopy(request=request, hold=entry.hold, copy=copy))
        self._oldest[request] = None
        if ttl is not None:
            self._ttls.append((entry.hold, ttl))
            self._conversations[request] = None
            entry.is_conversation = True
        else:
            self._firm_pages.update(pages)
        self._pages.update(pages)
        self._make_room(request)
        return entry.hold

    def fits(self, pages: int) -> bool:
        """Return whether ``max_pages`` allows a ticket for a request with this number of pages."""
        return self._max_pages is None or pages <= self._max_pages

    def has_room(self, pages: frozenset[int]) -> bool:
        """Return whether ``max_pages`` allows a conversation's ticket beside the prompts' tickets.

        Only tickets of other conversations are given up for a conversation's ticket.

        Args:
            pages: ids of the conversation's pages.
        """
        new = sum(page not in self._firm_pages for page in pages)
        return self._max_pages is None or len(self._firm_pages) + new <= self._max_pages

    def stands(self, request: RequestId) -> bool:
        """Return whether a request has a ticket that was neither given up nor reported as sent."""
        return request in self._oldest

    def take_evicted(self) -> list[RequestId]:
        """Return the requests whose holds were ended early because of ``max_pages``.

        Each request is returned once. Those of conversations are left out: their pages were kept
        only as long as there was room.
        """
        evicted, self._evicted = self._evicted, []
        return evicted

    def revoke(self, request: RequestId) -> bool:
        """Give up the ticket of a request: the workers will be told to end its hold.

        Returns:
            Whether the request had a ticket that was not given up before.
        """
        if request not in self._oldest:
            return False
        self._give_up(request, HoldEnd.REVOKED)
        return True

    def drop(self, request: RequestId) -> bool:
        """End the hold of a request that will get no ticket.

        Returns:
            Whether the request had a hold without a ticket; if not, nothing has changed.
        """
        entry = self._entries.get(request)
        if entry is None or entry.ticketed:
            return False
        del self._entries[request]
        self._watermarks.pop(request, None)
        if (request, entry.hold) in self._take_ons:  # the workers never heard of it
            self._take_ons.remove((request, entry.hold))
            self._free.append(entry.hold.slot)
        else:
            self._drops.append(entry.hold)
        return True

    def sent(self, request: RequestId) -> HoldEnd | None:
        """Free the slot of a request.

        Called when every worker has reported the request as sent; where the cache is staged, when
        every worker has reported it as over.

        Returns:
            Why the request's ticket was given up; ``None`` if it was not, or if the request has no
            ticket.
        """
        entry = self._entries.get(request)
        if entry is None or not entry.ticketed:
            return None
        del self._entries[request]
        self._free.append(entry.hold.slot)
        self._let_go(entry)
        self._oldest.pop(request, None)
        self._conversations.pop(request, None)
        self._ending.discard(request)
        return entry.given_up

    def reset(self) -> None:
        """Give up all tickets: the workers will be told to end their holds.

        The pages of each request may be freed once the request is reported as sent.
        """
        ticketed = {r: entry for r, entry in self._entries.items() if entry.ticketed}
        self._ends.extend(sorted({entry.hold for entry in ticketed.values()} - set(self._ends)))
        self._ending.update(ticketed)
        self._oldest.clear()
        self._conversations.clear()
        for entry in ticketed.values():
            self._let_go(entry)
            entry.given_up = entry.given_up or HoldEnd.REVOKED

    def reclaim(self, pages: int) -> int:
        """End holds of conversations early (give up their tickets), to free enough pages.

        A consumer may be reading the pages. Then its fence fails, because the workers clear the
        slot word before they report the request as sent, and it computes the tokens instead. A
        claim does not protect these holds: otherwise two engines, each waiting for pages that the
        other's requests hold, could wait for ever.

        Args:
            pages: number of pages to free.

        Returns:
            How many holds were ended; the oldest go first.
        """
        goal, given = len(self._pages) - pages, 0
        while self._conversations and len(self._pages) > goal:
            self._give_up(next(iter(self._conversations)), HoldEnd.RECLAIMED)
            given += 1
        return given

    def give_up(self, silent: Iterable[Silence], pages: int) -> list[Silence]:
        """End holds early whose consumer is gone (give up their tickets), to free enough pages.

        Args:
            silent: the holds, in the sequence in which to end them; a hold that has ended, or whose
                ticket was given up before, is skipped.
            pages: number of pages to free.

        Returns:
            The holds that were given up.
        """
        goal, given = len(self._pages) - pages, []
        for each in silent:
            if len(self._pages) <= goal:
                break
            entry = self._entries.get(each.request)
            if entry is not None and entry.hold == each.hold and each.request in self._oldest:
                self._give_up(each.request, HoldEnd.ORPHANED)
                given.append(each)
        return given

    def drain(self) -> HoldOrders:
        """Return the orders for the workers that have been collected since the last call.

        The caller sends the result to every worker. The slots of the holds in ``drops`` are free
        from now on, unless ``take_ons`` has them again.
        """
        marked = self._watermarks.items()
        orders = HoldOrders(
            drops=(*self._drops, *self._replaced),
            take_ons=tuple(self._take_ons),
            watermarks=tuple((self._entries[request].hold, tokens) for request, tokens in marked),
            ready=tuple(self._ready),
            ttls=tuple(self._ttls),
            copies=tuple(self._copies),
            ends=tuple(self._ends),
        )
        self._free.extend(hold.slot for hold in self._drops)
        self._watermarks.clear()
        self._replaced.clear()
        for pending in (self._drops, self._take_ons, self._ready, self._ttls, self._ends):
            pending.clear()
        self._copies.clear()
        return orders

    def _make_room(self, newest: RequestId) -> None:
        """Give up the oldest tickets until the others hold at most ``max_pages`` pages.

        Those of conversations go before all others.

        Args:
            newest: the request whose ticket was just made. It keeps its ticket: ``ticket`` has
                checked that it ``fits``.
        """
        while self._max_pages is not None and len(self._pages) > self._max_pages:
            candidates = chain(self._conversations, self._oldest)
            oldest = next(request for request in candidates if request != newest)
            if oldest not in self._conversations:
                self._evicted.append(oldest)
            self._give_up(oldest, HoldEnd.EVICTED)

    def _give_up(self, request: RequestId, reason: HoldEnd) -> None:
        """Give up a request's ticket: the workers will be told to end its hold.

        The request's pages no longer count against ``max_pages``, but may be freed only once the
        request is reported as sent.

        Args:
            request: the request.
            reason: why its ticket is given up.
        """
        del self._oldest[request]
        self._conversations.pop(request, None)
        entry = self._entries[request]
        entry.given_up = reason
        self._let_go(entry)
        self._ends.append(entry.hold)
        self._ending.add(request)

    def _let_go(self, entry: _Entry) -> None:
        """Stop counting the pages of a hold against ``max_pages``."""
        counters = (self._pages,) if entry.is_conversation else (self._pages, self._firm_pages)
        for counter in counters:
            counter.subtract(entry.pages)
            for page in entry.pages:
                if not counter[page]:
                    del counter[page]
        entry.pages = frozenset()
