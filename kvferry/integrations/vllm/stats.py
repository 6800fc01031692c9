"""Figures about loads, from the workers to vLLM's log line and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.core.stats import LoadRecord
from kvferry.integrations.vllm.figures import BYTES, COUNTERS, IGNORED, SECONDS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class FerryStats(KVConnectorStats):
    """An interval's figures: ``data`` has a sum for each of ``COUNTERS``, without those that are 0,
    and under ``SECONDS`` the list of how long each rank took for each successful load.

    The scheduler counts loads and their tokens, since a load is one, and fails as one, however many
    ranks take part; the ranks count what each of them has done."""

    @classmethod
    def of(cls, records: Iterable[LoadRecord], ignored: int = 0) -> FerryStats:
        """One rank's, of its part in some loads; one that pulls nothing, or fails, is none."""
        stats = cls()
        stats._add({IGNORED: ignored})
        for record in records:
            if record.reads and record.error is None:
                stats._add({BYTES: record.nbytes, SECONDS: [record.seconds]})
        return stats

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        """Add another's figures to these."""
        self._add(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        figures = {name: self.data[name] for name in COUNTERS if name in self.data}
        if seconds := self.data.get(SECONDS):
            figures["average load (ms)"] = round(1e3 * sum(seconds) / len(seconds), 3)
            figures["longest load (ms)"] = round(1e3 * max(seconds), 3)
        return figures

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def _add(self, figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            if value:
                self.data[name] = self.data[name] + value if name in self.data else value


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
        self._counters = {
            name: self._per_engine(self._counter_cls, name, text) for name, text in COUNTERS.items()
        }
        self._seconds = self._per_engine(
            self._histogram_cls,
            SECONDS,
            "Time from the start of a load of KV cache to its end, on each rank.",
            buckets=SECONDS_BUCKETS,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what an engine reported."""
        for name in COUNTERS:
            self._counters[name][engine_idx].inc(transfer_stats_data.get(name, 0))
        for seconds in transfer_stats_data.get(SECONDS, ()):
            self._seconds[engine_idx].observe(seconds)

    def _per_engine(self, kind: Any, name: str, text: str, **options: Any) -> Any:  # noqa: ANN401
        metric = kind(
            name=f"vllm:kvferry_{name}", documentation=text, labelnames=self._labelnames, **options
        )
        return create_metric_per_engine(metric, self.per_engine_labelvalues)
