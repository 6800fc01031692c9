"""Measure how fast reads of device memory are, and warn once per producer if they are slow.

Where the fast path between two devices cannot be used, a driver may move the bytes over another one
(UCX, for example, copies through host memory or over tcp). Loads then succeed, but take many times
longer, and nothing else says so: a driver may not know what its library used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvferry.core.error_causes import on_one_line
from kvferry.core.layout import Layout
from kvferry.core.memory import CPU
from kvferry.core.planner.plan import Source
from kvferry.core.transport.copies import SMALL_COPY

if TYPE_CHECKING:
    from kvferry.core.endpoint.peers import Peer

logger = logging.getLogger(__name__)

SLOW_RATE = 2e9
"""Reads of device memory that move fewer bytes per second are slow. PCIe, NVLink and RDMA move
several times as many."""
SAMPLE_BYTES = 64 << 20
"""A rate is the rate of more bytes than this."""
PERIOD_BYTES = 16 << 20
"""A busy period that moved fewer bytes is not measured, since ``LATE_SECONDS`` would hide even a
rate of half of ``SLOW_RATE``."""
LATE_SECONDS = 0.008
"""The end of a read may be noticed so late. A busy period is judged as if it had ended so much
earlier, so that a late end never makes a fast path look slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The sizes of some reads, and the time in which at least one of them was under way.

    Attributes:
        nbytes: bytes that the reads moved.
        copies: number of copies in the reads.
        seconds: time in which the bytes moved.
    """

    nbytes: int
    copies: int
    seconds: float


class Throughput:
    """Measure the rate of the reads over one connection.

    A busy period begins when a read is posted while no other read is under way. It ends when no
    read is under way any more, or after more than ``SAMPLE_BYTES``. The rate is that of busy
    periods, so reads that overlap are not counted twice, and the time without a read is not
    counted.

    What was measured is discarded when the connection's first read has ended, because that read may
    have included the setup of the path, and when a read has failed, because nobody knows how many
    of its bytes were moved.

    Args:
        slow: called with a sample of more than ``SAMPLE_BYTES`` whose rate is below ``SLOW_RATE``,
            even if the end of each of its busy periods was noticed ``LATE_SECONDS`` late.
    """

    def __init__(self, slow: Callable[[Sample], None]) -> None:
        self._slow = slow
        self._under_way = 0
        self._has_ended_one = False
        self._begin_period(0.0)
        self._begin_sample()

    def begin(self, now: float) -> None:
        """Count a read that has been posted.

        Args:
            now: when the driver was called, in seconds, monotonic.
        """
        if not self._under_way:
            self._begin_period(now)
        self._under_way += 1

    def end(self, now: float, *, nbytes: int, copies: int, succeeded: bool) -> None:
        """Count a read that has ended; call ``slow`` if it completes a sample that is slow.

        Args:
            now: seconds, monotonic.
            nbytes: bytes of all copies of the read.
            copies: number of copies of the read.
            succeeded: whether the read has moved all of its bytes.
        """
        self._under_way -= 1
        if not succeeded or not self._has_ended_one:
            self._has_ended_one = self._has_ended_one or succeeded
            self._begin_sample()
            self._begin_period(now)
            return
        self._period_bytes += nbytes
        self._period_copies += copies
        if not self._under_way or self._period_bytes > SAMPLE_BYTES:
            self._end_period(now)

    def _begin_period(self, now: float) -> None:
        self._since, self._period_bytes, self._period_copies = now, 0, 0

    def _begin_sample(self) -> None:
        self._bytes, self._copies, self._seconds, self._periods = 0, 0, 0.0, 0

    def _end_period(self, now: float) -> None:
        """Add the busy period to the sample unless it is too short; judge a complete sample."""
        if self._period_bytes >= PERIOD_BYTES:
            self._bytes += self._period_bytes
            self._copies += self._period_copies
            self._seconds += now - self._since
            self._periods += 1
        self._begin_period(now)
        if self._bytes > SAMPLE_BYTES:
            sample = Sample(nbytes=self._bytes, copies=self._copies, seconds=self._seconds)
            shortest = sample.seconds - LATE_SECONDS * self._periods
            self._begin_sample()
            if sample.nbytes < SLOW_RATE * shortest:
                self._slow(sample)


class SlowPathWarnings:
    """Warn once per producer when reads of device memory are slow.

    Used by the endpoint's thread only.

    Args:
        driver: name of the transport's driver.
        path: returns the driver's name for what carries a producer's bytes; may be empty.
    """

    def __init__(self, driver: str, path: Callable[[Peer], str]) -> None:
        self._driver = driver
        self._path = path
        self._warned: set[str] = set()
        """Ids of the engines that were warned about. The endpoint does not warn again when it
        connects to an engine anew."""

    def measure(self, peer: Peer, rank: int) -> Throughput | None:
        """Return what measures the reads from a rank of a producer.

        Args:
            peer: the producer, which is connected.
            rank: index of the producer rank, one of ``peer.sources``.

        Returns:
            The measurement, which the peer keeps; ``None`` if the reads need none, because both
            sides have CPU memory only.
        """
        if rank not in peer.throughput:
            is_measured = _has_device_memory(peer.sources[rank])
            peer.throughput[rank] = (
                Throughput(partial(self._warn, peer, rank)) if is_measured else None
            )
        return peer.throughput[rank]

    def _warn(self, peer: Peer, rank: int, sample: Sample) -> None:
        if peer.key.engine in self._warned:
            return
        self._warned.add(peer.key.engine)
        source = peer.sources[rank]
        logger.warning(
            "engine %s: reads from its rank %d, of %s into %s memory, run at %.2f GB/s, which is "
            "slow (driver %s, path %s): %d bytes, in copies of %d bytes on average, took %.1f ms; "
            "%sif the driver uses UCX, start this engine once with UCX_PROTO_INFO=y, which prints "
            "what moves the bytes; docs/gpu.md says what to set (logged once per engine)",
            on_one_line(peer.key.engine),
            rank,
            _kinds(source.remote_layout),
            _kinds(source.local_layout),
            sample.nbytes / sample.seconds / 1e9,
            self._driver,
            on_one_line(self._path(peer)) or "unknown",
            sample.nbytes,
            sample.nbytes // sample.copies,
            sample.seconds * 1e3,
            _about_copies(sample),
        )


def _has_device_memory(source: Source) -> bool:
    """Return whether either side of the reads from a producer rank has memory other than CPU."""
    regions = (*source.local_layout.regions, *source.remote_layout.regions)
    return any(region.kind != CPU for region in regions)


def _kinds(layout: Layout) -> str:
    """Return the kinds of memory that a rank's cache is in, such as ``cuda``, for a log line."""
    return on_one_line("+".join(sorted({region.kind for region in layout.regions})))


def _about_copies(sample: Sample) -> str:
    """Return a hint, to put before another hint, if the copies are small; otherwise nothing."""
    if sample.nbytes >= SMALL_COPY * sample.copies:
        return ""
    return (
        f"copies below {SMALL_COPY >> 10} KiB are slow on any path, and 'kvferry plan' says how to "
        "get larger ones; "
    )
