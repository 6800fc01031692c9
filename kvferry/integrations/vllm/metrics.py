"""Figures, from the workers and the scheduler to vLLM's log line and its Prometheus metrics.

They travel as plain dictionaries (``kvferry.core.metrics.Data``): those of each rank to the
scheduler, where vLLM adds them up, and the sum to the process that logs and serves the metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.core.errors import TicketReason
from kvferry.core.metrics import (
    BYTES,
    EXPIRED,
    LATE,
    LOAD_SECONDS,
    PEERS_DOWN,
    QUARANTINED,
    REFUSED,
    STAGE_SECONDS,
    STALE,
    Data,
    Metric,
    MetricKind,
    PeerNames,
    Stage,
    flat,
    merge,
)
from kvferry.integrations.vllm.config import Config
from kvferry.integrations.vllm.ticket_metrics import (
    BY_NAME,
    EVICTED,
    FAILED,
    FIGURES,
    HELD,
    LOADS,
    NO_TICKETS,
    ORPHANED,
    TOKENS,
    NoTicket,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:kvferry_"

SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

KNOWN = {
    STAGE_SECONDS: tuple(Stage),
    REFUSED: tuple(TicketReason),
    NO_TICKETS: tuple(NoTicket),
}
"""Figures of which all labels beside the driver's are known. They, and those with no other label,
are there and 0 from the start: what appears with its first failure hides that from a rate."""

TROUBLE = {
    FAILED: "failed",
    STALE: "stale reads",
    REFUSED: "refused tickets",
    EXPIRED: "expired leases",
    LATE: "done after expiry",
    EVICTED: "evicted holds",
    ORPHANED: "orphaned holds",
    PEERS_DOWN: "peers down",
    QUARANTINED: "quarantined pages",
}
"""In the log line if there is any, and by these names."""


class FerryStats(KVConnectorStats):
    """An interval's figures; ``data`` is ``kvferry.core.metrics.Data``.

    The scheduler counts loads and their tokens, since a load is one, and fails as one, however many
    ranks take part; the ranks count what each of them has done."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: Data = {}

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        """Add another's figures to these; where they are of one moment, it is the later one."""
        merge(BY_NAME, self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        figures: dict[str, int | float] = {}
        if loads := self._total(LOADS):
            figures |= {"loads": int(loads), "tokens": int(self._total(TOKENS))}
        if nbytes := self._total(BYTES):
            figures["MB"] = round(nbytes / 1e6, 3)
        if seconds := [each for _, some in flat(LOAD_SECONDS, self.data) for each in some]:
            figures["average ms"] = round(1e3 * sum(seconds) / len(seconds), 1)
            figures["longest ms"] = round(1e3 * max(seconds), 1)
        if HELD.name in self.data:
            figures["held pages"] = int(self._total(HELD))
        trouble = {name: int(self._total(figure)) for figure, name in TROUBLE.items()}
        return figures | {name: count for name, count in trouble.items() if count}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def _total(self, figure: Metric) -> float:
        """Of all; of peers, which all ranks have in common, the most that one has."""
        values = [value for _, value in flat(figure, self.data)]
        return float(max(values, default=0) if figure is PEERS_DOWN else sum(values))


class FerryPromMetrics(KVConnectorPromMetrics):
    """The figures as Prometheus metrics."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._peers = PeerNames()
        self._metrics = {figure: self._metric(figure) for figure in FIGURES}
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._start_at_zero(str(extra.get("driver", Config().driver)))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what an engine reported."""
        for name in transfer_stats_data:
            if name in BY_NAME:
                for labels, value in flat(BY_NAME[name], transfer_stats_data):
                    self._count(BY_NAME[name], labels, value, engine_idx)

    def _count(
        self,
        figure: Metric,
        labels: tuple[str, ...],
        value: Any,  # noqa: ANN401
        engine: int,
    ) -> None:
        child = self._child(figure, labels, engine)
        if figure.kind is MetricKind.HISTOGRAM:
            for each in value:
                child.observe(each)
        elif figure.kind is MetricKind.COUNTER:
            child.inc(value)
        else:
            child.set(value)

    def _child(self, figure: Metric, labels: tuple[str, ...], engine: int) -> Any:  # noqa: ANN401
        bounded = [
            self._peers(value) if label == "peer" else value
            for label, value in zip(figure.labels, labels, strict=True)
        ]
        return self._metrics[figure].labels(*self.per_engine_labelvalues[engine], *bounded)

    def _start_at_zero(self, driver: str) -> None:
        alone = {(figure, (driver,)) for figure in FIGURES if figure.labels == ("driver",)}
        known = {(each, (driver, str(value))) for each, values in KNOWN.items() for value in values}
        for figure, labels in alone | known:
            for engine in self.per_engine_labelvalues:
                self._child(figure, labels, engine)

    def _metric(self, figure: Metric) -> Any:  # noqa: ANN401
        types: dict[MetricKind, tuple[Any, dict[str, Any]]] = {
            MetricKind.COUNTER: (self._counter_cls, {}),
            MetricKind.GAUGE: (self._gauge_cls, {"multiprocess_mode": "mostrecent"}),
            MetricKind.HISTOGRAM: (self._histogram_cls, {"buckets": SECONDS_BUCKETS}),
        }
        kind, options = types[figure.kind]
        return kind(
            name=PREFIX + figure.name,
            documentation=figure.text,
            labelnames=[*self._labelnames, *figure.labels],
            **options,
        )
