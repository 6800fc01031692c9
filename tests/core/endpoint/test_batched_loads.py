"""Loads of several reads, and limits on the reads under way; fences come before other reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kvferry.core.endpoint import EndpointOptions, Results
from kvferry.core.errors import EndpointClosedError, TransportError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import DIM, HEADS, LAYERS, Engine, eventually, pull
from tests.core.endpoint.transports import PENDING, WORD, ScriptedTransport

TOKENS = 8
COPIES = LAYERS * HEADS * TOKENS
"""The copies of such a request, between a cache with heads first and one with tokens first."""
MAX_COPIES = 10
BATCHES = -(-COPIES // MAX_COPIES)


@pytest.fixture
def driver() -> ScriptedTransport:
    return ScriptedTransport(PENDING)


@contextlib.contextmanager
def two_engines(
    driver: ScriptedTransport, max_copies: int = MAX_COPIES
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
    decode.pull("d-1", prefill.serve("p-1", [1, 2], TOKENS), [3, 4])


def run_to_second_batch(driver: ScriptedTransport) -> None:
    """Let the first batch end, and wait until the second is posted."""
    driver.may_end = 1
    eventually(lambda: len(driver.pages) == 2, "the second batch is read")


def results(decode: Engine) -> Results:
    return decode.outcome("d-1")


def failure(decode: Engine) -> Exception:
    return results(decode).failed[RequestId("d-1")]


def test_a_load_is_read_batch_by_batch_and_the_fence_comes_last(
    driver: ScriptedTransport,
) -> None:
    with two_engines(driver) as (prefill, decode):
        start(prefill, decode)
        for batch in range(1, BATCHES + 1):
            eventually(lambda: len(driver.pages) == batch, "the next batch is read")  # noqa: B023
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


def test_a_later_load_does_not_wait_for_all_batches(
    driver: ScriptedTransport,
) -> None:
    with two_engines(driver, COPIES // 2) as (prefill, decode):
        start(prefill, decode)
        eventually(lambda: len(driver.pages) == 1, "the first batch is read")
        pull(prefill, decode, 5)
        eventually(lambda: len(driver.pages) == 2, "the other load is read")
        driver.may_end = 2
        assert decode.error("d-5") is None
        assert not decode.wrong_bytes([5], 4)
        assert decode.endpoint.pending == 1
        driver.may_end = 3
        assert not results(decode).failed
        assert not decode.wrong_bytes([3, 4], TOKENS)


def test_an_aborted_load_ends_with_the_batch_under_way(
    driver: ScriptedTransport,
) -> None:
    with two_engines(driver) as (prefill, decode):
        start(prefill, decode)
        run_to_second_batch(driver)
        decode.endpoint.abort(RequestId("d-1"))
        eventually(lambda: len(driver.cancelled) == 1, "the batch under way is cancelled")
        assert decode.endpoint.pending == 1, "bytes may still land"
        driver.may_end = 2
        assert isinstance(failure(decode), EndpointClosedError)
        prefill.released("p-1")
    assert driver.posted == [MAX_COPIES] * 2


def test_a_batch_that_fails_is_the_last(driver: ScriptedTransport) -> None:
    with two_engines(driver) as (prefill, decode):
        start(prefill, decode)
        eventually(lambda: len(driver.pages) == 1, "the first batch is read")
        driver.raises["read"] = TransportError("out of memory")
        driver.may_end = BATCHES
        assert "out of memory" in str(results(decode).failed[RequestId("d-1")])
        prefill.released("p-1")
    assert driver.posted == [MAX_COPIES]
