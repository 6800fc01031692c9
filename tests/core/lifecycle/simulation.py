"""The simulation of the model test: a prefill engine, two decode engines, and what connects them.

``Simulation`` runs the real state machines on a fake transport and a fake clock. ``moves`` returns
every step that can happen next; other methods are what users do and what fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId
from kvferry.core.lifecycle.load_machine import RemoteRank
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import State
from tests.core.lifecycle.consumer import Consumer, UncountedHoldUsers
from tests.core.lifecycle.consumer_rank import ConsumerRank
from tests.core.lifecycle.decode_requests import DecodeRequest, DecodeState
from tests.core.lifecycle.fabric import Fabric, Message, release, require
from tests.core.lifecycle.model import Components
from tests.core.lifecycle.producer import (
    LEASE,
    PAGES,
    TTL,
    IssuedTicket,
    PrefillRequest,
    PrefillState,
    Producer,
    ProducerRank,
)
from tests.core.lifecycle.rank_renewals import Wait, is_renewal
from tests.core.lifecycle.schedulers import check_unused

IDS = [RequestId(f"request-{i}") for i in range(4)]
"""Few, so that they are reused."""

_BIT = 1 << 40
"""Flipped to make another incarnation or generation."""

Plan = tuple[tuple[RemoteRank, ...], ...]
"""Per consumer rank, the producer ranks that it reads or notifies."""

Move = Callable[[], None]


def _plan(*ranks: str) -> Plan:
    """Parse a plan: per consumer rank the ranks that it reads, then "+" and those it notifies."""
    return tuple(
        tuple(
            RemoteRank(rank=int(digit), reads=reads)
            for part, reads in zip((*text.split("+"), ""), (True, False), strict=False)
            for digit in part
        )
        for text in ranks
    )


PLANS: dict[int, tuple[Plan, ...]] = {
    1: (_plan("0"), _plan("0", "0")),
    2: (_plan("01"), _plan("0+1"), _plan("0", "1"), _plan("01", "01"), _plan("0", "0+1")),
    3: (_plan("01", "1+2"), _plan("012"), _plan("0+12"), _plan("01", "12")),
}
"""Plans by the number of producer ranks: equal, split, merged, overlapping, with unread ranks."""


class Simulation:
    def __init__(
        self,
        *,
        ranks: int,
        plans: tuple[Plan, Plan],
        slots: int,
        components: Components,
        max_held: int | None = None,
        is_older: bool = False,
        old: str = "",
    ) -> None:
        self.components = components
        self._is_older = is_older
        self.now = 0.0
        self.silent = False
        self.fabric = Fabric()
        self.issues: list[IssuedTicket] = []
        self._ranks, self.slots, self._max_held = ranks, slots, max_held
        self.uids, self._lives = itertools.count(1), itertools.count(1)
        self._old = old
        self._forged: set[int] = set()
        self.producer = self._new_producer()
        self.consumers = [
            self._new_consumer(name, plan) for name, plan in zip("AB", plans, strict=True)
        ]
        self._plans = plans

    # What can happen next.

    def moves(self) -> list[Move]:
        return [
            *self._client_moves(),
            *self._producer_moves(),
            *self.fabric.moves(self.deliver),
            *self._consumer_moves(),
        ]

    def _client_moves(self) -> Iterator[Move]:
        """Yield new requests and tickets, while the engines are idle."""
        if len(self.producer.at(PrefillState.WAITING, PrefillState.RUNNING)) == 0:
            for kind in ("plain", "drafter"):
                yield partial(self.ask, size=2, kind=kind)
        for issue in self.issues[-2:]:
            stands = issue.ticket.hold in self.producer.ranks[0].table.active
            for engine in self.consumers if stands else ():
                if len(engine.requests) == 0:
                    yield partial(self.hand, engine, issue)

    def _producer_moves(self) -> Iterator[Move]:
        producer = self.producer
        if producer.can_schedule and producer.requests:
            yield producer.schedule
        if producer.can_process:
            yield producer.process
        for rank in producer.ranks:
            if rank.inbox:
                yield rank.launch
            if rank.stream:
                yield rank.device
            if rank.due:
                yield rank.tick

    def _consumer_moves(self) -> Iterator[Move]:
        for engine in self.consumers:
            if engine.can_schedule and (engine.requests or engine.pending):
                yield engine.schedule
            if engine.can_process:
                yield engine.process
            for request in engine.at(DecodeState.READY):
                yield partial(engine.finish, request)
            for rank in engine.ranks:
                yield from self._consumer_rank_moves(rank)

    def _consumer_rank_moves(self, rank: ConsumerRank) -> Iterator[Move]:
        if rank.inbox:
            yield rank.launch
        if any(t.state is not State.PENDING for t in rank.transfers):
            yield rank.poll
        for load_id in () if self.silent else rank.handshakes:
            yield partial(rank.answer, load_id)
        if rank.loads.open or rank.rank_renewals.waiting:
            yield rank.tick

    def deliver(self, message: Message) -> None:
        self.fabric.messages.remove(message)
        require(
            self._forged.isdisjoint(message.origins), "a message about a forged ticket:", message
        )
        self.producer.ranks[message.rank].hear(message)

    # What clients and engines do.

    def ask(
        self,
        *,
        size: int,
        kind: str,
        chunks: int = 1,
        remote: bool = True,
        errs: bool = False,
    ) -> None:
        """Add a request to the prefill engine, if an id is free.

        ``kind`` is "plain", "drafter" (a drafter writes its pages last) or "conversation" (its
        answer is held for the next turn).
        """
        free = [i for i in IDS if i not in self.producer.requests]
        if free:
            prompt = PrefillRequest(
                uid=next(self.uids),
                id=free[0],
                size=size,
                chunks=chunks,
                drafter=kind == "drafter",
                conversation=kind == "conversation",
                remote=remote,
                errs=errs,
            )
            self.producer.add(prompt)

    def hand(
        self,
        engine: Consumer,
        issue: IssuedTicket,
        *,
        cached: int = 0,
        fits: bool = True,
        forged: bool = False,
        sample: bool = False,
    ) -> None:
        """Add a request with a ticket to a decode engine, if an id is free there."""
        free = [i for i in IDS if i not in engine.requests]
        if free:
            request = DecodeRequest(
                uid=next(self.uids),
                id=free[0],
                issue=issue,
                cached=min(cached, issue.prompt.size),
                prompt_fits=fits,
                forged=forged,
                sample=sample,
            )
            if forged:
                self._forged.add(request.uid)
            engine.add(request)

    def fresh(self, *, kind: str, ordered: bool) -> IssuedTicket | None:
        """Return a new ticket, if the prefill engine has room for the request."""
        issued = len(self.issues)
        self.ask(size=2, kind=kind)
        if kind == "conversation" and self.producer.can_schedule:
            self.producer.schedule()  # so that a step more is under way when the answer ends
        self.compute(tail=False)
        if ordered and self.producer.can_schedule:
            self.producer.schedule()
            for rank in self.producer.ranks:
                while rank.inbox:
                    rank.launch()
        return self.issues[-1] if len(self.issues) > issued else None

    def compute(self, *, tail: bool) -> None:
        """Run the prefill engine alone until it makes a ticket; with ``tail``, one step more."""
        issued = len(self.issues)
        for _ in range(6):
            if len(self.issues) == issued:
                self._producer_step(tail=False)
        if tail:
            self._producer_step(tail=True)

    def pull(self, engine: Consumer, items: int, ranks: slice = slice(None)) -> None:
        """Run some ranks of a decode engine alone until ``items`` items have landed on each."""
        self.silent = items < 0
        if engine.can_schedule:
            engine.schedule()
        for rank in engine.ranks[ranks]:
            while rank.inbox:
                rank.launch()
            for load_id in () if self.silent else list(rank.handshakes):
                rank.answer(load_id)
            for _ in range(items):
                self._land_one(rank)
            rank.poll()

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def wait_patiently(self) -> None:
        """Let more than a lease pass, while every renewal arrives in time."""
        self._renew()
        kept = [
            (wait, rank)
            for wait, ranks in self._renewed()
            for rank in ranks
            if rank.table.fresh(wait.request.issue.ticket.hold, rank.now())
        ]
        for _ in range(10):
            self.wait(LEASE / 6)
            self._renew()
        for wait, rank in kept:
            hold = wait.request.issue.ticket.hold
            cause = rank.table.over.get(hold)
            expired = cause is not None and cause.why == "expired"
            waited = wait.renewal is not None and rank.rank not in wait.settled
            require(not (expired and waited), "expired, although it was renewed:", hold)

    def starve(self, seconds: float, heard: slice) -> None:
        """Let requests wait for pages for some seconds."""
        self._claim(self.producer.ranks[heard])
        for _ in IDS:
            if self.producer.starved is None:
                self.ask(size=2, kind="plain")
                self._producer_step(tail=True)
        # Conversations' holds go in the first step, and are back after two more. Then the ranks are
        # asked, and have answered a step later.
        for _ in range(6):
            self._producer_step(tail=True)
        answers = self.producer.conversations if self.producer.starved is not None else []
        require(not answers, "kept for a next turn, though requests wait for pages:", answers)
        ranks = self.producer.ranks[heard]
        kept = self._claimed(ranks)
        for second in range(int(seconds) + 1):
            self.wait(1.0 if second else 0.0)
            self._claim(ranks)
        kept = [hold for hold in self._claimed(ranks) if hold in kept]
        waits, left = self.producer.starved, self._lost()
        orphaned = len(self.producer.orphaned)
        for _ in range(3):
            self._producer_step(tail=True)
        waited = waits is not None and waits.at is PrefillState.WAITING
        given_up = self.producer.orphaned[orphaned:]
        require(not set(kept) & set(given_up), "given up, though a consumer waits for it:", kept)
        helped = given_up or not waited
        require(bool(helped) or not left, "kept, though it is silent and pages are lacking:", left)

    def _lost(self) -> list[Hold]:
        """Return the ticketed holds that are silent on every rank."""
        books = [(rank.table.ages(rank.now()), rank) for rank in self.producer.ranks]
        return [
            prompt.hold
            for prompt in self.producer.at(PrefillState.HELD)
            if prompt.hold is not None and prompt.hold not in self.producer.given_up
            if all(ages.get(prompt.hold, 0.0) >= GONE_SECONDS for ages, _ in books)
        ]

    def _claimed(self, ranks: Sequence[ProducerRank]) -> list[Hold]:
        """Return the holds that consumers renew on one of these ranks."""
        return [
            wait.request.issue.ticket.hold
            for wait, renewed in self._renewed()
            if any(rank in ranks and rank.rank not in wait.settled for rank in renewed)
        ]

    def _claim(self, ranks: Sequence[ProducerRank]) -> None:
        """Send renewals and heartbeats, and deliver them to these ranks."""
        self._land_renewals()
        numbers = {rank.rank for rank in ranks}
        for message in [m for m in self.fabric.messages if is_renewal(m)]:
            if message.rank in numbers:
                self.deliver(message)
        for producer_rank in self.producer.ranks:
            producer_rank.tick()

    def _renewed(self) -> Iterator[tuple[Wait, list[ProducerRank]]]:
        """Yield what is renewed at the producer that runs now, with the ranks."""
        for engine in self.consumers:
            for rank in engine.ranks:
                for wait in rank.rank_renewals.renewed():
                    if wait.request.issue.producer is self.producer:
                        yield wait, [self.producer.ranks[p.rank] for p in rank.remote_ranks]

    def _renew(self) -> None:
        self._claim(self.producer.ranks)

    def _land_renewals(self) -> None:
        """Post the renewals that are due, and let their reads land."""
        for engine in self.consumers:
            for rank in engine.ranks:
                rank.tick()
                for transfer in [t for t in rank.transfers if t.op is None]:
                    while not transfer.state.final:
                        self.fabric.land(transfer, 0)
                rank.poll()

    def _producer_step(self, *, tail: bool) -> None:
        producer = self.producer
        if producer.can_schedule:
            producer.schedule()
        for rank in producer.ranks:
            while rank.inbox:
                rank.launch()
        streams = [rank.stream for rank in producer.ranks]
        while any(streams) and (tail or not producer.can_process):
            next(stream for stream in streams if stream).popleft()()
        while producer.can_process:
            producer.process()
        for rank in producer.ranks if tail else ():
            rank.tick()

    def _land_one(self, rank: ConsumerRank) -> None:
        running = [t for t in rank.transfers if not t.state.final]
        if running:
            self.fabric.land(running[0], 0)

    # Failures.

    def restart_producer(
        self, *, severs: bool, failing: bool, messages: bool, gracefully: bool
    ) -> None:
        if gracefully:
            self.producer.shut_down()
        for engine in self.consumers:
            for rank in engine.ranks if severs else ():
                rank.sever(failing=failing)
        if not messages:
            self.fabric.messages.clear()
        self.producer = self._new_producer()

    def restart_consumer(self, index: int, *, messages: bool) -> None:
        old = self.consumers[index]
        old.crash()
        if not messages:
            self.fabric.messages = [m for m in self.fabric.messages if m.sender != old.name]
        self.consumers[index] = self._new_consumer(old.name, self._plans[index])

    def stray(self, index: int, how: str) -> None:
        """Deliver a release that differs from a hold in incarnation, generation or slot."""
        holds = [p.hold for p in self.producer.requests.values() if p.hold is not None]
        if not holds:
            return
        hold = holds[index % len(holds)]
        incarnation = self.producer.incarnation ^ (_BIT if how == "incarnation" else 0)
        generation = hold.generation ^ (_BIT if how == "generation" else 0)
        other = Hold(slot=hold.slot + (how == "slot"), generation=generation)
        note = release(incarnation, other, engine="A", rank=0, expected=1)
        for rank in self.producer.ranks:
            stray = Message(sender="A", rank=rank.rank, payload=encode([note]), origins=(0,))
            rank.hear(stray)

    # Rest.

    def settle(self) -> None:
        """Run until nothing is under way, without letting time pass."""
        calm = 0
        for _ in range(60):
            self._round()
            check_scheduler_holds(self)
            calm = 0 if self._under_way() else calm + 1
            if calm > 3:
                break
        require(calm > 3, "no rest")
        check_rest(self)

    def _round(self) -> None:
        self._producer_step(tail=True)
        for engine in self.consumers:
            self.pull(engine, items=8)
            for request in engine.at(DecodeState.READY):
                engine.finish(request)
            while engine.can_process:
                engine.process()
            for rank in engine.ranks:
                rank.tick()
        while self.fabric.messages:
            self.deliver(self.fabric.messages[0])

    def _under_way(self) -> bool:
        producer = self.producer
        waiting = [p for p in producer.at(PrefillState.WAITING) if p.size <= len(producer.free)]
        working = any(rank.stream or rank.passed for rank in producer.ranks)
        loads = any(engine.requests or engine.pending for engine in self.consumers)
        moving = self.fabric.transfers or self.fabric.messages
        return bool(waiting or producer.at(PrefillState.RUNNING) or working or loads or moving)

    def finish(self) -> None:
        self.settle()
        for _ in range(len(IDS) + 1):
            if self.producer.requests:
                self.wait(LEASE + 1)
                self.settle()
        if self.producer.requests:
            self.wait(TTL)
            self.settle()
        check_end(self)

    # Inside.

    def _new_producer(self) -> Producer:
        return self.components.of(Producer)(
            self.components,
            ranks=self._ranks,
            slots=self.slots,
            max_held=self._max_held,
            clock=lambda: self.now,
            issues=self.issues,
        )

    def _new_consumer(self, name: str, plan: Plan) -> Consumer:
        users = (
            UncountedHoldUsers if self._is_older and name == "B" else self.components.of(HoldUsers)
        )
        life = 0 if name == self._old else next(self._lives)
        return Consumer(self, name, plan, users, life)


# What must hold always, at rest, and at the end. What must hold at an event is checked there.


def check_scheduler_holds(simulation: Simulation) -> None:
    holds = sum(p.hold is not None for p in simulation.producer.requests.values())
    require(simulation.producer.scheduler_holds.held == holds, "the scheduler must hold", holds)


def check_rest(simulation: Simulation) -> None:
    """Check that all loads are over and all due messages were sent, when nothing is under way."""
    for engine in simulation.consumers:
        require(not engine.requests, "never reported:", engine.requests)
        require(len(engine.users) == 0, "holds without users:", len(engine.users))
        for rank in engine.ranks:
            _check_rank(simulation, rank)
    for prompt in simulation.producer.at(PrefillState.HELD):
        over = all(prompt.hold in rank.table.over for rank in simulation.producer.ranks)
        require(not over, "over on every rank, but its pages never came back:", prompt)
        reset = prompt.hold in simulation.producer.reset_holds
        require(not reset, "reset, but still held:", prompt)


def _check_rank(simulation: Simulation, rank: ConsumerRank) -> None:
    rank.echo(len(rank.heard))
    rank.heard.clear()
    require(
        rank.transfers == [] == simulation.fabric.messages,
        "a repeated event of a load that is over had an effect",
    )
    require(not rank.loads.open, "loads that are never over:", rank.loads.open)
    for load_id, pull in rank.pulls.items():
        require(pull.reported and rank.loads[load_id].is_over, "a load that is never over")
        issue, link = pull.request.issue, pull.link
        if pull.shared:
            _check_done_is_said(rank, issue)
            continue
        if link is None or link.broken or issue.producer is not simulation.producer:
            continue
        for remote in rank.remote_ranks:
            table = simulation.producer.ranks[remote.rank].table
            knows = table.knows(issue.ticket.hold, rank.engine, rank.rank)
            require(knows, "no message was sent to a producer rank:", remote)


def _check_done_is_said(rank: ConsumerRank, issue: IssuedTicket) -> None:
    """Check that one of the loads that share a hold, or one after them, sends "done"."""
    tells = any(not p.shared and p.request.issue is issue for p in rank.pulls.values())
    require(tells, "no done was sent for a shared hold:", issue.ticket.hold)


def check_end(simulation: Simulation) -> None:
    """Check that nothing is left and everything can be used again, when all leases are over."""
    producer = simulation.producer
    require(not producer.requests, "never released:", producer.requests)
    require(sorted(producer.free) == list(range(1, PAGES + 1)), "pages lost:", producer.free)
    for rank in producer.ranks:
        require(rank.worker_holds.held == 0, "the worker still holds", rank.worker_holds.held)
        require(set(rank.words) == {NOTHING}, "words left:", rank.words)
    for engine in simulation.consumers:
        require(len(engine.free) == PAGES, "pages lost:", engine.free)
    check_unused(producer.scheduler_holds, simulation.slots)
