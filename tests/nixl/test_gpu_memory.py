"""The nixl driver and GPUs: when a transfer is FAILED, and when a read is DONE.

There is no GPU: regions of kind ``cuda`` are CPU memory, and a stand-in plays CUDA's driver API.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.core.errors import TransportError, TransportUnsupportedError
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import State, TransferId
from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.nixl import NixlTransport, agent
from kvferry.drivers.nixl import transport as module
from kvferry.testing.memory import Bytes
from kvferry.testing.peers import Process
from tests.drivers.pairs import MIB, Pair, closed_at_end, paired
from tests.gpu.driver_api import FLUSH_OPTIONS, NEVER, WRITES_ORDERING, StandInCuda
from tests.nixl.test_contract import FACTORY


class CudaTransport(NixlTransport):
    """A transport that gives up early."""

    grace_seconds = 0.5


Make = Callable[..., CudaTransport]
AsRegion = Callable[[Bytes], Region]


@pytest.fixture
def library() -> StandInCuda:
    return StandInCuda(attributes={(1, FLUSH_OPTIONS): 1})


@pytest.fixture
def make(library: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    cuda = CudaDriver(library)
    for kind in ("cuda", "xpu"):
        monkeypatch.setitem(agent.SEGMENTS, kind, "DRAM_SEG")
    monkeypatch.setattr(agent, "accelerators", lambda: frozenset({"cuda", "xpu"}))
    monkeypatch.setattr(module, "find_cuda", lambda: cuda)
    with closed_at_end(CudaTransport) as make_one:
        yield make_one
        library.idle_at.clear()


def on_gpu(array: Bytes, kind: str = "cuda") -> Region:
    """Return the memory of an array as a region of the second GPU."""
    return Region(address=array.ctypes.data, nbytes=array.nbytes, kind=kind, device=1)


def on_xpu(array: Bytes) -> Region:
    return on_gpu(array, "xpu")


FailedRead = tuple[Pair[CudaTransport, Process], TransferId]


def fail_read(transport: CudaTransport, local: AsRegion = on_gpu) -> FailedRead:
    """Read from a process that is killed meanwhile; the transfer is FAILING."""
    with Process(FACTORY, {}, "cpu", MIB) as process:
        pair = paired(transport, process, local=local)
        with process.killed_soon():
            transfer = pair.read(times=4096)
        assert pair.known(transfer).state is State.FAILING
    return pair, transfer


def expect_final(failed: FailedRead) -> None:
    """Disconnect, with time, after which the read is FAILED."""
    pair, transfer = failed
    pair.reader.grace_seconds = 60.0  # type: ignore[misc]
    pair.reader.disconnect(pair.peer)
    assert pair.status(transfer).state is State.FAILED


def test_failed_read_stays_failing_until_the_gpu_has_done_its_queue(
    make: Make, library: StandInCuda
) -> None:
    """However often the peer is disconnected meanwhile."""
    entered: list[int] = []
    made = make(enter=lambda: entered.append(threading.get_ident()))
    pair, transfer = failed = fail_read(made)
    library.idle_at[1] = NEVER
    for _ in range(3):
        with pytest.raises(TransportError, match="stay failing; disconnect again, later"):
            pair.reader.disconnect(pair.peer)
        assert pair.status(transfer).state is State.FAILING
    calls = [call for call in library.calls if call.name == "cuCtxSynchronize"]
    assert {call.device for call in calls} == {1}
    assert [call.thread for call in calls] == entered
    library.idle_at[1] = idle_at = time.monotonic() + 0.2
    expect_final(failed)
    assert time.monotonic() >= idle_at


def test_close_says_that_a_gpu_may_still_copy(make: Make, library: StandInCuda) -> None:
    transport = make()
    fail_read(transport)
    library.idle_at[1] = NEVER
    with pytest.raises(TransportError, match="bytes may still land"):
        transport.close()


def test_failed_read_into_cpu_memory_asks_no_gpu(make: Make, library: StandInCuda) -> None:
    failed = fail_read(make(), region_of)
    library.idle_at[1] = NEVER
    expect_final(failed)
    assert library.called("cuCtxSynchronize") == []


def test_failed_read_into_an_accelerator_without_cuda_stays_failing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    pair, transfer = fail_read(make(), on_xpu)
    with pytest.raises(TransportError, match="stay failing"):
        pair.reader.disconnect(pair.peer)
    assert pair.status(transfer).state is State.FAILING
    assert "(xpu) has ended the copies of a failed transfer" in caplog.text
    with pytest.raises(TransportError, match="bytes may still land"):
        pair.reader.close()


@pytest.mark.parametrize(
    ("local", "ordering", "flushed"),
    [(on_gpu, 0, [1]), (on_gpu, 100, []), (region_of, 0, [])],
    ids=["unordered", "ordered", "cpu"],
)
def test_unordered_gpu_memory_is_flushed_once_before_a_read_is_done(
    make: Make, library: StandInCuda, local: AsRegion, ordering: int, flushed: list[int]
) -> None:
    library.attributes[1, WRITES_ORDERING] = ordering
    pair = paired(make(), make(), local=local)
    assert pair.moved([(0, 0, 4096), (4096, 0, 4096)]).state is State.DONE
    assert library.called("cuFlushGPUDirectRDMAWrites") == flushed
    assert (pair.mine[4096:8192] == pair.theirs[:4096]).all()


def test_read_fails_if_its_bytes_cannot_be_made_visible(make: Make, library: StandInCuda) -> None:
    library.attributes[1, FLUSH_OPTIONS] = 0
    status = paired(make(), make(), local=on_gpu).moved()
    assert status.state is State.FAILED
    assert "GPU 1 neither orders what a NIC writes" in str(status.error)


def test_memory_of_an_accelerator_that_is_not_there_is_refused() -> None:
    with (
        closed_at_end(NixlTransport) as make_one,
        pytest.raises(TransportUnsupportedError, match=r"reaches .*cpu.* memory, not hpu"),
    ):
        make_one().register(Region(address=4096, nbytes=4096, kind="hpu", device=1))
