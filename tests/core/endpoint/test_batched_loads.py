"""Loads of more copies than one read may have: several reads, and one fence after the last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from kvferry.core.endpoint import EndpointOptions, Results
from kvferry.core.errors import EndpointClosedError, PeerLostError, StaleError, TransportError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.messages import WORD_BYTES
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import DIM, HEADS, LAYERS, Engine, eventually, until
from tests.core.endpoint.loads import outcome, pull
from tests.core.endpoint.test_killed_producer import producer
from tests.core.endpoint.test_killed_producer import ticket as ticket_of

TOKENS = 8
COPIES = LAYERS * HEADS * TOKENS
"""The copies of such a request, between a cache with heads first and one with tokens first."""
MAX_COPIES = 10
BATCHES = -(-COPIES // MAX_COPIES)
WORD = 0


class SteppedReadsTransport(LoopbackTransport):
    """A transport whose page reads end in order, as the test lets them.

    Attributes:
        posted: number of copies of each read, in order; ``WORD`` for the read of a slot word.
        may_end: how many of the page reads may end.
        cancelled: how many reads were cancelled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[int] = []
        self.may_end = 0
        self.cancelled = 0
        self._pages: list[TransferId] = []

    @property
    def page_reads(self) -> int:
        """The number of page reads that were posted."""
        return len(self._pages)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        is_word = copies.total == WORD_BYTES
        self.posted.append(WORD if is_word else len(copies))
        transfer = super().read(peer, copies, notify)
        if not is_word:
            self._pages.append(transfer)
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        self.cancelled += 1

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        held = set(self._pages[self.may_end :])
        statuses = super().poll(transfers)
        return [
            Status(state=State.PENDING) if each in held else status
            for each, status in zip(transfers, statuses, strict=True)
        ]


@contextlib.contextmanager
def two_engines(
    driver: SteppedReadsTransport, max_copies: int = MAX_COPIES
) -> Iterator[tuple[Engine, Engine]]:
    """Run a producer, and a consumer that keeps its cache in another order."""
    options = EndpointOptions(max_copies=max_copies)
    shape = CacheShape(heads_first=False)
    with (
        Engine("prefill") as prefill,
        Engine("decode", shape, options=options, transport=lambda: driver) as decode,
    ):
        try:
            yield prefill, decode
        finally:
            driver.may_end = 1 << 30


def start(prefill: Engine, decode: Engine) -> None:
    """Start the load ``d-1`` of two pages."""
    decode.pull("d-1", prefill.serve("p-1", [1, 2], TOKENS), [3, 4])


def run_to_second_batch(driver: SteppedReadsTransport) -> None:
    """Let the first batch end, and wait until the second is posted."""
    driver.may_end = 1
    eventually(lambda: driver.page_reads == 2, "the second batch is read")


def results(decode: Engine) -> Results:
    """Wait until the load ``d-1`` is reported."""
    return until(decode.ranks[0].endpoint, lambda found: RequestId("d-1") in found.received)


def failure(decode: Engine) -> Exception:
    return results(decode).failed[RequestId("d-1")]


def test_a_load_is_read_batch_by_batch_and_the_fence_comes_last() -> None:
    driver = SteppedReadsTransport()
    with two_engines(driver) as (prefill, decode):
        start(prefill, decode)
        for batch in range(1, BATCHES + 1):
            eventually(lambda: driver.page_reads == batch, "the next batch is read")  # noqa: B023
            assert WORD not in driver.posted
            driver.may_end = batch
        found = results(decode)
        assert not found.failed
        assert not decode.wrong_bytes([3, 4], TOKENS)
        prefill.released("p-1")
    assert driver.posted == [10] * 6 + [4, WORD]
    [record] = found.loads
    assert (record.copies, record.nbytes) == (COPIES, COPIES * DIM * 4)
    assert record.post_seconds > 0
    in_stages = record.handshake_seconds + record.check_seconds + record.post_seconds
    in_stages += record.transfer_seconds + record.fence_seconds
    assert in_stages <= record.seconds


@pytest.mark.parametrize("max_copies", [COPIES, COPIES + 1])
def test_a_load_that_fits_is_read_at_once(max_copies: int) -> None:
    driver = SteppedReadsTransport()
    driver.may_end = 1
    with two_engines(driver, max_copies) as (prefill, decode):
        start(prefill, decode)
        assert not results(decode).failed
        assert not decode.wrong_bytes([3, 4], TOKENS)
    assert driver.posted == [COPIES, WORD]


def test_a_later_load_does_not_wait_for_all_batches() -> None:
    driver = SteppedReadsTransport()
    with two_engines(driver, COPIES // 2) as (prefill, decode):
        start(prefill, decode)
        eventually(lambda: driver.page_reads == 1, "the first batch is read")
        pull(prefill, decode, 5)
        eventually(lambda: driver.page_reads == 2, "the other load is read")
        driver.may_end = 2
        assert outcome(decode, 5) is None
        assert not decode.wrong_bytes([5], 4)
        assert decode.ranks[0].endpoint.pending == 1
        driver.may_end = 3
        assert not results(decode).failed
        assert not decode.wrong_bytes([3, 4], TOKENS)


def test_a_load_whose_hold_ends_between_batches_is_stale() -> None:
    driver = SteppedReadsTransport()
    with two_engines(driver) as (prefill, decode):
        start(prefill, decode)
        run_to_second_batch(driver)
        prefill.scheduler_holds.reset()
        prefill.step()
        prefill.released("p-1")
        driver.may_end = BATCHES
        assert isinstance(failure(decode), StaleError)
    assert driver.posted.count(WORD) == 1


def test_an_aborted_load_ends_with_the_batch_under_way() -> None:
    driver = SteppedReadsTransport()
    with two_engines(driver) as (prefill, decode):
        start(prefill, decode)
        run_to_second_batch(driver)
        decode.ranks[0].endpoint.abort(RequestId("d-1"))
        eventually(lambda: driver.cancelled == 1, "the batch under way is cancelled")
        assert decode.ranks[0].endpoint.pending == 1, "bytes may still land"
        driver.may_end = 2
        assert isinstance(failure(decode), EndpointClosedError)
        prefill.released("p-1")
    assert driver.posted == [MAX_COPIES] * 2


def test_a_batch_that_fails_is_the_last() -> None:
    class SecondReadFailsTransport(SteppedReadsTransport):
        def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
            if self.page_reads == 1:
                raise TransportError("out of memory")
            return super().read(peer, copies, notify)

    driver = SecondReadFailsTransport()
    driver.may_end = BATCHES
    with two_engines(driver) as (prefill, decode):
        start(prefill, decode)
        [record] = (found := results(decode)).loads
        assert "out of memory" in str(found.failed[RequestId("d-1")])
        assert record.copies == 2 * MAX_COPIES
        prefill.released("p-1")
    assert driver.posted == [MAX_COPIES]


def test_a_load_from_a_producer_killed_between_batches_fails() -> None:
    driver = SteppedReadsTransport()
    options = EndpointOptions(max_copies=MAX_COPIES, liveness_interval=0.0)
    shape = CacheShape(heads_first=False)
    with (
        producer() as (process, pipe),
        Engine("decode", shape, options=options, transport=lambda: driver) as decode,
    ):
        decode.pull("d-1", ticket_of(pipe, 0), [3, 4])
        eventually(lambda: driver.page_reads == 2, "the first batch of both ranks is read")
        process.kill()
        process.join()
        driver.may_end = 1 << 30
        assert isinstance(failure(decode), PeerLostError)
        assert driver.page_reads <= 4
