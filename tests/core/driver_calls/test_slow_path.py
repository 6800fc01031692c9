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
    SAMPLE_BYTES,
    SLOW_RATE,
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
Event = tuple[float, int, bool]
"""When, how many bytes (0: a read begins), and whether the read that ends has succeeded."""


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    return [each for each in found if "which is slow" in each]


def test_slow_reads_of_device_memory_are_logged_once_per_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    every = SlowPathWarnings("loopback")

    def measured(engine: str, local: str, *remote: str) -> Throughput | None:
        layouts = [
            SimpleNamespace(regions=[SimpleNamespace(kind=kind) for kind in kinds])
            for kinds in ([local], remote)
        ]
        source: Any = SimpleNamespace(remote=3, local_layout=layouts[0], remote_layout=layouts[1])
        return every.measure(engine, source, lambda: "a path")

    for engine, local in (("prefill", CPU), ("prefill", CPU), ("another", "cuda")):
        throughput = measured(engine, local, "cuda", CPU)
        assert throughput is not None
        for _ in range(2):  # the first may include the setup of the path
            throughput.begin(0.0)
            throughput.end(1.0, nbytes=1 << 27, copies=1 << 14, succeeded=True)
    first, second = warnings(caplog)
    for said in (
        "engine prefill: reads from its rank 3, of cpu+cuda into cpu memory, run at 0.13 GB/s",
        "(driver loopback, path a path)",
        "134217728 bytes, in copies of 8192 bytes on average, took 1000.0 ms",
    ):
        assert said in first
    assert second.startswith("engine another: ")
    assert measured("prefill", CPU, CPU) is None


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
    for name, value in (("SLOW_RATE", math.inf), ("SAMPLE_BYTES", 0), ("LATE_SECONDS", 0.0)):
        monkeypatch.setattr(slow_path, name, value)
    with Engine("decode", CacheShape(memory="cuda"), transport=DeviceTransport) as decode:
        for first in (1, 4):
            with Engine("prefill") as prefill:
                assert [load(prefill, decode, first + more) for more in range(3)] == [None] * 3
    [warning] = warnings(caplog)
    assert warning.startswith("engine prefill: reads from its rank 0, of cpu into cuda memory")


def read(begin: float, end: float, nbytes: int, *, succeeded: bool = True) -> list[Event]:
    """Return the events of a read that overlaps no other."""
    return [(begin, 0, True), (end, nbytes, succeeded)]


def reads(count: int, seconds: float, nbytes: int) -> list[Event]:
    """Return the events of reads after each other, one a second."""
    return [event for now in range(1, count + 1) for event in read(now, now + seconds, nbytes)]


FIRST = read(0.0, 0.0, 1)
ENOUGH, HALF = SAMPLE_BYTES + MIB, SAMPLE_BYTES // 2 + MIB
PART, LATE = SAMPLE_BYTES // 4, ENOUGH / 1.9999e9 + LATE_SECONDS
SLOW = read(100.0, 101.0, ENOUGH)
CASES: dict[str, tuple[list[Event], list[tuple[int, float]]]] = {
    "the first read, which may include the setup": (SLOW, []),
    "a first read that has failed": (read(0, 1, ENOUGH, succeeded=False) + SLOW, []),
    "reads that overlap share their time": (
        [
            *(*FIRST, (1.0, 0, True), (1.0, 0, True)),
            *((1 + HALF / FAST, HALF, True), (1 + 2 * HALF / FAST, HALF, True)),
        ],
        [],
    ),
    "time between reads does not count": (FIRST + reads(10, ENOUGH / FAST, ENOUGH), []),
    "busy periods of 64 MiB": (FIRST + reads(99, 0.9, SAMPLE_BYTES), []),
    "a failed read, and the time before its end": (
        [
            *(*FIRST, *read(1.0, 2.0, SAMPLE_BYTES), (3.0, 0, True)),
            *read(3.0, 60.0, 2 * SAMPLE_BYTES, succeeded=False),
            (60 + SAMPLE_BYTES / FAST, 2 * SAMPLE_BYTES, True),
        ],
        [],
    ),
    "just fast enough": (FIRST + reads(12, ENOUGH / SLOW_RATE / 1.01 + LATE_SECONDS, ENOUGH), []),
    "slow, also if its end was noticed late": (
        FIRST + read(2.0, 2.0 + LATE, ENOUGH),
        [(ENOUGH, LATE)],
    ),
    "a busy period that does not end": (
        FIRST + [(1.0, 0, True)] * 6 + [(2.0, PART, True)] * 5,
        [(5 * PART, 1.0)],
    ),
}


@pytest.mark.parametrize(("events", "slow"), CASES.values(), ids=CASES)
def test_busy_periods_of_more_than_64_mib_are_samples(
    events: list[Event], slow: list[tuple[int, float]]
) -> None:
    """With a copy per MiB."""
    found: list[tuple[int, int, float]] = []
    throughput = Throughput(lambda *sizes: found.append(sizes))
    for now, nbytes, succeeded in events:
        if nbytes:
            throughput.end(now, nbytes=nbytes, copies=nbytes // MIB or 1, succeeded=succeeded)
        else:
            throughput.begin(now)
    assert [sizes for *sizes, _ in found] == [[moved, moved // MIB] for moved, _ in slow]
    assert [seconds for *_, seconds in found] == pytest.approx([seconds for _, seconds in slow])
