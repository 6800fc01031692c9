"""Unexpected exceptions in drivers and callbacks fail the loads that they concern, no others."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from kvferry.core.endpoint import EndpointOptions, peers
from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.errors import EndpointClosedError, PeerLostError, TransportError
from kvferry.core.lifecycle import ticket as ticket_module
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.loads import LoadMachine
from kvferry.core.messages import Release
from kvferry.core.metrics import IGNORED
from kvferry.core.side_channel_messages import encode
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually
from tests.core.endpoint.loads import TOKENS, load, outcome, outcomes, pull
from tests.core.endpoint.metric_totals import MetricTotals
from tests.core.endpoint.transports import PENDING, ScriptedTransport

LOAD_TIMEOUT = 100.0
NUMBERS = itertools.count(1)


@contextlib.contextmanager
def three_engines(driver: ScriptedTransport) -> Iterator[tuple[Engine, Engine, Engine, Clock]]:
    clock = Clock()
    options = EndpointOptions(liveness_interval=0.0, load_timeout=LOAD_TIMEOUT)
    with (
        Engine("prefill") as prefill,
        Engine("other") as other,
        Engine("decode", options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        yield prefill, other, decode, clock
        # Whatever was raised before, later loads succeed.
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


@pytest.mark.parametrize("method", ["read", "connect"])
def test_an_exception_in_a_call_for_one_load_fails_that_load(
    driver: ScriptedTransport, method: str
) -> None:
    with three_engines(driver) as (prefill, _, decode, _):
        driver.raises[method] = ZeroDivisionError(f"a bug in {method}")
        assert f"a bug in {method}" in str(load(prefill, decode, 1))


@pytest.mark.parametrize("method", ["forget", "notify"])
def test_an_exception_in_a_call_after_the_read_fails_nothing(
    driver: ScriptedTransport, method: str
) -> None:
    with three_engines(driver) as (prefill, _, decode, _):
        driver.raises[method] = ZeroDivisionError(f"a bug in {method}")
        pull(prefill, decode, 1, 2)
        assert outcomes(decode, 1, 2) == [None, None]
        assert decode.endpoint.healthy


def test_a_load_whose_cancel_raises_ends_when_its_read_ends(driver: ScriptedTransport) -> None:
    with three_engines(driver) as (prefill, _, decode, clock):
        driver.default, driver.raises["cancel"] = PENDING, ZeroDivisionError("a bug")
        pull(prefill, decode, 1)
        eventually(lambda: len(driver.pages) == 1, "it is read")
        decode.endpoint.abort(RequestId("d-1"))
        eventually(lambda: bool(driver.cancelled), "the read is cancelled")
        assert decode.endpoint.pending == 1, "bytes may still land"
        clock.skip(2.0)  # the grace of the cancelled read
        driver.default = None
        assert isinstance(outcome(decode, 1), EndpointClosedError)


def test_a_transfer_that_cannot_be_polled_fails_alone_and_only_once_quiesced(
    driver: ScriptedTransport,
) -> None:
    with three_engines(driver) as (prefill, _, decode, clock):
        (rank,) = decode.ranks
        driver.default, driver.unknown = PENDING, {0}
        pull(prefill, decode, 1, 2)
        eventually(lambda: len(driver.cancelled) == 1, "the first read is cancelled")
        clock.skip(LOAD_TIMEOUT / 2)
        driver.default = None
        assert outcome(decode, 2) is None, "another load from the same peer succeeds"
        error = outcome(decode, 1)
        assert "cannot say how a read stands: ZeroDivisionError('a bug in poll')" in str(error)
        assert len(driver.disconnected) == 1, "only a disconnect proves that no byte lands any more"
        eventually(lambda: rank.endpoint.healthy, "a round has run since the skip")


def test_a_poll_that_always_raises_is_a_problem_until_it_succeeds(
    driver: ScriptedTransport,
) -> None:
    with three_engines(driver) as (prefill, _, decode, clock):
        endpoint = decode.endpoint
        driver.default, driver.raises["poll"] = PENDING, ZeroDivisionError("a bug in poll")
        pull(prefill, decode, 1)
        eventually(lambda: not endpoint.healthy, "poll has failed repeatedly")
        assert endpoint.problems[0].startswith(
            "the driver's poll failed, again and again, first with ZeroDivisionError: a bug in poll"
        )
        assert endpoint.problems == endpoint.problems
        clock.skip(2.0)
        assert "a bug in poll" in str(outcome(decode, 1))
        driver.raises.clear()
        driver.default = None
        assert load(prefill, decode, 2) is None
        eventually(lambda: endpoint.healthy, "poll has succeeded")


MALFORMED = [
    b"x",
    b"\xc1" * 100,
    encode([]),
    msgspec.msgpack.encode([{"type": "release"}]),
    b"\x91" * 10_000,
    msgspec.msgpack.encode([[1] * 100]),
]


@pytest.mark.parametrize("payload", MALFORMED)
def test_a_malformed_notification_is_dropped_and_the_producer_goes_on(
    prefill: Engine, decode: Engine, payload: bytes
) -> None:
    with closing(RecordingTransport()) as other_transport:
        (rank,) = prefill.ranks
        peer = other_transport.connect(rank.endpoint.payload.address)
        ticket = prefill.serve("p-1", [1], TOKENS)
        other_transport.notify(peer, payload)
        unknown = Release(
            incarnation=1, slot=0, generation=1, engine="e", rank=0, expected=1, abandoned=True
        )
        other_transport.notify(peer, encode([unknown]))  # notifications keep their order
        totals = MetricTotals(prefill)
        eventually(lambda: totals.total(IGNORED) == 1, "the note after it is handled")
        assert rank.endpoint.healthy
        assert decode.load("d-1", ticket, [2]) is None
        prefill.released("p-1")


def test_an_exception_in_handling_one_note_loses_only_that_note(
    prefill: Engine, decode: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = prefill.ranks
    server = rank.endpoint._hold_server
    real = server._take
    failed: list[object] = []

    def fails_once(note: Any) -> None:
        if not failed:
            failed.append(note)
            raise ZeroDivisionError("a bug")
        real(note)

    monkeypatch.setattr(server, "_take", fails_once)
    for number in (1, 2):
        assert load(prefill, decode, number) is None
    prefill.released("p-2")
    assert len(failed) == 1
    assert rank.endpoint.healthy, "a peer cannot make the engine unhealthy"


@pytest.mark.parametrize(
    "change",
    [
        {"pages": ((1,), (2,))},
        {"pages": ((1 << 70,),)},
        {"pages": (("one",),)},
        {"first_index": (None,)},
        {"pages": None},
    ],
)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_malformed_ticket_fails_its_load(
    prefill: Engine, decode: Engine, change: dict[str, Any], is_prepared: bool
) -> None:
    """Integrations check tickets too; the endpoint does not rely on that."""
    ticket = prefill.serve("p-1", [1], TOKENS)
    bad = copy.copy(ticket)  # the constructor would refuse these values
    for name, value in change.items():
        object.__setattr__(bad, name, value)
    if is_prepared:
        decode.prepare(bad)
    assert decode.load("d-1", bad, [2]) is not None
    assert decode.load("d-2", ticket, [2]) is None


def test_an_exception_in_using_an_engines_payloads_fails_its_loads(
    prefill: Engine, driver: RecordingTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has been connected by then."""
    real = ticket_module.page_limits

    def fails(payloads: Any) -> Any:
        if payloads[0].engine == "prefill":
            raise ZeroDivisionError("unlike numbers of groups")
        return real(payloads)

    monkeypatch.setattr(peers, "page_limits", fails)
    with (
        Engine("other") as other,
        Engine("decode", transport=lambda: driver) as decode,
    ):
        pull(prefill, decode, 1)
        assert "unlike numbers of groups" in str(outcome(decode, 1))
        assert not driver.connected
        pull(other, decode, 2)
        assert outcome(decode, 2) is None


