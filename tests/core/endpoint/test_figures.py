"""What endpoints count, and what they log, when loads go well and when they fail."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from kvferry.core.endpoint import Endpoint, EndpointOptions
from kvferry.core.errors import TransportError
from kvferry.core.handshake import HandshakeServer
from kvferry.core.lifecycle.holds import RequestId, random_incarnation
from kvferry.core.messages import encode
from kvferry.core.metrics import (
    BYTES,
    COPIES,
    EXPIRED,
    FAILURES,
    FIGURES,
    IGNORED,
    LATE,
    LOAD_SECONDS,
    LOST_PEERS,
    PEERS_DOWN,
    PEERS_UP,
    PULLS,
    QUARANTINED,
    REFUSED,
    STAGE_SECONDS,
    STALE,
    UNREACHED,
    UNTOLD,
    Data,
    Metric,
    Stage,
    flat,
    merge,
)
from kvferry.core.transport import Capabilities, PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import Clock, Engine, Shape, Watched, engine, eventually, until

BY_NAME = {figure.name: figure for figure in FIGURES}
PAGE_BYTES = 4 * 4 * 8 * 4  # tokens, heads, elements, bytes of each


class Counted:
    """All that an engine's endpoints have counted so far."""

    def __init__(self, counting: Engine) -> None:
        self._endpoints: list[Endpoint] = [rank.endpoint for rank in counting.ranks]
        self._data: Data = {}

    def all(self) -> Data:
        for endpoint in self._endpoints:
            merge(BY_NAME, self._data, endpoint.take_figures() or {})
        return self._data

    def of(self, figure: Metric) -> dict[tuple[str, ...], Any]:
        """Without the driver's name."""
        found = dict(flat(figure, self.all()))
        assert all(labels[0] == "loopback" for labels in found)
        return {labels[1:]: value for labels, value in found.items()}

    def total(self, figure: Metric) -> float:
        return float(sum(self.of(figure).values()))


def test_a_load_is_counted_where_it_was_read() -> None:
    with engine("prefill") as prefill, engine("decode") as decode:
        decode.pull("d-1", prefill.serve("p-1", [1, 2], 8), [3, 4])
        assert not decode.outcome("d-1").failed
        prefill.released("p-1")
        counted = Counted(decode)
        assert counted.of(BYTES) == {("prefill", "memcpy"): 2 * 2 * PAGE_BYTES}
        assert counted.of(COPIES) == {("prefill", "memcpy"): 2}
        assert counted.of(PULLS) == {("prefill", "memcpy"): 1}
        assert counted.of(PEERS_UP) == {("0",): 1}
        [seconds] = counted.of(LOAD_SECONDS)[()]
        stages = {stage: value for (stage,), [value] in counted.of(STAGE_SECONDS).items()}
        assert set(stages) == set(Stage)
        inside = [stages[each] for each in Stage if each not in (Stage.WAIT, Stage.HANDSHAKE)]
        assert 0 < sum(inside) <= seconds
        assert stages[Stage.HANDSHAKE] > 0
        assert stages[Stage.FENCE] > 0
        assert stages[Stage.WAIT] == 0.0
        troubles = (FAILURES, STALE, REFUSED, LOST_PEERS, UNTOLD, PEERS_DOWN)
        assert not any(counted.of(figure) for figure in troubles)
        assert Counted(prefill).all() == {}


def test_nothing_is_new_while_nothing_happens() -> None:
    with engine("prefill") as prefill, engine("decode") as decode:
        for number in range(2):
            decode.pull(f"d-{number}", prefill.serve(f"p-{number}", [1], 4), [3])
            assert not decode.outcome(f"d-{number}").failed
            prefill.released(f"p-{number}")
            figures = decode.ranks[0].endpoint.take_figures() or {}
            assert ("peers_up" in figures) == (number == 0)
            assert decode.ranks[0].endpoint.take_figures() is None
        assert prefill.ranks[0].endpoint.take_figures() is None


def test_the_time_that_a_request_waits_for_pages() -> None:
    driver = Watched()
    with (
        engine("prefill") as prefill,
        engine("decode", transport=lambda: driver) as decode,
    ):
        ticket = prefill.serve("p-1", [1], 4)
        decode.prepare(ticket)
        eventually(lambda: driver.links == 1, "the producer is reached ahead")
        decode.pull("d-1", ticket, [2])
        assert not decode.outcome("d-1").failed
        [waited] = Counted(decode).of(STAGE_SECONDS)[(Stage.WAIT,)]
        assert waited > 0


