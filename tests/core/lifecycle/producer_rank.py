"""The producer's half of a simulated rank: its holds, and copies of their pages to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.core.lifecycle.holds import NOTHING, Hold
from kvferry.core.lifecycle.leased_holds import LeasedHolds
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS
from kvferry.core.messages import Heartbeat, Renewal
from tests.core.lifecycle.fabric import Content, Message, require
from tests.core.lifecycle.protocol_table import Cause, ProtocolTable
from tests.core.lifecycle.turns import PAGES, Step

if TYPE_CHECKING:
    from tests.core.lifecycle.engine import Engine


class Pages:
    """Blocks or host pages; what was read of a page from each remote rank, or -1: computed here."""

    def __init__(self, count: int) -> None:
        self._pages: list[dict[int, Content | None]] = [{} for _ in range(count + 1)]

    def __getitem__(self, page: int) -> Content | None:
        """Return the content of a page; ``None`` if there is none, or it has parts of several."""
        found = set(self._pages[page].values())
        return found.pop() if len(found) == 1 else None

    def parts(self, page: int) -> dict[int, Content | None]:
        return self._pages[page]

    def write(self, page: int, content: Content) -> None:
        self._pages[page] = {-1: content}

    def zero(self, page: int) -> None:
        self._pages[page] = {}

    def put(self, page: int, parts: dict[int, Content | None]) -> None:
        self._pages[page] = dict(parts)


class Device:
    """What both halves of a rank share: its blocks, and the queue of what its device has to do."""

    def __init__(self) -> None:
        self.blocks = Pages(PAGES)
        self.stream: deque[Callable[[], object]] = deque()

    def queue(self, work: Callable[..., object], *arguments: Any) -> None:
        self.stream.append(partial(work, *arguments))


@dataclass(slots=True, kw_only=True, eq=False)
class BlockCopy:
    """A copy between blocks and host pages that is under way, one block at a time."""

    source: Any  # the order of a copy to the host, or the load that is copied to the device
    items: list[tuple[int, int]]  # pairs of where a block is copied from and to


class ProducerRank:
    """The holds of a rank, the protocol table for them, and what peers read."""

    def __init__(self, engine: Engine, rank: int, device: Device) -> None:
        world = engine.world
        slots = world.options.slots
        self.rank, self.now, self._device = rank, engine.clock(1000.0 * rank), device
        self.words, self.watermarks = [NOTHING] * slots, [0] * slots
        self.holds = world.components.of(LeasedHolds)(
            self.words, engine.incarnation, self.watermarks
        )
        self.table = ProtocolTable(engine.incarnation)
        self.host = Pages(world.options.staged)
        self.readable = self.host if world.options.staged else device.blocks
        self.copies: list[BlockCopy] = []
        self.passed: list[Callable[[], None]] = []
        self._strict = world.components.strict

    def apply(self, orders: HoldOrders) -> None:
        """Apply the orders of a step; what waits for the device is queued there."""
        now = self.now()
        self.holds.apply(orders, now)
        for hold in orders.drops:
            self.table.end(hold, Cause(why="dropped"))
        for request, hold in orders.take_ons:
            self.table.take_on(request, hold)
        for hold, tokens in orders.watermarks:
            mark = partial(self.holds.mark, hold, tokens)
            self._device.queue(self.passed.append, mark)
        for each in orders.tickets:
            self.table.order(each.hold, each.lease, each.ttl, now)
            is_copied = each.copy is not None
            self._device.queue(self.passed.append, partial(self._ready, each.hold, is_copied))
        for hold in orders.ends:
            self.table.end(hold, Cause(why="reset"))

    def answer(self, step: Step) -> None:
        """Report silent holds."""
        step.silent[self.rank] = self.holds.silent(self.now(), GONE_SECONDS, PAGES)
        step.ages[self.rank] = self.table.ages(self.now())

    def tick(self) -> None:
        """Mark what the device has finished, begin copies to the host, and expire leases."""
        now = self.now()
        for write in self.passed:
            write()
        self.passed.clear()
        self.copies += [
            BlockCopy(source=each, items=list(zip(each.copy.blocks, each.copy.pages, strict=True)))
            for each in self.holds.take_copies()
            if each.copy is not None
        ]
        expired, expected = self.holds.expire(now), self.table.expire(now)
        same = sorted(expired) == sorted(expected)
        require(same or not self._strict, "expired", expired, "not", expected)
        self.check()

    @property
    def has_due(self) -> bool:
        deadlines = (active.deadline for active in self.table.active.values())
        return bool(self.passed) or any(d is not None and d <= self.now() for d in deadlines)

    def _ready(self, hold: Hold, is_copied: bool) -> None:
        self.holds.ready(hold, self.now())
        if not is_copied:
            self.table.passed(hold, self.now())

    def copy(self, copy: BlockCopy, pick: int = 0) -> None:
        """Let one block of a copy reach the host."""
        block, page = copy.items.pop(pick)
        self.host.put(page, self._device.blocks.parts(block))
        if not copy.items:
            self.copies.remove(copy)
            self.holds.copied(copy.source.hold, self.now())
            self.table.passed(copy.source.hold, self.now())
            self.check()

    def fail(self, copy: BlockCopy) -> None:
        self.copies.remove(copy)
        self.holds.failed(copy.source.hold)
        self.table.end(copy.source.hold, Cause(why="its copy failed"))
        self.check()

    def hear(self, message: Message) -> None:
        now = self.now()
        note = message.note
        if isinstance(note, Renewal):
            self.holds.renew(note, now)
            self.table.renewed(note, now)
        elif isinstance(note, Heartbeat):
            self.holds.heartbeat(note, now)
            self.table.heartbeat(note, now)
        else:
            verdict, expected = self.holds.release(note), self.table.heard(note, message.origin)
            same = verdict is expected or not self._strict
            require(same, "verdict", verdict, "not", expected)
        self.check()

    def check(self) -> None:
        """Compare slot words, the number of holds and their ages with the protocol table."""
        if self._strict:
            words = self.table.words(len(self.words))
            require(self.words == words, "slot words", self.words, "are to be", words)
            require(self.holds.held == len(self.table.active), "held", self.holds.held)
            silent = self.holds.silent(self.now(), 0.0, len(self.words))
            ages = {each.hold: each.age for each in silent}
            expected = self.table.ages(self.now())
            require(ages == expected, "ages", ages, "are to be", expected)
