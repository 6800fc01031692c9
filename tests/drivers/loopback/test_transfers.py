"""Reads within one transport, within one process, and across processes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvferry.core.errors import (
    TransferCancelledError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.contract.copy_batches import batch
from tests.drivers.loopback.conftest import LocalPeer, MakeTransport
from tests.drivers.loopback.helpers import done, endless, run, wait
from tests.drivers.loopback.peer import Bytes, Peer, pattern

MIB = 1 << 20


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 25])
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_move_100_000_copies(
    make: MakeTransport, shared_peer: Peer, chunk_bytes: int, threads: int
) -> None:
    transport = make(chunk_bytes=chunk_bytes, threads=threads, inline_bytes=0)
    order = np.random.default_rng(2).permutation(100_000)
    target = np.zeros(10 * len(order), np.uint8)
    transport.register(region_of(target))
    peer = transport.connect(shared_peer.address())
    copies = batch(
        region_of(target), shared_peer.region, 10 * np.arange(len(order)), 10 * order,
        np.full(len(order), 9),
    )  # fmt: skip
    assert done(transport, transport.read(peer, copies))
    expected = shared_peer.content[: 10 * len(order)].reshape(-1, 10)[order]
    expected[:, 9] = 0
    np.testing.assert_array_equal(target.reshape(-1, 10), expected)


def test_copy_may_be_larger_than_a_chunk(make: MakeTransport, remote: LocalPeer | Peer) -> None:
    transport = make(chunk_bytes=4096, inline_bytes=1 << 30)
    target = np.zeros(MIB, np.uint8)
    transport.register(region_of(target))
    peer = transport.connect(remote.address())
    whole = batch(region_of(target), remote.region, [0], [0], [MIB])
    assert done(transport, transport.read(peer, whole))
    np.testing.assert_array_equal(target, remote.content)


def test_source_and_target_may_overlap_in_one_buffer(
    transport: LoopbackTransport, buffer: Bytes, local: Region
) -> None:
    buffer[:] = content = pattern(MIB, 3)
    peer = transport.connect(transport.address())
    assert done(transport, transport.read(peer, batch(local, local, [100], [0], [500_000])))
    np.testing.assert_array_equal(buffer[100:500_100], content[:500_000])


def start_endless_read(
    make: MakeTransport, remote: LocalPeer | Peer, notify: bytes | None = None
) -> tuple[LoopbackTransport, PeerId, TransferId, Region]:
    transport = make()
    target = np.zeros(MIB, np.uint8)
    region = region_of(target)
    transport.register(region)
    peer = transport.connect(remote.address())
    transfer = transport.read(peer, endless(region, remote.region), notify)
    assert transport.poll([transfer]) == [Status(state=State.PENDING)]
    # A region does not keep its memory alive, so an attribute of the transport does for the test.
    transport.kept = target  # type: ignore[attr-defined]
    return transport, peer, transfer, region


def wait_until_bytes_moved(transport: LoopbackTransport) -> None:
    """Wait until the transfer has moved some bytes."""
    deadline = time.monotonic() + 60.0
    while not transport.kept.any():  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, "nothing moves"
        time.sleep(0.0005)  # without it, this loop starves the driver's threads


def test_cancel_ends_transfer_that_has_not_begun(
    make: MakeTransport, remote: LocalPeer | Peer
) -> None:
    transport, peer, running, region = start_endless_read(make, remote)
    waiting = transport.read(peer, endless(region, remote.region))
    transport.cancel(waiting)
    (first, second) = transport.poll([running, waiting])
    assert first.state is State.PENDING
    assert second.state is State.FAILED
    transport.cancel(running)


def test_cancel_ends_running_transfer(make: MakeTransport, remote: LocalPeer | Peer) -> None:
    """A cancelled transfer fails although none of its copies failed."""
    transport, _, running, _ = start_endless_read(make, remote)
    wait_until_bytes_moved(transport)
    transport.cancel(running)
    status = wait(transport, running)
    assert status.state is State.FAILED
    assert isinstance(status.error, TransferCancelledError)


def test_small_transfers_do_not_wait_for_large_ones(
    make: MakeTransport, remote: LocalPeer | Peer
) -> None:
    transport, peer, large, region = start_endless_read(make, remote)
    small = transport.read(peer, batch(region, remote.region, [0], [0], [8]))
    assert transport.poll([small, large]) == [
        Status(state=State.DONE),
        Status(state=State.PENDING),
    ]
    transport.cancel(large)


def test_unknown_ids_are_refused(transport: LoopbackTransport, local: Region) -> None:
    peer = transport.connect(transport.address())
    transfer = transport.read(peer, batch(local, local, [0], [8], [8]))
    transport.forget(transfer)
    for call in (transport.forget, transport.cancel):
        with pytest.raises(TransportUsageError, match="no transfer"):
            call(transfer)
    with pytest.raises(TransportUsageError, match="no transfer"):
        transport.poll([transfer])
    with pytest.raises(TransportUsageError, match="no peer"):
        transport.notify(PeerId(peer + 1), b"x")


@pytest.mark.parametrize("side", ["local", "remote"])
def test_copy_outside_its_region_is_refused_and_moves_nothing(
    transport: LoopbackTransport,
    buffer: Bytes,
    local: Region,
    remote: LocalPeer | Peer,
    side: str,
) -> None:
    peer = transport.connect(remote.address())
    offset = MIB - 4
    here, there = ([0, offset], [0, 0]) if side == "local" else ([0, 0], [0, offset])
    copies = batch(local, remote.region, here, there, [8, 8])
    with pytest.raises(TransportUsageError, match=f"copy 1 leaves its {side} region"):
        transport.read(peer, copies)
    assert not buffer.any()
    assert (remote.get() == remote.content).all()


@pytest.mark.parametrize("nbytes", [MIB - 1, MIB + 4096])
def test_unregistered_regions_are_refused(
    transport: LoopbackTransport, local: Region, remote: LocalPeer | Peer, nbytes: int
) -> None:
    peer = transport.connect(remote.address())
    no_local = Region(address=local.address, nbytes=nbytes)
    no_remote = Region(address=remote.region.address, nbytes=nbytes)
    with pytest.raises(TransportUsageError, match="is not registered"):
        transport.read(peer, batch(no_local, remote.region, [0], [0], [8]))
    with pytest.raises(TransportUsageError, match=r"is not among the [12] regions"):
        transport.read(peer, batch(local, no_remote, [0], [0], [8]))


def test_unexpected_exception_in_thread_fails_the_transfer(
    make: MakeTransport, shared_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = make(inline_bytes=0)
    target = np.zeros(MIB, np.uint8)
    transport.register(region_of(target))
    peer = transport.connect(shared_peer.address())
    copies = batch(region_of(target), shared_peer.region, [0], [0], [MIB])
    with monkeypatch.context() as patched:
        patched.setattr("kvferry.drivers.loopback.peer_memory.vm_read", lambda *_, **__: 1 / 0)
        status = run(transport, transport.read(peer, copies))
    assert status.state is State.FAILED
    assert isinstance(status.error, TransportError)
    assert done(transport, transport.read(peer, copies))
