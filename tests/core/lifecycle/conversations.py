"""Engines that each prefill for and decode from the other: the model, and planted faults."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvferry.core.errors import KVFerryError, TransportError
from kvferry.core.lifecycle.holds import RequestId
from tests.core.lifecycle import protocol_faults
from tests.core.lifecycle.model import Faults, Model
from tests.core.lifecycle.producer import LEASE, LOAD_TIMEOUT, TTL
from tests.core.lifecycle.staged_model import DeviceNotAwaited
from tests.core.lifecycle.two_engines import (
    LARGEST,
    PAGES,
    Engine,
    Leaves,
    Rank,
    Stage,
    Turn,
    TwoEngines,
)

PICKS = st.binary(max_size=8) | st.binary(min_size=24, max_size=60)
LEAVES = st.sampled_from(list(Leaves))
PLANTED = Faults()
PLANTED.add("nothing is reclaimed")(protocol_faults.PLANTED["answers are never reclaimed"])
PLANTED.add("a load does not wait for the device")(DeviceNotAwaited)
NEITHER_NOR = st.sampled_from([False, False, False, True])


class Conversations(Model):
    """Any order of requests, steps, deliveries, aborts and failures."""

    simulation: TwoEngines
    mode: str

    @initialize(
        mode=st.sampled_from(["roles", "answers", "both"]),
        full=st.sampled_from([(), (0, 1), (1, 0)]),
    )
    def start(self, mode: str = "roles", full: tuple[int, ...] = ()) -> None:
        """Begin a simulation.

        With ``mode`` "roles", engine A decodes, and its answers are held; engine B prefills, and
        its prompts are held. With "answers", both hold only answers, and with "both", each engine
        has both roles. Then an engine must keep some pages for itself: a prompt's hold is not ended
        while a consumer waits for it, so that without a limit each could wait for the other. With
        ``full``, the engines are filled in this order (``fill``).
        """
        self.mode = mode
        self.simulation = TwoEngines(self.components, PAGES - LARGEST if mode == "both" else None)
        if full:
            self.fill(full, 1, Leaves.NOTHING)

    def allowed(self, engine: Engine, leaves: Leaves) -> Leaves:
        """Return what a request leaves to be held, as its engine's role allows."""
        if leaves is Leaves.NOTHING or self.mode == "both":
            return leaves
        prefills = self.mode == "roles" and engine.name == "B"
        return Leaves.PROMPT if prefills else Leaves.ANSWER

    @rule(
        index=st.integers(0, 1),
        back=st.sampled_from([None, "new", 0, 1]),
        size=st.integers(1, LARGEST),
        chunks=st.integers(1, 2),
        leaves=LEAVES,
        errs=NEITHER_NOR,
        aborts=NEITHER_NOR,
        after_abort=NEITHER_NOR,
        steps=st.integers(0, 4),
        items=st.integers(0, 3),
        ahead=st.booleans(),
        works=st.booleans(),
        picks=PICKS,
    )
    def ask(
        self,
        index: int = 0,
        back: int | str | None = None,
        size: int = 1,
        chunks: int = 1,
        leaves: Leaves = Leaves.NOTHING,
        errs: bool = False,
        aborts: bool = False,
        after_abort: bool = False,
        steps: int = 0,
        items: int = 0,
        ahead: bool = False,
        works: bool = False,
        picks: bytes = b"",
    ) -> None:
        """Add a request, which may load with a ticket of the other engine, and run a few steps.

        With ``after_abort``, one is aborted first, whose pages the devices have yet to write.
        """
        engine, simulation = self.simulation.engines[index], self.simulation
        if after_abort:
            aborted = simulation.ask(engine, size=LARGEST, chunks=1, leaves=Leaves.NOTHING)
            simulation.run(engine, items=0, ahead=False, works=False)
            if aborted is not None:
                engine.abort(aborted)
        if back == "new":  # while the other engine's devices still work for it
            kept = self.allowed(engine.other, Leaves.ANSWER)
            simulation.ask(engine.other, size=LARGEST, chunks=1, leaves=kept)
            simulation.run(engine.other, items=0)
            back = 0
        issues = [issue for issue in simulation.issues if issue.engine != engine.name]
        source = issues[-1 - back] if isinstance(back, int) and back < len(issues) else None
        leaves = self.allowed(engine, leaves)
        turn = simulation.ask(
            engine, size=size, chunks=chunks, leaves=leaves, errs=errs, source=source
        )
        for _ in range(steps):
            simulation.run(engine, items=items, ahead=ahead, works=works)
        if aborts and turn is not None:
            engine.abort(turn)
            simulation.run(engine, items=items, ahead=ahead, works=works)
        self.drift(picks)

    @rule(
        indices=st.sampled_from([(0, 1), (1, 0)]),
        rounds=st.integers(0, 3),
        leaves=LEAVES,
        seconds=st.integers(0, 4),
        picks=PICKS,
    )
    def overfill(
        self,
        indices: tuple[int, ...] = (0, 1),
        rounds: int = 0,
        leaves: Leaves = Leaves.NOTHING,
        seconds: int = 0,
        picks: bytes = b"",
    ) -> None:
        self.fill(indices, rounds, leaves)
        self.simulation.now += seconds
        self.drift(picks)

    def fill(self, indices: tuple[int, ...], rounds: int, leaves: Leaves) -> None:
        """Fill both engines with held pages, and ask each one to go on with those of the other."""
        simulation = self.simulation
        engines = [simulation.engines[index] for index in indices]
        for engine in engines:
            held = self.allowed(engine, Leaves.ANSWER)
            for _ in range(PAGES // LARGEST):
                simulation.ask(engine, size=LARGEST, chunks=1, leaves=held)
        for _ in range(2 + rounds):
            for engine in engines:
                simulation.run(engine, items=0)
        issues = simulation.issues[-4:]
        for engine in engines:
            for issue in [each for each in issues if each.engine != engine.name]:
                kept = self.allowed(engine, leaves)
                simulation.ask(engine, size=LARGEST, chunks=1, leaves=kept, source=issue)
            self._claim(engine)

    def _claim(self, engine: Engine) -> None:
        """Let an engine schedule its requests, and claim the holds for which they wait."""
        if engine.can_schedule:
            engine.schedule()
        for rank in engine.ranks:
            while rank.inbox:
                rank.launch()
            rank.tick()
        while self.simulation.fabric.messages:
            self.simulation.deliver(self.simulation.fabric.messages[0])

    @rule(
        index=st.integers(0, 1),
        items=st.integers(0, 4),
        ahead=st.booleans(),
        works=st.booleans(),
    )
    def run(self, index: int = 0, items: int = 0, ahead: bool = False, works: bool = False) -> None:
        self.simulation.run(self.simulation.engines[index], items=items, ahead=ahead, works=works)

    drift = rule(picks=PICKS)(Model.drift)

    @rule(index=st.integers(0, 1), which=st.integers(0, 4), picks=PICKS)
    def abort(self, index: int = 0, which: int = 0, picks: bytes = b"") -> None:
        engine = self.simulation.engines[index]
        if turns := list(engine.turns.values()):
            engine.abort(turns[which % len(turns)])
        self.drift(picks)

    @rule(
        seconds=st.sampled_from([1.0, LEASE - 0.5, TTL - 0.5, TTL, LOAD_TIMEOUT]),
        settles=st.booleans(),
        picks=PICKS,
    )
    def wait(self, seconds: float = 1.0, settles: bool = False, picks: bytes = b"") -> None:
        if settles:
            self.simulation.settle(2)
        else:
            self.simulation.now += seconds
        self.drift(picks)

    @rule(index=st.integers(0, 7), loses=st.booleans(), picks=PICKS)
    def harm(self, index: int = 0, loses: bool = False, picks: bytes = b"") -> None:
        fabric = self.simulation.fabric
        if loses and fabric.messages:
            del fabric.messages[index % len(fabric.messages)]
        elif fabric.transfers:
            fabric.fail(fabric.transfers[index % len(fabric.transfers)], TransportError("cut"))
        self.drift(picks)


@PLANTED.add("claimed answers are not reclaimed")
class ClaimedAnswersStay(Engine):
    def reclaim(self, pages: int) -> int:
        holds = [rank.holds._held for rank in self.ranks]
        held = [each for table in holds for each in table.values()]
        claimed = any(each.ttl is not None and each.claimants for each in held)
        return 0 if claimed else super().reclaim(pages)


@PLANTED.add("a reclaimed hold's pages given back at once")
class ReclaimedAtOnce(Engine):
    def reclaim(self, pages: int) -> int:
        given = super().reclaim(pages)
        ended = set(self.holds._ends)
        for turn in [turn for turn in self.at(Stage.HELD) if turn.hold in ended]:
            self.give_back(turn)
        return given


PLANTED.replace("an answer's ticket says computed", Engine, computed=lambda self, turn: True)


@PLANTED.add("the abort of a load leaves its request's hold")
class AbortKeepsTheHold(Engine):
    def drop(self, turn: Turn) -> None:
        if turn.stage is not Stage.ABORTED:
            super().drop(turn)


@PLANTED.add("the abort of a load reports its request's hold")
class AbortReportsTheHold(Rank):
    def launch(self) -> None:
        for held in list(self.holds._held.values()):
            if held.request in self.inbox[0].aborts:
                self.holds.drop(held.hold)
                self.holds._sent.append(held.request)
        super().launch()


@PLANTED.add("a failed load ends its request's hold")
class FailureEndsTheHold(Rank):
    def launch(self) -> None:
        failed = {request for request, error in self.results if error is not None}
        for held in list(self.holds._held.values()):
            if held.request in failed and held.lease is None:
                self.holds.drop(held.hold)
        super().launch()


@PLANTED.add("received, so not sent")
class SentOfOneIsReceivedOfTheOther(Rank):
    _seen: frozenset[RequestId] = frozenset()

    def launch(self) -> None:
        self._seen |= {request for request, _ in self.results}
        sent = self.holds._sent
        self.holds._sent = [each for each in sent if each not in self._seen]
        super().launch()


@PLANTED.add("received counts as sent")
class ReceivedReportedAsSent(Engine):
    def _hear_received(self, rank: int, request: RequestId, error: KVFerryError | None) -> None:
        super()._hear_received(rank, request, error)
        turn = self.turns.get(request)
        if turn is not None and turn.leaves is not Leaves.NOTHING and turn.stage is Stage.RUNNING:
            self.sent[request].add(rank)
