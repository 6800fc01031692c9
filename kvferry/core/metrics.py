"""The metrics of an endpoint, and a record of each load.

An endpoint counts into ``Metrics``, which returns the changes since the last call as ``Data``:
dictionaries that can be sent to another process and added up there with ``merge``.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvferry.core.errors import KVFerryError, TicketReason

Data = dict[str, Any]
"""By metric and label values, nested: a number, or the list of a histogram's observations."""


class Stage(enum.StrEnum):
    """The stages that a load goes through."""

    WAIT = "wait"  # before the load begins: the request waits for pages to load into
    HANDSHAKE = "handshake"  # from the start of the load until its producer is connected
    CHECK = "check"  # until the read is posted: the producer computes; the load waits for its turn
    POST = "post"  # the copies are computed and passed to the driver
    TRANSFER = "transfer"  # the driver moves the bytes
    FENCE = "fence"  # after the data, the slot word is read: were the pages held all the time?
    COPY = "copy"  # where the cache is staged: pages are copied from host memory to the device


class CopyDirection(enum.StrEnum):
    """Where a copy of a staged cache goes."""

    TO_HOST = "to_host"  # to host pages, for other engines to read
    TO_DEVICE = "to_device"  # from host pages that were loaded


class MetricKind(enum.StrEnum):
    """How a metric changes; the names are those of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The definition of one metric; ``text`` describes it to people.

    ``merge`` adds counters, joins observed values and replaces gauges. Labels are in the order of
    the keys in ``Data``; ``rank`` is the one that counts, ``peer`` the producer. ``values`` are all
    values of the label after ``driver``, if they are known in advance.
    """

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...]
    values: tuple[str, ...] = ()


def _metric(
    kind: MetricKind, name: str, text: str, labels: Iterable[str] = (), values: Iterable[str] = ()
) -> Metric:
    labels = ("driver", *labels)
    return Metric(name=name, kind=kind, text=text, labels=labels, values=tuple(values))


counter = partial(_metric, MetricKind.COUNTER)
gauge = partial(_metric, MetricKind.GAUGE)
histogram = partial(_metric, MetricKind.HISTOGRAM)

BYTES = counter("bytes", "Bytes of KV cache that were pulled from other engines.", ["peer", "path"])
EARLY_BYTES = counter(
    "early_bytes",
    "Those of these bytes that were pulled while the producer computed the rest.",
    ["peer", "path"],
)
COPIES = counter(
    "copies",
    "Copies that pulled those bytes; few large copies are faster than many small ones.",
    ["peer", "path"],
)
PULLS = counter(
    "pulls", "Loads that succeeded, counted on each rank that took part.", ["peer", "path"]
)
LOAD_SECONDS = histogram(
    "load_seconds",
    "Time from the start of a load of KV cache to its end, on each rank. An early load starts "
    "with its ticket.",
)
STAGE_SECONDS = histogram(
    "stage_seconds",
    "Time of each stage of a load, on each rank; a handshake counts once, not per load.",
    ["stage"],
    Stage,
)
PEER_SECONDS = counter(
    "peer_seconds",
    "Total time of each stage of loads, by producer: shows which producer is slow, and where.",
    ["peer", "stage"],
)
FAILURES = counter(
    "load_failures",
    "Loads that failed, counted on each rank that took part, by stage and cause.",
    ["peer", "stage", "cause"],
)
STALE = counter(
    "stale_reads",
    "Reads that the fence refused: the producer did not hold the pages any more.",
    ["peer"],
)
REFUSED = counter(
    "refused_tickets",
    "Tickets that were refused before anything was read, by reason.",
    ["reason"],
    TicketReason,
)
LOST_PEERS = counter(
    "lost_peers",
    "Connected producers that a rank gave up because they died, restarted or failed.",
    ["peer"],
)
UNTOLD = counter(
    "untold_releases",
    "Messages that end holds and could not be sent; the lease ends those holds.",
    ["peer"],
)
PEERS_UP = gauge("peers_up", "Producers that a rank is connected to.", ["rank"])
PEERS_DOWN = gauge(
    "peers_down",
    "Producers that a rank could not reach, or lost, at its last contact with them.",
    ["rank"],
)
QUARANTINED = gauge(
    "quarantined_pages",
    "Pages of failed loads that a connection may still write, so that they are not released.",
    ["rank"],
)
LATE = counter(
    "done_after_expiry",
    'Messages "done" about holds whose lease was over; a fence after that refuses.',
)
IGNORED = counter(
    "ignored_releases", "Other messages that end holds, for holds that had ended or never existed."
)
COPY_SECONDS = histogram(
    "copy_seconds",
    "Time of each request's copy between the device and host pages, where the cache is staged "
    "(kv_buffer_device cpu).",
    ["direction"],
)

