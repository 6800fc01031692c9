"""The model of staging, and the faults that it must find, planted one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvferry.core.lifecycle.holds import EndedHold, Hold, RequestId
from kvferry.core.lifecycle.host_pages import HostPages, Reservation
from kvferry.core.lifecycle.load_machine import LoadAction, LoadId, LoadMachine
from kvferry.core.lifecycle.page_copy import HoldCopy
from kvferry.core.lifecycle.worker_holds import HoldState, WorkerHolds
from tests.core.lifecycle.model import Faults, Model
from tests.core.lifecycle.producer import LEASE, PrefillState
from tests.core.lifecycle.reading_engines import PLANS
from tests.core.lifecycle.staged_simulation import (
    PATIENCE,
    BlockCopy,
    Decode,
    DecodeRank,
    DecodeRequest,
    Prefill,
    Prompt,
    StagedSimulation,
)

PICKS = st.binary(min_size=4, max_size=60)
"""Which of the possible moves come next."""
PLANTED = Faults()


class Staging(Model):
    simulation: StagedSimulation

    @initialize(
        plan=st.sampled_from(range(len(PLANS))), slots=st.integers(1, 3), pages=st.integers(1, 3)
    )
    def start(self, plan: int = 0, slots: int = 1, pages: int = 1) -> None:
        self.simulation = StagedSimulation(
            plan=PLANS[plan], slots=slots, pages=pages, components=self.components
        )

    @rule(
        sizes=st.lists(st.integers(1, 2) | st.integers(1, 3), min_size=1, max_size=2),
        until=st.sampled_from(["asked", "drafted", "ticket", "copying", "copied", "handed"]),
        picks=PICKS,
    )
    def ask(self, sizes: list[int], until: str = "asked", picks: bytes = b"") -> None:
        simulation = self.simulation
        for size in sizes:
            simulation.ask(size)
        if until == "drafted":  # the ticket is made while a drafter goes on
            simulation.launch()
            simulation.device(items=sum(sizes) + 1)
            simulation.launch()
            simulation.copy_out()
        for _ in range(3 if until not in ("asked", "drafted") else 0):
            simulation.launch()
            simulation.device()
        if until in ("copying", "copied", "handed"):
            simulation.copy_out(items=1 if until == "copying" else 4)
        if until == "handed":
            self.hand_newest()
        self.drift(picks)

    @rule(index=st.integers(-3, -1), rounds=st.integers(0, 3), items=st.integers(1, 4), picks=PICKS)
    def hand(self, index: int = -1, rounds: int = 0, items: int = 1, picks: bytes = b"") -> None:
        simulation = self.simulation
        issues = simulation.prefill.issues
        if len(issues) >= -index:
            simulation.hand(issues[index])
        for _ in range(rounds):
            simulation.begin_loads()
            simulation.land(items=items)
            simulation.copy_in(items=1)
        self.drift(picks)

    @rule(script=st.lists(st.sampled_from("SSDdCCccHBBbLLlIIiR"), min_size=4, max_size=16))
    def proceed(self, script: list[str]) -> None:
        """Let some part proceed while the others wait; sequences have "l" and "h", too."""
        simulation = self.simulation
        acts: dict[str, Callable[[], object]] = {
            "S": simulation.launch,
            "D": simulation.device,
            "d": lambda: simulation.device(items=1),
            "C": simulation.copy_out,
            "c": lambda: simulation.copy_out(items=1),
            "H": simulation.hear,
            "h": lambda: simulation.deliver_all(1),
            "B": simulation.begin_loads,
            "b": lambda: simulation.begin_loads(device=False),
            "L": simulation.land,
            "l": lambda: simulation.land(items=1),
            "I": simulation.copy_in,
            "i": lambda: simulation.copy_in(items=1),
            "R": self.hand_newest,
        }
        for each in script:
            acts[each]()

    def hand_newest(self) -> None:
        for prompt in self.simulation.prefill.issues[-1:]:
            self.simulation.hand(prompt)

    drift = rule(picks=PICKS)(Model.drift)

    @rule(
        what=st.sampled_from(["preempt", "abort", "reset", "abort decode"]),
        index=st.integers(0, 2),
        picks=PICKS,
    )
    def stop(self, what: str = "preempt", index: int = 0, picks: bytes = b"") -> None:
        prefill, decode = self.simulation.prefill, self.simulation.decode
        running = prefill.at(PrefillState.RUNNING)
        waiting = prefill.at(PrefillState.WAITING, PrefillState.RUNNING)
        if what == "preempt" and running:
            prefill.preempt(running[index % len(running)])
        elif what == "abort" and waiting:
            prefill.abort(waiting[index % len(waiting)])
        elif what == "reset":
            prefill.reset()
        elif what == "abort decode" and decode.requests:
            decode.abort(decode.requests[index % len(decode.requests)])
        self.drift(picks)

    @rule(rank=st.integers(0, 1), way=st.sampled_from(["out", "in"]), picks=PICKS)
    def fail_copies(self, rank: int = 0, way: str = "out", picks: bytes = b"") -> None:
        engine = self.simulation.prefill if way == "out" else self.simulation.decode
        one = engine.ranks[rank % len(engine.ranks)]
        for copy in one.copies[:1]:
            one.fail(copy)
        self.drift(picks)

    @rule(rank=st.integers(0, 1), failing=st.booleans(), picks=PICKS)
    def sever(self, rank: int = 0, failing: bool = False, picks: bytes = b"") -> None:
        ranks = self.simulation.decode.ranks
        ranks[rank % len(ranks)].sever(failing=failing)
        self.drift(picks)

    @rule(seconds=st.sampled_from([0.0, 0.0, PATIENCE, LEASE]), picks=PICKS)
    def rest(self, seconds: float = 0.0, picks: bytes = b"") -> None:
        if seconds:
            self.simulation.wait(seconds)
        else:
            self.simulation.settle()
        self.drift(picks)


# Faults that docs/protocol.md lists.


@PLANTED.add("copied to the device before the fence")
class CopiedBeforeTheFence(LoadMachine):
    def passed(self) -> None:
        super().passed()
        if self.needs_copy and not self.is_copying and not self.reported:
            self.is_copying = True
            self._queue(LoadAction.COPY)


class OverTooEarly(WorkerHolds):
    """A hold is over as soon as ``is_early``, and not again when it is over."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._early = set[Hold]()

    def is_early(self, held: Any) -> bool:
        raise NotImplementedError

    def take_ended(self) -> list[EndedHold]:
        early = [h for h in self._held.values() if h.hold not in self._early and self.is_early(h)]
        self._early |= {held.hold for held in early}
        return [EndedHold(request=held.request) for held in early] + super().take_ended()

    def _report(self, held: Any) -> None:
        super()._report(held)
        if held.hold in self._early:
            self._ended.pop()


