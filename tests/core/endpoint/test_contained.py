"""Drivers and callbacks that raise what they must not: what it concerns fails, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.core.endpoint import Endpoint, EndpointOptions, peers
from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.errors import EndpointClosedError, KVFerryError, PeerLostError, TransportError
from kvferry.core.lifecycle import ticket as ticket_module
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.messages import WORD_BYTES, Release, encode
from kvferry.core.metrics import IGNORED
from kvferry.core.transport import Notification, PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import (
    LAYERS,
    Clock,
    Engine,
    Watched,
    engine,
    eventually,
    expected,
)
from tests.core.endpoint.test_figures import Counted

TOKENS = 4
LOAD_TIMEOUT = 100.0
NUMBERS = itertools.count(1)


class Hostile(Watched):
    """A driver of which any call can be made to raise, and reads of pages to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.raises: set[str] = set()
        """Methods."""
        self.pages: list[TransferId] = []
        self.unclear: set[int] = set()
        """Of which reads of pages ``poll`` raises."""
        self.held = False
        self.says: Any = None
        """What ``poll`` returns instead of a list of statuses."""
        self.asked: list[tuple[str, TransferId]] = []

    def _may_raise(self, method: str) -> None:
        if method in self.raises:
            raise ZeroDivisionError(f"a bug in {method}")

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self._may_raise("read")
        transfer = super().read(peer, copies, notify)
        if copies.total != WORD_BYTES:
            self.pages.append(transfer)
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self._may_raise("poll")
        if any(self.pages.index(each) in self.unclear for each in transfers if each in self.pages):
            raise ZeroDivisionError("a bug in poll")
        if self.says is not None:
            return self.says  # type: ignore[no-any-return]
        pending = Status(state=State.PENDING)
        return [
            pending if self.held and each in self.pages else status
            for each, status in zip(transfers, super().poll(list(transfers)), strict=True)
        ]

    def cancel(self, transfer: TransferId) -> None:
        self.asked.append(("cancel", transfer))
        self._may_raise("cancel")
        super().cancel(transfer)

    def forget(self, transfer: TransferId) -> None:
        self._may_raise("forget")
        super().forget(transfer)

    def notifications(self) -> list[Notification]:
        self._may_raise("notifications")
        return super().notifications()

    def notify(self, peer: PeerId, payload: bytes) -> None:
        self._may_raise("notify")
        super().notify(peer, payload)

    def connect(self, address: bytes) -> PeerId:
        self._may_raise("connect")
        return super().connect(address)

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self.held = False
        self._may_raise("disconnect")


