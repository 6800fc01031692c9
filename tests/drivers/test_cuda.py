"""CUDA's driver API, on a stand-in for libcuda: contexts, waits, flushes and errors."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from kvferry.core.errors import TransportError
from kvferry.core.transport import enter_nothing
from kvferry.drivers.cuda import CudaDriver, DeviceWait, StreamCaptureError
from tests.gpu.driver_api import (
    FLUSH_OPTIONS,
    HOST_PAGE_TABLES,
    NEVER,
    RDMA_SUPPORTED,
    WRITES_ORDERING,
    StandInCuda,
)


@pytest.mark.parametrize("mine", [[], [0]], ids=["none", "another"])
def test_wait_has_the_device_s_context_and_gives_back_the_caller_s(mine: list[int]) -> None:
    library = StandInCuda()
    library.contexts.extend(mine)
    CudaDriver(library).wait_idle(1)
    assert library.called("cuCtxSynchronize") == [1]
    assert library.contexts == mine
    assert library.retained == {1: 0}


def test_no_context_is_made_where_none_is_active() -> None:
    library = StandInCuda(active={0})
    CudaDriver(library).wait_idle(1)
    assert library.called("cuCtxSynchronize") == []
    assert library.active == {0}
    assert not library.retained


def test_error_has_cuda_s_text_and_context_is_given_back() -> None:
    library = StandInCuda(broken={1})
    with pytest.raises(TransportError, match=r"cuCtxSynchronize: stand-in's error 719 \(719\)"):
        CudaDriver(library).wait_idle(1)
    assert library.contexts == []
    assert library.retained == {1: 0}


def test_unknown_device_is_refused() -> None:
    with pytest.raises(TransportError, match=r"cuDeviceGet: .*101"):
        CudaDriver(StandInCuda(devices=2)).wait_idle(2)


@pytest.mark.parametrize(
    ("ordering", "c2c", "needed"),
    [(0, 0, True), (100, 0, False), (200, 0, False), (100, 1, True), (200, 1, True)],
    ids=["none", "owner", "all devices", "owner by C2C", "all devices by C2C"],
)
def test_flush_is_needed_where_a_nic_s_writes_are_not_ordered(
    ordering: int, c2c: int, needed: bool
) -> None:
    library = StandInCuda(attributes={(1, WRITES_ORDERING): ordering, (1, HOST_PAGE_TABLES): c2c})
    assert CudaDriver(library).needs_flush(1) is needed
    library.attributes[1, RDMA_SUPPORTED] = 0
    assert not CudaDriver(library).needs_flush(1)


def test_flush_has_the_device_s_context() -> None:
    library = StandInCuda(attributes={(1, FLUSH_OPTIONS): 1})
    CudaDriver(library).flush(1)
    assert library.called("cuFlushGPUDirectRDMAWrites") == [1]
    assert library.contexts == []


def test_flush_that_the_device_cannot_do_is_refused() -> None:
    library = StandInCuda(attributes={(1, FLUSH_OPTIONS): 2})
    with pytest.raises(TransportError, match=r"GPU 1 neither orders .* nor can be told to flush"):
        CudaDriver(library).flush(1)
    assert library.called("cuFlushGPUDirectRDMAWrites") == []


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def test_device_wait_ends_when_all_queues_have_drained() -> None:
    library = StandInCuda(idle_at={1: NEVER})
    wait = DeviceWait(CudaDriver(library), [1, 0, 1], enter_nothing)
    assert not wait.until(soon(0.05))
    library.idle_at[1] = 0.0
    assert wait.until(soon())
    assert wait.quiet
    assert library.called("cuCtxSynchronize") == [0, 1]


def test_device_wait_enters_its_thread_first() -> None:
    library, entered = StandInCuda(), []

    def enter() -> None:
        entered.append((threading.get_ident(), len(library.called("cuCtxSynchronize"))))

    assert DeviceWait(CudaDriver(library), [0], enter).until(soon())
    [call] = [call for call in library.calls if call.name == "cuCtxSynchronize"]
    assert entered == [(call.thread, 0)]
    assert call.thread != threading.get_ident()


def test_device_with_an_error_is_never_quiet(caplog: pytest.LogCaptureFixture) -> None:
    wait = DeviceWait(CudaDriver(StandInCuda(broken={0})), [0, 1], enter_nothing)
    with caplog.at_level(logging.ERROR):
        assert not wait.until(soon())
    assert "restart the engine" in caplog.text


def test_device_wait_tries_again_while_a_stream_is_captured() -> None:
    library = StandInCuda(capturing=2)
    assert DeviceWait(CudaDriver(library), [1], enter_nothing).until(soon())
    assert library.called("cuCtxSynchronize") == [1, 1, 1]
    assert (library.contexts, library.retained) == ([], {1: 0})
    library.capturing = 1_000_000
    with pytest.raises(StreamCaptureError, match=r"\(900\)"):
        CudaDriver(library).wait_idle(0)
    wait = DeviceWait(CudaDriver(library), [0], enter_nothing)
    assert not wait.until(soon(0.05))
    library.capturing = 0
    assert wait.until(soon())
