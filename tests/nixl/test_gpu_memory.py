"""The nixl driver and GPUs: when a transfer is FAILED, and when a read is DONE.

There is no GPU: regions of kind ``cuda`` are CPU memory, and a stand-in plays CUDA's driver API.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import TransportError, TransportUnsupportedError
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import copies_between
from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.nixl import NixlTransport, accelerators, agent
from kvferry.drivers.nixl import transport as module
from kvferry.testing.contract.killed_peers import killed_soon
from kvferry.testing.peers import Process
from tests.gpu.driver_api import StandInCuda

FLUSH_OPTIONS = 117
WRITES_ORDERING = 118
MIB = 1 << 20
NEVER = 1e9
"""A time that no test reaches, for a queue that does not drain."""


class CudaTransport(NixlTransport):
    """A transport that gives up early."""

    grace_seconds = 2.0


Make = Callable[..., CudaTransport]


@pytest.fixture
def library() -> StandInCuda:
    return StandInCuda(attributes={(1, FLUSH_OPTIONS): 1})


@pytest.fixture
def make(library: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    cuda = CudaDriver(library)
    monkeypatch.setitem(agent.SEGMENTS, "cuda", "DRAM")
    monkeypatch.setitem(agent.SEGMENTS, "xpu", "DRAM")
    monkeypatch.setattr(accelerators, "present", lambda: frozenset({"cuda", "xpu"}))
    monkeypatch.setattr(module, "find_cuda", lambda: cuda)
    made: list[CudaTransport] = []

    def transport(**options: Any) -> CudaTransport:
        made.append(CudaTransport(**options))
        return made[-1]

    yield transport
    library.idle_at.clear()
    for one in made:
        one.close()


@pytest.fixture
def buffer() -> np.ndarray:
    return np.zeros(8 * MIB, np.uint8)


def on_gpu(array: np.ndarray, kind: str = "cuda") -> Region:
    """Return the memory of an array as a region of the second GPU."""
    return Region(address=array.ctypes.data, nbytes=array.nbytes, kind=kind, device=1)


def move(transport: CudaTransport, other: CudaTransport, local: Region) -> Status:
    """Read 8 KiB in two copies, and return the transfer's last status."""
    far = np.ones(8192, np.uint8)
    remote = region_of(far)
    transport.register(local)
    other.register(remote)
    peer = transport.connect(other.address())
    places = [(local.address, remote.address, 4096), (local.address + 4096, remote.address, 4096)]
    copies = copies_between(places, local=local, remote=remote)
    status = wait(transport, transport.read(peer, copies))
    transport.disconnect(peer)
    other.deregister(remote)
    return status


def wait(transport: CudaTransport, transfer: TransferId) -> Status:
    while (status := transport.poll([transfer])[0]).state is State.PENDING:
        time.sleep(0.001)
    return status


def fail_read(transport: CudaTransport, local: Region) -> tuple[PeerId, TransferId]:
    """Read from a process that is killed meanwhile; the transfer is FAILING."""
    transport.register(local)
    with Process("kvferry.drivers.nixl:NixlTransport", {}, "cpu", MIB) as process:
        peer, far = transport.connect(process.address()), process.region
        copies = copies_between([(local.address, far.address, MIB)] * 4096, local=local, remote=far)
        with killed_soon(process):
            transfer = transport.read(peer, copies)
        assert wait(transport, transfer).state is State.FAILING
    return peer, transfer


