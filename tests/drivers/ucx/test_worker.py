"""When a worker closes endpoints, over a fake libucp."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.core.errors import TransportError
from kvferry.drivers.ucx.messages import MAX_MESSAGE, Bye, Message, encode
from kvferry.drivers.ucx.ucp import Context, Endpoint, Ucp
from kvferry.drivers.ucx.ucp_structs import Code
from kvferry.drivers.ucx.worker import Worker

ENDPOINT = Endpoint(7)
BYE = Bye(bytes(16))
FLUSH = 1 << 20
"""The handle of a flush that is still under way."""


class FakeUcp:
    """The calls of libucp that a worker makes."""

    def __init__(self) -> None:
        self.names = "tcp/eth0"  # the transports of the endpoint, joined by "+"
        self.flushed = FLUSH  # what a flush returns
        self.status: int = Code.IN_PROGRESS  # of that flush
        self.closed: list[Endpoint] = []
        self.sent: int = Code.OK  # what a send returns
        self.on_close: int = Code.OK  # what closing an endpoint returns
        self.destroyed: list[list[Endpoint]] = []  # what was closed before each worker's end

    def create_worker(self, context: Context, on_message: object) -> tuple[int, bytes, int]:
        return context, b"address", 0

    def arm(self, worker: int) -> bool:
        return bool(worker)

    def transports(self, endpoint: Endpoint) -> list[str]:
        return [*self.names.split("+"), "cma/memory"] if endpoint == ENDPOINT else []

    def flush(self, endpoint: Endpoint) -> int:
        return self.flushed if endpoint == ENDPOINT else Code.OK

    def check(self, request: int) -> int:
        return self.status if request == FLUSH else Code.OK

    def free(self, request: int) -> None:
        assert request == FLUSH

    def close_endpoint(self, endpoint: Endpoint) -> int:
        self.closed.append(endpoint)
        return self.on_close

    def send(self, endpoint: Endpoint, header: bytes, data: object, nbytes: int) -> int:
        del endpoint, header, data, nbytes
        return self.sent

    def destroy_worker(self, worker: int) -> None:
        del worker
        self.destroyed.append(list(self.closed))


@pytest.fixture
def ucp() -> FakeUcp:
    return FakeUcp()


@pytest.fixture
def worker(ucp: FakeUcp) -> Worker:
    loops: Any = SimpleNamespace(progress=lambda worker, seconds: False)
    return Worker(cast("Ucp", ucp), Context(1), loops)


@pytest.mark.parametrize(
    ("transports", "flushed", "lingers"),
    [
        ("tcp/eth0", FLUSH, True),  # closed earlier, UCX crashes if the peer closes it, too
        ("tcp/eth0+rc_mlx5/mlx5_0:1", FLUSH, False),  # a NIC could go on reading
        ("rc_mlx5/mlx5_0:1", FLUSH, False),
        ("tcp/eth0", 0, False),
        ("tcp/eth0", (1 << 64) + Code.NOT_CONNECTED, False),
    ],
)
@pytest.mark.parametrize("status", [Code.OK, Code.ENDPOINT_TIMEOUT])
def test_tcp_endpoint_is_closed_when_flushed_or_failed_and_others_at_once(
    ucp: FakeUcp, worker: Worker, transports: str, flushed: int, lingers: bool, status: Code
) -> None:
    ucp.names, ucp.flushed = transports, flushed
    worker.close_endpoint(ENDPOINT)
    worker.run_once()
    assert ((ENDPOINT in worker.lingering.values()), not ucp.closed) == (lingers, lingers)
    assert not worker.closing, "closing waits for a peer that may be stopped"
    ucp.status = status
    worker.run_once()
    assert (ucp.closed, worker.lingering) == ([ENDPOINT], {})


def test_lingering_endpoint_is_closed_before_its_worker_is_destroyed(
    ucp: FakeUcp, worker: Worker
) -> None:
    worker.close_endpoint(ENDPOINT)
    worker.destroy()
    assert ucp.destroyed == [[ENDPOINT]]


def test_endpoint_is_closing_until_ucx_has_closed_it(ucp: FakeUcp, worker: Worker) -> None:
    ucp.on_close = FLUSH
    worker.close_endpoint(ENDPOINT, at_once=True)
    worker.run_once()
    assert worker.closing
    ucp.status = Code.OK
    worker.run_once()
    assert not worker.closing


def test_a_message_that_ucx_refuses_is_an_error(ucp: FakeUcp, worker: Worker) -> None:
    ucp.sent = (1 << 64) + Code.NOT_CONNECTED
    with pytest.raises(TransportError, match="cannot send a message"):
        worker.send(ENDPOINT, Bye(bytes(16)))


@pytest.mark.parametrize(
    ("data", "length", "heard"),
    [
        (encode(BYE), len(encode(BYE)), [BYE]),
        (b"nonsense", 8, []),
        (encode(BYE), MAX_MESSAGE + 1, []),
        (None, 0, []),
    ],
)
def test_what_is_no_message_is_dropped(
    worker: Worker, data: bytes | None, length: int, heard: list[Message]
) -> None:
    """Anybody may send it: to answer with an error would end UCX's progress."""
    kept = None if data is None else ctypes.create_string_buffer(data, len(data))
    address = None if kept is None else ctypes.addressof(kept)
    assert worker._on_message(None, None, 0, address, length, None) == Code.OK
    assert list(worker.messages()) == heard
