"""Slow reads of device memory are logged once per engine; the rate is that of busy periods."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.driver_calls import slow_path
from kvferry.core.driver_calls.slow_path import (
    LATE_SECONDS,
    PERIOD_BYTES,
    SAMPLE_BYTES,
    SLOW_RATE,
    Sample,
    SlowPathWarnings,
    Throughput,
)
from kvferry.core.memory import CPU, Region
from kvferry.core.transport import PeerId, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Engine, load

FAST = 3e9
MIB = 1 << 20


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    return [each for each in found if "which is slow" in each]


def layout_in(*kinds: str) -> Any:
    return SimpleNamespace(regions=[SimpleNamespace(kind=kind) for kind in kinds])


def measured(all_warnings: SlowPathWarnings, engine: str, local: str, *remote: str) -> Any:
    """Return what measures reads from an engine's rank 3."""
    source: Any = SimpleNamespace(
        remote=3, local_layout=layout_in(local), remote_layout=layout_in(*remote)
    )
    return all_warnings.measure(engine, source, lambda: "a path")


def read_slowly(throughput: Throughput, copies: int) -> None:
    for _ in range(2):  # the first may include the setup of the path
        throughput.begin(0.0)
        throughput.end(1.0, nbytes=1 << 27, copies=copies, succeeded=True)


def test_slow_reads_of_device_memory_are_logged_once_per_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    every = SlowPathWarnings("loopback")
    for _ in range(2):
        read_slowly(measured(every, "prefill", CPU, "cuda", CPU), 1 << 14)
    read_slowly(measured(every, "another", "cuda", CPU), 1 << 13)
    first, second = warnings(caplog)
    assert first == (
        "engine prefill: reads from its rank 3, of cpu+cuda into cpu memory, run at 0.13 GB/s, "
        "which is slow (driver loopback, path a path): 134217728 bytes, in copies of 8192 bytes "
        "on average, took 1000.0 ms; copies below 16 KiB are slow on any path, and 'kvferry plan' "
        "says how to get larger ones; if the driver uses UCX, start this engine once with "
        "UCX_PROTO_INFO=y, which prints what moves the bytes; docs/drivers.md says what to set "
        "(logged once per engine)"
    )
    assert second.startswith("engine another: ")
    assert "took 1000.0 ms; if the driver uses UCX" in second
    assert measured(every, "prefill", CPU, CPU) is None


class DeviceTransport(LoopbackTransport):
    """A transport that takes device memory, which is CPU memory in fact."""

    def register(self, region: Region) -> None:
        super().register(in_cpu_memory(region))

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        segments = [
            dataclasses.replace(s, local=in_cpu_memory(s.local), remote=in_cpu_memory(s.remote))
            for s in copies.segments
        ]
        return super().read(peer, dataclasses.replace(copies, segments=tuple(segments)), notify)


def in_cpu_memory(region: Region) -> Region:
    return dataclasses.replace(region, kind=CPU)


def test_reads_of_loads_are_measured_also_of_an_engine_that_is_connected_anew(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SLOW_RATE", math.inf), ("SAMPLE_BYTES", 0), ("PERIOD_BYTES", 1)):
        monkeypatch.setattr(slow_path, name, value)
    monkeypatch.setattr(slow_path, "LATE_SECONDS", 0.0)
    shape = CacheShape(memory="cuda")
    with Engine("decode", shape, transport=DeviceTransport) as decode:
        for first in (1, 4):
            with Engine("prefill") as prefill:
                assert [load(prefill, decode, first + more) for more in range(3)] == [None] * 3
    [warning] = warnings(caplog)
    assert warning.startswith("engine prefill: reads from its rank 0, of cpu into cuda memory")


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
