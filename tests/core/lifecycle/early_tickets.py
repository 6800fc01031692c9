"""The model of early tickets, and the faults that it must find, planted one at a time."""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle import loads as loads_module
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.loads import LoadAction, LoadId, Loads
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.worker_holds import HoldState, ReleaseOutcome, WorkerHolds
from kvferry.core.messages import Release
from tests.core.lifecycle.early_engines import (
    PLANS,
    Components,
    Decode,
    DecodeRequest,
    EarlySimulation,
    Part,
    Prefill,
    PrefillRank,
    Prompt,
)
from tests.core.lifecycle.model import Model
from tests.core.lifecycle.producer import LEASE, LOAD_TIMEOUT, PrefillState
from tests.core.lifecycle.protocol_faults import FenceIgnored

PICKS = st.binary(min_size=4, max_size=60)
"""Which of the possible moves come next."""


class EarlyTickets(Model):
    """Any order of requests, steps, deliveries, preemptions and failures."""

    components: ClassVar[Components] = Components()
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


class GenerationKeptAtPreemption(SchedulerHolds):
    def take_on(self, request: RequestId) -> Hold | None:
        entry = self._entries.get(request)
        return super().take_on(request) if entry is None or entry.ticketed else entry.hold


class LastChunkPublishedEarly(Prefill):
    """The watermark for a chunk is ordered with the very step that computes it."""

    def publish(self, prompt: Prompt) -> None:
        self.publish_chunks(prompt, prompt.chunk + 1)


class MarkedBeforeTheEvent(PrefillRank):
    def queue_mark(self, hold: Hold, tokens: int) -> None:
        self.worker_holds.mark(hold, tokens)


class AnyPartAccepted(Decode):
    """No part is compared with the prompt, nor the ticket."""

    def admits(self, request: DecodeRequest, part: Part) -> bool:
        return True


class SentWhileComputing(WorkerHolds):
    """A hold that its consumer ends is reported sent at once, though it has no ticket."""

    def release(self, message: Release) -> ReleaseOutcome:
        outcome = super().release(message)
        for held in [h for h in self._held.values() if h.state is HoldState.ENDED]:
            self._report(held)
        return outcome


class MarkedBeforeItsGeneration(Loads):
    """The watermark is read first, and then the slot word."""

    _marks: dict[tuple[LoadId, int], int]

    def _mark(self, load_id: LoadId, load: Any) -> None:
        for rank in load.at:
            load.early_reads(rank).stood = True
        super()._mark(load_id, load)

    def marked(self, load_id: LoadId, rank: int, watermark: int) -> None:
        load = self._at(load_id, rank, loads_module._At.MARKING)
        if load is None or load.failure or not load.early or not load.hold.marked_tokens(watermark):
            super().marked(load_id, rank, watermark)
            return
        self.__dict__.setdefault("_marks", {})[load_id, rank] = watermark
        self._do(load_id, load, rank, loads_module._At.CHECKING, LoadAction.CHECK)

    def checked(self, load_id: LoadId, rank: int, word: int) -> None:
        mark = self.__dict__.get("_marks", {}).pop((load_id, rank), None)
        load = self._at(load_id, rank, loads_module._At.CHECKING)
        if load is None or load.failure or mark is None or not load.early:
            super().checked(load_id, rank, word)
            return
        if self._is_outdated(load, rank) or not load.hold.stands(word):
            self._proceed(load_id, load, rank)
            return
        load.at[rank] = loads_module._At.MARKING
        super().marked(load_id, rank, mark)


# Further faults.


class WatermarkNotZeroed(WorkerHolds):
    def take_on(self, request: RequestId, hold: Hold) -> None:
        watermarks, self._watermarks = self._watermarks, [0] * len(self._watermarks)
        super().take_on(request, hold)
        self._watermarks = watermarks


class WatermarksIgnored(Loads):
    """All pages that a part names are read."""

    def marked(self, load_id: LoadId, rank: int, watermark: int) -> None:
        load = self._loads.get(load_id)
        super().marked(load_id, rank, load.hold.watermark(load.tokens) if load else watermark)


