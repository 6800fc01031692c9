"""A rank that nobody reads and that reads nothing: it only has to say so, once per request."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.integrations.vllm.metadata import StepMetadata


class UnreadRankWorker:
    """The worker half of a rank whose cache another rank of its engine publishes as well.

    vLLM gives pages back when every rank has reported a request sent. Nobody reads from this one,
    so it reports as soon as there is a ticket; the rank that is read reports when that is over.
    A request whose ticket was refused has failed on every rank, so this one says so too.
    """

    handshake = None
    """It publishes nothing."""

    def __init__(self) -> None:
        self._held: dict[Hold, RequestId] = {}
        self._sent: set[str] = set()
        self._refused: set[str] = set()

    def apply(self, step: StepMetadata) -> None:
        """What the scheduler half says in this step."""
        self._apply(step.orders)
        self._refused.update(request for request, _ in step.refused)

    def _apply(self, orders: HoldOrders) -> None:
        for hold in orders.drops:
            self._held.pop(hold, None)
        self._held.update((hold, request) for request, hold in orders.take_ons)
        for hold, _ in orders.ready:
            if hold in self._held:
                self._sent.add(self._held.pop(hold))

    def results(self) -> KVConnectorTransferResults:
        """What is over since the last call, each request once."""
        sent, self._sent = self._sent, set()
        refused, self._refused = self._refused, set()
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=refused, failed_recving=set(refused)
        )

    def take_stats(self) -> None:
        """There are no figures."""

    def take_report(self) -> None:
        """There is nothing that could fail, nor is anything held."""

    def close(self) -> None:
        """Nothing to end."""
