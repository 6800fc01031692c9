"""What becomes of a load when something happens to its producer, or to the way to it.

Whatever it is, and whenever: the load has its own bytes or has failed, it is reported once, no page
stays held, and the next load works.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.core.endpoint.engines import eventually
from tests.faults.bench import Bench, bench
from tests.faults.cable import pester
from tests.faults.cells import DRIVERS, ELSEWHERE, STAGES, Cell
from tests.faults.stages import OPTIONS, PATIENT

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

SHAKING = {"before the handshake", "during the handshake"}
LOADING = {*SHAKING, "reading", "fencing"}
FAILS = {
    "killed": LOADING,
    "stopped": {"before the handshake"},
    "restarted": LOADING,
    "pestered": set[str](),
    "cut off": LOADING,
    "slow": set[str](),
    "garbage": LOADING,
    "aborted": LOADING,
    "out of blocks": LOADING,
}
"""What happens, and the stages at which a load cannot come through it. (Who is stopped during the
handshake goes on soon; before it, not before the deadline. Whether others can read its memory
meanwhile is the driver's affair.)"""
DIRECT = {"killed", "stopped", "restarted", "pestered"}
"""What happens to the process itself: no proxy stands before it."""
PLACES = [
    *(("loopback", fault) for fault in FAILS),
    *(
        pytest.param(driver, fault, marks=getattr(pytest.mark, driver))
        for driver in DRIVERS
        for fault in ELSEWHERE["producer"]
    ),
]
SLOW_SECONDS = 0.5


def slow(world: Bench) -> None:
    """All that it answers, and all that is read, takes longer; a handshake has many answers."""
    world.cable.delay = world.far.channel.delay = SLOW_SECONDS


def garbage(world: Bench) -> None:
    """Its side channel answers noise, and its slot words are noise."""
    world.far.channel.noisy = frozenset({"answers"})
    world.far.process.ask("babble")


HAPPENS: dict[str, Callable[[Bench], object]] = {
    "killed": lambda world: world.far.process.kill(),
    "stopped": lambda world: world.far.process.signal(signal.SIGSTOP),
    "restarted": lambda world: world.far.restart(),
    "pestered": lambda world: pester(world.far.port),
    "cut off": lambda world: world.cut(),
    "slow": slow,
    "garbage": garbage,
    "aborted": lambda world: world.far.process.ask("reuse"),
    "out of blocks": lambda world: world.far.process.ask("crowd", "p-9"),
}


def mend(world: Bench, fault: str) -> None:
    if fault == "killed":
        world.far.start(world.far.port)
    elif fault == "stopped":
        world.far.process.signal(signal.SIGCONT)


@pytest.mark.parametrize("fault", ["killed", "stopped", "restarted"])
def test_while_pages_are_computed(fault: str) -> None:
    """No transfer fails of a process that is stopped: only its side channel tells."""
    cell = Cell(side="producer", fault=fault, stage="computing")
    with bench(proxied=False) as world:
        world.begin("d-1", world.far.serve("p-1", "promise"))
        eventually(lambda: world.driver.words > 3, "the pages are asked for again and again")
        cell.strikes()
        HAPPENS[fault](world)
        outcome = world.outcome("d-1")
        assert outcome == "PeerLostError"
        cell.write(outcome)
        mend(world, fault)
        if fault == "stopped":
            world.far.process.ask("reset")
        world.goes_on()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("driver", "fault"), PLACES)
def test_at_a_stage(driver: str, fault: str, stage: str) -> None:
    cell = Cell(side="producer", fault=fault, stage=stage, driver=driver)

    def happen() -> None:
        cell.strikes()
        HAPPENS[fault](world)

    options = PATIENT if fault == "slow" else OPTIONS
    with bench(options, driver=driver, proxied=fault not in DIRECT) as world:
        if fault == "slow":
            world.far.lease = PATIENT.load_timeout
        world.begin_until(stage, happen)
        outcome = world.outcome_or_quarantine("d-1")
        if fault != "stopped" or driver == "loopback":
            assert (outcome != "loaded") is (stage in FAILS[fault]), outcome
            assert "quarantine" not in outcome
        cell.write(outcome)
        mend(world, fault)
        world.outcome("d-1")
        world.goes_on()
