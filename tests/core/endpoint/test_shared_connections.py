"""Two engines that publish the same transport address share a connection."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import (
    DeadlineError,
    EndpointClosedError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.handshake import HandshakeServer
from kvferry.core.handshake import server as server_module
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.metrics import LOST_PEERS, PEERS_UP
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import Capabilities, PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.aliases import AliasEngine, alias_engine
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually
from tests.core.endpoint.loads import TOKENS, outcome, outcomes
from tests.core.endpoint.metric_totals import MetricTotals

LOAD_TIMEOUT = 100.0


NUMBERS = itertools.count(10)


def load_by_name(
    decode: Engine, real: Engine, alias: AliasEngine | None = None
) -> KVFerryError | None:
    """Load one request, under the alias's name if one is given; return the error, if any."""
    number = next(NUMBERS)
    ticket = real.serve(f"p-{number}", [1], TOKENS)
    decode.pull(f"d-{number}", alias.ticket(ticket) if alias else ticket, [2])
    failed = decode.outcome(f"d-{number}").failed.get(RequestId(f"d-{number}"))
    if failed is None:
        assert not decode.wrong_bytes([2], TOKENS)
        if alias is None:
            real.released(f"p-{number}")
    return failed


@contextlib.contextmanager
def real_and_alias(
    driver: RecordingTransport, clock: Clock | None = None, liveness_interval: float = 0.0
) -> Iterator[tuple[Engine, AliasEngine, Engine]]:
    options = EndpointOptions(
        liveness_interval=liveness_interval, load_timeout=LOAD_TIMEOUT, engine_ttl=600.0
    )
    with (
        Engine("real") as real,
        alias_engine(real) as alias,
        Engine(
            "decode", transport=lambda: driver, options=options, clock=clock or Clock()
        ) as decode,
    ):
        yield real, alias, decode


def test_two_engines_with_one_address_share_a_connection() -> None:
    """Both are released when idle, and connected again."""
    driver, clock = RecordingTransport(), Clock()
    with real_and_alias(driver, clock) as (real, alias, decode):
        for links in (1, 2):
            assert load_by_name(decode, real) is None
            assert load_by_name(decode, real, alias) is None
            assert len(driver.connected) == links, "they share one connection"
            clock.skip(601.0)
            eventually(lambda: driver.open_connections == 0, "both are idle")
            assert len(driver.disconnected) == links
        eventually(lambda: decode.ranks[0].endpoint.healthy, "a round has run since the skip")


@pytest.mark.parametrize("lost", ["alias", "real"])
def test_the_loss_of_one_engine_does_not_disconnect_the_other(lost: str) -> None:
    driver = RecordingTransport()
    with real_and_alias(driver, liveness_interval=0.05) as (real, alias, decode):
        assert load_by_name(decode, real) is None
        assert load_by_name(decode, real, alias) is None
        totals = MetricTotals(decode)
        (alias if lost == "alias" else real).server.close()
        eventually(lambda: totals.of(LOST_PEERS) == {(lost,): 1}, "the lost engine is given up")
        assert totals.of(PEERS_UP) == {("0",): 1}
        assert driver.disconnected == set()
        remaining = None if lost == "alias" else alias
        assert load_by_name(decode, real, remaining) is None
        assert len(driver.connected) == 1
        assert decode.ranks[0].endpoint.healthy


def test_two_ranks_of_one_engine_with_one_address_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reading side checks it too, because a peer's server may not have."""
    with Engine("prefill", CacheShape(tp=2)) as prefill, Engine("decode") as decode:
        ticket = prefill.serve("p-1", [1], TOKENS)
        zero, one = (rank.endpoint.payload for rank in prefill.ranks)
        payloads = [encode(zero), encode(msgspec.structs.replace(one, address=zero.address))]
        info = SimpleNamespace(engine="prefill", incarnation=prefill.incarnation)
        monkeypatch.setattr(server_module, "engine_info", lambda *_: info)
        with HandshakeServer(
            payloads, engine="prefill", incarnation=prefill.incarnation, port=0
        ) as server:
            decode.pull("d-1", dataclasses.replace(ticket, port=server.port), [2])
            error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert isinstance(error, HandshakeError)
        assert "ranks 0 and 1 publish one transport address" in str(error)
        decode.pull("d-2", ticket, [2])
        assert not decode.outcome("d-2").failed


class ScriptedReadsTransport(RecordingTransport):
    """A transport whose page reads are pending until the test gives them a status."""

    quiescence = Quiescence.ALWAYS

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[TransferId] = []
        self.statuses: dict[int, Status] = {}
        """Statuses by the index of the page read."""
        self.cancelled: list[TransferId] = []
        self._disconnected_reads: set[TransferId] = set()
        self._peer_of_read: dict[TransferId, PeerId] = {}

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, quiescence=self.quiescence)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if notify is None:
            self.pages.append(transfer)
            self._peer_of_read[transfer] = peer
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        self.cancelled.append(transfer)

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self._disconnected_reads |= {
            transfer for transfer, of in self._peer_of_read.items() if of == peer
        }

    def poll(self, transfers: list[TransferId]) -> list[Status]:  # type: ignore[override]
        statuses = super().poll(transfers)
        return [self._status(each, real) for each, real in zip(transfers, statuses, strict=True)]

    def _status(self, transfer: TransferId, real: Status) -> Status:
        if transfer not in self.pages:
            return real
        if transfer in self._disconnected_reads:
            return Status(state=State.FAILED, error=PeerLostError("disconnected"))
        return self.statuses.get(self.pages.index(transfer), Status(state=State.PENDING))


