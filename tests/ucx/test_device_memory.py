"""Transfers of GPU memory, on stand-ins: CPU memory that the driver takes for a GPU's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.core.errors import PeerLostError, TransportError, TransportUnsupportedError
from kvferry.core.memory import Region, U64Array, region_of
from kvferry.core.transport import PeerId, State, Status
from kvferry.core.transport.copies import copies_between
from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.ucx import UcxTransport, client, device_memory, library, transport, ucp
from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.posting import PostedRuns
from kvferry.drivers.ucx.ucp import Endpoint, RemoteKey, Ucp
from kvferry.testing.peers import Process
from tests.drivers.ucx.helpers import MIB, again_and_again, at_last, ended, until
from tests.gpu.driver_api import StandInCuda

FACTORY = "kvferry.drivers.ucx:UcxTransport"
PATIENT: dict[str, Any] = {"connect_seconds": 60.0}
TCP: dict[str, Any] = {**PATIENT, "transports": ["tcp"]}

DEVICE = 1
WRITES_ORDERING, FLUSH_OPTIONS = 118, 117
NEVER = 1e9
"""Seconds after which a GPU's queue is empty, for a queue that lasts longer than any test."""

Make = Callable[..., UcxTransport]


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
    made: list[UcxTransport] = []

    def make_one(**options: Any) -> UcxTransport:
        made.append(UcxTransport(**PATIENT | options))
        return made[-1]

    yield make_one
    gpus.idle_at.clear()
    for one in made:
        one.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two connected transports, each with registered memory.

    Attributes:
        reader: the transport that reads.
        other: the transport that is read.
        peer: the other transport, as the reader knows it.
        mine: the reader's memory, registered as ``local``.
        theirs: the other's memory, registered as ``remote``.
    """

    reader: UcxTransport
    other: UcxTransport
    peer: PeerId
    mine: npt.NDArray[np.uint8]
    theirs: npt.NDArray[np.uint8]
    local: Region
    remote: Region

    def moved(self, nbytes: int = MIB, notify: bytes | None = None) -> Status:
        """Read bytes, and return the final status."""
        row = (self.local.address, self.remote.address, nbytes)
        copies = copies_between([row], local=self.local, remote=self.remote)
        transfer = self.reader.read(self.peer, copies, notify)
        assert until(lambda: self.reader.poll([transfer])[0].state.final)
        return self.reader.poll([transfer])[0]


def on_gpu(array: npt.NDArray[np.uint8], device: int = DEVICE) -> Region:
    """Return the region of memory that stands for a GPU's."""
    return Region(address=array.ctypes.data, nbytes=array.nbytes, kind="cuda", device=device)


def pair(
    make: Make,
    nbytes: int = MIB,
    local: Callable[..., Region] = on_gpu,
    remote: Callable[..., Region] = on_gpu,
    options: Mapping[str, object] = PATIENT,
) -> Pair:
    mine = np.zeros(nbytes, np.uint8)
    theirs = np.random.default_rng(7).integers(1, 255, nbytes, np.uint8)
    reader, other = make(**options), make(**options)
    reader.register(local(mine))
    other.register(remote(theirs))
    return Pair(
        reader=reader,
        other=other,
        peer=reader.connect(other.address()),
        mine=mine,
        theirs=theirs,
        local=local(mine),
        remote=remote(theirs),
    )


# Whether a connection reaches the memory.


def test_cuda_memory_is_a_capability_only_if_cudas_driver_can_be_called(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make().capabilities.memory == {"cpu", "cuda"}
    monkeypatch.setattr(transport, "find_cuda", lambda: None)
    assert make().capabilities.memory == {"cpu"}


def test_cuda_memory_is_no_capability_of_a_ucx_that_may_crash_with_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "LOWEST_FOR_CUDA", (1, 99, 0))
    assert make().capabilities.memory == {"cpu"}
    assert "install 1.99.0 or later" in caplog.text


def test_first_read_of_device_memory_finds_a_way(make: Make) -> None:
    found = pair(make, 4 * MIB)
    assert found.moved(nbytes=4 * MIB).state is State.DONE
    np.testing.assert_array_equal(found.mine, found.theirs)


