"""A worker: when it closes endpoints, over a UCX that does as it is told."""

from __future__ import annotations

from typing import cast

import pytest

from kvferry.drivers.ucx.posting import PlainPoster
from kvferry.drivers.ucx.ucp import Context, Endpoint, Ucp
from kvferry.drivers.ucx.ucp_structs import Code
from kvferry.drivers.ucx.worker import Worker

ENDPOINT = Endpoint(7)
FLUSH = 1 << 20
"""A request."""


class Told:
    """What a worker calls of UCP.

    Attributes:
        way: what carries the endpoint, joined by "+".
        flushed: what comes of a flush, at once.
        status: of the flush, where that is a request.
        closed: the endpoints, by force.
        destroyed: the workers, each with the endpoints that were closed before.
    """

    def __init__(self) -> None:
        self.way = "tcp/eth0"
        self.flushed = FLUSH
        self.status: int = Code.IN_PROGRESS
        self.closed: list[Endpoint] = []
        self.destroyed: list[list[Endpoint]] = []

    def create_worker(self, context: Context) -> int:
        return context

    def set_message_handler(self, worker: int, callback: object) -> None: ...

    def worker_address(self, worker: int) -> bytes:
        return b"%d" % worker

    def descriptor(self, worker: int) -> int:
        return worker

    def arm(self, worker: int) -> bool:
        return bool(worker)

    def function(self, name: str) -> str:
        return name

    def progress(self, worker: int) -> int:
        return 0 * worker

    def transports(self, endpoint: Endpoint) -> list[str]:
        return [*self.way.split("+"), "cma/memory"] if endpoint == ENDPOINT else []

    def flush(self, endpoint: Endpoint) -> int:
        return self.flushed if endpoint == ENDPOINT else Code.OK

    def check(self, request: int) -> int:
        return self.status if request == FLUSH else Code.OK

    def free(self, request: int) -> None:
        assert request == FLUSH

    def close_endpoint(self, endpoint: Endpoint) -> int:
        self.closed.append(endpoint)
        return Code.OK

    def destroy_worker(self, worker: int) -> None:
        del worker
        self.destroyed.append(list(self.closed))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def worker(told: Told) -> Worker:
    library = cast("Ucp", told)
    return Worker(library, Context(1), PlainPoster(library))


@pytest.mark.parametrize("status", [Code.OK, Code.ENDPOINT_TIMEOUT])
def test_over_tcp_an_endpoint_is_closed_when_all_has_left_or_it_has_failed(
    told: Told, worker: Worker, status: Code
) -> None:
    """Before, UCX crashes if the peer closes it, too."""
    worker.close_endpoint(ENDPOINT)
    worker.run_once()
    assert worker.is_lingering(ENDPOINT)
    assert not told.closed
    assert not worker.closing, "nobody waits for a peer that is stopped"
    told.status = status
    worker.run_once()
    assert told.closed == [ENDPOINT]
    assert not worker.is_lingering(ENDPOINT)


@pytest.mark.parametrize(
    ("way", "flushed"),
    [
        ("rc_mlx5/mlx5_0:1", FLUSH),
        # A NIC could go on writing.
        ("tcp/eth0+rc_mlx5/mlx5_0:1", FLUSH),
        ("tcp/eth0", 0),
        ("tcp/eth0", (1 << 64) + Code.NOT_CONNECTED),
    ],
)
def test_elsewhere_and_where_nothing_is_on_its_way_it_is_closed_at_once(
    told: Told, worker: Worker, way: str, flushed: int
) -> None:
    told.way, told.flushed = way, flushed
    worker.close_endpoint(ENDPOINT)
    assert told.closed == [ENDPOINT]
    assert not worker.lingering


def test_one_that_lingers_is_closed_before_its_worker_goes(told: Told, worker: Worker) -> None:
    worker.close_endpoint(ENDPOINT)
    worker.destroy()
    assert told.destroyed == [[ENDPOINT]]
