"""Exceptions of drivers and in callbacks: what they cost, and what a health check says of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvferry.core.driver_calls.connections import STUCK_SECONDS
from kvferry.core.driver_calls.error_containment import REPEATED, ErrorContainment
from kvferry.core.errors import (
    EndpointClosedError,
    KVFerryError,
    PeerLostError,
    TransportError,
)
from kvferry.core.lifecycle.load_machine import LoadMachine
from kvferry.core.messages import Release
from kvferry.core.metrics import IGNORED
from kvferry.core.side_channel.connection import health
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import TransferId
from tests.core.endpoint.engines import (
    TOKENS,
    Clock,
    Engine,
    MetricTotals,
    RecordingTransport,
    eventually,
    fail_once,
    load,
    outcomes,
    pull,
)
from tests.core.endpoint.transports import (
    PENDING,
    ScriptedTransport,
    three_engines,
)

NUMBERS = itertools.count(1)


@contextlib.contextmanager
def recovering(driver: ScriptedTransport, clock: Clock) -> Iterator[tuple[Engine, Engine]]:
    """Run engines; whatever the driver has raised before, later loads succeed."""
    with three_engines(driver, clock) as (prefill, other, decode):
        yield prefill, decode
        driver.raises.clear()
        driver.default = None
        for number, producer in enumerate((other, prefill)):
            eventually(
                lambda: loads(producer, decode, f"last-{number}"),  # noqa: B023
                "loads succeed again",
            )


def loads(producer: Engine, decode: Engine, name: str) -> bool:
    if decode.load(name, producer.serve(f"{name}-{next(NUMBERS)}", [9], TOKENS), [9]) is not None:
        return False
    assert not decode.wrong_bytes([9], TOKENS)
    return True


@pytest.mark.parametrize("method", ["read", "connect", "forget", "notify", "path"])
def test_an_exception_in_a_call_for_one_load_costs_at_most_that_load(
    driver: ScriptedTransport, clock: Clock, method: str
) -> None:
    with recovering(driver, clock) as (prefill, decode):
        driver.raises[method] = ZeroDivisionError(f"a bug in {method}")
        if method in ("read", "connect"):
            assert f"a bug in {method}" in str(load(prefill, decode, 1))
        else:
            pull(prefill, decode, 1, 2)
            assert outcomes(decode, 1, 2) == [None, None]
        assert decode.endpoint.healthy


PROBLEM = "the driver's {} failed, again and again, with ZeroDivisionError: a bug; restart the"


@pytest.mark.parametrize("method", ["poll", "notifications"])
def test_a_call_for_all_peers_that_always_raises_is_a_problem_until_it_succeeds(
    driver: ScriptedTransport, clock: Clock, method: str
) -> None:
    with recovering(driver, clock) as (prefill, decode):
        endpoint = decode.endpoint
        driver.default, driver.raises[method] = PENDING, ZeroDivisionError("a bug")
        pull(prefill, decode, 1)
        eventually(lambda: not endpoint.healthy, "it has failed repeatedly")
        assert endpoint.problems[0].startswith(PROBLEM.format(method))
        clock.skip(2.0)
        driver.default = None
        error = decode.error("d-1")
        assert error is None if method == "notifications" else "a bug" in str(error)
        driver.raises.clear()
        eventually(lambda: endpoint.healthy, "the driver works again")


class StuckReadTransport(RecordingTransport):
    """A transport whose ``read`` does not return until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reading, self.may_return = threading.Event(), threading.Event()

    def read(self, *how: Any) -> TransferId:
        self.is_reading.set()
        self.may_return.wait()
        return super().read(*how)


def test_a_driver_call_that_does_not_return_is_a_problem_until_it_does(
    prefill: Engine, clock: Clock
) -> None:
    driver = StuckReadTransport()
    with Engine("decode", transport=lambda: driver, clock=clock) as decode:
        endpoint = decode.endpoint
        pull(prefill, decode, 1)
        try:
            eventually(driver.is_reading.is_set, "the driver is called")
            assert endpoint.healthy
            clock.skip(STUCK_SECONDS)
            assert "a call of the driver does not return" in endpoint.problems[0]
            assert endpoint.pending == 1
        finally:
            driver.may_return.set()
        assert outcomes(decode, 1) == [None]
        eventually(lambda: endpoint.healthy, "the call has returned")


@pytest.mark.parametrize("name", ["", "prefill"])
def test_a_probe_gets_the_problems_of_the_engine(prefill: Engine, name: str) -> None:
    problems = list[str]()
    with prefill.side_channel(problems=lambda: problems) as server:
        condition = health(server.host, server.port, name, timeout=20.0)
        assert (condition.engine, condition.problems) == ("prefill", [])
        problems += ["rank 0: it burns", "x" * 100_000] * 100
        condition = health(server.host, server.port, name, timeout=20.0)
        assert condition.problems[0] == "rank 0: it burns"
        assert len(condition.problems) == 64