@pytest.mark.parametrize("nbytes", [8, 8192, 4 * MIB])
@pytest.mark.parametrize(
    ("local", "remote"),
    [(on_gpu, on_gpu), (on_gpu, region_of), (region_of, on_gpu)],
    ids=["both", "local", "remote"],
)
def test_device_memory_that_no_transport_reaches_fails_with_what_to_look_at(
    make: Make,
    nbytes: int,
    local: Callable[..., Region],
    remote: Callable[..., Region],
) -> None:
    found = pair(make, 4 * MIB, local, remote, TCP)
    status = found.moved(nbytes)
    assert status.state is State.FAILED
    assert isinstance(status.error, TransportUnsupportedError)
    for hint in ("over tcp", "nvidia_peermem", "dmabuf", "cuda_ipc", "UCX_PROTO_INFO=y"):
        assert hint in str(status.error)
    assert "driver_options: transports" in str(status.error)
    assert not found.mine.any()
    assert found.theirs.all()


def test_large_read_fails_with_what_to_look_at_after_a_small_one_has_worked(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX has other protocols for large reads, and may have none."""
    found = pair(make, 4 * MIB)
    poster = found.reader._poster
    post = poster.post

    def unserved_if_large(endpoint: Endpoint, batch: PostedRuns) -> U64Array:
        if batch.nbytes.max() < MIB:
            return post(endpoint, batch)
        return np.full(len(batch.nbytes), (1 << 64) + structs.Code.CANCELED, np.uint64)

    monkeypatch.setattr(poster, "post", unserved_if_large)
    assert found.moved(nbytes=8192).state is State.DONE
    status = found.moved(nbytes=4 * MIB)
    assert status.state is State.FAILED
    assert isinstance(status.error, TransportUnsupportedError)
    assert "nvidia_peermem" in str(status.error)
    assert found.moved(nbytes=8192).state is State.DONE


def test_key_to_device_memory_that_ucx_refuses_says_what_to_look_at(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX says that the memory is unreachable; the peer is not lost."""

    def refuse(self: Ucp, endpoint: Endpoint, packed: bytes) -> RemoteKey:
        raise ucp.error(structs.Code.UNREACHABLE, "cannot reach the peer's memory")

    monkeypatch.setattr(Ucp, "unpack_key", refuse)
    status = pair(make).moved()
    assert status.state is State.FAILED
    assert isinstance(status.error, TransportUnsupportedError)
    assert "UCX says unreachable, -6" in str(status.error)
    assert "nvidia_peermem" in str(status.error)


def test_connection_stays_usable_after_a_read_that_no_transport_serves(make: Make) -> None:
    found = pair(make, options=TCP)
    assert isinstance(found.moved().error, TransportUnsupportedError)
    mine, theirs = np.zeros(MIB, np.uint8), np.full(MIB, 5, np.uint8)
    found.reader.register(region_of(mine))
    found.other.register(region_of(theirs))
    assert found.reader.connect(found.other.address()) == found.peer
    copies = again_and_again(region_of(mine), region_of(theirs), 1)
    transfer = found.reader.read(found.peer, copies)
    assert until(ended(found.reader, transfer, State.DONE))
    assert (mine == 5).all()


# When a failed transfer is FAILED.


def test_failed_read_is_failed_when_the_gpu_has_emptied_its_queue(
    make: Make, gpus: StandInCuda
) -> None:
    entered: set[int] = set()
    one = make(enter=lambda: entered.add(threading.get_ident()))
    buffer = np.zeros(MIB, np.uint8)
    local = on_gpu(buffer)
    one.register(local)
    gpus.idle_at[DEVICE] = NEVER
    with Process(FACTORY, PATIENT, "cpu", MIB) as process:
        peer = one.connect(process.address())
        transfer = one.read(peer, again_and_again(local, process.region, 1 << 17))
        process.kill()
        assert until(lambda: gpus.called("cuCtxSynchronize"))
    assert gpus.called("cuCtxSynchronize") == [DEVICE]
    [waiting] = [call.thread for call in gpus.calls if call.name == "cuCtxSynchronize"]
    assert waiting in entered
    for _ in range(20):
        status = one.poll([transfer])[0]
        assert status.state is State.FAILING
        assert isinstance(status.error, PeerLostError)
        time.sleep(0.005)
    assert one._client._connections, "the copies in the queue use what the connection has mapped"
    gpus.idle_at.clear()
    assert until(ended(one, transfer, State.FAILED))
    assert until(lambda: one.poll([]) == [] and not one._client._connections)
    assert gpus.called("cuCtxSynchronize") == [DEVICE]


def test_a_gpu_that_never_becomes_idle_keeps_a_read_failing(
    make: Make, gpus: StandInCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_END_SECONDS", 0.5)
    monkeypatch.setattr(transport, "_BREAK_SECONDS", 0.5)
    found = pair(make)
    gpus.idle_at[DEVICE] = NEVER
    transfer = found.reader.read(found.peer, again_and_again(found.local, found.remote, 1 << 17))
    found.reader.cancel(transfer)
    for _ in range(2):
        with pytest.raises(TransportError, match="disconnect again, later"):
            found.reader.disconnect(found.peer)
        assert found.reader.poll([transfer])[0].state is State.FAILING
    gpus.idle_at.clear()
    at_last(lambda: found.reader.disconnect(found.peer))
    assert found.reader.poll([transfer])[0].state is State.FAILED


def test_a_peer_waits_for_copies_in_the_queue_before_it_gives_up_memory(
    make: Make, gpus: StandInCuda
) -> None:
    """The copies would read memory that is no longer there."""
    found = pair(make)
    gpus.idle_at[DEVICE] = time.monotonic() + 1.0
    found.reader.read(found.peer, again_and_again(found.local, found.remote, 1 << 17))
    found.other.deregister(found.remote)
    assert time.monotonic() >= gpus.idle_at[DEVICE]


def test_cancelled_transfer_of_cpu_memory_does_not_wait_for_a_gpu(
    make: Make, gpus: StandInCuda
) -> None:
    found = pair(make, local=region_of, remote=region_of)
    gpus.idle_at[DEVICE] = NEVER
    copies = again_and_again(found.local, found.remote, 1 << 17)
    transfer = found.reader.read(found.peer, copies)
    found.reader.cancel(transfer)
    assert until(ended(found.reader, transfer, State.FAILED))
    assert not gpus.calls


# When a read is DONE.


@pytest.fixture
def nic_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the transports of this machine for those of a NIC."""
    monkeypatch.setattr(device_memory, "WITHOUT_NIC", frozenset())


@pytest.mark.usefixtures("nic_writes")
@pytest.mark.parametrize("ordered", [False, True])
def test_memory_is_flushed_before_a_read_is_done_unless_the_gpu_orders_writes(
    make: Make, gpus: StandInCuda, ordered: bool
) -> None:
    gpus.attributes = {(DEVICE, FLUSH_OPTIONS): 1, (DEVICE, WRITES_ORDERING): 100 * ordered}
    found = pair(make)
    assert found.moved().state is State.DONE
    np.testing.assert_array_equal(found.mine, found.theirs)
    assert gpus.called("cuFlushGPUDirectRDMAWrites") == ([] if ordered else [DEVICE])


@pytest.mark.usefixtures("nic_writes")
def test_a_read_whose_bytes_cannot_be_made_visible_is_failed(make: Make, gpus: StandInCuda) -> None:
    found = pair(make)
    status = found.moved(notify=b"arrived")
    assert status.state is State.FAILED
    assert "GPU 1 neither orders what a NIC writes" in str(status.error)
    assert found.other.notifications() == []
    assert not gpus.called("cuFlushGPUDirectRDMAWrites")


def test_memory_that_no_nic_has_written_is_not_flushed(make: Make, gpus: StandInCuda) -> None:
    """A GPU that cannot flush is no obstacle where a GPU or a core copies the bytes."""
    assert pair(make).moved().state is State.DONE
    assert not gpus.calls


# Windows.


@pytest.mark.parametrize(
    ("kind", "nbytes", "piece", "expected"),
    [
        (on_gpu, 20 * MIB, 2048, [8192, 2048]),
        (region_of, 20 * MIB, 2048, [2048] * 5),
        # Adjacent pieces become runs of 16 MiB.
        (on_gpu, 80 * MIB, 80 * MIB, [4, 1]),
        (region_of, 80 * MIB, 80 * MIB, [1] * 5),
    ],
)
def test_windows_of_device_memory_have_more_runs_and_bytes(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[..., Region],
    nbytes: int,
    piece: int,
    expected: list[int],
) -> None:
    monkeypatch.setattr(client, "available_cores", lambda: 1)
    found = pair(make, nbytes, kind, kind)
    poster, counts = found.reader._poster, list[int]()
    post = poster.post

    def counted(endpoint: Endpoint, batch: PostedRuns) -> U64Array:
        counts.append(len(batch.local))
        return post(endpoint, batch)

    monkeypatch.setattr(poster, "post", counted)
    # In reverse order, so that only the bytes within a piece are adjacent on both sides.
    last = nbytes // piece - 1
    rows = [
        (found.local.address + piece * i, found.remote.address + piece * (last - i), piece)
        for i in range(last + 1)
    ]
    copies = copies_between(rows, local=found.local, remote=found.remote)
    transfer = found.reader.read(found.peer, copies)
    assert until(ended(found.reader, transfer, State.DONE))
    assert counts == expected
    moved = found.mine.reshape(-1, piece)[::-1]
    np.testing.assert_array_equal(moved, found.theirs.reshape(-1, piece))