# Host pages are given back, with the slot, when the blocks are.
PLANTED.replace(
    "a host page reused before its word is cleared",
    OverTooEarly,
    is_early=lambda self, held: bool(held.is_sent),
)


@PLANTED.add("sent before the event")
class SentBeforeTheEvent(WorkerHolds):
    def take_copies(self) -> list[HoldCopy]:
        copies = super().take_copies()
        self._sent += [each.request for each in copies]
        return copies

    def copied(self, hold: Hold, now: float) -> None:
        before = list(self._sent)
        super().copied(hold, now)
        self._sent[:] = before


@PLANTED.add("copied to the host before the event")
class CopiedBeforeTheEvent(WorkerHolds):
    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        super().order(hold, lease, now, ttl)
        super().ready(hold, now)


@PLANTED.add("ready before the copy has passed")
class ReadyBeforeTheCopy(WorkerHolds):
    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        super().order(hold, lease, now, ttl)
        if hold in self:
            self._words[hold.slot] = hold.ready


PLANTED.replace(
    "over while it is copied",
    OverTooEarly,
    is_early=lambda self, held: held.copy is not None and held.state is HoldState.ENDED,
)


@PLANTED.add("received before its copy has passed")
class ReportedBeforeTheCopy(LoadMachine):
    def _advance_if_over(self) -> None:
        super()._advance_if_over()
        if self.is_copying:
            self.is_copying = self.needs_copy = False
            super()._advance_if_over()


@PLANTED.add("copied to blocks that the device still zeroes")
class DeviceNotAwaited(LoadMachine):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.awaits_device = False


PLANTED.replace(
    "a failed copy accepted", LoadMachine, copied=lambda self, error=None: LoadMachine.copied(self)
)


@PLANTED.add("two loads of one request id")
class LoadsOfOneRequest(DecodeRank):
    """The end of a copy is taken for that of the first: all loads have one request id."""

    def copied(self, copy: BlockCopy) -> LoadId:
        first: LoadId = [*self.copies, copy][0].source
        return first


PLANTED.replace("a staged ticket that says computed", Prefill, is_computed=lambda self: True)


@PLANTED.add("over on one rank")
class OverOnOneRank(HostPages):
    def over(self, request: RequestId, rank: int) -> bool:
        self.ranks = 1
        return super().over(request, rank)


@PLANTED.add("a full pool, and pages given out twice")
class FullPoolOvercommitted(HostPages):
    def take(self, request: RequestId, count: int) -> tuple[int, ...] | None:
        return super().take(request, count) or tuple(range(1, min(count, self.total) + 1))

    def reserve(self, request: RequestId, count: int) -> Reservation:
        found = super().reserve(request, count)
        return Reservation.GRANTED if found is Reservation.WAITING else found


PLANTED.replace("a full pool, and no deadline", HostPages, _is_hopeless=lambda self, wish: False)


@PLANTED.add("a reservation forgotten")
class ReservationForgotten(Prefill):
    def abort(self, prompt: Prompt) -> None:
        pages, self.host_pages = self.host_pages, HostPages(range(1, 2), patience=1.0)
        super().abort(prompt)
        self.host_pages = pages


@PLANTED.add("host pages given back while bytes may land")
class FailedLoadGivenBackAtOnce(Decode):
    def abort(self, request: DecodeRequest) -> None:
        loading = bool(request.blocks)
        super().abort(request)
        if loading:
            self.finish(request)

    def finish(self, request: DecodeRequest) -> None:
        if request in self.requests:
            super().finish(request)
