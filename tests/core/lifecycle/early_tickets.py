"""The model of early tickets, and the faults that it must find, planted one at a time."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.load_machine import LoadAction, LoadMachine, _At
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.worker_holds import HoldState, ReleaseOutcome, WorkerHolds
from kvferry.core.messages import Release
from tests.core.lifecycle import protocol_faults
from tests.core.lifecycle.early_engines import (
    Decode,
    EarlySimulation,
    Prefill,
    PrefillRank,
)
from tests.core.lifecycle.model import Faults, Model
from tests.core.lifecycle.producer import LEASE, LOAD_TIMEOUT, PrefillState
from tests.core.lifecycle.reading_engines import PLANS

PICKS = st.binary(min_size=4, max_size=60)
"""Which of the possible moves come next."""
PLANTED = Faults()
PLANTED.add("no fence")(protocol_faults.PLANTED["the fence ignored"])


class EarlyTickets(Model):
    simulation: EarlySimulation

    @initialize(plan=st.sampled_from(range(len(PLANS))), slots=st.integers(1, 2))
    def start(self, plan: int = 0, slots: int = 1) -> None:
        self.simulation = EarlySimulation(plan=PLANS[plan], slots=slots, components=self.components)

    @rule(
        size=st.integers(1, 3),
        drafter=st.booleans(),
        fits=st.sampled_from([True] * 5 + [False]),
        decodes=st.sampled_from([True] * 4 + [False]),
        picks=PICKS,
    )
    def ask(
        self,
        size: int = 1,
        drafter: bool = False,
        fits: bool = True,
        decodes: bool = True,
        picks: bytes = b"",
    ) -> None:
        self.simulation.ask(size=size, drafter=drafter, fits=fits, decodes=decodes)
        self.drift(picks)

    @rule(script=st.lists(st.sampled_from("SLLCCCHHKK11RRP"), min_size=4, max_size=16))
    def proceed(self, script: list[str]) -> None:
        """Let some part proceed while the others wait; sequences have "l" and "h", too."""
        simulation = self.simulation
        acts = {
            "S": simulation.schedule,
            "L": simulation.launch,
            "l": self.launch_one,
            "C": simulation.compute,
            "H": simulation.hear,
            "K": simulation.look,
            "1": lambda: simulation.land(1),
            "R": simulation.read,
            "P": self.preempt_one,
        }
        for each in script:
            acts[each]()

    def launch_one(self) -> None:
        for rank in self.simulation.prefill.ranks:
            if rank.inbox:
                rank.launch()

    def preempt_one(self) -> None:
        prefill = self.simulation.prefill
        for prompt in prefill.at(PrefillState.RUNNING)[:1]:
            prefill.preempt(prompt)

    drift = rule(picks=PICKS)(Model.drift)

    @rule(
        what=st.sampled_from(["preempt", "preempt", "abort"]),
        index=st.integers(0, 2),
        picks=PICKS,
    )
    def stop_prefill(self, what: str = "preempt", index: int = 0, picks: bytes = b"") -> None:
        prefill = self.simulation.prefill
        found = prefill.at(PrefillState.RUNNING)
        if found:
            stop = prefill.preempt if what == "preempt" else prefill.abort
            stop(found[index % len(found)])
        self.drift(picks)

    @rule(index=st.integers(0, 2), picks=PICKS)
    def abort_decode(self, index: int = 0, picks: bytes = b"") -> None:
        decode = self.simulation.decode
        if decode.requests:
            decode.abort(decode.requests[index % len(decode.requests)])
        self.drift(picks)

    @rule(rank=st.integers(0, 1), failing=st.booleans(), picks=PICKS)
    def sever(self, rank: int = 0, failing: bool = False, picks: bytes = b"") -> None:
        ranks = self.simulation.decode.ranks
        ranks[rank % len(ranks)].sever(failing=failing)
        self.drift(picks)

    @rule(seconds=st.sampled_from([0.0, 0.005, 0.005, LEASE, LOAD_TIMEOUT]), picks=PICKS)
    def rest(self, seconds: float = 0.0, picks: bytes = b"") -> None:
        if seconds:
            self.simulation.wait(seconds)
        else:
            self.simulation.settle()
        self.drift(picks)


# Faults that docs/protocol.md lists.


@PLANTED.add("the generation kept at a preemption")
class GenerationKeptAtPreemption(SchedulerHolds):
    def take_on(self, request: RequestId) -> Hold | None:
        entry = self._entries.get(request)
        return super().take_on(request) if entry is None or entry.ticketed else entry.hold


# The watermark for a chunk is ordered with the very step that computes it.
PLANTED.replace(
    "the last chunk published early",
    Prefill,
    publish=lambda self, prompt: self.publish_chunks(prompt, prompt.chunk + 1),
)
PLANTED.replace(
    "a watermark before its event",
    PrefillRank,
    queue_mark=lambda self, hold, tokens: self.worker_holds.mark(hold, tokens),
)
PLANTED.replace(
    "a part of one prompt taken for another", Decode, admits=lambda self, request, part: True
)


@PLANTED.add("a hold reported sent while computing")
class SentWhileComputing(WorkerHolds):
    def release(self, message: Release) -> ReleaseOutcome:
        outcome = super().release(message)
        for held in [h for h in self._held.values() if h.state is HoldState.ENDED]:
            self._report(held)
        return outcome


@PLANTED.add("a watermark read before its generation")
class MarkedBeforeItsGeneration(LoadMachine):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.marks: dict[int, int] = {}

    def _mark(self) -> None:
        for rank in self.at:
            self._early_reads(rank).stood = True
        super()._mark()

    def watermark_read(self, rank: int, watermark: int) -> None:
        counts = self.awaits_parts and self.hold.marked_tokens(watermark) > 0
        if self.at.get(rank) is _At.WATERMARK and counts:
            self.marks[rank] = watermark
            self._do(rank, _At.CHECKING, LoadAction.CHECK)
        else:
            super().watermark_read(rank, watermark)

    def checked(self, rank: int, word: int) -> None:
        mark = self.marks.pop(rank, None)
        if self.at.get(rank) is not _At.CHECKING or mark is None or not self.awaits_parts:
            super().checked(rank, word)
        elif self.is_outdated(rank) or not self.hold.stands(word):
            self._proceed(rank)
        else:
            self.at[rank] = _At.WATERMARK
            super().watermark_read(rank, mark)


# Further faults.


@PLANTED.add("a watermark not zeroed at take-on")
class WatermarkNotZeroed(WorkerHolds):
    def take_on(self, request: RequestId, hold: Hold) -> None:
        watermarks, self._watermarks = self._watermarks, [0] * len(self._watermarks)
        super().take_on(request, hold)
        self._watermarks = watermarks


PLANTED.replace(
    "watermarks ignored",
    LoadMachine,
    watermark_read=lambda self, rank, watermark: LoadMachine.watermark_read(
        self, rank, self.hold.watermark(self.tokens)
    ),
)


@PLANTED.add("pages of the old hold kept")
class PagesOfTheOldHoldKept(LoadMachine):
    def extend(self, hold: Hold, tokens: int, deadline: float) -> None:
        super().extend(hold, tokens, deadline)
        self._keep()

    def finish(self, hold: Hold, *, computed: bool, deadline: float) -> None:
        if self.early and not self.reported:
            self.hold = hold
            self._keep()
        super().finish(hold, computed=computed, deadline=deadline)

    def _keep(self) -> None:
        for progress in self.progress.values():
            progress.hold = self.hold


@PLANTED.add("the read of an old hold not awaited")
class OldReadNotAwaited(LoadMachine):
    def finish(self, hold: Hold, *, computed: bool, deadline: float) -> None:
        for rank, at in self.at.items():
            if self.early and at is _At.READING and hold != self.hold:
                self.at[rank] = _At.IDLE
        super().finish(hold, computed=computed, deadline=deadline)


@PLANTED.add("over before the ticket")
class OverBeforeTheTicket(LoadMachine):
    def _mark(self) -> None:
        super()._mark()
        if self.progress and all(p.until == self.tokens for p in self.progress.values()):
            for rank in self.at:
                self._do(rank, _At.FENCING, LoadAction.FENCE)


@PLANTED.add("gone fails an early load")
class GoneFailsAnEarlyLoad(LoadMachine):
    """The slot word may be read before the hold is taken on, or after a preemption."""

    def checked(self, rank: int, word: int) -> None:
        if self.awaits_parts and not self.hold.stands(word):
            self._early_reads(rank).stood = True
        super().checked(rank, word)


@PLANTED.add("the deadline counts while prefill computes")
class DeadlineWhileComputing(LoadMachine):
    def tick(self, now: float) -> None:
        if self.early and not self.reported and now >= self.deadline:
            self._fail(KVFerryError("late"))
        super().tick(now)


@PLANTED.add("the old hold not dropped")
class OldHoldNotDropped(SchedulerHolds):
    def take_on(self, request: RequestId) -> Hold | None:
        entry = self._entries.get(request)
        if entry is None or entry.ticketed:
            return super().take_on(request)
        slot = self._free.popleft() if self._free else entry.hold.slot
        entry.hold = Hold(slot=slot, generation=self._draw())
        self._take_ons.append((request, entry.hold))
        return entry.hold


@PLANTED.add("an abandon before the order forgotten")
class AbandonForgottenBeforeTheOrder(WorkerHolds):
    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        if hold not in self:
            self.drop(hold)
        super().order(hold, lease, now, ttl)
