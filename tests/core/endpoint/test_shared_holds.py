"""Requests of one engine that share a hold, between real endpoints."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import EndpointClosedError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.messages import Release
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Engine, RecordingTransport, until


@contextlib.contextmanager
def pair(tp: int = 2) -> Iterator[tuple[Engine, Engine, list[RecordingTransport]]]:
    """Run two engines with ``tp`` ranks each; yield them and the producer's transports."""
    drivers = [RecordingTransport() for _ in range(tp)]
    made = iter(drivers)
    with (
        Engine("prefill", CacheShape(tp=tp), transport=lambda: next(made)) as prefill,
        Engine("decode", CacheShape(tp=tp), options=EndpointOptions(liveness_interval=0)) as decode,
    ):
        yield prefill, decode, drivers


def test_several_requests_load_and_one_done_ends_the_hold() -> None:
    """The ranks start the loads in different orders."""
    with pair() as (prefill, decode, drivers):
        ticket = prefill.serve("p-1", [1, 2], 8)
        names, pages = ["d-1", "d-2", "d-3"], [[3, 4], [5, 6], [7, 8]]
        for index, rank in enumerate(decode.ranks):
            alone = copy.copy(decode)
            alone.endpoints = (rank.endpoint,)
            for name, each in list(zip(names, pages, strict=True))[:: 1 if index else -1]:
                alone.pull(name, ticket, each, shared=True)
        assert not any(map(decode.error, names))
        assert not any(decode.wrong_bytes(each, 8) for each in pages)
        decode.pull("done", ticket, [], nothing=True)
        prefill.released("p-1")
        for driver in drivers:
            assert [release.abandoned for release in driver.notes(Release)] == [False]


def test_an_aborted_request_does_not_end_the_shared_hold() -> None:
    with pair() as (prefill, decode, drivers):
        ticket = prefill.serve("p-1", [1], 4)
        never = threading.Event()
        decode.pull("d-1", ticket, [2], shared=True, passed=never.is_set)
        for rank in decode.ranks:
            rank.endpoint.abort(RequestId("d-1"))
        assert isinstance(decode.error("d-1"), EndpointClosedError)
        assert decode.load("d-2", ticket, [3]) is None
        prefill.released("p-1")
        for driver in drivers:
            assert [release.abandoned for release in driver.notes(Release)] == [False]


def test_a_shared_request_that_needs_nothing_connects_to_no_producer() -> None:
    with pair(tp=1) as (prefill, decode, _):
        ticket = prefill.serve("p-1", [1], 4)
        decode.pull("d-1", ticket, [], nothing=True, shared=True)
        decode.pull("d-2", ticket, [2])
        results = until(decode.endpoint, lambda results: bool(results.loads))
        assert [record.request for record in results.loads] == ["d-2"]
