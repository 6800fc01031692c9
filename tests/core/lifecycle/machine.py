"""The Hypothesis state machine that drives the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvferry.core.errors import HandshakeError, TransportError
from tests.core.lifecycle.model import Model
from tests.core.lifecycle.producer import LEASE, LOAD_TIMEOUT, PAGES, TTL, PrefillState
from tests.core.lifecycle.simulation import PLANS, Simulation, check_scheduler_holds

T = TypeVar("T")

PICKS = st.binary(max_size=8) | st.binary(min_size=24, max_size=60)
"""Which of the possible moves come next: few, or many."""

KINDS = ["plain", "drafter", "conversation"]
"""What ``Simulation.ask`` makes."""


class Protocol(Model):
    examples: ClassVar[int] = 600
    steps: ClassVar[int] = 25
    simulation: Simulation

    @initialize(
        ranks=st.sampled_from(sorted(PLANS)),
        first=st.integers(0, 9),
        second=st.integers(0, 9),
        slots=st.integers(1, PAGES),
        max_held=st.sampled_from([None, None, 2, 3]),
        is_older=st.booleans(),
        old=st.sampled_from(["", "", "", "B"]),
    )
    def start(
        self,
        ranks: int = 1,
        first: int = 0,
        second: int = 0,
        slots: int = 1,
        max_held: int | None = None,
        is_older: bool = False,
        old: str = "",
    ) -> None:
        """Begin a simulation.

        With ``is_older``, engine B is of a build without ``HoldUsers``. ``old`` names an engine of
        a build without heartbeats.
        """
        plans = PLANS[ranks]
        pair = (plans[first % len(plans)], plans[second % len(plans)])
        self.simulation = Simulation(
            ranks=ranks,
            plans=pair,
            slots=slots,
            components=self.components,
            max_held=max_held,
            is_older=is_older,
            old=old,
        )

    # Requests.

    @rule(
        size=st.integers(1, 2),
        chunks=st.integers(1, 2),
        kind=st.sampled_from(KINDS),
        remote=st.sampled_from([True, True, True, False]),
        errs=st.sampled_from([False, False, False, True]),
        until=st.sampled_from(["asked", "scheduled", "preempted", "aborted", "ticket", "ready"]),
    )
    def ask(
        self,
        until: str = "asked",
        size: int = 1,
        chunks: int = 1,
        kind: str = "plain",
        remote: bool = True,
        errs: bool = False,
    ) -> None:
        producer = self.simulation.producer
        self.simulation.ask(size=size, chunks=chunks, kind=kind, remote=remote, errs=errs)
        if until in ("scheduled", "preempted", "aborted"):
            if producer.can_schedule:
                producer.schedule()
            stops = {"preempted": producer.preempt, "aborted": producer.abort}
            for prompt in producer.at(PrefillState.RUNNING)[-1:]:
                stops.get(until, lambda _: None)(prompt)
        elif until != "asked":
            self.simulation.compute(tail=until != "ticket")

    @rule(
        engines=st.sampled_from(["A", "B", "AB", "AA", "BBB"]),
        back=st.sampled_from([None, None, None, 0, 1, 2]),
        cached=st.sampled_from([0, 0, 0, 1, 2]),
        fits=st.sampled_from([True] * 7 + [False]),
        forged=st.sampled_from([False] * 7 + [True]),
        kind=st.sampled_from(KINDS),
        ordered=st.booleans(),
        together=st.booleans(),
        sample=st.booleans(),
        items=st.sampled_from([-1, -1, 0, 1, 2, 3]),
        rounds=st.sampled_from([0, 1, 1, 2, 4]),
        aborts=st.sampled_from([False, False, False, True]),
        picks=PICKS,
    )
    def hand(
        self,
        engines: str = "A",
        back: int | None = None,
        cached: int = 0,
        fits: bool = True,
        forged: bool = False,
        kind: str = "plain",
        ordered: bool = False,
        together: bool = False,
        sample: bool = False,
        items: int = -1,
        rounds: int = 0,
        aborts: bool = False,
        picks: bytes = b"",
    ) -> None:
        simulation = self.simulation
        if back is None:
            issue = simulation.fresh(kind=kind, ordered=ordered)
        else:
            issue = simulation.issues[-1 - back] if back < len(simulation.issues) else None
        consumers = [simulation.consumers["AB".index(name)] for name in engines]
        how: dict[str, Any] = {"cached": cached, "fits": fits, "forged": forged, "sample": sample}
        if issue is not None and together:
            for consumer in consumers:
                simulation.hand(consumer, issue, **how)
        for consumer in consumers:
            if issue is not None and not together:
                simulation.hand(consumer, issue, **how)
            for _ in range(rounds):
                simulation.pull(consumer, items)
            for request in list(consumer.requests.values())[-1:] if aborts else ():
                consumer.abort(request)
                simulation.pull(consumer, items)
        self.drift(picks)

    # One engine proceeds, and the others wait.

    @rule(
        engine=st.integers(0, 1),
        ranks=st.sampled_from([slice(None), slice(None), slice(0, 1), slice(1, 2)]),
        items=st.integers(-1, 4),
        processes=st.booleans(),
    )
    def consume(
        self,
        engine: int = 0,
        ranks: slice = slice(None),
        items: int = -1,
        processes: bool = False,
    ) -> None:
        consumer = self.simulation.consumers[engine]
        self.simulation.pull(consumer, items, ranks)
        if processes and consumer.can_process:
            consumer.process()

    @rule(
        schedules=st.booleans(),
        rank=st.integers(0, 2),
        launches=st.integers(0, 2),
        entries=st.integers(0, 6),
        ticks=st.booleans(),
    )
    def produce(
        self,
        schedules: bool = False,
        rank: int = 0,
        launches: int = 0,
        entries: int = 0,
        ticks: bool = False,
    ) -> None:
        producer = self.simulation.producer
        if schedules and producer.can_schedule:
            producer.schedule()
        one = producer.ranks[rank % len(producer.ranks)]
        for _ in range(min(launches, len(one.inbox))):
            one.launch()
        for _ in range(min(entries, len(one.stream))):
            one.device()
        if ticks:
            one.tick()
        while producer.can_process:
            producer.process()

    # Any possible moves, in any order.

    drift = rule(picks=PICKS)(Model.drift)

    @rule(
        seconds=st.sampled_from([0.0, 0.0, 0.0, 0.5, LEASE - 0.5, LEASE, LOAD_TIMEOUT, TTL]),
        resets=st.sampled_from([False, False, False, True]),
        patient=st.sampled_from([False, False, True]),
        picks=PICKS,
    )
    def rest(
        self,
        seconds: float = 0.0,
        resets: bool = False,
        patient: bool = False,
        picks: bytes = b"",
    ) -> None:
        if resets:
            self.simulation.producer.reset()
        if patient:
            self.simulation.wait_patiently()
        elif seconds:
            self.simulation.wait(seconds)
        else:
            self.simulation.settle()
        self.drift(picks)

    @rule(
        seconds=st.sampled_from([3.0, 5.0, 7.0]),
        heard=st.sampled_from([slice(None), slice(0, 1), slice(1, 2), slice(0, 0)]),
        picks=PICKS,
    )
    def starve(self, seconds: float = 3.0, heard: slice = slice(None), picks: bytes = b"") -> None:
        """Let the prefill engine lack pages; renewals and heartbeats arrive at some ranks only."""
        self.simulation.starve(seconds, heard)
        self.drift(picks)

    # Aborts and failures.

    @rule(
        who=st.sampled_from(["abort", "preempt", "abort A", "abort B", "handshakes"]),
        index=st.integers(0, 3),
        picks=PICKS,
    )
    def give_up(self, who: str = "abort", index: int = 0, picks: bytes = b"") -> None:
        simulation = self.simulation
        if who == "preempt":
            _one(simulation.producer.at(PrefillState.RUNNING), index, simulation.producer.preempt)
        elif who == "abort":
            _one(
                simulation.producer.at(PrefillState.WAITING, PrefillState.RUNNING),
                index,
                simulation.producer.abort,
            )
        elif who == "handshakes":
            for rank in (r for e in simulation.consumers for r in e.ranks):
                for load_id in rank.handshakes[index % 2 :]:
                    rank.answer(load_id, HandshakeError("nobody answers"))
        else:
            engine = simulation.consumers["AB".index(who[-1])]
            _one(list(engine.requests.values()), index, engine.abort)
        self.drift(picks)

    @rule(index=st.integers(0, 7), failing=st.booleans(), picks=PICKS)
    def harm(self, index: int = 0, failing: bool = False, picks: bytes = b"") -> None:
        error = TransportError("a cable was pulled")
        fabric = self.simulation.fabric
        _one(
            fabric.transfers, index, lambda transfer: fabric.fail(transfer, error, failing=failing)
        )
        self.drift(picks)

    @rule(
        what=st.sampled_from(
            ["restart P", "restart P", "restart A", "restart B", "part", "stray", "echo"]
        ),
        how=st.sampled_from(
            ["nothing breaks", "nothing breaks", "links break", "links are failing"]
        ),
        messages=st.booleans(),
        index=st.integers(0, 2),
        picks=PICKS,
    )
    def disturb(
        self,
        what: str = "restart P",
        how: str = "nothing breaks",
        messages: bool = False,
        index: int = 0,
        picks: bytes = b"",
    ) -> None:
        simulation = self.simulation
        if what == "restart P":
            severs, failing = how != "nothing breaks", how == "links are failing"
            simulation.restart_producer(
                severs=severs, failing=failing, messages=messages, gracefully=index == 0
            )
            if index == 1:
                simulation.fresh(kind="plain", ordered=False)
        elif what == "part":
            for rank in (r for e in simulation.consumers for r in e.ranks[index % 2 :]):
                rank.handle_producer_death(failing=how == "links are failing")
        elif what == "stray":
            for how in ("incarnation", "generation", "slot"):
                simulation.stray(index, how)
        elif what == "echo":
            for rank in (r for e in simulation.consumers for r in e.ranks):
                rank.echo(events=2 + 3 * index)
        else:
            simulation.restart_consumer("AB".index(what[-1]), messages=messages)
        self.drift(picks)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "simulation"):
            check_scheduler_holds(self.simulation)


def _one(things: Sequence[T], index: int, act: Callable[[T], None]) -> None:
    if things:
        act(things[index % len(things)])