@contextlib.contextmanager
def three(driver: Hostile) -> Iterator[tuple[Engine, Engine, Engine, Clock]]:
    clock = Clock()
    options = EndpointOptions(liveness_interval=0.0, load_timeout=LOAD_TIMEOUT)
    with (
        engine("prefill") as prefill,
        engine("other") as other,
        engine("decode", options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        yield prefill, other, decode, clock
        # However much was raised: what follows goes well.
        driver.raises.clear()
        driver.held, driver.says = False, None
        for number, producer in enumerate((other, prefill)):
            eventually(
                lambda: loads(producer, decode, f"last-{number}"),  # noqa: B023
                "loads succeed again",
            )


def loads(producer: Engine, decode: Engine, name: str) -> bool:
    ticket = producer.serve(f"{name}-{next(NUMBERS)}", [9], TOKENS)
    decode.pull(name, ticket, [9])
    if decode.outcome(name).failed:
        return False
    (rank,) = decode.ranks
    want = [expected(decode.shape, TOKENS, layer, 0) for layer in range(LAYERS)]
    assert np.array_equal([rank.tokens([9], layer)[:TOKENS] for layer in range(LAYERS)], want)
    return True


def outcomes(decode: Engine, *numbers: int) -> list[KVFerryError | None]:
    """Why each of these loads failed, if it did, once all are reported."""
    found: dict[str, KVFerryError | None] = {}

    def all_over() -> bool:
        results = decode.ranks[0].endpoint.results()
        found.update({name: results.failed.get(name) for name in results.received})
        return found.keys() >= {f"d-{number}" for number in numbers}

    eventually(all_over, "all are reported")
    return [found[f"d-{number}"] for number in numbers]


def outcome(decode: Engine, number: int) -> KVFerryError | None:
    return outcomes(decode, number)[0]


def pulls(producer: Engine, decode: Engine, *numbers: int) -> None:
    for number in numbers:
        ticket = producer.serve(f"p-{number}", [number], TOKENS)
        decode.pull(f"d-{number}", ticket, [number])


@pytest.mark.parametrize("method", ["read", "connect"])
def test_a_call_for_one_load_fails_that_load(method: str) -> None:
    driver = Hostile()
    with three(driver) as (prefill, _, decode, _clock):
        driver.raises = {method}
        pulls(prefill, decode, 1)
        assert f"a bug in {method}" in str(outcome(decode, 1))


@pytest.mark.parametrize("method", ["forget", "notify"])
def test_a_call_after_the_end_fails_nothing(method: str) -> None:
    driver = Hostile()
    with three(driver) as (prefill, _, decode, _clock):
        driver.raises = {method}
        pulls(prefill, decode, 1, 2)
        assert outcomes(decode, 1, 2) == [None, None]
        assert decode.ranks[0].endpoint.healthy


def test_a_cancel_that_raises_ends_nothing_and_the_load_ends_as_others() -> None:
    driver = Hostile()
    with three(driver) as (prefill, _, decode, clock):
        driver.held, driver.raises = True, {"cancel"}
        pulls(prefill, decode, 1)
        eventually(lambda: len(driver.pages) == 1, "it is read")
        decode.ranks[0].endpoint.abort(RequestId("d-1"))
        eventually(lambda: bool(driver.asked), "it is cancelled")
        assert decode.ranks[0].endpoint.pending == 1, "bytes may still land"
        clock.skip(2.0)  # and then nothing less than a disconnect ends it
        driver.held = False
        assert isinstance(outcome(decode, 1), EndpointClosedError)


def test_a_disconnect_that_raises_is_tried_again() -> None:
    driver = Hostile()
    with three(driver) as (prefill, _, decode, clock):
        driver.held, driver.raises = True, {"disconnect"}
        pulls(prefill, decode, 1)
        eventually(lambda: len(driver.pages) == 1, "it is read")
        clock.skip(LOAD_TIMEOUT + 2.0)
        eventually(lambda: not decode.ranks[0].endpoint.healthy, "it did not fall silent")
        driver.held, driver.raises = False, set()
        clock.skip(60.0)
        assert outcome(decode, 1) is not None
        eventually(lambda: decode.ranks[0].endpoint.healthy, "it did")


def test_a_transfer_that_cannot_be_polled_fails_alone_and_only_when_its_bytes_are_quiet() -> None:
    driver = Hostile()
    with three(driver) as (prefill, _, decode, clock):
        (rank,) = decode.ranks
        driver.held, driver.unclear = True, {0}
        pulls(prefill, decode, 1, 2)
        eventually(lambda: len(driver.asked) == 1, "it is known that the first will fail")
        clock.skip(LOAD_TIMEOUT / 2)
        driver.held = False
        assert outcome(decode, 2) is None, "another of the same peer, meanwhile"
        error = outcome(decode, 1)
        assert "cannot say how a read stands: ZeroDivisionError('a bug in poll')" in str(error)
        assert len(driver.disconnected) == 1, "nothing less proves that no byte lands"
        assert rank.endpoint.healthy


def test_a_transfer_that_cannot_be_polled_is_not_over_while_its_connection_stands() -> None:
    driver = Hostile()
    with three(driver) as (prefill, _, decode, clock):
        driver.held, driver.unclear = True, {0}
        pulls(prefill, decode, 1, 2)
        eventually(lambda: len(driver.asked) == 1, "it is known that the first will fail")
        clock.skip(LOAD_TIMEOUT / 2)
        decode.ranks[0].endpoint.wait(0.1)
        assert not decode.ranks[0].endpoint.results().received
        assert driver.disconnected == set(), "another load is wanted"
        clock.skip(LOAD_TIMEOUT / 2 + 2.0)
        assert all(outcomes(decode, 1, 2))


@pytest.mark.parametrize("says", [[], [None], "no statuses", 7])
def test_a_poll_that_returns_nonsense_fails_what_it_is_about(says: Any) -> None:
    driver = Hostile()
    with three(driver) as (prefill, _, decode, clock):
        driver.says = says
        pulls(prefill, decode, 1)
        eventually(lambda: len(driver.asked) == 1, "it is known that it will fail")
        clock.skip(2.0)
        assert "cannot say how a read stands: TypeError" in str(outcome(decode, 1))


def test_a_poll_that_raises_for_all_is_a_problem_until_it_does_not() -> None:
    driver = Hostile()
    with three(driver) as (prefill, _, decode, clock):
        endpoint: Endpoint = decode.ranks[0].endpoint
        driver.held, driver.raises = True, {"poll"}
        pulls(prefill, decode, 1)
        eventually(lambda: not endpoint.healthy, "it is known")
        assert endpoint.problems[0].startswith(
            "the driver's poll failed, again and again, first with ZeroDivisionError: a bug in poll"
        )
        assert endpoint.problems == endpoint.problems
        clock.skip(2.0)
        assert "a bug in poll" in str(outcome(decode, 1))
        driver.raises = set()
        driver.held = False
        pulls(prefill, decode, 2)
        assert outcome(decode, 2) is None
        eventually(lambda: endpoint.healthy, "it has succeeded since")


DECODE_ERRORS = [
    b"x",
    b"\xc1" * 100,
    encode([]),
    msgspec.msgpack.encode([{"type": "release"}]),
    b"\x91" * 10_000,
    msgspec.msgpack.encode([[1] * 100]),
]


@pytest.mark.parametrize("payload", DECODE_ERRORS)
def test_a_malformed_notification_is_dropped_and_its_producer_goes_on(payload: bytes) -> None:
    with engine("prefill") as prefill, engine("decode") as decode, closing(Watched()) as stranger:
        (rank,) = prefill.ranks
        peer = stranger.connect(rank.endpoint.payload.address)
        ticket = prefill.serve("p-1", [1], TOKENS)
        stranger.notify(peer, payload)
        unknown = Release(
            incarnation=1, slot=0, generation=1, engine="e", rank=0, expected=1, abandoned=True
        )
        stranger.notify(peer, encode([unknown]))  # they keep their order
        counted = Counted(prefill)
        eventually(lambda: counted.total(IGNORED) == 1, "what came after it is heard")
        assert rank.endpoint.healthy
        decode.pull("d-1", ticket, [2])
        assert not decode.outcome("d-1").failed
        prefill.released("p-1")


def test_a_message_that_the_producer_cannot_take_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is wrong with it, or with the producer."""
    with engine("prefill") as prefill, engine("decode") as decode:
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
            decode.pull(f"d-{number}", prefill.serve(f"p-{number}", [number], TOKENS), [number])
            assert not decode.outcome(f"d-{number}").failed
        prefill.released("p-2")
        assert len(failed) == 1
        assert rank.endpoint.healthy, "no peer chooses an engine's health"


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
@pytest.mark.parametrize("waits", [False, True])
def test_a_ticket_that_is_none_fails_its_load(change: dict[str, Any], waits: bool) -> None:
    """Integrations check tickets, too; nothing here depends on that."""
    with engine("prefill") as prefill, engine("decode") as decode:
        ticket = prefill.serve("p-1", [1], TOKENS)
        bad = copy.copy(ticket)  # which would refuse this when it is made
        for name, value in change.items():
            object.__setattr__(bad, name, value)
        if waits:
            decode.prepare(bad)
        decode.pull("d-1", bad, [2])
        assert outcome(decode, 1) is not None
        decode.pull("d-2", ticket, [2])
        assert outcome(decode, 2) is None


def test_what_the_engine_publishes_that_cannot_be_used_fails_its_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found out on the endpoint's thread, when it is connected; and the connection is let go."""
    driver = Watched()
    real = ticket_module.page_limits

    def fails(payloads: Any) -> Any:
        if payloads[0].engine == "prefill":
            raise ZeroDivisionError("unlike numbers of groups")
        return real(payloads)

    monkeypatch.setattr(peers, "page_limits", fails)
    with (
        engine("prefill") as prefill,
        engine("other") as other,
        engine("decode", transport=lambda: driver) as decode,
    ):
        pulls(prefill, decode, 1)
        assert "unlike numbers of groups" in str(outcome(decode, 1))
        eventually(lambda: driver.links == 0, "the connection is let go")
        pulls(other, decode, 2)
        assert outcome(decode, 2) is None


@pytest.mark.parametrize("method", ["read", "fenced", "checked"])
def test_a_callback_that_raises_fails_its_load(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of a load by then: its read is over, so it is reported at once."""
    with engine("prefill") as prefill, engine("decode") as decode:
        machine = decode.ranks[0].endpoint._load_manager._loads
        real: Callable[..., None] = getattr(machine, method)
        failed: list[object] = []

        def fails_once(*args: object) -> None:
            if not failed:
                failed.append(args)
                raise ZeroDivisionError("a bug")
            real(*args)

        monkeypatch.setattr(machine, method, fails_once)
        for number in (1, 2):
            prefill.compute(f"p-{number}", [number], TOKENS)
            ticket = prefill.finish(f"p-{number}", [number], TOKENS, computed=False)
            decode.pull(f"d-{number}", ticket, [number])
        failed_as, other = outcomes(decode, 1, 2)
        assert "unexpected ZeroDivisionError: a bug" in str(failed_as)
        assert other is None
        eventually(lambda: prefill.ranks[0].endpoint.held == 0, "the producer hears of both")


# What is contained.


def test_as_much_is_logged_as_is_needed_to_report_it(caplog: pytest.LogCaptureFixture) -> None:
    contained = ErrorContainment()
    for error in (ValueError("one"), ValueError("two"), KeyError("three")):
        with pytest.raises(type(error)):
            raise error
        contained.caught("a read", error)
    contained.caught("a word", ValueError("four"))
    logged = [(r.levelno, r.message.partition(" failed")[0], r.exc_info) for r in caplog.records]
    assert [(level, what) for level, what, _ in logged] == [
        (logging.ERROR, "a read"),
        (logging.ERROR, "a read"),
        (logging.ERROR, "a word"),
    ]
    assert all(info is not None and info[1] is not None for *_, info in logged)


def test_errors_of_ours_stay_what_they_are() -> None:
    contained = ErrorContainment()
    ours = PeerLostError("gone")
    assert contained.caught("a read", ours) is ours
    other = ValueError("bad")
    made = contained.caught("a read", other)
    assert isinstance(made, TransportError)
    assert (str(made), made.__cause__) == ("unexpected ValueError: bad", other)


def test_only_what_serves_all_and_fails_in_a_row_is_a_problem() -> None:
    contained = ErrorContainment()

    def fails() -> int:
        raise ValueError("bad")

    for _ in range(5):
        assert contained.run("one", fails, 7) == 7
    assert not contained.problems
    for row in (2, 2, 3):
        contained.run("all", lambda: 1, 0, serves_all=True)
        assert not contained.problems
        for _ in range(row):
            contained.run("all", fails, 0, serves_all=True)
    problem = "".join(contained.problems)
    assert problem == (
        "all failed, again and again, first with ValueError: bad; restart the engine if that lasts"
    )
    contained.run("all", lambda: 1, 0)
    assert contained.problems == (problem,)
    assert contained.run("all", lambda: 1, 0, serves_all=True) == 1
    assert not contained.problems


def test_what_ends_a_process_is_not_contained() -> None:
    def ends() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ErrorContainment().run("anything", ends, None)