class EndsByDisconnectTransport(ScriptedReadsTransport):
    quiescence = Quiescence.AFTER_DISCONNECT


def start_both_reads(
    driver: ScriptedReadsTransport, real: Engine, alias: AliasEngine, decode: Engine
) -> None:
    """Start load 1 from the alias and load 2 from the real engine; wait until both are read."""
    for number, by_alias in ((1, True), (2, False)):
        ticket = real.serve(f"p-{number}", [number], TOKENS)
        decode.pull(f"d-{number}", alias.ticket(ticket) if by_alias else ticket, [number])
        eventually(lambda: len(driver.pages) == number, "it is read")  # noqa: B023


def pass_time(clock: Clock, decode: Engine, seconds: float) -> None:
    """Move the clock, and wait until the endpoint has done all that is due by then."""
    clock.skip(seconds)
    with Engine(f"third-{next(NUMBERS)}") as third:
        for _ in range(2):
            request = f"o-{next(NUMBERS)}"
            decode.pull(request, third.serve(request, [5], TOKENS), [], nothing=True)
            third.released(request)


DONE = Status(state=State.DONE)


def test_a_lost_connection_fails_the_loads_of_both_engines_and_both_can_reconnect() -> None:
    driver = ScriptedReadsTransport()
    with real_and_alias(driver) as (real, alias, decode):
        start_both_reads(driver, real, alias, decode)
        driver.statuses[0] = Status(
            state=State.FAILED, error=PeerLostError("its process has ended")
        )
        assert all(isinstance(error, PeerLostError) for error in outcomes(decode, 1, 2))
        assert len(driver.disconnected) == 1
        driver.statuses.update({2: DONE, 3: DONE})
        assert load_by_name(decode, real, alias) is None
        assert load_by_name(decode, real) is None
        assert len(driver.connected) == 2


def test_a_read_that_only_a_disconnect_ends_also_ends_the_other_engines_loads() -> None:
    driver = EndsByDisconnectTransport()
    with real_and_alias(driver) as (real, alias, decode):
        start_both_reads(driver, real, alias, decode)
        driver.statuses[0] = Status(state=State.FAILING, error=TransportError("the cable is out"))
        first, second = outcomes(decode, 1, 2)
        assert "the cable is out" in str(first)
        assert isinstance(second, PeerLostError)
        assert len(driver.disconnected) == 1


def test_a_failed_read_of_one_engine_fails_alone() -> None:
    driver = ScriptedReadsTransport()
    with real_and_alias(driver) as (real, alias, decode):
        start_both_reads(driver, real, alias, decode)
        driver.statuses[0] = Status(state=State.FAILED, error=TransportError("out of range"))
        assert "out of range" in str(outcome(decode, 1))
        driver.statuses[1] = DONE
        assert outcome(decode, 2) is None
        assert driver.disconnected == set()


@pytest.mark.parametrize("ended_by", ["itself", "deadline", "abort"])
def test_reads_from_a_lost_engine_go_on_while_the_other_engine_is_read(
    ended_by: str,
) -> None:
    """They go on until they end, until the other load is aborted, or until a deadline.

    Both loads are reported only then.
    """
    driver, clock = ScriptedReadsTransport(), Clock()
    with real_and_alias(driver, clock, liveness_interval=0.05) as (real, alias, decode):
        (rank,) = decode.ranks
        start_both_reads(driver, real, alias, decode)
        alias.server.close()
        eventually(lambda: len(driver.cancelled) == 1, "the read from the alias is cancelled")
        pass_time(clock, decode, LOAD_TIMEOUT / 2)
        assert driver.disconnected.isdisjoint(driver._peer_of_read.values())
        assert rank.endpoint.pending == 2, "bytes may still land in the pages of both"
        if ended_by == "itself":
            cancelled = TransferCancelledError("cancelled")
            driver.statuses.update({0: Status(state=State.FAILED, error=cancelled), 1: DONE})
        elif ended_by == "abort":
            rank.endpoint.abort(RequestId("d-2"))
            eventually(lambda: len(driver.cancelled) == 2, "the other read is cancelled too")
            clock.skip(2.0)
        else:
            clock.skip(LOAD_TIMEOUT / 2 + 2.0)
        first, second = outcomes(decode, 1, 2)
        assert isinstance(first, PeerLostError)
        if ended_by == "itself":
            assert second is None
            assert driver.disconnected.isdisjoint(driver._peer_of_read.values())
        else:
            kinds = EndpointClosedError if ended_by == "abort" else (DeadlineError, PeerLostError)
            assert isinstance(second, kinds)
            assert driver.disconnected.issuperset(driver._peer_of_read.values())