# Messages, tickets and replies.

MALFORMED = [
    b"x",
    b"\xc1" * 100,
    encode([]),
    msgspec.msgpack.encode([{"type": "release"}]),
    b"\x91" * 10_000,
    msgspec.msgpack.encode([[1] * 100]),
]


def test_malformed_notifications_are_dropped_and_the_producer_goes_on(
    prefill: Engine, decode: Engine
) -> None:
    with contextlib.closing(RecordingTransport()) as other_transport:
        peer = other_transport.connect(prefill.endpoint.payload.address)
        unknown = Release(
            incarnation=1, slot=0, generation=1, engine="e", rank=0, expected=1, abandoned=True
        )
        note = encode([unknown])
        for payload in (note, *MALFORMED, note):  # notifications keep their order
            other_transport.notify(peer, payload)
        totals = MetricTotals(prefill)
        eventually(lambda: totals.total(IGNORED) >= 2, "the note after them is handled")
        assert prefill.endpoint.healthy
        assert load(prefill, decode, 1) is None
        prefill.released("p-1")
        assert totals.total(IGNORED) == 2, "no note is handled again in place of a malformed one"


def test_an_action_or_a_callback_that_raises_fails_its_load(
    prefill: Engine, decode: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 0
    for owner, method in (
        (decode.endpoint._load_manager, "_read"),
        (LoadMachine, "pages_read"),
        (LoadMachine, "fenced"),
        (LoadMachine, "checked"),
    ):
        fail_once(monkeypatch, owner, method)
        numbers = number + 1, number + 2
        for number in numbers:
            ticket = prefill.serve_later(f"p-{number}", [number])
            prefill.step()
            decode.pull(f"d-{number}", ticket, [number])
        failed_as, other = outcomes(decode, *numbers)
        assert "unexpected ZeroDivisionError: a bug" in str(failed_as), method
        assert other is None
    eventually(lambda: prefill.endpoint.held == 0, "the producer is told of all")


def test_an_exception_elsewhere_ends_the_endpoint_which_says_so(
    prefill: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its books cannot be relied on any more."""
    with Engine("decode") as decode:
        fail_once(monkeypatch, decode.endpoint._calls.transfers, "progress")
        eventually(lambda: not decode.endpoint.healthy, "the endpoint has failed")
        assert decode.endpoint.problems[0] == "the endpoint has failed: a bug"
        assert decode.endpoint.wait(10.0), "nobody waits for what it will never report"
        with pytest.raises(EndpointClosedError) as raised:
            decode.endpoint.results()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)


# ErrorContainment by itself.


def fails(error: BaseException) -> Callable[[], int]:
    def call() -> int:
        raise error

    return call


def test_each_kind_of_unexpected_exception_is_logged_once_for_each_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    containment, errors = ErrorContainment(), list[KVFerryError]()
    ours = PeerLostError("gone")
    for error in (ValueError("one"), ValueError("two"), KeyError("three"), ours):
        assert containment.run("a read", fails(error), errors.append) is None
    containment.run("a word", fails(ValueError("four")))
    containment.run("a word", fails(ours))
    logged = [record.getMessage().partition(" failed")[0] for record in caplog.records]
    assert logged == ["a read", "a read", "a word", "a word"], "handled errors are no news"
    assert all(record.levelno == logging.ERROR and record.exc_info for record in caplog.records)
    assert errors[-1] is ours
    assert isinstance(errors[0], TransportError)
    assert str(errors[0]) == "unexpected ValueError: one"
    assert isinstance(errors[0].__cause__, ValueError)
    with pytest.raises(KeyboardInterrupt):
        containment.run("a read", fails(KeyboardInterrupt()))


def test_only_repeated_failures_of_what_serves_all_peers_are_a_problem() -> None:
    containment, bad = ErrorContainment(), fails(ValueError("bad"))
    for _ in range(REPEATED + 1):
        containment.run("one", bad)
    for failures in (REPEATED - 1, REPEATED - 1, REPEATED):
        assert containment.run("all", lambda: 1, serves_all=True) == 1
        assert not containment.problems
        for _ in range(failures):
            containment.run("all", bad, serves_all=True)
    [problem] = containment.problems
    assert problem == (
        "all failed, again and again, with ValueError: bad; restart the engine if that lasts"
    )
    containment.run("all", fails(KeyError("other")), serves_all=True)
    containment.run("all", lambda: 1)
    assert containment.problems == (problem,)
    containment.run("all", lambda: 1, serves_all=True)
    assert not containment.problems
