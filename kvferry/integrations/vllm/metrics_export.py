"""Metrics of workers and scheduler, for vLLM's log line and its Prometheus endpoint.

Metrics travel as plain dictionaries (``kvferry.core.metrics.Data``): each rank sends its own to the
scheduler, where vLLM adds them up and passes the sum on to the process that logs and serves it.
``scheduler_metrics`` defines the metrics.
"""

from __future__ import annotations

import itertools
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.core.lifecycle.holds import HoldEnd
from kvferry.core.metrics import (
    BYTES,
    EARLY_BYTES,
    LATE,
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
from kvferry.integrations.vllm.scheduler_metrics import (
    BY_NAME,
    FAILED,
    HELD,
    HOLD_MADE,
    HOLDS,
    LOADS,
    METRICS,
    TOKENS,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:kvferry_"
"""The prefix of the metrics' Prometheus names."""

SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histograms' buckets, in seconds."""

KINDS: dict[MetricKind, tuple[str, dict[str, Any], str]] = {
    MetricKind.COUNTER: ("_counter_cls", {}, "inc"),
    MetricKind.GAUGE: ("_gauge_cls", {"multiprocess_mode": "mostrecent"}, "set"),
    MetricKind.HISTOGRAM: ("_histogram_cls", {"buckets": SECONDS_BUCKETS}, "observe"),
}
"""Of each kind of metric: vLLM's class, further arguments of it, and its method for a value."""

LOGGED_PROBLEMS = {
    FAILED: "failed",
    STALE: "stale reads",
    REFUSED: "refused tickets",
    LATE: "done after expiry",
    PEERS_DOWN: "peers down",
    QUARANTINED: "quarantined pages",
}
"""Counts that the log line shows if they are not 0, and their names there."""

LOGGED_TIMES = {
    "waited": (Stage.WAIT, Stage.CHECK),
    "read": (Stage.POST, Stage.TRANSFER, Stage.FENCE, Stage.COPY),
}
"""The times of loads that the log line shows, and the stages of which they are the sum.

Several loads may share a handshake, so it is in neither.
"""

LOGGED_OUTCOMES = {
    HoldEnd.EXPIRED: "expired leases",
    HoldEnd.EVICTED: "evicted holds",
    HoldEnd.ORPHANED: "orphaned holds",
}
"""Outcomes of holds that the log line shows likewise."""


class FerryStats(KVConnectorStats):
    """The metrics counted in an interval; ``data`` is a ``kvferry.core.metrics.Data``.

    The scheduler counts loads and their tokens; the ranks count what each of them did.
    """

    def reset(self) -> None:
        """Remove all values."""
        self.data: Data = {}

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        """Add metrics of another process or a later interval; of a gauge, keep the later value."""
        merge(BY_NAME, self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values for vLLM's log line, by name."""
        line: dict[str, int | float] = {}
        if loads := self._total(LOADS):
            line |= {"loads": int(loads), "tokens": int(self._total(TOKENS))}
        if nbytes := self._total(BYTES):
            line["MB"] = round(nbytes / 1e6, 3)
            # Of each stage, the times of one load are at the same place.
            times = {stage: values for (_, stage), values in flat(STAGE_SECONDS, self.data)}
            if moving := sum(times.get(Stage.TRANSFER, ())):
                late = nbytes - self._total(EARLY_BYTES)  # early reads count in no stage
                line["GB/s"] = round(late / moving / 1e9, 3)
            for name, stages in LOGGED_TIMES.items():
                each = [times[stage] for stage in stages if stage in times]
                if seconds := [sum(load) for load in itertools.zip_longest(*each, fillvalue=0.0)]:
                    line[f"{name} ms median"] = round(1e3 * median(seconds), 1)
                    line[f"{name} ms longest"] = round(1e3 * max(seconds), 1)
        holds = {outcome: int(count) for (_, outcome), count in flat(HOLDS, self.data)}
        if made := holds.get(HOLD_MADE):
            line["tickets"] = made
        if HELD.name in self.data:
            line["held pages"] = int(self._total(HELD))
        problems = {name: int(self._total(metric)) for metric, name in LOGGED_PROBLEMS.items()}
        problems |= {name: holds.get(outcome, 0) for outcome, name in LOGGED_OUTCOMES.items()}
        return line | {name: count for name, count in problems.items() if count}

    def is_empty(self) -> bool:
        """Return whether there are no values."""
        return not self.data

    def _total(self, metric: Metric) -> float:
        """Return a metric's sum over all labels."""
        values = [value for _, value in flat(metric, self.data)]
        # Several ranks may count the same peer.
        return float(max(values, default=0) if metric is PEERS_DOWN else sum(values))


class LoggedStats(FerryStats):
    """The metrics of an interval, in the process that logs them."""

    def is_empty(self) -> bool:
        """Return whether the log line would have nothing to say; vLLM then logs none."""
        return not self.reduce()


class FerryPromMetrics(KVConnectorPromMetrics):
    """Export the metrics to Prometheus, where they are served; vLLM gives the arguments."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._peers = PeerNames()
        self._metrics = {metric: self._make(metric) for metric in METRICS}
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._start_at_zero(str(extra.get("driver", Config().driver)))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the ``data`` of an engine's ``FerryStats``."""
        for metric in METRICS:
            _, _, method = KINDS[metric.kind]
            for labels, value in flat(metric, transfer_stats_data):
                change = getattr(self._child(metric, labels, engine_idx), method)
                for each in value if metric.kind is MetricKind.HISTOGRAM else [value]:
                    change(each)

    def _child(self, metric: Metric, labels: tuple[str, ...], engine: int) -> Any:  # noqa: ANN401
        bounded = [
            self._peers(value) if label == "peer" else value
            for label, value in zip(metric.labels, labels, strict=True)
        ]
        return self._metrics[metric].labels(*self.per_engine_labelvalues[engine], *bounded)

    def _start_at_zero(self, driver: str) -> None:
        """Export as 0 the metrics whose label values are known in advance.

        A counter that appears only with its first failure hides that from Prometheus's ``rate``.
        """
        for metric in METRICS:
            known = [(driver,)] if len(metric.labels) == 1 else []
            for labels in [*known, *((driver, value) for value in metric.values)]:
                for engine in self.per_engine_labelvalues:
                    self._child(metric, labels, engine)

    def _make(self, metric: Metric) -> Any:  # noqa: ANN401
        """Return Prometheus's counter, gauge or histogram for a metric."""
        kind, options, _ = KINDS[metric.kind]
        make: Any = getattr(self, kind)
        return make(
            name=PREFIX + metric.name,
            documentation=metric.text,
            labelnames=[*self._labelnames, *metric.labels],
            **options,
        )
