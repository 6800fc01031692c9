"""What an endpoint did, in numbers: each load's, and figures of all of them for whoever monitors.

``FIGURES`` says what is counted. An endpoint counts into ``Metrics``, which give out what is new
since the last time as ``Data``: plain dictionaries, so that they can be sent anywhere and added up
there (``merge``).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.core.error_causes import cause_of
from kvferry.core.errors import KVFerryError

Data = dict[str, Any]
"""Figure name to label value to the next label's value and so on, and there the figure itself: a
number, or for a distribution the list of what was observed."""


class Stage(enum.StrEnum):
    """The stages of a load, in which it spends its time or fails."""

    WAIT = "wait"
    """The request waits for pages to load into."""
    HANDSHAKE = "handshake"
    """Until its producer is known and connected."""
    CHECK = "check"
    """Until its read is posted: the producer has computed the pages, and it is this read's turn."""
    POST = "post"
    """The copies are computed and given to the driver."""
    TRANSFER = "transfer"
    """The bytes move."""
    FENCE = "fence"
    """The slot word is read: whether the pages were held throughout."""


class MetricKind(enum.StrEnum):
    """How a figure changes; the names are Prometheus's."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Something that is counted.

    Attributes:
        name: unique.
        kind: how it changes, and so how two of it are added: the later one of two gauges counts.
        text: what it says.
        labels: by what it is told apart, in the order of ``Data``. ``driver`` is the transport's
            name, ``rank`` the own one, ``peer`` the id of a producer engine.
    """

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ("driver",)


BYTES = Metric(
    name="bytes",
    kind=MetricKind.COUNTER,
    text="Bytes of KV cache that were pulled from other engines.",
    labels=("driver", "peer", "path"),
)
COPIES = Metric(
    name="copies",
    kind=MetricKind.COUNTER,
    text="Copies in which they were pulled; few large ones are faster than many small ones.",
    labels=("driver", "peer", "path"),
)
PULLS = Metric(
    name="pulls",
    kind=MetricKind.COUNTER,
    text="Loads that succeeded, counted on each rank that took part.",
    labels=("driver", "peer", "path"),
)
LOAD_SECONDS = Metric(
    name="load_seconds",
    kind=MetricKind.HISTOGRAM,
    text="Time from the start of a load of KV cache to its end, on each rank.",
)
STAGE_SECONDS = Metric(
    name="stage_seconds",
    kind=MetricKind.HISTOGRAM,
    text="Time of each stage of a load, on each rank; of a handshake once, and not per load.",
    labels=("driver", "stage"),
)
PEER_SECONDS = Metric(
    name="peer_seconds",
    kind=MetricKind.COUNTER,
    text="The same time, added up by producer: which one is slow, and where.",
    labels=("driver", "peer", "stage"),
)
FAILURES = Metric(
    name="load_failures",
    kind=MetricKind.COUNTER,
    text="Loads that failed, counted on each rank that took part, by where and why.",
    labels=("driver", "peer", "stage", "cause"),
)
STALE = Metric(
    name="stale_reads",
    kind=MetricKind.COUNTER,
    text="Reads that the fence refused: the producer did not hold the pages any more.",
    labels=("driver", "peer"),
)
REFUSED = Metric(
    name="refused_tickets",
    kind=MetricKind.COUNTER,
    text="Tickets that were refused before anything was read, by reason.",
    labels=("driver", "reason"),
)
LOST_PEERS = Metric(
    name="lost_peers",
    kind=MetricKind.COUNTER,
    text="Producers that were connected and given up: dead, restarted, or failing; on each rank.",
    labels=("driver", "peer"),
)
UNTOLD = Metric(
    name="untold_releases",
    kind=MetricKind.COUNTER,
    text="Messages that end holds and could not be sent: the lease ends those holds.",
    labels=("driver", "peer"),
)
PEERS_UP = Metric(
    name="peers_up",
    kind=MetricKind.GAUGE,
    text="Producers that a rank is connected to.",
    labels=("driver", "rank"),
)
PEERS_DOWN = Metric(
    name="peers_down",
    kind=MetricKind.GAUGE,
    text="Producers that a rank could not reach, or lost, when it last had to do with them.",
    labels=("driver", "rank"),
)
QUARANTINED = Metric(
    name="quarantined_pages",
    kind=MetricKind.GAUGE,
    text="Pages of failed loads that a connection may still write, and that are not given back.",
    labels=("driver", "rank"),
)
EXPIRED = Metric(
    name="expired_leases",
    kind=MetricKind.COUNTER,
    text="Holds that nobody read, or renewed, within their lease; counted on each rank.",
)
LATE = Metric(
    name="done_after_expiry",
    kind=MetricKind.COUNTER,
    text='Messages "done" about holds whose lease was over; the fence refused those reads.',
)
IGNORED = Metric(
    name="ignored_releases",
    kind=MetricKind.COUNTER,
    text="Other messages that end holds, about holds that did not stand (any more).",
)

