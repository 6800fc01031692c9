"""Whether reads of device memory are slow: a rate for each connection, and a warning.

Where the fast path cannot be used, a driver may move the bytes over another one (UCX, over tcp).
Loads then succeed, many times slower, and nothing else says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvferry.core.error_causes import on_one_line
from kvferry.core.memory import CPU
from kvferry.core.planner.plan import Source

logger = logging.getLogger(__name__)

SLOW_RATE = 2e9
"""Bytes per second below which reads of device memory are slow; PCIe, NVLink and RDMA do more."""
SAMPLE_BYTES = 64 << 20
"""A rate is that of more bytes than this."""
LATE_SECONDS = 0.008
"""How late a read's end may be noticed; rates are judged as if it were that much earlier."""


class Throughput:
    """Measure the rate of the reads over one connection.

    A busy period lasts from a read that is posted while none is under way until none is, or for
    ``SAMPLE_BYTES``: reads that overlap count once, and idle time does not. ``slow`` is called with
    the bytes, copies and seconds of a period below ``SLOW_RATE``, if its end was noticed late, too.
    """

    def __init__(self, slow: Callable[[int, int, float], None]) -> None:
        self._slow = slow
        self._under_way = 0
        # The first read may include the setup of the path.
        self._has_ended_one = False
        self._begin_period(0.0)

    def begin(self, now: float) -> None:
        """Count a read that has been posted; ``now`` is when the driver was called, monotonic."""
        if not self._under_way:
            self._begin_period(now)
        self._under_way += 1

    def end(self, now: float, *, nbytes: int, copies: int, succeeded: bool) -> None:
        """Count a read that has ended; call ``slow`` if it ends a period that is slow."""
        self._under_way -= 1
        if not succeeded or not self._has_ended_one:  # nobody knows what a failed one has moved
            self._has_ended_one |= succeeded
            self._begin_period(now)
            return
        self._nbytes += nbytes
        self._copies += copies
        if self._nbytes > SAMPLE_BYTES:
            seconds, nbytes, copies = now - self._since, self._nbytes, self._copies
            self._begin_period(now)
            if nbytes < SLOW_RATE * (seconds - LATE_SECONDS):
                self._slow(nbytes, copies, seconds)

    def _begin_period(self, now: float) -> None:
        self._since, self._nbytes, self._copies = now, 0, 0


class SlowPathWarnings:
    """Warn once per producer when reads of device memory are slow. Endpoint's thread only."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._warned: set[str] = set()
        """Ids of engines, which are not warned about again when they are connected anew."""

    def measure(self, engine: str, source: Source, path: Callable[[], str]) -> Throughput | None:
        """Return what measures the reads from an engine's rank; ``None`` for CPU memory only.

        ``path`` returns by which way the bytes go.
        """
        remote, local = (
            on_one_line("+".join(sorted({region.kind for region in layout.regions})))
            for layout in (source.remote_layout, source.local_layout)
        )
        if remote == local == CPU:
            return None

        def warn(nbytes: int, copies: int, seconds: float) -> None:
            if engine in self._warned:
                return
            self._warned.add(engine)
            logger.warning(
                "engine %s: reads from its rank %d, of %s into %s memory, run at %.2f GB/s, which "
                "is slow (driver %s, path %s): %d bytes, in copies of %d bytes on average, took "
                "%.1f ms; docs/drivers.md says what to look at (logged once per engine)",
                on_one_line(engine),
                source.remote,
                remote,
                local,
                nbytes / seconds / 1e9,
                self._driver,
                on_one_line(path()) or "unknown",
                nbytes,
                nbytes // copies,
                seconds * 1e3,
            )

        return Throughput(warn)
