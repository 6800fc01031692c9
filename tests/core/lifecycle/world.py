"""The simulation: engines, what is between them, the clock, and everything that can happen.

Either engine P prefills for engines A and B, or A and B each prefill for and decode from the other.
An action is a line of text: a verb, then an engine or a rank ("A", "A0"), then numbers or options.
It does nothing where it is not possible, so that any actions can be left out of a sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import HandshakeError, TransportError
from kvferry.core.lifecycle.holds import NOTHING, Hold, HoldEnd, RequestId
from kvferry.core.lifecycle.load_machine import RemoteRank
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS
from kvferry.core.messages import Heartbeat, Release, Renewal
from kvferry.core.transport import State
from tests.core.lifecycle.consumer_rank import ConsumerRank, Pull
from tests.core.lifecycle.engine import Engine, Plan, Rank
from tests.core.lifecycle.fabric import Components, Fabric, Message, require
from tests.core.lifecycle.producer_rank import ProducerRank
from tests.core.lifecycle.turns import LEASE, PAGES, TTL, Issue, Leaves, Stage, Turn

IDS = [RequestId(f"request-{i}") for i in range(5)]
"""All engines use the same ids, and use them again."""
PROGRESS = 80
"""Seconds within which every request must end once nothing fails any more."""


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


def _value(word: str) -> int | str:
    return int(word) if word.lstrip("-").isdigit() else word


PLANS: dict[int, tuple[Plan, ...]] = {
    1: (_plan("0"), _plan("0", "0")),
    2: (_plan("01"), _plan("0+1"), _plan("0", "1"), _plan("01", "01"), _plan("0", "0+1")),
    3: (_plan("01", "1+2"), _plan("012"), _plan("0+12"), _plan("01", "12")),
}
"""Plans by the number of producer ranks: equal, split, merged, overlapping, with unread ranks."""
PAIR = _plan("0", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is simulated."""

    pair: bool = False  # whether A and B prefill for each other; then P is not there
    staged: int = 0  # whether the caches are staged, with this number of host pages on each side
    # Whether decode engines load what is computed of a prompt with parts of its ticket.
    early: bool = False
    ranks: int = 1  # how many ranks the producer has; ``plans`` choose what those of A and B read
    plans: str = "00"
    slots: int = PAGES
    max_held: int | None = None  # as in ``SchedulerHolds``

    @property
    def kind(self) -> str:
        return next((kind for kind in ("pair", "staged", "early") if getattr(self, kind)), "plain")