FIGURES = (
    BYTES,
    COPIES,
    PULLS,
    LOAD_SECONDS,
    STAGE_SECONDS,
    PEER_SECONDS,
    FAILURES,
    STALE,
    REFUSED,
    LOST_PEERS,
    UNTOLD,
    PEERS_UP,
    PEERS_DOWN,
    QUARANTINED,
    EXPIRED,
    LATE,
    IGNORED,
)
"""What an endpoint counts."""

MAX_OBSERVED = 1 << 14
"""Values of a distribution that are kept until somebody takes them: nobody may ever do."""
MAX_PEERS = 32
"""So many producers are told apart in a figure; see ``PeerNames``."""
OTHER = "other"
"""The label of the producers beyond."""
UNREACHED = "unreached"
"""The label of producers that were never connected: only a client's ticket names them."""
MAX_NAME = 64
"""Characters of an engine's id in a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """One load from begin to report.

    Attributes:
        request: the consumer's id of the request.
        engine: the producer, as the ticket names it.
        reached: whether the producer was connected.
        path: what carried the bytes, in the driver's words; empty if it cannot tell.
        error: why the load failed; ``None`` if it succeeded.
        stage: the stage in which the load failed; ``None`` if it succeeded.
        reads: whether there was anything to pull; if not, the producer was only notified.
        tokens: number of tokens to pull, in the group with the most.
        copies, nbytes: number of copies and bytes that this rank read.
        seconds: time from begin to report.
        wait_seconds: time that the request waited for pages before the load began; 0 without
            ``prepare``.
        handshake_seconds: the part of ``seconds`` until the producer was connected.
        check_seconds, post_seconds, transfer_seconds, fence_seconds: of the others, those of each
            stage; where several ranks are read from, of the one that took longest.
    """

    request: str
    engine: str
    reached: bool = True
    path: str = ""
    error: KVFerryError | None = None
    stage: Stage | None = None
    reads: bool
    tokens: int
    copies: int
    nbytes: int
    seconds: float
    wait_seconds: float = 0.0
    handshake_seconds: float = 0.0
    check_seconds: float = 0.0
    post_seconds: float = 0.0
    transfer_seconds: float = 0.0
    fence_seconds: float = 0.0

    @property
    def peer(self) -> str:
        """The producer as a label: bounded in length, and a client cannot make names up."""
        return self.engine[:MAX_NAME] if self.reached else UNREACHED

    @property
    def stages(self) -> dict[Stage, float]:
        """Seconds of the stages that every load has."""
        return {
            Stage.WAIT: self.wait_seconds,
            Stage.CHECK: self.check_seconds,
            Stage.POST: self.post_seconds,
            Stage.TRANSFER: self.transfer_seconds,
            Stage.FENCE: self.fence_seconds,
        }


class Metrics:
    """What happened since the last ``take``. From any thread.

    Args:
        common: labels that are the same for all that is counted here: the driver, the rank.
    """

    def __init__(self, **common: str) -> None:
        self._common = common
        self._new: Data = {}
        self._gauges: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()

    def add(self, figure: Metric, value: float = 1, **labels: str) -> None:
        """Add to a counter; adding 0 does nothing."""
        if value:
            with self._lock:
                self._put(figure, value, labels)

    def observe(self, figure: Metric, value: float, **labels: str) -> None:
        """Add a value to a distribution."""
        with self._lock:
            self._put(figure, [value], labels)

    def set(self, figure: Metric, value: float, **labels: str) -> None:
        """Set a gauge; ``take`` returns it only if it changed, or was never set and is not 0."""
        key = (figure.name, *labels.values())
        with self._lock:
            if self._gauges.get(key, 0) != value:
                self._gauges[key] = value
                self._put(figure, value, labels)

    def take(self) -> Data | None:
        """Return what changed since the last call, owned by the caller; ``None`` if nothing did."""
        with self._lock:
            taken, self._new = self._new, {}
        return taken or None

    def count_load(self, record: LoadRecord) -> None:
        """Count a load that is over; a load that pulls nothing is not counted."""
        if not record.reads:
            return
        if record.error is not None:
            self._count_failure(record, record.error)
            return
        for figure, value in ((BYTES, record.nbytes), (COPIES, record.copies), (PULLS, 1)):
            self.add(figure, value, peer=record.peer, path=record.path)
        self.observe(LOAD_SECONDS, record.seconds)
        for stage, seconds in record.stages.items():
            self.count_stage(stage, seconds, record.peer)

    def count_stage(self, stage: Stage, seconds: float, peer: str) -> None:
        """Add the time that a stage took, in seconds."""
        self.observe(STAGE_SECONDS, seconds, stage=stage.value)
        self.add(PEER_SECONDS, seconds, peer=peer[:MAX_NAME], stage=stage.value)

    def _count_failure(self, record: LoadRecord, error: KVFerryError) -> None:
        stage, cause = record.stage or Stage.HANDSHAKE, cause_of(error)
        self.add(FAILURES, peer=record.peer, stage=stage.value, cause=cause.value)
        if cause == "stale" and stage is Stage.FENCE:
            self.add(STALE, peer=record.peer)

    def _put(self, figure: Metric, value: Any, labels: Mapping[str, str]) -> None:  # noqa: ANN401
        at = self._new.setdefault(figure.name, {})
        *outer, last = figure.labels
        for name in outer:
            at = at.setdefault(labels[name] if name in labels else self._common[name], {})
        _add_to(at, figure.kind, labels[last] if last in labels else self._common[last], value)


class PeerNames:
    """Which producers are told apart: the first ``limit``; the others are one."""

    def __init__(self, limit: int = MAX_PEERS) -> None:
        self._limit = limit
        self._known: set[str] = {UNREACHED}

    def __call__(self, peer: str) -> str:
        """The label of a producer."""
        if peer in self._known:
            return peer
        if len(self._known) > self._limit:
            return OTHER
        self._known.add(peer)
        return peer


def merge(figures: Mapping[str, Metric], into: Data, other: Data) -> None:
    """Add what was counted elsewhere, or later; ``other`` is left as it is.

    Args:
        figures: those that ``other`` may have, by name; what is none of them is left out.
        into: is changed.
        other: later than ``into``, where a figure is of one moment.
    """
    for name, values in other.items():
        if name in figures:
            figure = figures[name]
            into[name] = _added(figure.kind, into.get(name, {}), values, len(figure.labels))


def flat(figure: Metric, data: Data) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A figure's values, each with the values of its labels, in their order."""
    yield from _leaves(data.get(figure.name, {}), len(figure.labels))


def _leaves(values: Any, depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401
    if depth == 0:
        yield (), values
        return
    for label, inner in values.items():
        for labels, value in _leaves(inner, depth - 1):
            yield (label, *labels), value


def _added(kind: MetricKind, mine: Any, theirs: Any, depth: int) -> Any:  # noqa: ANN401
    """Both together; ``mine`` may be changed, and nothing of ``theirs`` is kept."""
    if depth > 1:
        for label, inner in theirs.items():
            mine[label] = _added(kind, mine.get(label, {}), inner, depth - 1)
        return mine
    for label, value in theirs.items():
        _add_to(mine, kind, label, value)
    return mine


def _add_to(values: Data, kind: MetricKind, label: str, value: Any) -> None:  # noqa: ANN401
    if kind is MetricKind.COUNTER:
        values[label] = values.get(label, 0) + value
    elif kind is MetricKind.GAUGE:
        values[label] = value
    else:
        observed = values.setdefault(label, [])
        observed.extend(value[: MAX_OBSERVED - len(observed)])
