"""Slow reads of device memory are logged once per engine; the rate is that of busy periods."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence

import pytest

from kvferry.core.driver_calls import slow_path
from kvferry.core.driver_calls.slow_path import (
    LATE_SECONDS,
    PERIOD_BYTES,
    SAMPLE_BYTES,
    SLOW_RATE,
    Sample,
    Throughput,
)
from kvferry.core.memory import CPU, Region
from kvferry.core.transport import PeerId, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Engine

GPU = "cuda"
BLOCK, PAGES = 4, 16
"""A load of so many pages has 16 KiB, so it is long enough to be measured here."""
LOADS = 6
"""The first load may include the setup of the path; the other five are more than 64 KiB."""
SLOW, FAST = 1e9, 3e9
MIB = 1 << 20


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have samples of a thousandth of the bytes, whose ends are noticed at once."""
    monkeypatch.setattr(slow_path, "SAMPLE_BYTES", SAMPLE_BYTES >> 10)
    monkeypatch.setattr(slow_path, "PERIOD_BYTES", PERIOD_BYTES >> 10)
    monkeypatch.setattr(slow_path, "LATE_SECONDS", 0.0)


class StoppableClock:
    """The real clock until ``stop``; from then on, only ``skip`` moves it."""

    def __init__(self) -> None:
        self._stopped_at: float | None = None

    def __call__(self) -> float:
        return time.monotonic() if self._stopped_at is None else self._stopped_at

    def stop(self) -> None:
        self._stopped_at = time.monotonic()

    def skip(self, seconds: float) -> None:
        if self._stopped_at is not None:
            self._stopped_at += seconds


class DeviceTransport(LoopbackTransport):
    """A transport that takes device memory, which is CPU memory in fact.

    On the clock, its reads of pages take as long as the rate says.

    Args:
        clock: moved forward when a read of pages ends.
        rate: bytes per second.
    """

    def __init__(self, clock: StoppableClock, rate: float = SLOW) -> None:
        super().__init__()
        self._clock = clock
        self.rate = rate
        self._sizes: dict[TransferId, int] = {}

    def register(self, region: Region) -> None:
        super().register(in_cpu_memory(region))

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        segments = tuple(
            dataclasses.replace(
                each, local=in_cpu_memory(each.local), remote=in_cpu_memory(each.remote)
            )
            for each in copies.segments
        )
        transfer = super().read(peer, dataclasses.replace(copies, segments=segments), notify)
        self._sizes[transfer] = copies.total
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        for transfer, status in zip(transfers, statuses, strict=True):
            if status.state.final:
                self._clock.skip(self._sizes.pop(transfer, 0) / self.rate)
        return statuses


def in_cpu_memory(region: Region) -> Region:
    return dataclasses.replace(region, kind=CPU)


class Pair:
    """A decode engine, and the prefill engines that it loads from.

    Args:
        memory: kind of memory of decode's cache.
    """

    def __init__(self, memory: str = GPU) -> None:
        self.clock = StoppableClock()
        self.transport = DeviceTransport(self.clock)
        self._shape = CacheShape(block=BLOCK, pages=PAGES + 1, memory=memory)
        self._names = (f"d-{number}" for number in itertools.count())
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Pair:
        self._decode = self._stack.enter_context(
            Engine("decode", self._shape, transport=lambda: self.transport, clock=self.clock)
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def load(self, prefill: Engine, count: int) -> None:
        """Load all pages several times, one load after the other; the clock stops at the first."""
        ticket = prefill.serve(f"p-{next(self._names)}", list(range(1, PAGES + 1)), PAGES * BLOCK)
        for _ in range(count):
            name = next(self._names)
            self._decode.pull(name, ticket, list(range(1, PAGES + 1)), shared=True)
            assert not self._decode.outcome(name).failed
            self.clock.stop()


@contextlib.contextmanager
def prefill_engine(name: str = "prefill", memory: str = GPU) -> Iterator[Engine]:
    shape = CacheShape(block=BLOCK, pages=PAGES + 1, memory=memory)
    with Engine(name, shape, transport=lambda: DeviceTransport(StoppableClock())) as prefill:
        yield prefill


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if "which is slow" in record.getMessage()
    ]