class World:
    def __init__(self, options: Options, components: Components) -> None:
        self.options, self.components = options, components
        self.now = 0.0
        self.fabric = Fabric()
        self.issues: list[Issue] = []
        self.uids, self._lives = itertools.count(1), itertools.count(1)
        self._draws = itertools.count(1)
        self._forged: set[int] = set()
        self._has_lost = False
        self.engines: dict[str, Engine] = {}
        for name in "AB" if options.pair else "PAB":
            self.engines[name] = self._new_engine(name)

    def _new_engine(self, name: str) -> Engine:
        options, life = self.options, next(self._lives)
        peer = {"P": "", "A": "B", "B": "A"}[name] if options.pair else "P" * (name != "P")
        plan: Plan = ()
        if name == "P":
            ranks = options.ranks
        elif options.pair:
            plan, ranks = PAIR, len(PAIR)
        else:
            plans = PLANS[options.ranks]
            plan = plans[int(options.plans["AB".index(name)]) % len(plans)]
            ranks = len(plan)
        engine = self.components.of(Engine)
        return engine(self, name, ranks=ranks, peer=peer, plan=plan, life=life)

    def draw(self) -> int:
        """Return a generation with the same low bits as others.

        A watermark alone tells nothing about the hold that it belongs to, then.
        """
        return next(self._draws) << 32 | 7

    # Steps that can happen next.

    def moves(self) -> list[str]:
        fabric = self.fabric
        lands = [f"land {i} {pick}" for i in range(len(fabric.transfers)) for pick in (0, 1)]
        delivers = [f"deliver {i}" for i in range(len(fabric.messages))]
        engines = [move for each in self.engines.values() for move in self._moves(each)]
        return [*engines, *lands, *delivers]

    def _moves(self, engine: Engine) -> Iterator[str]:
        name = engine.name
        has_work = engine.turns or engine.has_orders or engine.holds.held
        if engine.can_schedule and has_work:
            yield f"schedule {name}"
        if engine.can_process:
            yield f"process {name}"
        if any(not each.is_last for each in engine.turns.values()):
            yield f"follow {name}"
        for rank in engine.ranks:
            consumer, producer = rank.consumer, rank.producer
            if rank.inbox:
                yield f"launch {name}{rank.rank}"
            if rank.device.stream:
                yield f"device {name}{rank.rank}"
            if any(t.state is not State.PENDING for t in consumer.transfers):
                yield f"poll {name}{rank.rank}"
            if consumer.open or consumer.waiting or producer.has_due:
                yield f"tick {name}{rank.rank}"
            for i in range(len(consumer.handshakes)):
                yield f"answer {name}{rank.rank} {i}"
            for i in range(len(producer.copies) + len(consumer.copies)):
                for pick in (0, 1):
                    yield f"copy {name}{rank.rank} {i} {pick}"

    def act(self, action: str) -> None:
        """Carry out one action."""
        verb, *words = action.split()
        options: dict[str, Any] = dict(word.split("=") for word in words if "=" in word)
        options = {name: _value(word) for name, word in options.items()}
        getattr(self, f"do_{verb}")(*(_value(word) for word in words if "=" not in word), **options)

    def _rank(self, name: str) -> Rank | None:
        engine = self.engines.get(name[0])
        index = int(name[1:])
        return engine.ranks[index % len(engine.ranks)] if engine is not None else None

    def do_schedule(self, name: str) -> None:
        if self.engines[name].can_schedule:
            self.engines[name].schedule()

    def do_process(self, name: str) -> None:
        while self.engines[name].can_process:
            self.engines[name].process()

    def do_follow(self, name: str) -> None:
        """Let an engine hear of the requests that it follows."""
        for turn in self.engines[name].turns.values():
            if turn.follows is not None and turn.has_news and not turn.is_last:
                turn.news = turn.heard = turn.follows.part

    def do_launch(self, name: str) -> None:
        if (rank := self._rank(name)) and rank.inbox:
            rank.launch()

    def do_device(self, name: str, entries: int = 1) -> None:
        if rank := self._rank(name):
            for _ in range(min(entries, len(rank.device.stream))):
                rank.device.stream.popleft()()

    def do_poll(self, name: str) -> None:
        if rank := self._rank(name):
            rank.consumer.poll()

    def do_tick(self, name: str) -> None:
        if rank := self._rank(name):
            rank.producer.tick()
            rank.consumer.tick()

    def do_answer(self, name: str, index: int = 0, refused: int = 0) -> None:
        rank = self._rank(name)
        if rank and rank.consumer.handshakes:
            waiting = rank.consumer.handshakes
            error = HandshakeError("nobody answers") if refused else None
            rank.consumer.answer(waiting[index % len(waiting)], error)

    def do_copy(self, name: str, index: int = 0, pick: int = 0) -> None:
        """Let a block of a copy between device and host arrive; with ``pick`` -1, it fails."""
        if rank := self._rank(name):
            copies = [
                (half, copy) for half in (rank.producer, rank.consumer) for copy in half.copies
            ]
            for half, copy in copies[index : index + 1]:
                if pick < 0:
                    half.fail(copy)
                else:
                    half.copy(copy, pick % len(copy.items))

    def do_land(self, index: int = 0, pick: int = 0) -> None:
        for transfer in self.fabric.transfers[index : index + 1]:
            self.fabric.land(transfer, pick)

    def do_deliver(self, index: int = 0) -> None:
        for message in self.fabric.messages[index : index + 1]:
            self._deliver(message)

    def _deliver(self, message: Message) -> None:
        self.fabric.messages.remove(message)
        require(message.origin not in self._forged, "a message about a forged ticket:", message)
        self.engines[message.to].ranks[message.rank].producer.hear(message)

    # Several steps at once.

    def do_run(self, name: str, items: int = 8, *, slow: int = 0) -> None:
        """Let an engine take a step, and so many items arrive of each of its reads and copies.

        If it is ``slow``, its devices do only what the oldest step needs, or (2) nothing.
        """
        engine = self.engines[name]
        if self.options.early and engine.peer:
            self.do_follow(name)
        if engine.can_schedule:
            engine.schedule()
        for rank in engine.ranks:
            while rank.inbox:
                rank.launch()
            while rank.device.stream and (slow == 0 or (slow == 1 and not engine.can_process)):
                rank.device.stream.popleft()()
            rank.producer.tick()
            for copy in [each for each in rank.producer.copies for _ in each.items][:items]:
                rank.producer.copy(copy)
            self._load(rank.consumer, items)
            rank.producer.tick()
        while engine.can_process:
            engine.process()

    def _load(self, rank: ConsumerRank, items: int) -> None:
        """Let the loads of a rank proceed."""
        while rank.handshakes:
            rank.answer(rank.handshakes[0])
        for _ in range(items):
            for transfer in [each for each in rank.transfers if not each.state.final][:1]:
                self.fabric.land(transfer, 0)
            rank.poll()
        for copy in [each for each in rank.copies for _ in each.items][:items]:
            rank.copy(copy)
        rank.tick()

    def do_wait(self, seconds: int, milliseconds: int = 0) -> None:
        self.now += seconds + milliseconds / 1000

    def do_settle(self) -> None:
        """Run until nothing is under way, without letting (much) time pass."""
        calm = 0
        for _ in range(60):
            self._round()
            calm = 0 if self._is_under_way() else calm + 1
            if calm > 3:
                break
        left = {name: engine.turns for name, engine in self.engines.items()}
        require(calm > 3, "no rest:", left)
        self._check_rest()

    def _round(self) -> None:
        for name in self.engines:
            self.do_run(name)
        while self.fabric.messages:
            self._deliver(self.fabric.messages[0])
        if self.options.early:
            self.now += 0.01

    def do_patient(self) -> None:
        """Let more than a lease pass, while every renewal arrives in time."""
        self._claim()
        kept = [
            (pull, rank)
            for pull, ranks in self._renewed()
            for rank in ranks
            if rank.table.fresh(pull.hold, rank.now())
        ]
        for _ in range(10):
            self.now += LEASE / 6
            self._claim()
        for pull, rank in kept:
            hold = pull.hold
            cause = rank.table.over.get(hold)
            expired = cause is not None and cause.why == "expired"
            waited = pull.renewal is not None and rank.rank not in pull.settled
            require(not (expired and waited), "expired, although it was renewed:", hold)

    def do_starve(self, seconds: int = 3, first: int = 0, until: int = 9) -> None:
        """Let requests wait for blocks of P; only some ranks hear renewals and heartbeats."""
        producer = self.engines["P"]
        ranks = [rank.producer for rank in producer.ranks[first:until]]
        self._claim(ranks)
        for _ in IDS:
            if not producer.starved:
                self.do_ask("P", 2)
                self.do_run("P")
        # Conversations' holds go in the first step, and are back after two more. Then the ranks are
        # asked, and have answered a step later.
        for _ in range(6):
            self.do_run("P")
        answers = producer.conversations if producer.starved else []
        require(not answers, "kept for a next turn, though requests wait for pages:", answers)
        kept = self._claimed(ranks)
        for second in range(seconds + 1):
            self.now += 1.0 if second else 0.0
            self._claim(ranks)
        kept = [hold for hold in self._claimed(ranks) if hold in kept]
        waits, left, ended = producer.starved, self._silent(), set(producer.ends)
        for _ in range(3):
            self.do_run("P")
        given_up = [hold for hold, end in producer.ends.items() if end is HoldEnd.ORPHANED]
        given_up = [hold for hold in given_up if hold not in ended]
        require(not set(kept) & set(given_up), "given up, though a consumer waits for it:", kept)
        helped = given_up or not any(turn.stage is Stage.WAITING for turn in waits)
        require(bool(helped) or not left, "kept, though it is silent and pages are lacking:", left)

    def _silent(self) -> list[Hold]:
        """Return the ticketed holds that are silent on every rank of P."""
        producer = self.engines["P"]
        ages = [rank.producer.table.ages(rank.producer.now()) for rank in producer.ranks]
        held = [turn.hold for turn in producer.at(Stage.HELD) if turn.hold is not None]
        return [
            hold
            for hold in held
            if hold not in producer.ends
            and all(each.get(hold, 0.0) >= GONE_SECONDS for each in ages)
        ]

    def _claimed(self, ranks: list[ProducerRank]) -> list[Hold]:
        """Return the holds that consumers renew on one of these ranks."""
        return [
            pull.hold
            for pull, renewed in self._renewed()
            if any(rank in ranks and rank.rank not in pull.settled for rank in renewed)
        ]

    def _claim(self, ranks: list[ProducerRank] | None = None) -> None:
        """Send what renews, and deliver it to these ranks, by default to all."""
        for engine in self.engines.values():
            for rank in (each.consumer for each in engine.ranks):
                rank.tick()
                for transfer in [t for t in rank.transfers if t.op is None]:
                    while not transfer.state.final:
                        self.fabric.land(transfer, 0)
                rank.poll()
        for message in list(self.fabric.messages):
            if not isinstance(message.note, Renewal | Heartbeat):
                continue
            if ranks is None or self.engines[message.to].ranks[message.rank].producer in ranks:
                self._deliver(message)
        for engine in self.engines.values():
            for each in engine.ranks:
                each.producer.tick()

    def _renewed(self) -> Iterator[tuple[Pull, list[ProducerRank]]]:
        """Yield what is renewed at a producer that runs now, with its ranks."""
        for engine in self.engines.values():
            for rank in (each.consumer for each in engine.ranks):
                for pull in rank.renewed():
                    if pull.issue.producer is rank.producer():
                        ranks = pull.issue.producer.ranks
                        yield pull, [ranks[p.rank].producer for p in rank.remote_ranks]

    # What users do.

    def do_ask(
        self,
        name: str,
        size: int = 1,
        *,
        back: int | None = None,
        chunks: int = 1,
        leaves: str = "",
        follower: str = "",
        how: str = "",
    ) -> None:
        """Add a request, if an id is free.

        With ``back``, it comes with one of the last tickets of the engine's peer. ``how`` has any
        of "drafter", "errs", "unfit", "forged", "sample". A ``follower`` gets the same request,
        without a ticket, while this one is computed.
        """
        engine = self.engines[name]
        issues = [each for each in self.issues if each.ticket.engine == engine.peer]
        free = [each for each in IDS if each not in engine.turns]
        source = issues[-1 - back] if back is not None and back < len(issues) else None
        if not free or (back is not None and source is None):
            return
        default = "prompt" if source is None else "nothing"
        turn = Turn(
            uid=next(self.uids),
            id=free[0],
            size=size,
            chunks=size if self.options.early else chunks,
            leaves=Leaves(leaves or default),
            source=source,
            drafter="drafter" in how,
            errs="errs" in how,
            fits="unfit" not in how,
            forged="forged" in how,
            sample="sample" in how,
        )
        if source is not None and not self.options.pair:
            turn.size = source.turn.size
        if turn.forged:
            self._forged.add(turn.uid)
        engine.add(turn)
        if follower:
            self._follow(self.engines[follower], turn)

    def _follow(self, engine: Engine, prompt: Turn) -> None:
        free = [each for each in IDS if each not in engine.turns]
        if free:
            turn = Turn(
                uid=next(self.uids),
                id=free[0],
                size=prompt.size,
                follows=prompt,
                is_last=False,
                fits=prompt.fits,
            )
            engine.add(turn)

    def do_abort(self, name: str, index: int = 0) -> None:
        engine = self.engines[name]
        if turns := list(engine.turns.values()):
            engine.abort(turns[index % len(turns)])

    def do_preempt(self, name: str, index: int = 0) -> None:
        engine = self.engines[name]
        if running := [turn for turn in engine.at(Stage.RUNNING) if turn.source is None]:
            engine.preempt(running[index % len(running)])

    def do_reset(self, name: str) -> None:
        self.engines[name].reset()

    def do_revoke(self, name: str, conversations: int = 0) -> None:
        self.engines[name].revoke(conversations=bool(conversations))

    def do_update(self, name: str) -> None:
        self.engines[name].update()

    # Failures.

    def do_fail(self, index: int = 0, failing: int = 0) -> None:
        """Let a transfer fail; with ``failing``, bytes may still land."""
        error = TransportError("a cable was pulled")
        for transfer in self.fabric.transfers[index : index + 1]:
            self.fabric.fail(transfer, error, failing=bool(failing))

    def do_lose(self, index: int = 0) -> None:
        self._has_lost |= index < len(self.fabric.messages)
        del self.fabric.messages[index : index + 1]

    def do_part(self, name: str, failing: int = 0) -> None:
        """Let a rank take its producer for dead."""
        if (rank := self._rank(name)) and rank.consumer.engine.peer:
            rank.consumer.handle_producer_death(failing=bool(failing))

    def do_restart(self, name: str, links: str = "stay", *, messages: str = "stay") -> None:
        """Restart an engine; with ``links`` "closed", in order.

        Connections to it "stay", "break" or are "failing" (or "closed"); messages "stay" or go.
        """
        old = self.engines[name]
        if links == "closed":
            old.shut_down()
        old.crash()
        for engine in self.engines.values() if links in ("break", "failing") else ():
            for rank in engine.ranks if engine.peer == name else ():
                self.fabric.sever(rank.consumer.link, failing=links == "failing")
        if messages != "stay":
            gone = [m for m in self.fabric.messages if name in (m.sender, m.to)]
            self.fabric.messages = [m for m in self.fabric.messages if m not in gone]
        self.engines[name] = self._new_engine(name)
        self.engines[name].weights = old.weights

    def do_stray(self, index: int = 0) -> None:
        """Deliver a release of a hold of P in the name of another incarnation."""
        producer = self.engines["P"]
        holds = [turn.hold for turn in producer.turns.values() if turn.hold is not None]
        for hold in holds[index : index + 1]:
            note = Release(
                incarnation=producer.incarnation ^ 1,
                slot=hold.slot,
                generation=hold.generation,
                engine="A",
                rank=0,
                expected=1,
            )
            for rank in producer.ranks:
                rank.producer.hear(Message(sender="A", to="P", rank=0, note=note, origin=0))

    # What must hold always, at rest, and at the end. What must hold at an event is checked there.

    def check(self) -> None:
        for engine in self.engines.values():
            held = sum(turn.hold is not None for turn in engine.turns.values())
            mine = engine.holds.held
            require(mine == held or bool(self.options.staged), "the scheduler must hold", held)

    def _is_under_way(self) -> bool:
        moving = bool(self.fabric.transfers or self.fabric.messages)
        return moving or any(
            engine.has_orders
            or any(not self._is_stuck(engine, turn) for turn in engine.turns.values())
            or any(self._is_busy(rank) for rank in engine.ranks)
            for engine in self.engines.values()
        )

    def _is_busy(self, rank: Rank) -> bool:
        loads = [p for p in rank.consumer.open if not self._waits_for(p)]
        copies = rank.producer.copies or rank.consumer.copies
        return bool(loads or copies or rank.device.stream or rank.producer.passed)

    def _waits_for(self, pull: Pull) -> bool:
        engine, turn = pull.issue.producer, pull.turn
        return (
            turn.follows is not None and turn.news is None and self._is_stuck(engine, turn.follows)
        )

    def _is_stuck(self, engine: Engine, turn: Turn) -> bool:
        """Return whether a request waits for what is held, so that time must pass."""
        if turn.follows is not None and not turn.is_last and turn.stage is not Stage.ABORTED:
            heard_all = turn.news is None and not turn.has_news
            return heard_all and self._is_stuck(self.engines[engine.peer], turn.follows)
        if turn.stage is not Stage.WAITING:
            return turn.stage is Stage.HELD
        lacks_host = engine.in_pages.waiting or engine.out_pages.waiting
        lacks_slot = self.options.early and engine.holds.held >= self.options.slots
        return bool(turn.size > len(engine.free) or lacks_host or lacks_slot)

    def _check_rest(self) -> None:
        """Check that all loads are over and all messages sent, when nothing is under way."""
        for engine in self.engines.values():
            users = [turn for turn in engine.turns.values() if turn.source is not None]
            waits = any(turn.stage is Stage.WAITING for turn in users)
            require(waits or len(engine.users) == 0, "holds without users:", len(engine.users))
            for rank in engine.ranks:
                self._check_rank_rest(rank.consumer)
            for turn in engine.at(Stage.HELD):
                over = all(turn.hold in rank.producer.table.over for rank in engine.ranks)
                require(not over, "over on every rank, but its pages never came back:", turn)
                require(turn.hold not in engine.ends, "given up, but still held:", turn)

    def _check_rank_rest(self, rank: ConsumerRank) -> None:
        for pull in rank.pulls.values():
            if self._waits_for(pull):
                continue
            require(pull.reported and pull.load.is_over, "a load that is never over")
            producer, link = rank.producer(), pull.link
            if pull.load.shared:
                pulls = rank.pulls.values()
                tells = any(not p.load.shared and p.issue is pull.issue for p in pulls)
                awaited = len(rank.engine.users) > 0
                require(tells or awaited, "no done was sent for a shared hold:", pull.hold)
            elif (
                link and not link.broken and pull.issue.producer is producer and not self._has_lost
            ):
                for remote in rank.remote_ranks:
                    table = producer.ranks[remote.rank].producer.table
                    knows = table.knows(pull.hold, rank.engine.name, rank.rank)
                    require(knows, "no message was sent to a producer rank:", remote)

    def finish(self) -> None:
        """Check that every request ends, and that nothing is left when all leases are over."""
        self.do_settle()
        for _ in range(PROGRESS):
            if not self._unfinished():
                break
            self.now += 1.0
            self.do_settle()
        require(not self._unfinished(), "no progress:", self._unfinished())
        for _ in range(2 * len(IDS)):
            if any(engine.holds.held for engine in self.engines.values()):
                self.now += LEASE + 1 if _ < len(IDS) else TTL
                self.do_settle()
        for engine in self.engines.values():
            self._check_end(engine)

    def _unfinished(self) -> list[Turn]:
        turns = [turn for engine in self.engines.values() for turn in engine.turns.values()]
        return [turn for turn in turns if turn.stage is not Stage.HELD]

    def _check_end(self, engine: Engine) -> None:
        """Check that an engine has nothing left, and can use everything again."""
        require(not engine.turns, "never released:", engine.turns)
        require(sorted(engine.free) == list(range(1, PAGES + 1)), "pages lost:", engine.free)
        for pages in (engine.in_pages, engine.out_pages):
            require(pages.used == pages.waiting == pages.taken == 0, "host pages lost", pages.used)
        for rank in engine.ranks:
            holds = rank.producer.holds
            require(not holds._held, "the worker still holds", holds._held)
            require(set(rank.producer.words) == {NOTHING}, "words left:", rank.producer.words)
            require(not holds.take_sent(), "sent, but nothing is held")
        require(engine.holds.held == 0, "the scheduler still holds:", engine.holds.held)
        slots = self.options.slots
        taken = [engine.holds.take_on(RequestId(f"after-{i}")) for i in range(slots + 1)]
        given = {hold.slot for hold in taken if hold is not None}
        require(len(given) == slots, "slots lost, or given twice:", given)
