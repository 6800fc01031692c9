"""What becomes of held pages when something happens to their consumer, or to the way to it.

They are given back once, and a consumer that comes late does not take what lies there then.
"""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager

import pytest

from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.transport.registry import create
from tests.core.endpoint.engines import Engine, engine, eventually, until
from tests.faults.bench import LOCAL, bench
from tests.faults.cable import WAYS, Way, staged
from tests.faults.cells import DRIVERS, STAGES, Cell
from tests.faults.stages import (
    HELD,
    LEASE,
    LONG,
    OPTIONS,
    PATIENT,
    SHAPE,
    Remote,
    consume,
    remote,
    right,
    serve,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

WITH_WAITING = ["waiting", *STAGES]
PLACES = [
    *(("loopback", stage) for stage in WITH_WAITING),
    *(
        pytest.param(driver, stage, marks=getattr(pytest.mark, driver))
        for driver in DRIVERS
        for stage in STAGES
    ),
]
CUT = {"before the handshake": WAYS, "during the handshake": frozenset[Way]({"answers"})}
"""What of a side channel is cut so that a load stands still there."""


def producer(driver: str) -> AbstractContextManager[Engine]:
    """Here, over a driver."""
    return engine("prefill", SHAPE, options=OPTIONS, transport=lambda: create(driver))


def reach(decode: Remote, prefill: Engine, lease: float = LEASE) -> Ticket:
    """Let a consumer load a request, and wait until it stands at its stage; the ticket."""
    assert decode.answer() == "ready"
    ticket = serve(prefill, "p-1", lease)
    decode.pipe.send((ticket, LOCAL))
    assert decode.answer() == "here"
    return ticket


def reuse(prefill: Engine) -> None:
    """The pages are another request's now."""
    for rank in prefill.ranks:
        rank.cache[:, HELD] += 1.0


def works(prefill: Engine, request: str, driver: str = "loopback") -> None:
    """Another consumer is served; no page is held then, and nothing was said twice."""
    with engine("other", SHAPE, options=OPTIONS, transport=lambda: create(driver)) as other:
        other.pull("o-1", serve(prefill, request), LOCAL)
        assert not other.outcome("o-1").failed
        assert right(other, LOCAL)
    (rank,) = prefill.ranks
    sent = until(rank.endpoint, lambda results: RequestId(request) in results.sent).sent
    assert sent == {RequestId(request)}
    assert rank.endpoint.held == 0
    assert rank.endpoint.results().sent == frozenset()


@pytest.mark.parametrize(("driver", "stage"), PLACES)
def test_one_that_is_killed(driver: str, stage: str) -> None:
    cell = Cell(side="consumer", fault="killed", stage=stage, driver=driver)
    with (
        producer(driver) as prefill,
        remote(consume, stage, driver) as decode,
    ):
        reach(decode, prefill, LONG if stage == "finishing" else LEASE)
        cell.strikes()
        decode.kill()
        prefill.released("p-1")
        cell.write("released" if stage == "finishing" else "released by the lease")
        works(prefill, "p-2", driver)


@pytest.mark.parametrize(("driver", "stage"), PLACES[1:])
def test_one_that_is_started_again(driver: str, stage: str) -> None:
    """The request comes to the next start of it with the ticket that it had."""
    cell = Cell(side="consumer", fault="restarted", stage=stage, driver=driver)
    with (
        producer(driver) as prefill,
        remote(consume, stage, driver) as first,
    ):
        ticket = reach(first, prefill, LONG)
        cell.strikes()
        first.kill()
        with remote(consume, "never", driver) as second:
            assert second.answer() == "ready"
            second.pipe.send((ticket, LOCAL))
            outcome, is_right = second.answer()
            prefill.released("p-1")
        assert outcome == ("StaleError" if stage == "finishing" else "loaded")
        assert is_right or outcome == "StaleError"
        cell.write(outcome)
        works(prefill, "p-2", driver)


@pytest.mark.parametrize(("driver", "stage"), PLACES)
def test_one_that_is_stopped_longer_than_the_lease(driver: str, stage: str) -> None:
    cell = Cell(side="consumer", fault="stopped", stage=stage, driver=driver)
    with (
        producer(driver) as prefill,
        remote(consume, stage, driver) as decode,
    ):
        reach(decode, prefill)
        cell.strikes()
        decode.signal(signal.SIGSTOP)
        prefill.released("p-1")
        reuse(prefill)
        decode.signal(signal.SIGCONT)
        decode.pipe.send("go on")
        outcome, is_right = decode.answer()
        assert outcome == ("loaded" if stage == "finishing" else "StaleError")
        assert is_right or outcome == "StaleError"
        cell.write(outcome)
        works(prefill, "p-2", driver)


@pytest.mark.parametrize("stage", WITH_WAITING)
def test_one_that_is_slower_than_the_lease(stage: str) -> None:
    """One that waits for pages renews; one that stands still in the middle of a read cannot."""
    cell = Cell(side="consumer", fault="slow", stage=stage)
    with (
        engine("prefill", SHAPE, options=OPTIONS) as prefill,
        remote(consume, stage) as decode,
    ):
        reach(decode, prefill)
        cell.strikes()
        endpoint = prefill.ranks[0].endpoint
        if stage == "waiting":
            assert not endpoint.wait(2.5 * LEASE)
        else:
            prefill.released("p-1")
            reuse(prefill)
        decode.pipe.send("go on")
        outcome, is_right = decode.answer()
        assert outcome == ("loaded" if stage in ("waiting", "finishing") else "StaleError")
        assert is_right or outcome == "StaleError"
        cell.write(outcome)
        if stage == "waiting":
            prefill.released("p-1")
        works(prefill, "p-2")


@pytest.mark.parametrize(("driver", "stage"), PLACES)
def test_one_that_gives_the_request_up(driver: str, stage: str) -> None:
    cell = Cell(side="consumer", fault="aborted", stage=stage, driver=driver)
    near = staged(driver)
    with (
        producer(driver) as prefill,
        engine("decode", SHAPE, options=OPTIONS, transport=lambda: near) as decode,
    ):
        endpoint = decode.ranks[0].endpoint

        def abort() -> None:
            cell.strikes()
            endpoint.abort(RequestId("d-1"))

        near.at = {stage: abort}
        ticket = serve(prefill, "p-1", LONG)
        if stage == "waiting":
            decode.prepare(ticket)
        decode.pull("d-1", ticket, LOCAL, nothing=stage == "waiting")
        if stage == "before the handshake":
            abort()
        if stage != "waiting":
            until(endpoint, lambda results: RequestId("d-1") in results.received)
        prefill.released("p-1")
        assert endpoint.results().received == frozenset()
        assert endpoint.pending == 0
        cell.write("released")
        works(prefill, "p-2", driver)


@pytest.mark.parametrize("stage", STAGES)
def test_one_that_is_cut_off_longer_than_the_lease(stage: str) -> None:
    """The pages are another request's when the way is whole again, and what has waited goes on."""
    cell = Cell(side="consumer", fault="cut off", stage=stage)

    def cut() -> None:
        cell.strikes()
        world.cut()

    with bench(PATIENT) as world:
        world.begin_until(stage, cut)
        eventually(lambda: world.is_cut, "the way is cut")
        eventually(lambda: world.far.process.ask("held") == 0, "the pages are given back")
        world.far.process.ask("scribble")
        world.mend()
        outcome = world.outcome("d-1")
        assert outcome == ("loaded" if stage == "finishing" else "StaleError")
        cell.write(outcome)
        world.goes_on()


@pytest.mark.parametrize("stage", STAGES)
def test_one_that_talks_nonsense(stage: str) -> None:
    """Its questions at the side channel, and what it says of holds, are noise."""
    cell = Cell(side="consumer", fault="garbage", stage=stage)

    def garble() -> None:
        cell.strikes()
        world.cable.is_noisy = True
        world.far.channel.noisy = frozenset({"questions"})

    with bench() as world:
        world.far.lease = LONG if stage == "finishing" else LEASE
        outcome = world.through(stage, garble)
        assert outcome == ("HandshakeError" if "handshake" in stage else "loaded")
        world.far.released()
        cell.write(f"{outcome}, released" + " by the lease" * (stage != "finishing"))
        world.goes_on()


@pytest.mark.parametrize("stage", STAGES)
def test_one_that_has_no_pages_left(stage: str) -> None:
    """Another load has them, and stands still at a stage for longer than this one's lease."""
    cell = Cell(side="consumer", fault="out of blocks", stage=stage)
    with bench(PATIENT) as world:
        first = world.another("prefill-2") if "handshake" in stage else world.far
        first.channel.cut(CUT.get(stage, frozenset()))
        world.cable.held = frozenset({stage})
        world.begin("d-0", first.serve("p-0"))
        waiting = world.far.serve("p-1")
        world.decode.prepare(waiting)
        cell.strikes()
        assert not world.endpoint.wait(1.5 * LEASE)
        world.mend()
        first.channel.mend()
        assert world.outcome("d-0") in ("loaded", "StaleError")
        outcome = world.load("d-1", waiting)
        assert outcome == "loaded"
        cell.write(outcome)
        first.released()
        world.goes_on()