class PagesOfTheOldHoldKept(Loads):
    """After a preemption, what was read is not read again."""

    def extend(self, load_id: LoadId, hold: Hold, tokens: int, deadline: float) -> None:
        super().extend(load_id, hold, tokens, deadline)
        self._keep(load_id)

    def finish(self, load_id: LoadId, hold: Hold, *, computed: bool, deadline: float) -> None:
        load = self._loads.get(load_id)
        if load is not None and load.early and not load.reported:
            load.hold = hold
            self._keep(load_id)
        super().finish(load_id, hold, computed=computed, deadline=deadline)

    def _keep(self, load_id: LoadId) -> None:
        load = self._loads.get(load_id)
        for progress in load.progress.values() if load is not None else ():
            progress.hold = load.hold if load is not None else progress.hold


class OldReadNotAwaited(Loads):
    """After a preemption, pages are read again while the old read is under way."""

    def finish(self, load_id: LoadId, hold: Hold, *, computed: bool, deadline: float) -> None:
        load = self._loads.get(load_id)
        for rank, at in load.at.items() if load is not None and load.early else ():
            if at is loads_module._At.READING and load is not None and hold != load.hold:
                load.at[rank] = loads_module._At.IDLE
        super().finish(load_id, hold, computed=computed, deadline=deadline)


class OverBeforeTheTicket(Loads):
    """A load is over when all that the newest part names was read."""

    def _mark(self, load_id: LoadId, load: Any) -> None:
        super()._mark(load_id, load)
        if load.progress and all(p.until == load.tokens for p in load.progress.values()):
            for rank in load.at:
                self._do(load_id, load, rank, loads_module._At.FENCING, LoadAction.FENCE)


class GoneFailsAnEarlyLoad(Loads):
    """The slot word may be read before the hold is taken on, or after a preemption."""

    def checked(self, load_id: LoadId, rank: int, word: int) -> None:
        load = self._loads.get(load_id)
        if load is not None and load.early and not load.failure and not load.hold.stands(word):
            load.early_reads(rank).stood = True
        super().checked(load_id, rank, word)


class DeadlineWhileComputing(Loads):
    def tick(self, now: float) -> None:
        for load_id, load in list(self._loads.items()):
            if load.early and not load.reported and now >= load.deadline:
                self._fail(load_id, load, KVFerryError("late"))
        super().tick(now)


class OldHoldNotDropped(SchedulerHolds):
    def _replace(self, request: RequestId, entry: Any) -> Hold:
        slot = self._free.popleft() if self._free else entry.hold.slot
        hold = entry.hold = Hold(slot=slot, generation=self._draw())
        self._take_ons.append((request, hold))
        return hold


class AbandonForgottenBeforeTheOrder(WorkerHolds):
    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        if hold not in self:
            self.drop(hold)
        super().order(hold, lease, now, ttl)


PLANTED: dict[str, Components] = {
    "the generation kept at a preemption": Components(scheduler_holds=GenerationKeptAtPreemption),
    "the last chunk published early": Components(prefill=LastChunkPublishedEarly),
    "a watermark before its event": Components(prefill_rank=MarkedBeforeTheEvent),
    "a part of one prompt taken for another": Components(decode=AnyPartAccepted),
    "a hold reported sent while computing": Components(worker_holds=SentWhileComputing),
    "watermarks ignored": Components(loads=WatermarksIgnored),
    "pages of the old hold kept": Components(loads=PagesOfTheOldHoldKept),
    "over before the ticket": Components(loads=OverBeforeTheTicket),
    "gone fails an early load": Components(loads=GoneFailsAnEarlyLoad),
    "the deadline counts while prefill computes": Components(loads=DeadlineWhileComputing),
    "the old hold not dropped": Components(scheduler_holds=OldHoldNotDropped),
    "an abandon before the order forgotten": Components(
        worker_holds=AbandonForgottenBeforeTheOrder
    ),
    "a watermark read before its generation": Components(loads=MarkedBeforeItsGeneration),
    "a watermark not zeroed at take-on": Components(worker_holds=WatermarkNotZeroed),
    "the read of an old hold not awaited": Components(loads=OldReadNotAwaited),
    "no fence": Components(loads=FenceIgnored),
}