FIGURES = tuple(each for each in vars().values() if isinstance(each, Metric))
"""All metrics of an endpoint: those above."""

HOST_PAGES = gauge(
    "host_pages",
    "Host pages that each rank has for staging, by use: for holds, or for loads.",
    ["use"],
)
HOST_PAGES_USED = gauge(
    "host_pages_used", "Those of the host pages that requests have reserved or use.", ["use"]
)
HOST_PAGE_WAITS = histogram(
    "host_page_wait_seconds",
    "Time that requests waited for host pages, by use, and whether they got them.",
    ["use", "outcome"],
)

HOST_FIGURES = (HOST_PAGES, HOST_PAGES_USED, HOST_PAGE_WAITS)
"""The metrics of the host pages of an engine whose cache is staged (``PageSource``)."""

MAX_OBSERVED = 1 << 14
"""The most values kept per histogram and labels, since it may be that nobody ever takes them."""
MAX_PEERS = 32
"""How many producers have a ``peer`` label of their own; see ``PeerNames``."""
OTHER = "other"
"""The ``peer`` label of all further producers."""
UNREACHED = "unreached"
"""The ``peer`` label of producers never connected: their names come from clients' tickets only."""
MAX_NAME = 64
"""The most characters of an engine's id in a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """Sizes, times and outcome of one load on one consumer rank.

    The parts of ``seconds`` in stages are each that of the producer rank where it took longest.
    Early reads count in no stage, except that what is left of one is part of the check.
    """

    request: str  # the consumer's id
    engine: str  # the producer's id, from the ticket
    reached: bool = True  # whether the handshake succeeded, so that the producer was connected
    path: str = ""  # what carried the bytes, as the driver names it; empty if it cannot tell
    error: KVFerryError | None = None
    stage: Stage | None = None  # in which it failed
    reads: bool  # whether there was anything to pull; if not, the producer was only notified
    tokens: int  # to pull, in the KV-cache group where most are pulled
    copies: int
    nbytes: int
    seconds: float  # until the report: from the start, or from an early load's last part
    wait_seconds: float = 0.0  # before the load began (``Endpoint.prepare``)
    handshake_seconds: float = 0.0
    check_seconds: float = 0.0
    post_seconds: float = 0.0
    transfer_seconds: float = 0.0
    fence_seconds: float = 0.0
    copy_seconds: float = 0.0
    ended: float = 0.0  # in seconds since the epoch
    early_nbytes: int = 0  # read before the last part, and not again after a preemption
    # Per cache group, the first token that the pages have; bytes before it are zero. Empty if the
    # load failed or pulled nothing.
    first_tokens: tuple[int, ...] = ()

    @property
    def peer(self) -> str:
        """The ``peer`` label."""
        return self.engine[:MAX_NAME] if self.reached else UNREACHED

    @property
    def stages(self) -> dict[Stage, float]:
        """Seconds of each stage, without the handshake (loads share one) and, if 0, the copy."""
        stages = {
            Stage.WAIT: self.wait_seconds,
            Stage.CHECK: self.check_seconds,
            Stage.POST: self.post_seconds,
            Stage.TRANSFER: self.transfer_seconds,
            Stage.FENCE: self.fence_seconds,
        }
        return {**stages, Stage.COPY: self.copy_seconds} if self.copy_seconds else stages

    @property
    def waiting_and_reading(self) -> tuple[float, float]:
        """Seconds for which the load waited: for pages, a connection, its turn; and the others."""
        before = self.handshake_seconds + self.check_seconds
        return self.wait_seconds + before, max(0.0, self.seconds - before)

    def combine(self, other: LoadRecord) -> LoadRecord:
        """Return a request's figures on two ranks together: sums, and times of the slower."""
        slower = max(self, other, key=lambda each: each.seconds)
        return replace(
            slower,
            copies=self.copies + other.copies,
            nbytes=self.nbytes + other.nbytes,
            early_nbytes=self.early_nbytes + other.early_nbytes,
            first_tokens=tuple(map(max, self.first_tokens, other.first_tokens)),
        )


