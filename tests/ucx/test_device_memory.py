"""Transfers of GPU memory, on stand-ins: CPU memory that the driver takes for a GPU's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.core.errors import PeerLostError, TransportError, TransportUnsupportedError
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import State
from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.ucx import UcxTransport, library, transport, ucp
from kvferry.drivers.ucx import transfer as transfer_module
from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.ucp import Endpoint, RemoteKey, Ucp
from kvferry.testing.memory import Bytes
from kvferry.testing.peers import Process
from tests.drivers.pairs import MIB, Pair, closed_at_end, paired, until, until_accepted
from tests.gpu.driver_api import FLUSH_OPTIONS, NEVER, WRITES_ORDERING, StandInCuda
from tests.ucx.test_transport import FACTORY, PATIENT, TCP, Make

DEVICE = 1

AsRegion = Callable[[Bytes], Region]
UcxPair = Pair[UcxTransport, UcxTransport]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    """GPUs in whose place UCX registers and moves CPU memory."""
    stand_in = StandInCuda()
    cuda = CudaDriver(stand_in)
    monkeypatch.setitem(structs.MEMORY, "cuda", structs.MEMORY["cpu"])
    monkeypatch.setattr(transport, "find_cuda", lambda: cuda)
    return stand_in


@pytest.fixture
def make(gpus: StandInCuda) -> Iterator[Make]:
    with closed_at_end(lambda **options: UcxTransport(**PATIENT | options)) as make_one:
        yield make_one
        gpus.idle_at.clear()


def on_gpu(array: Bytes) -> Region:
    """Return the region of memory that stands for a GPU's."""
    return Region(address=array.ctypes.data, nbytes=array.nbytes, kind="cuda", device=DEVICE)


def gpu_pair(make: Make, nbytes: int = MIB) -> UcxPair:
    return paired(make(), make(), nbytes, on_gpu, on_gpu)


# Whether a connection reaches the memory.


def test_cuda_memory_is_a_capability_only_if_cuda_and_ucx_can_be_used_for_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert make().capabilities.memory == {"cpu", "cuda"}
    with monkeypatch.context() as absent:
        absent.setattr(transport, "find_cuda", lambda: None)
        assert make().capabilities.memory == {"cpu"}
    monkeypatch.setattr(library, "LOWEST_FOR_CUDA", (1, 99, 0))
    assert make().capabilities.memory == {"cpu"}
    assert "install 1.99.0 or later" in caplog.text


def expect_advice(found: UcxPair, nbytes: int) -> str:
    """Read in vain, and return the error, which says what to look at."""
    status = found.moved([(0, 0, nbytes)])
    assert status.state is State.FAILED
    assert isinstance(status.error, TransportUnsupportedError)
    assert "nvidia_peermem" in str(status.error)
    return str(status.error)


@pytest.mark.parametrize(
    ("local", "remote"),
    [(on_gpu, on_gpu), (on_gpu, region_of), (region_of, on_gpu)],
    ids=["both", "local", "remote"],
)
def test_device_memory_that_no_transport_reaches_fails_with_what_to_look_at(
    make: Make, local: AsRegion, remote: AsRegion
) -> None:
    found = paired(make(**TCP), make(**TCP), 4 * MIB, local, remote)
    for nbytes in (8, 8192, 4 * MIB):
        said = expect_advice(found, nbytes)
        for hint in ("over tcp", "dmabuf", "cuda_ipc", "UCX_PROTO_INFO=y"):
            assert hint in said
        assert "driver_options: transports" in said
    assert not found.mine.any()
    # The connection stays usable.
    again = paired(found.reader, found.other)
    assert again.peer == found.peer
    assert again.works()