def test_a_lease_that_is_over_and_the_read_that_comes_too_late() -> None:
    clock = Clock()
    with engine("prefill", Shape(tp=2), clock=clock) as prefill, engine("decode") as decode:
        there, here = Counted(prefill), Counted(decode)
        ticket = prefill.serve("p-1", [1], 4)
        clock.skip(31.0)
        prefill.released("p-1")
        assert there.of(EXPIRED) == {(): 2}, "each rank keeps a lease of its own"
        decode.pull("d-1", ticket, [2])
        assert decode.outcome("d-1").failed
        assert here.of(FAILURES) == {("prefill", "fence", "stale"): 1}
        assert here.of(STALE) == {("prefill",): 1}
        assert not here.of(BYTES)
        eventually(lambda: there.total(IGNORED) == 2, "both ranks have heard that it was refused")
        # The second is not read any more once the first has been found stale.
        assert there.total(LATE) in (1, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"incarnation": random_incarnation()}, "restarted"), ({"pages": ((1, 99),)}, "mismatch")],
)
def test_a_ticket_that_the_handshake_denies_is_counted_once(
    change: dict[str, Any], reason: str
) -> None:
    """However many ranks refuse it."""
    with engine("prefill") as prefill, engine("decode", Shape(tp=2)) as decode:
        ticket = dataclasses.replace(prefill.serve("p-1", [1, 2], 8), **change)
        decode.pull("d-1", ticket, [3, 4])
        assert decode.outcome("d-1").failed
        counted = Counted(decode)
        assert counted.of(REFUSED) == {(reason,): 1}
        assert counted.total(FAILURES) == 2
        assert {labels[1:] for labels in counted.of(FAILURES)} == {("handshake", "ticket")}


def test_a_producer_that_cannot_be_reached_and_one_that_comes_back() -> None:
    with engine("prefill") as prefill, engine("decode") as decode:
        counted, port = Counted(decode), prefill.server.port
        prefill.server.close()
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert decode.outcome("d-1").failed
        assert counted.of(FAILURES) == {(UNREACHED, "handshake", "unreachable"): 1}
        assert counted.of(PEERS_DOWN) == {("0",): 1}
        assert not counted.of(PEERS_UP)
        with HandshakeServer(
            [encode(rank.endpoint.payload) for rank in prefill.ranks],
            engine="prefill",
            incarnation=prefill.incarnation,
            port=port,
        ):
            decode.pull("d-2", prefill.serve("p-2", [1], 4), [2])
            assert not decode.outcome("d-2").failed
        assert counted.of(PEERS_DOWN) == {("0",): 0}
        assert counted.of(PEERS_UP) == {("0",): 1}


def test_a_producer_that_dies_is_down_until_it_is_forgotten() -> None:
    clock = Clock()
    options = EndpointOptions(liveness_interval=5.0, engine_ttl=600.0)
    with (
        engine("prefill") as prefill,
        engine("decode", options=options, clock=clock) as decode,
    ):
        counted = Counted(decode)
        prefill.compute("p-1", [1], 4)
        ticket = prefill.finish("p-1", [1], 4, computed=False, order=False)
        decode.pull("d-1", ticket, [2])
        eventually(lambda: counted.of(PEERS_UP) == {("0",): 1}, "it is connected")
        prefill.server.close()
        assert decode.outcome("d-1").failed
        assert counted.of(FAILURES) == {("prefill", "check", "peer_lost"): 1}
        assert counted.of(LOST_PEERS) == {("prefill",): 1}
        assert counted.of(PEERS_UP) == {("0",): 0}
        assert counted.of(PEERS_DOWN) == {("0",): 1}
        clock.skip(601.0)
        eventually(lambda: counted.of(PEERS_DOWN) == {("0",): 0}, "nobody asked for it since")


def test_a_producer_that_is_idle_is_neither_up_nor_down() -> None:
    clock = Clock()
    options = EndpointOptions(liveness_interval=0, engine_ttl=600.0)
    with (
        engine("prefill") as prefill,
        engine("decode", options=options, clock=clock) as decode,
    ):
        counted = Counted(decode)
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert not decode.outcome("d-1").failed
        clock.skip(601.0)
        eventually(lambda: counted.of(PEERS_UP) == {("0",): 0}, "it is released")
        assert not counted.of(PEERS_DOWN)
        assert not counted.of(LOST_PEERS)