class Metrics:
    """Collect values of metrics, until ``take`` returns them. Thread-safe.

    ``common`` are labels of one value in all metrics (``driver``, ``rank``), ``labels`` the others.
    """

    def __init__(self, **common: str) -> None:
        self._common = common
        self._new: Data = {}
        self._gauges: dict[tuple[str, ...], float] = {}
        self._lock = threading.RLock()

    def add(self, figure: Metric, value: float = 1, **labels: str) -> None:
        """Add a value to a counter (0 does nothing), or an observed value to a histogram."""
        if value or figure.kind is MetricKind.HISTOGRAM:
            with self._lock:
                self._put(figure, value, labels)

    def set(self, figure: Metric, value: float, **labels: str) -> None:
        """Set a gauge (0 until then); pass its labels in the same order in each call."""
        key = (figure.name, *labels.values())
        with self._lock:
            if self._gauges.get(key, 0) != value:
                self._gauges[key] = value
                self._put(figure, value, labels)

    def take(self) -> Data | None:
        """Return the values since the last call, for the caller to change; ``None`` without any."""
        with self._lock:
            taken, self._new = self._new, {}
        return taken or None

    def count_load(self, record: LoadRecord) -> None:
        """Add a load that is over to the metrics of loads, unless it had nothing to pull."""
        if not record.reads:
            return
        if record.error is not None:
            stage, cause = record.stage or Stage.HANDSHAKE, record.error.cause
            self.add(FAILURES, peer=record.peer, stage=stage.value, cause=cause.value)
            if cause == "stale" and stage is Stage.FENCE:
                self.add(STALE, peer=record.peer)
            return
        carried = {"peer": record.peer, "path": record.path}
        with self._lock:  # once, so that ``take`` has the stages of a load together
            for figure, value in (
                (BYTES, record.nbytes),
                (EARLY_BYTES, record.early_nbytes),
                (COPIES, record.copies),
                (PULLS, 1),
            ):
                self.add(figure, value, **carried)
            self.add(LOAD_SECONDS, record.seconds)
            for stage, seconds in record.stages.items():
                self.count_stage(stage, seconds, record.peer)

    def count_stage(self, stage: Stage, seconds: float, peer: str) -> None:
        """Count the time that a load from a peer (its id or label) spent in a stage."""
        with self._lock:
            self.add(STAGE_SECONDS, seconds, stage=stage.value)
            self.add(PEER_SECONDS, seconds, peer=peer[:MAX_NAME], stage=stage.value)

    def _put(self, figure: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Add a value. The caller must hold the lock."""
        known = {**self._common, **labels}
        added = [value] if figure.kind is MetricKind.HISTOGRAM else value
        _add(self._new, figure, [known[name] for name in figure.labels], added)


class PeerNames:
    """Limit the ``peer`` labels: the first ``limit`` producers get one, the others ``OTHER``."""

    def __init__(self, limit: int = MAX_PEERS) -> None:
        self._limit = limit
        self._known: set[str] = {UNREACHED}

    def __call__(self, peer: str) -> str:
        """Return the label to publish for a producer: its own, or ``OTHER``."""
        if peer in self._known:
            return peer
        if len(self._known) > self._limit:
            return OTHER
        self._known.add(peer)
        return peer


def merge(figures: Mapping[str, Metric], into: Data, other: Data) -> None:
    """Add what ``other``, maybe of another process, has of ``figures`` to ``into``."""
    for name, values in other.items():
        if name in figures:
            for labels, value in _leaves(values, len(figures[name].labels)):
                _add(into, figures[name], labels, value)


def flat(figure: Metric, data: Data) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of one metric in ``Data``, each after the values of its labels."""
    yield from _leaves(data.get(figure.name, {}), len(figure.labels))


def _leaves(values: Any, depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401
    """Yield (label values, metric value) for each value in dictionaries nested ``depth`` deep."""
    if depth == 0:
        yield (), values
        return
    for label, inner in values.items():
        for labels, value in _leaves(inner, depth - 1):
            yield (label, *labels), value


def _add(data: Data, figure: Metric, labels: Sequence[str], value: Any) -> None:  # noqa: ANN401
    """Add a value to a metric in ``Data``, for a histogram a list of values, which is copied."""
    *outer, last = labels
    values = data.setdefault(figure.name, {})
    for label in outer:
        values = values.setdefault(label, {})
    if figure.kind is MetricKind.COUNTER:
        values[last] = values.get(last, 0) + value
    elif figure.kind is MetricKind.GAUGE:
        values[last] = value
    else:
        observed = values.setdefault(last, [])
        observed.extend(value[: MAX_OBSERVED - len(observed)])
