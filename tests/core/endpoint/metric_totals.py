"""Sums of the metrics that an engine's endpoints have taken since the sums were begun."""

from __future__ import annotations

from typing import Any

from kvferry.core.endpoint import Endpoint
from kvferry.core.metrics import FIGURES, Data, Metric, flat, merge
from tests.core.endpoint.engines import Engine

BY_NAME = {metric.name: metric for metric in FIGURES}


class MetricTotals:
    """The metrics of all ranks of an engine, merged."""

    def __init__(self, engine: Engine) -> None:
        self._endpoints: list[Endpoint] = [rank.endpoint for rank in engine.ranks]
        self._data: Data = {}

    def all(self) -> Data:
        for endpoint in self._endpoints:
            merge(BY_NAME, self._data, endpoint.take_figures() or {})
        return self._data

    def of(self, metric: Metric) -> dict[tuple[str, ...], Any]:
        """Return the values of a metric by its labels, without the driver's name."""
        found = dict(flat(metric, self.all()))
        assert all(labels[0] == "loopback" for labels in found)
        return {labels[1:]: value for labels, value in found.items()}

    def total(self, metric: Metric) -> float:
        return float(sum(self.of(metric).values()))
