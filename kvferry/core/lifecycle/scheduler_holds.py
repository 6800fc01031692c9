"""The holds of a producer, as its scheduler half keeps them.

Each engine step, it sends the workers ``HoldOrders``. A request's pages may be freed when they
report it as sent.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from kvferry.core.lifecycle.holds import Hold, HoldEnd, PageCopy, RequestId, random_generation
from kvferry.core.lifecycle.silent_holds import Silence


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTicket:
    """A ticket that was made in a step, as the workers hear of it. Times are in seconds."""

    request: RequestId
    hold: Hold
    lease: float  # how long pages are kept after they are ready, and after each renewal
    # A conversation's pages: how long they are kept until a renewal starts the lease.
    ttl: float | None = None
    copy: PageCopy | None = None  # where the cache is staged: it makes the pages readable


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOrders:
    """What the scheduler half tells every worker in one engine step, to be done in this sequence.

    "Computed" means: once the device has finished all work that was enqueued before this step.
    """

    drops: tuple[Hold, ...] = ()  # holds to end that never got a ticket: none is reported as sent
    take_ons: tuple[tuple[RequestId, Hold], ...] = ()  # may reuse slots of ``drops``
    watermarks: tuple[tuple[Hold, int], ...] = ()  # the number of first tokens that are computed
    tickets: tuple[NewTicket, ...] = ()  # the new ones, whose pages may be read when computed
    ends: tuple[Hold, ...] = ()  # holds with a ticket that end now: they are reported as sent

    def __bool__(self) -> bool:
        return bool(self.drops or self.take_ons or self.tickets or self.ends or self.watermarks)

    @property
    def needs_device(self) -> bool:
        """Return whether the worker must say when the device has finished its earlier work."""
        return bool(self.tickets or self.watermarks)


@dataclass(slots=True, kw_only=True)
class _Entry:
    hold: Hold
    ticketed: bool = False
    is_conversation: bool = False
    pages: frozenset[int] = frozenset()
    """Pages that count against ``max_pages``: none without a ticket, or once it is given up."""
    given_up: HoldEnd | None = None


class SchedulerHolds:
    """Give holds to requests, limit the pages that tickets hold, and collect ``HoldOrders``.

    To give up a ticket means to end its hold early, so that consumers cannot load from it any more.
    A conversation's ticket (one with a ``ttl``) goes first: its consumer can do without the pages.

    Args:
        slots: number of slots in each worker's table; as many as the engine has blocks.
        draw: returns a random generation for a new hold.
        max_pages: how many pages may be kept for all tickets; without a limit (``None``), clients
            could use up the engine's pages by asking for tickets.
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
        """Page id to the number of tickets that hold it: common prefixes share pages."""
        self._firm_pages = Counter[int]()
        """The same, without the tickets of conversations."""
        self._oldest: dict[RequestId, None] = {}
        """Requests with a ticket that was not given up, the oldest first."""
        self._conversations: dict[RequestId, None] = {}
        """Those of ``_oldest`` whose ticket is a conversation's, the oldest first."""
        self._free = deque(range(slots))
        self._draw = draw
        self._entries: dict[RequestId, _Entry] = {}
        self._watermarks: dict[RequestId, int] = {}
        self._ending: set[RequestId] = set()
        """Requests whose tickets were given up and that are not reported as sent yet."""
        self._asked = set[bool]()
        """Of revocations not begun: whether only conversations are meant. Any thread adds."""
        self._begin_orders()

    def _begin_orders(self) -> None:
        self._drops: list[Hold] = []
        self._replaced: list[Hold] = []
        """Holds to drop whose slot another hold of the same request has."""
        self._take_ons: list[tuple[RequestId, Hold]] = []
        self._tickets: list[NewTicket] = []
        self._ends: list[Hold] = []

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
        """Number of conversations with a ticket, not given up or reported as sent."""
        return len(self._conversations)

    @property
    def ticketed(self) -> int:
        """Number of requests with a ticket, not given up or reported as sent."""
        return len(self._oldest)

    @property
    def is_ending(self) -> bool:
        """Whether a request whose hold was ended early is not reported as sent yet."""
        return bool(self._ending)

    @property
    def is_reclaiming(self) -> bool:
        """Whether a request whose hold ``reclaim`` has ended is not reported as sent yet."""
        return any(self._entries[each].given_up is HoldEnd.RECLAIMED for each in self._ending)

    def take_on(self, request: RequestId) -> Hold | None:
        """Give a hold to a request that another engine will decode, when it gets its blocks.

        After a preemption it gets a new one, as its pages are others, or were others' meanwhile.
        ``None`` if no slot is free, or an earlier request of this id is not reported as sent.
        """
        entry = self._entries.get(request)
        if entry is None and self._free:
            slot = self._free.popleft()
        elif entry is not None and not entry.ticketed:
            slot = entry.hold.slot
            if not self._take_back(request, entry.hold):
                self._replaced.append(entry.hold)
        else:
            return None
        hold = Hold(slot=slot, generation=self._draw())
        self._entries[request] = _Entry(hold=hold)
        self._take_ons.append((request, hold))
        return hold

    def _take_back(self, request: RequestId, hold: Hold) -> bool:
        """Forget what was ordered for a hold; return whether the workers never heard of it."""
        self._watermarks.pop(request, None)
        if (request, hold) not in self._take_ons:
            return False
        self._take_ons.remove((request, hold))
        return True

    def mark(self, request: RequestId, tokens: int) -> Hold | None:
        """Order a request's watermark; return its hold, ``None`` if it has none or has its ticket.

        The workers write it when the device is done with all work before the step of the next
        ``drain``. So call this one step after the one that computes the tokens.
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
        """Return the hold to put into the ticket of a computed request, and order its lease.

        The pages (ids; where the cache is staged, of host pages) must not be freed until ``sent``.
        Beyond ``max_pages``, older tickets are given up, conversations first. ``None`` if the
        request has no hold or has its ticket, does not fit (``fits``), or is a conversation without
        room (``has_room``).

        A conversation's hold is kept for ``ttl`` seconds until a consumer claims it, which starts
        the ``lease`` (in seconds). Where the cache is staged, ``copy`` fills the host pages: the
        blocks may be freed when the request is sent, and ``sent`` is called when it is over. Such a
        ticket must not say ``computed``: a fence would accept pages that are not copied yet.
        """
        entry = self._entries.get(request)
        if entry is None or entry.ticketed or not self.fits(len(pages)):
            return None
        if ttl is not None and not self.has_room(pages):
            return None
        self._watermarks.pop(request, None)
        entry.ticketed, entry.pages, entry.is_conversation = True, pages, ttl is not None
        self._tickets.append(
            NewTicket(request=request, hold=entry.hold, lease=lease, ttl=ttl, copy=copy)
        )
        self._oldest[request] = None
        if ttl is not None:
            self._conversations[request] = None
        for counter in self._counters(entry):
            counter.update(pages)
        self._make_room(request)
        return entry.hold

    def fits(self, pages: int) -> bool:
        """Return whether ``max_pages`` allows a ticket for a request with this number of pages."""
        return self._max_pages is None or pages <= self._max_pages

    def has_room(self, pages: frozenset[int]) -> bool:
        """Return whether a conversation fits if only other conversations' tickets are given up."""
        new = sum(page not in self._firm_pages for page in pages)
        return self._max_pages is None or len(self._firm_pages) + new <= self._max_pages

    def has_ticket(self, request: RequestId) -> bool:
        """Return whether a request has a ticket that was neither given up nor reported as sent."""
        return request in self._oldest

    def revoke(self, request: RequestId) -> bool:
        """Give up a request's ticket; return whether it had one not given up before."""
        if request not in self._oldest:
            return False
        self._give_up(request, HoldEnd.REVOKED)
        return True

    def drop(self, request: RequestId) -> bool:
        """End the hold of a request that gets no ticket; return whether there was one."""
        entry = self._entries.get(request)
        if entry is None or entry.ticketed:
            return False
        del self._entries[request]
        if self._take_back(request, entry.hold):
            self._free.append(entry.hold.slot)
        else:
            self._drops.append(entry.hold)
        return True

    def sent(self, request: RequestId) -> HoldEnd | None:
        """Free the slot of a request that is sent (if staged, over) on all workers.

        Returns why its ticket was given up; ``None`` if it was not, or there is none.
        """
        entry = self._entries.get(request)
        if entry is None or not entry.ticketed:
            return None
        del self._entries[request]
        self._free.append(entry.hold.slot)
        self._uncount(entry)
        self._oldest.pop(request, None)
        self._conversations.pop(request, None)
        self._ending.discard(request)
        return entry.given_up

    def reset(self, *, conversations: bool = False) -> None:
        """Give up all tickets, or those of conversations only.

        Their pages may be freed once the requests are reported as sent.
        """
        for request in list(self._conversations if conversations else self._oldest):
            self._give_up(request, HoldEnd.REVOKED)

    def ask_revocation(self, conversations: bool) -> int:
        """Have the next ``drain`` do a ``reset``; return the number of tickets. Thread-safe."""
        self._asked.add(conversations)
        return len(self._conversations if conversations else self._oldest)

    @property
    def is_asked(self) -> bool:
        """Whether a revocation was asked for since the last ``drain``."""
        return bool(self._asked)

    def reclaim(self, pages: int) -> int:
        """Give up conversations' tickets, oldest first, to free enough pages; return how many."""
        # A consumer may be reading: its fence fails, as the workers clear the slot word before they
        # report the request as sent. Claims do not protect: two engines, each waiting for pages
        # held for the other, could wait for ever.
        goal, given = len(self._pages) - pages, 0
        while self._conversations and len(self._pages) > goal:
            self._give_up(next(iter(self._conversations)), HoldEnd.RECLAIMED)
            given += 1
        return given

    def give_up(self, silent: Iterable[Silence], pages: int) -> list[Silence]:
        """End those silent holds, in this sequence, that free enough pages; return them."""
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
        """Return the orders since the last call, which the caller sends to every worker."""
        for conversations in self._asked.copy():
            self._asked.discard(conversations)  # before the tickets: who asks later is not missed
            self.reset(conversations=conversations)
        marked = self._watermarks.items()
        orders = HoldOrders(
            drops=(*self._drops, *self._replaced),
            take_ons=tuple(self._take_ons),
            watermarks=tuple((self._entries[request].hold, tokens) for request, tokens in marked),
            tickets=tuple(self._tickets),
            ends=tuple(self._ends),
        )
        # Free from now on: workers apply drops before take-ons.
        self._free.extend(hold.slot for hold in self._drops)
        self._watermarks.clear()
        self._begin_orders()
        return orders

    def _make_room(self, newest: RequestId) -> None:
        while self._max_pages is not None and len(self._pages) > self._max_pages:
            candidates = chain(self._conversations, self._oldest)
            # The newest stays: it fits.
            oldest = next(request for request in candidates if request != newest)
            self._give_up(oldest, HoldEnd.EVICTED)

    def _give_up(self, request: RequestId, reason: HoldEnd) -> None:
        """Have the workers end a hold. Its pages may be freed only once it is reported as sent."""
        del self._oldest[request]
        self._conversations.pop(request, None)
        entry = self._entries[request]
        entry.given_up = reason
        self._uncount(entry)
        self._ends.append(entry.hold)
        self._ending.add(request)

    def _counters(self, entry: _Entry) -> tuple[Counter[int], ...]:
        return (self._pages,) if entry.is_conversation else (self._pages, self._firm_pages)

    def _uncount(self, entry: _Entry) -> None:
        """Stop counting the pages of a ticket that was given up, or is sent."""
        for counter in self._counters(entry):
            counter.subtract(entry.pages)
            for page in entry.pages:
                if not counter[page]:
                    del counter[page]
        entry.pages = frozenset()