def test_key_to_device_memory_that_ucx_refuses_says_what_to_look_at(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX says that the memory is unreachable; the peer is not lost."""

    def refuse(self: Ucp, endpoint: Endpoint, packed: bytes) -> RemoteKey:
        raise ucp.error(structs.Code.UNREACHABLE, "cannot reach the peer's memory")

    monkeypatch.setattr(Ucp, "unpack_key", refuse)
    assert "UCX says unreachable, -6" in expect_advice(gpu_pair(make), MIB)


# When a failed transfer is FAILED.


def test_failed_read_is_failed_when_the_gpu_has_emptied_its_queue(
    make: Make, gpus: StandInCuda
) -> None:
    entered: set[int] = set()
    one = make(enter=lambda: entered.add(threading.get_ident()))
    gpus.idle_at[DEVICE] = NEVER
    with Process(FACTORY, PATIENT, "cpu", MIB) as process:
        pair = paired(one, process, local=on_gpu)
        transfer = pair.lasting()
        process.kill()
        assert until(lambda: gpus.called("cuCtxSynchronize"))
    assert gpus.called("cuCtxSynchronize") == [DEVICE]
    [waiting] = [call.thread for call in gpus.calls if call.name == "cuCtxSynchronize"]
    assert waiting in entered
    for _ in range(20):
        status = pair.status(transfer)
        assert status.state is State.FAILING
        assert isinstance(status.error, PeerLostError)
        time.sleep(0.005)
    assert one._client._connections, "the copies in the queue use what the connection has mapped"
    gpus.idle_at.clear()
    assert pair.comes_to(transfer, State.FAILED)
    assert until(lambda: one.poll([]) == [] and not one._client._connections)
    assert gpus.called("cuCtxSynchronize") == [DEVICE]


def test_a_gpu_that_never_becomes_idle_keeps_a_read_failing(
    make: Make, gpus: StandInCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_END_SECONDS", 0.2)
    monkeypatch.setattr(transport, "_BREAK_SECONDS", 0.2)
    found = gpu_pair(make)
    gpus.idle_at[DEVICE] = NEVER
    transfer = found.lasting()
    found.reader.cancel(transfer)
    for _ in range(2):
        with pytest.raises(TransportError, match="disconnect again, later"):
            found.reader.disconnect(found.peer)
        assert found.status(transfer).state is State.FAILING
    gpus.idle_at.clear()
    until_accepted(lambda: found.reader.disconnect(found.peer))
    assert found.status(transfer).state is State.FAILED


def test_a_peer_waits_for_copies_in_the_queue_before_it_gives_up_memory(
    make: Make, gpus: StandInCuda
) -> None:
    """The copies would read memory that is no longer there."""
    found = gpu_pair(make)
    gpus.idle_at[DEVICE] = time.monotonic() + 1.0
    found.lasting()
    found.other.deregister(found.remote)
    assert time.monotonic() >= gpus.idle_at[DEVICE]


def test_cancelled_transfer_of_cpu_memory_does_not_wait_for_a_gpu(
    make: Make, gpus: StandInCuda
) -> None:
    found = paired(make(), make())
    gpus.idle_at[DEVICE] = NEVER
    transfer = found.lasting()
    found.reader.cancel(transfer)
    assert found.comes_to(transfer, State.FAILED)
    assert not gpus.calls


# When a read is DONE.


@pytest.fixture
def nic_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the transports of this machine for those of a NIC."""
    monkeypatch.setattr(transfer_module, "WITHOUT_NIC", frozenset())


@pytest.mark.usefixtures("nic_writes")
@pytest.mark.parametrize("ordered", [False, True])
def test_memory_is_flushed_before_a_read_is_done_unless_the_gpu_orders_writes(
    make: Make, gpus: StandInCuda, ordered: bool
) -> None:
    gpus.attributes = {(DEVICE, FLUSH_OPTIONS): 1, (DEVICE, WRITES_ORDERING): 100 * ordered}
    assert gpu_pair(make).works()
    assert gpus.called("cuFlushGPUDirectRDMAWrites") == ([] if ordered else [DEVICE])


def test_a_read_is_failed_whose_bytes_from_a_nic_cannot_be_made_visible(
    make: Make, gpus: StandInCuda, request: pytest.FixtureRequest
) -> None:
    """A GPU that cannot flush is no obstacle where a GPU or a core copies the bytes."""
    assert gpu_pair(make).works()
    assert not gpus.calls
    request.getfixturevalue("nic_writes")
    found = gpu_pair(make)
    status = found.moved(notify=b"arrived")
    assert status.state is State.FAILED
    assert "GPU 1 neither orders what a NIC writes" in str(status.error)
    assert found.other.notifications() == []
    assert not gpus.called("cuFlushGPUDirectRDMAWrites")