def test_failed_read_is_final_when_the_gpu_has_done_its_queue(
    make: Make, library: StandInCuda, buffer: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []
    transport = make(enter=lambda: entered.append(threading.get_ident()))
    monkeypatch.setattr(transport, "grace_seconds", 60.0)
    peer, transfer = fail_read(transport, on_gpu(buffer))
    library.idle_at[1] = idle_at = time.monotonic() + 0.5
    transport.disconnect(peer)
    assert time.monotonic() >= idle_at
    assert transport.poll([transfer])[0].state is State.FAILED
    calls = [call for call in library.calls if call.name == "cuCtxSynchronize"]
    assert calls
    assert {call.device for call in calls} == {1}
    assert [call.thread for call in calls] == entered


def test_failed_read_stays_failing_while_the_gpu_has_work(
    make: Make, library: StandInCuda, buffer: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = make()
    peer, transfer = fail_read(transport, on_gpu(buffer))
    library.idle_at[1] = NEVER
    with pytest.raises(TransportError, match="stay failing; disconnect again, later"):
        transport.disconnect(peer)
    assert transport.poll([transfer])[0].state is State.FAILING
    library.idle_at[1] = 0.0
    monkeypatch.setattr(transport, "grace_seconds", 60.0)
    transport.disconnect(peer)
    assert transport.poll([transfer])[0].state is State.FAILED


def test_disconnect_that_is_called_again_starts_no_second_thread(
    make: Make, library: StandInCuda, buffer: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = make()
    peer, transfer = fail_read(transport, on_gpu(buffer))
    monkeypatch.setattr(transport, "grace_seconds", 0.2)
    library.idle_at[1] = NEVER
    for _ in range(3):
        with pytest.raises(TransportError, match="stay failing"):
            transport.disconnect(peer)
    assert library.called("cuCtxSynchronize") == [1]
    library.idle_at[1] = 0.0
    monkeypatch.setattr(transport, "grace_seconds", 60.0)
    transport.disconnect(peer)
    assert transport.poll([transfer])[0].state is State.FAILED


def test_close_says_that_a_gpu_may_still_copy(
    make: Make, library: StandInCuda, buffer: np.ndarray
) -> None:
    transport = make()
    fail_read(transport, on_gpu(buffer))
    library.idle_at[1] = NEVER
    with pytest.raises(TransportError, match="bytes may still land"):
        transport.close()


def test_failed_read_into_cpu_memory_asks_no_gpu(
    make: Make, library: StandInCuda, buffer: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = make()
    peer, transfer = fail_read(transport, region_of(buffer))
    library.idle_at[1] = NEVER
    monkeypatch.setattr(transport, "grace_seconds", 60.0)
    transport.disconnect(peer)
    assert transport.poll([transfer])[0].state is State.FAILED
    assert library.called("cuCtxSynchronize") == []


def test_failed_read_into_an_accelerator_without_cuda_stays_failing(
    make: Make, buffer: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    transport = make()
    peer, transfer = fail_read(transport, on_gpu(buffer, "xpu"))
    with pytest.raises(TransportError, match="stay failing"):
        transport.disconnect(peer)
    assert transport.poll([transfer])[0].state is State.FAILING
    assert "(xpu) has ended the copies of a failed transfer" in caplog.text
    with pytest.raises(TransportError, match="bytes may still land"):
        transport.close()


def test_read_is_flushed_once_before_it_is_done(
    make: Make, library: StandInCuda, buffer: np.ndarray
) -> None:
    assert move(make(), make(), on_gpu(buffer)).state is State.DONE
    assert library.called("cuFlushGPUDirectRDMAWrites") == [1]
    assert (buffer[:8192] == 1).all()


def test_cpu_memory_is_not_flushed(make: Make, library: StandInCuda, buffer: np.ndarray) -> None:
    assert move(make(), make(), region_of(buffer)).state is State.DONE
    assert library.called("cuFlushGPUDirectRDMAWrites") == []


def test_ordered_memory_is_not_flushed(
    make: Make, library: StandInCuda, buffer: np.ndarray
) -> None:
    library.attributes[1, WRITES_ORDERING] = 100
    assert move(make(), make(), on_gpu(buffer)).state is State.DONE
    assert library.called("cuFlushGPUDirectRDMAWrites") == []


def test_read_fails_if_its_bytes_cannot_be_made_visible(
    make: Make, library: StandInCuda, buffer: np.ndarray
) -> None:
    library.attributes[1, FLUSH_OPTIONS] = 0
    status = move(make(), make(), on_gpu(buffer))
    assert status.state is State.FAILED
    assert "GPU 1 neither orders what a NIC writes" in str(status.error)


def test_memory_of_an_accelerator_that_is_not_there_is_refused(buffer: np.ndarray) -> None:
    transport = NixlTransport()
    try:
        with pytest.raises(TransportUnsupportedError, match=r"reaches .*cpu.* memory, not hpu"):
            transport.register(on_gpu(buffer, "hpu"))
    finally:
        transport.close()
