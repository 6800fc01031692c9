"""What becomes of held pages when their consumer is killed, stopped or gives up.

They are given back once, and a consumer that comes late does not take what lies there then.
"""

from __future__ import annotations

import signal

import pytest

from kvferry.core.lifecycle.holds import RequestId
from tests.core.endpoint.engines import Engine, engine, eventually, fill, until
from tests.faults.stages import (
    HELD,
    OPTIONS,
    SHAPE,
    TOKENS,
    Cell,
    Staged,
    consume,
    remote,
    right,
    serve,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

STAGES = ["waiting", "reading", "fencing"]
LOCAL = [3, 4]


def reuse(prefill: Engine) -> None:
    """The pages are another request's now."""
    for rank in prefill.ranks:
        fill(prefill.shape, rank, HELD, TOKENS)
        rank.cache[:, HELD] += 1.0


def works(prefill: Engine, request: str) -> None:
    """Another consumer is served."""
    with engine("other", SHAPE, options=OPTIONS) as other:
        other.pull("o-1", serve(prefill, request), LOCAL)
        assert not other.outcome("o-1").failed
        assert right(other, LOCAL)


@pytest.mark.parametrize("stage", STAGES)
def test_a_consumer_that_is_killed(stage: str) -> None:
    cell = Cell(side="consumer", fault="killed", stage=stage)
    with (
        engine("prefill", SHAPE, options=OPTIONS) as prefill,
        remote(consume, stage) as decode,
    ):
        assert decode.answer() == "ready"
        decode.pipe.send((serve(prefill, "p-1"), LOCAL))
        assert decode.answer() == "here"
        decode.kill()
        prefill.released("p-1")
        cell.write("released by the lease")
        works(prefill, "p-2")


@pytest.mark.parametrize("stage", STAGES)
def test_a_consumer_that_is_stopped_longer_than_the_lease(stage: str) -> None:
    cell = Cell(side="consumer", fault="stopped", stage=stage)
    with (
        engine("prefill", SHAPE, options=OPTIONS) as prefill,
        remote(consume, stage) as decode,
    ):
        assert decode.answer() == "ready"
        decode.pipe.send((serve(prefill, "p-1"), LOCAL))
        assert decode.answer() == "here"
        decode.signal(signal.SIGSTOP)
        prefill.released("p-1")
        reuse(prefill)
        decode.signal(signal.SIGCONT)
        decode.pipe.send("go on")
        outcome, _ = decode.answer()
        assert outcome == "StaleError"
        cell.write(outcome)
        works(prefill, "p-2")


@pytest.mark.parametrize("stage", STAGES)
def test_a_consumer_that_is_slower_than_the_lease(stage: str) -> None:
    """One that waits for pages renews; one that stands still in the middle of a read cannot."""
    cell = Cell(side="consumer", fault="slow", stage=stage)
    with (
        engine("prefill", SHAPE, options=OPTIONS) as prefill,
        remote(consume, stage) as decode,
    ):
        assert decode.answer() == "ready"
        decode.pipe.send((serve(prefill, "p-1"), LOCAL))
        assert decode.answer() == "here"
        endpoint = prefill.ranks[0].endpoint
        if stage == "waiting":
            assert not endpoint.wait(2.5 * OPTIONS.lease)
        else:
            prefill.released("p-1")
            reuse(prefill)
        decode.pipe.send("go on")
        outcome, is_right = decode.answer()
        assert outcome == ("loaded" if stage == "waiting" else "StaleError")
        assert is_right or outcome == "StaleError"
        cell.write(outcome)
        eventually(lambda: endpoint.held == 0, "no page is held any more")
        works(prefill, "p-2")


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_that_is_aborted(stage: str) -> None:
    cell = Cell(side="consumer", fault="aborted", stage=stage)
    driver = Staged()
    with (
        engine("prefill", SHAPE, options=OPTIONS) as prefill,
        engine("decode", SHAPE, options=OPTIONS, transport=lambda: driver) as decode,
    ):
        endpoint = decode.ranks[0].endpoint
        driver.at = {stage: lambda: endpoint.abort(RequestId("d-1"))}
        ticket = serve(prefill, "p-1")
        decode.prepare(ticket)
        decode.pull("d-1", ticket, LOCAL, nothing=stage == "waiting")
        if stage != "waiting":
            until(endpoint, lambda results: RequestId("d-1") in results.received)
        prefill.released("p-1")
        assert endpoint.results().received == frozenset()
        cell.write("released")
        works(prefill, "p-2")