class Loud(Watched):
    """Reads of pages do not end, and connections do not fall silent, until the test says so."""

    not_quiesced = True

    def __init__(self) -> None:
        super().__init__()
        self._pages: set[TransferId] = set()

    @property
    def capabilities(self) -> Capabilities:
        after = Quiescence.AFTER_DISCONNECT
        return dataclasses.replace(super().capabilities, quiescence=after)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if notify is None:
            self._pages.add(transfer)
        return transfer

    def poll(self, transfers: list[TransferId]) -> list[Status]:  # type: ignore[override]
        error = TransportError("the cable is out")
        said = super().poll(transfers)
        failing = Status(state=State.FAILING, error=error)
        final = failing if self.not_quiesced else Status(state=State.FAILED, error=error)
        return [
            final if each in self._pages else status
            for each, status in zip(transfers, said, strict=True)
        ]

    def disconnect(self, peer: PeerId) -> None:
        if self.not_quiesced:
            raise TransportError("still copying")
        super().disconnect(peer)


def test_pages_that_may_still_be_written_are_quarantined(caplog: pytest.LogCaptureFixture) -> None:
    driver, clock = Loud(), Clock()
    with (
        engine("prefill") as prefill,
        engine("decode", transport=lambda: driver, clock=clock) as decode,
    ):
        counted = Counted(decode)
        decode.pull("d-1", prefill.serve("p-1", [1, 2, 3], 12), [4, 5, 6])
        eventually(lambda: counted.of(QUARANTINED) == {("0",): 3}, "the pages are quarantined")
        assert not decode.ranks[0].endpoint.healthy
        assert decode.ranks[0].endpoint.pending == 1, "and not given back"
        driver.not_quiesced = False
        clock.skip(60.0)
        assert decode.outcome("d-1").failed
        assert counted.of(FAILURES) == {("prefill", "transfer", "transport"): 1}
        eventually(lambda: counted.of(QUARANTINED) == {("0",): 0}, "they are quiet")
    [line] = [r.getMessage() for r in caplog.records if "did not fall silent" in r.getMessage()]
    assert "prefill" in line
    assert "(stage disconnect, cause transport): still copying; the pages" in line
    assert "restart the engine if that lasts" in line
    assert not any(record.exc_info for record in caplog.records)


class Secretive(Watched):
    """A driver that cannot even say that it cannot say."""

    def path(self, peer: PeerId) -> str:
        raise RuntimeError("a driver's bug")


def test_a_driver_that_fails_to_say_the_path_moves_pages_all_the_same() -> None:
    with engine("prefill") as prefill, engine("decode", transport=Secretive) as decode:
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert not decode.outcome("d-1").failed
        assert Counted(decode).of(PULLS) == {("prefill", ""): 1}


class Mute(Watched):
    """A driver that cannot send a message."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        raise TransportError("the queue is full")


def test_a_release_that_could_not_be_sent(caplog: pytest.LogCaptureFixture) -> None:
    with engine("prefill") as prefill, engine("decode", transport=Mute) as decode:
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [], nothing=True)
        until(decode.ranks[0].endpoint, lambda results: bool(results.loads))
        assert Counted(decode).of(UNTOLD) == {("prefill",): 1}
    [line] = [r.getMessage() for r in caplog.records if "not told" in r.getMessage()]
    assert "(stage release, cause transport): the queue is full; their leases end them" in line


def test_a_failure_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Request, peer, stage, cause and what to do."""
    with engine("prefill") as prefill, engine("decode") as decode:
        ticket = dataclasses.replace(prefill.serve("p-1", [1], 4), pages=((99,),))
        decode.pull("d-1", ticket, [2])
        assert decode.outcome("d-1").failed
        port = prefill.server.port
    [line] = [r.getMessage() for r in caplog.records if "d-1" in r.getMessage()]
    assert line == (
        f"request d-1: not loaded from engine prefill at 127.0.0.1 port {port} (stage handshake, "
        "cause ticket): group 0 names block 99; the producer has 16 (prefill again, and let the "
        "router pass kv_transfer_params on as they are)"
    )


def test_a_request_that_nobody_wants_any_more_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.INFO),
        engine("prefill") as prefill,
        engine("decode") as decode,
    ):
        prefill.compute("p-1", [1], 4)
        ticket = prefill.finish("p-1", [1], 4, computed=False, order=False)
        decode.pull("d-1", ticket, [2])
        decode.ranks[0].endpoint.abort(RequestId("d-1"))
        assert decode.outcome("d-1").failed
        [labels] = Counted(decode).of(FAILURES)
    assert labels[2] == "given_up"
    [found] = [r for r in caplog.records if "d-1" in r.getMessage()]
    assert found.levelno == logging.INFO
