"""What ends when vLLM pauses, resets its prefix cache, or gets other weights.

``missing_hooks`` has vLLM say so. See docs/protocol.md, "Reset", and ADR 21.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.integrations.vllm.adapter_checks import Adapters
from kvferry.integrations.vllm.consumer import Consumer
from kvferry.integrations.vllm.metadata import RankReport
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.weights import Weights

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


class Pauses:
    """The ``missing_hooks.Hooks`` of an engine."""

    def __init__(
        self, *, producer: Producer, consumer: Consumer, adapters: Adapters, weights: Weights
    ) -> None:
        self._producer = producer
        self._consumer = consumer
        self._adapters = adapters
        self._weights = weights
        self._clears_caches = False
        """Whether the pause that began last does."""

    def before_pause(self, *, keeps: bool, clears: bool) -> None:
        """End all holds, and the loads of requests that are kept, if the caches are cleared."""
        self._clears_caches = clears
        if clears:
            self._producer.reset()
        if clears and keeps:
            self._consumer.abort_loads()

    def holds_up_pause(self) -> bool:
        """Return whether holds or loads are to end first; tickets made meanwhile end, too."""
        if not self._clears_caches:
            return False
        return self._producer.reset() or self._consumer.is_loading

    def before_reset(self, *, preempts: bool) -> bool:
        """End all holds, and loads if all that runs is preempted, so that the next reset succeeds.

        Returns:
            Whether there are holds that not all workers have reported to have ended.
        """
        if preempts:
            self._consumer.abort_loads()
        return self._producer.reset()

    def weights_loaded(self) -> None:
        """Take notice of other weights, with which pages of before must not be decoded."""
        self._weights.loaded()
        self._consumer.weights_changed()

    def weights_named(self, version: object) -> None:
        """Take the version of the weights that were loaded last."""
        self._weights.set(version)
        self._consumer.weights_changed()

    def doomed(self, output: KVConnectorOutput) -> list[str]:
        """Return the requests that would decode pages of other weights than their adapter's."""
        found = output.kv_connector_worker_meta
        reports = getattr(found, "metadata", (found,))  # MultiConnector's: one for each connector
        return [
            request_id
            for report in reports
            if isinstance(report, RankReport)
            for request_id in self._adapters.contradicted(report.adapters)
            if self._consumer.adapter_changed(request_id)
        ]