@pytest.mark.parametrize("method", ["read", "fenced", "checked"])
def test_a_callback_that_raises_fails_its_load(
    prefill: Engine, decode: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., None] = getattr(LoadMachine, method)
    failed: list[object] = []

    def fails_once(*args: object) -> None:
        if not failed:
            failed.append(args)
            raise ZeroDivisionError("a bug")
        real(*args)

    monkeypatch.setattr(LoadMachine, method, fails_once)
    for number in (1, 2):
        prefill.compute(f"p-{number}", [number], TOKENS)
        ticket = prefill.finish(f"p-{number}", [number], TOKENS, computed=False)
        decode.pull(f"d-{number}", ticket, [number])
    failed_as, other = outcomes(decode, 1, 2)
    assert "unexpected ZeroDivisionError: a bug" in str(failed_as)
    assert other is None
    eventually(lambda: prefill.endpoint.held == 0, "the producer is told of both")


# ErrorContainment by itself.


def test_each_kind_of_exception_is_logged_once_per_activity(
    caplog: pytest.LogCaptureFixture,
) -> None:
    containment = ErrorContainment()
    for error in (ValueError("one"), ValueError("two"), KeyError("three")):
        with pytest.raises(type(error)):
            raise error
        containment.caught("a read", error)
    containment.caught("a word", ValueError("four"))
    logged = [(r.levelno, r.message.partition(" failed")[0], r.exc_info) for r in caplog.records]
    assert [(level, what) for level, what, _ in logged] == [
        (logging.ERROR, "a read"),
        (logging.ERROR, "a read"),
        (logging.ERROR, "a word"),
    ]
    assert all(info is not None and info[1] is not None for *_, info in logged)


def test_errors_of_kvferry_are_not_wrapped() -> None:
    containment = ErrorContainment()
    known_error = PeerLostError("gone")
    assert containment.caught("a read", known_error) is known_error
    other = ValueError("bad")
    made = containment.caught("a read", other)
    assert isinstance(made, TransportError)
    assert (str(made), made.__cause__) == ("unexpected ValueError: bad", other)


def test_only_repeated_failures_of_what_serves_all_loads_are_a_problem() -> None:
    containment = ErrorContainment()

    def fails() -> int:
        raise ValueError("bad")

    for _ in range(5):
        assert containment.run("one", fails, 7) == 7
    assert not containment.problems
    for row in (2, 2, 3):
        containment.run("all", lambda: 1, 0, serves_all=True)
        assert not containment.problems
        for _ in range(row):
            containment.run("all", fails, 0, serves_all=True)
    problem = "".join(containment.problems)
    assert problem == (
        "all failed, again and again, first with ValueError: bad; restart the engine if that lasts"
    )
    containment.run("all", lambda: 1, 0)
    assert containment.problems == (problem,)
    assert containment.run("all", lambda: 1, 0, serves_all=True) == 1
    assert not containment.problems


def test_keyboard_interrupt_is_not_contained() -> None:
    def ends() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ErrorContainment().run("anything", ends, None)