@pytest.mark.parametrize(("memory", "other"), [(GPU, CPU), (CPU, GPU)])
@pytest.mark.usefixtures("small_samples")
def test_slow_reads_of_device_memory_are_logged_once_per_engine(
    memory: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it is connected anew."""
    with Pair(memory) as pair:
        with prefill_engine(memory=other) as prefill:
            pair.load(prefill, LOADS - 1)
            assert not warnings(caplog), "as many bytes as a sample are not more"
            pair.load(prefill, 1 + LOADS)
        with prefill_engine(memory=other) as prefill:
            pair.load(prefill, LOADS)
        with prefill_engine("another", memory=other) as another:
            pair.load(another, LOADS)
    first, second = warnings(caplog)
    assert first == (
        f"engine prefill: reads from its rank 0, of {other} into {memory} memory, run at 1.00 "
        "GB/s, which is slow (driver loopback, path memcpy): 81920 bytes, in copies of 8192 "
        "bytes on average, took 0.1 ms; copies below 16 KiB are slow on any path, and 'kvferry "
        "plan' says how to get larger ones; if the driver uses UCX, start this engine once with "
        "UCX_PROTO_INFO=y, which prints what moves the bytes; docs/drivers.md says what to set "
        "(logged once per engine)"
    )
    assert second.startswith("engine another: ")


@pytest.mark.usefixtures("small_samples")
def test_slow_reads_between_cpu_memory_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with Pair(CPU) as pair, prefill_engine(memory=CPU) as prefill:
        pair.load(prefill, 2 * LOADS)
    assert not warnings(caplog)


@pytest.mark.usefixtures("small_samples")
def test_slow_reads_in_large_copies_are_logged_without_advice_about_the_copies(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_path, "SMALL_COPY", 8192)
    with Pair() as pair, prefill_engine() as prefill:
        pair.load(prefill, LOADS)
    [warning] = warnings(caplog)
    assert "took 0.1 ms; if the driver uses UCX" in warning


class Connection:
    """A ``Throughput`` after the first read of its connection, and its slow samples."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.throughput = Throughput(self.samples.append)
        self.read(0.0, 0.0, 1)

    def read(self, begun: float, ended: float, nbytes: int, *, succeeded: bool = True) -> None:
        """Begin a read and end it, with a copy per MiB."""
        self.throughput.begin(begun)
        self.end(ended, nbytes, succeeded=succeeded)

    def end(self, now: float, nbytes: int, *, succeeded: bool = True) -> None:
        copies = max(nbytes // MIB, 1)
        self.throughput.end(now, nbytes=nbytes, copies=copies, succeeded=succeeded)


def test_a_rate_below_2_gb_per_second_is_slow() -> None:
    nbytes = SAMPLE_BYTES + MIB
    connection = Connection()
    connection.read(1.0, 1.0 + nbytes / 2.0001e9 + LATE_SECONDS, nbytes)
    assert not connection.samples
    seconds = nbytes / 1.9999e9 + LATE_SECONDS
    connection.read(2.0, 2.0 + seconds, nbytes)
    [sample] = connection.samples
    assert (sample.nbytes, sample.copies) == (nbytes, 65)
    assert sample.seconds == pytest.approx(seconds)


def test_ends_that_are_noticed_8_ms_late_make_no_fast_path_slow() -> None:
    for nbytes in (PERIOD_BYTES, 2 * PERIOD_BYTES, SAMPLE_BYTES + MIB):
        for rate in (1.01 * SLOW_RATE, 400e9):
            connection = Connection()
            for start in range(1, 13):
                connection.read(start, start + nbytes / rate + 0.008, nbytes)
            assert not connection.samples


@pytest.mark.parametrize("late", [0.0, 0.008])
def test_a_path_of_half_the_rate_is_slow_even_in_the_shortest_periods(late: float) -> None:
    connection = Connection()
    for start in range(1, 6):
        connection.read(start, start + PERIOD_BYTES / (SLOW_RATE / 2) + late, PERIOD_BYTES)
    assert len(connection.samples) == 1


def test_reads_that_overlap_share_their_time() -> None:
    connection, half = Connection(), SAMPLE_BYTES // 2 + MIB
    seconds = 2 * half / FAST
    for _ in range(2):
        connection.throughput.begin(1.0)
    connection.end(1.0 + seconds / 2, half)
    connection.end(1.0 + seconds, half)
    assert not connection.samples, "counted for each read, the time would be 1.5 times as long"


def test_time_without_a_read_is_not_counted() -> None:
    connection = Connection()
    for start in range(10):
        connection.read(start, start + PERIOD_BYTES / FAST, PERIOD_BYTES)
    assert not connection.samples


def test_a_busy_period_that_does_not_end_is_judged_after_64_mib() -> None:
    connection = Connection()
    connection.throughput.begin(1.0)
    for _ in range(5):
        connection.throughput.begin(1.0)
        assert not connection.samples
        connection.end(2.0, PERIOD_BYTES)
    assert [sample.nbytes for sample in connection.samples] == [5 * PERIOD_BYTES]
    assert connection.samples[0].seconds == 1.0


def test_busy_periods_of_less_than_16_mib_are_not_measured() -> None:
    connection = Connection()
    for start in range(100):
        connection.read(start, start + 0.9, PERIOD_BYTES - 1)
    assert not connection.samples
    for start in range(200, 205):  # together long enough
        connection.throughput.begin(start)
        connection.read(start, start + 0.4, PERIOD_BYTES // 2)
        connection.end(start + 0.8, PERIOD_BYTES // 2)
    [sample] = connection.samples
    assert (sample.nbytes, sample.copies) == (5 * PERIOD_BYTES, 5 * 16)
    assert sample.seconds == pytest.approx(4.0)


def test_the_first_read_of_a_connection_is_not_measured() -> None:
    samples: list[Sample] = []
    throughput = Throughput(samples.append)
    for begun in (0.0, 0.0):
        throughput.begin(begun)
    throughput.end(10.0, nbytes=10 * SAMPLE_BYTES, copies=1, succeeded=True)
    throughput.end(10.0 + SAMPLE_BYTES / FAST, nbytes=2 * SAMPLE_BYTES, copies=1, succeeded=True)
    assert not samples
    throughput.begin(20.0)
    throughput.end(21.0, nbytes=SAMPLE_BYTES + 1, copies=1, succeeded=True)
    assert len(samples) == 1


def test_a_failed_read_and_the_time_before_its_end_are_not_measured() -> None:
    connection = Connection()
    connection.read(1.0, 2.0, SAMPLE_BYTES)
    connection.throughput.begin(3.0)
    connection.read(3.0, 60.0, 2 * SAMPLE_BYTES, succeeded=False)
    connection.end(60.0 + SAMPLE_BYTES / FAST, 2 * SAMPLE_BYTES)
    assert not connection.samples


def test_a_first_read_that_fails_does_not_count_as_the_first() -> None:
    samples: list[Sample] = []
    throughput = Throughput(samples.append)
    for succeeded in (False, True, True):
        assert not samples
        throughput.begin(0.0)
        throughput.end(1.0, nbytes=2 * SAMPLE_BYTES, copies=1, succeeded=succeeded)
    assert len(samples) == 1
