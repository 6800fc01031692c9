"""Reads and writes: within one transport, between two of this process, and across processes."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.core.copies import Copies, Segment
from kvferry.core.errors import (
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.drivers.loopback import LoopbackTransport
from tests.drivers.loopback.conftest import MakeTransport, Neighbour
from tests.drivers.loopback.helpers import batch, done, endless, run, wait
from tests.drivers.loopback.peer import Bytes, Peer, pattern

MIB = 1 << 20


def test_reads_scattered_unaligned_copies_of_every_size(
    transport: LoopbackTransport, buffer: Bytes, local: Region, remote: Neighbour | Peer
) -> None:
    sizes = np.array([1, 0, 7, 4095, 4096, 4097, 100_000, 1])
    there = np.array([0, 5, MIB - 7, 3, 8191, 12_289, 500_001, MIB - 1])
    here = np.array([MIB - 1, 0, 11, 1001, 8000, 20_000, 300_003, 0])
    peer = transport.connect(remote.address())
    assert done(transport, transport.read(peer, batch(local, remote.region, here, there, sizes)))
    expected = np.zeros(MIB, np.uint8)
    for to, start, size in zip(here, there, sizes, strict=True):
        expected[to : to + size] = remote.content[start : start + size]
    np.testing.assert_array_equal(buffer, expected)


def test_writes(
    transport: LoopbackTransport, buffer: Bytes, local: Region, remote: Neighbour | Peer
) -> None:
    buffer[:] = pattern(MIB, 9)
    peer = transport.connect(remote.address())
    copies = batch(local, remote.region, [0, 4097], [70_001, 1], [65_537, 4096])
    assert done(transport, transport.write(peer, copies))
    assert remote.bytes_at(70_001, 65_537) == buffer[:65_537].tobytes()
    assert remote.bytes_at(1, 4096) == buffer[4097 : 4097 + 4096].tobytes()
    assert remote.bytes_at(0, 1) == remote.content[:1].tobytes()


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 25])
@pytest.mark.parametrize("threads", [1, 3])
def test_moves_100_000_copies_on_threads(
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


def test_one_copy_may_be_larger_than_a_chunk(make: MakeTransport, remote: Neighbour | Peer) -> None:
    transport = make(chunk_bytes=4096, inline_bytes=1 << 30)
    target = np.zeros(MIB, np.uint8)
    transport.register(region_of(target))
    peer = transport.connect(remote.address())
    whole = batch(region_of(target), remote.region, [0], [0], [MIB])
    assert done(transport, transport.read(peer, whole))
    np.testing.assert_array_equal(target, remote.content)


def test_overlapping_sources(
    transport: LoopbackTransport, buffer: Bytes, local: Region, remote: Neighbour | Peer
) -> None:
    peer = transport.connect(remote.address())
    copies = batch(local, remote.region, [0, 1000, 2000], [5, 7, 5], [1000, 1000, 1000])
    assert done(transport, transport.read(peer, copies))
    for to, start in ((0, 5), (1000, 7), (2000, 5)):
        np.testing.assert_array_equal(buffer[to : to + 1000], remote.content[start : start + 1000])


def test_overlapping_source_and_target_within_one_buffer(
    transport: LoopbackTransport, buffer: Bytes, local: Region
) -> None:
    buffer[:] = content = pattern(MIB, 3)
    peer = transport.connect(transport.address())
    assert done(transport, transport.read(peer, batch(local, local, [100], [0], [500_000])))
    np.testing.assert_array_equal(buffer[100:500_100], content[:500_000])


def test_several_regions_in_one_transfer(
    transport: LoopbackTransport, remote: Neighbour | Peer
) -> None:
    targets = [np.zeros(100, np.uint8) for _ in range(50)]
    peer = transport.connect(remote.address())
    segments = []
    for index, target in enumerate(targets):
        transport.register(region_of(target))
        segments.append(
            Segment(start=index, stop=index + 1, local=region_of(target), remote=remote.region)
        )
    starts = np.arange(50, dtype=np.uint64) * np.uint64(1000)
    copies = Copies(
        local=np.array([target.ctypes.data for target in targets], np.uint64),
        remote=starts + np.uint64(remote.region.address),
        nbytes=np.full(50, 100, np.uint64),
        segments=tuple(segments),
    )
    assert done(transport, transport.read(peer, copies))
    for start, target in zip(starts, targets, strict=True):
        np.testing.assert_array_equal(target, remote.content[int(start) : int(start) + 100])


def test_copies_of_no_bytes_are_done(
    transport: LoopbackTransport, local: Region, remote: Neighbour | Peer
) -> None:
    peer = transport.connect(remote.address())
    none = Copies(
        local=np.empty(0, np.uint64),
        remote=np.empty(0, np.uint64),
        nbytes=np.empty(0, np.uint64),
        segments=(),
    )
    empty = batch(local, remote.region, np.zeros(5000), np.zeros(5000), np.zeros(5000))
    assert done(transport, transport.read(peer, none))
    assert done(transport, transport.write(peer, empty))


def test_the_callers_arrays_are_free_after_the_call(make: MakeTransport, shared_peer: Peer) -> None:
    transport = make(inline_bytes=0)
    target = np.zeros(MIB, np.uint8)
    transport.register(region_of(target))
    peer = transport.connect(shared_peer.address())
    starts = np.arange(0, MIB, 4096)
    copies = batch(region_of(target), shared_peer.region, starts, starts[::-1], np.full(256, 4096))
    transfer = transport.read(peer, copies)
    copies.local[:] = copies.remote[:] = copies.nbytes[:] = 0
    assert done(transport, transfer)
    np.testing.assert_array_equal(
        target.reshape(-1, 4096), shared_peer.content.reshape(-1, 4096)[::-1]
    )


def test_many_transfers_at_once(make: MakeTransport, shared_peer: Peer) -> None:
    transport = make(inline_bytes=0)
    target = np.zeros(MIB, np.uint8)
    transport.register(region_of(target))
    peer = transport.connect(shared_peer.address())
    transfers = [
        transport.read(peer, batch(region_of(target), shared_peer.region, [start], [start], [4096]))
        for start in range(0, MIB, 4096)
    ]
    assert all(done(transport, transfer) for transfer in transfers)
    np.testing.assert_array_equal(target, shared_peer.content)


def in_flight(
    make: MakeTransport, remote: Neighbour | Peer, notify: bytes | None = None
) -> tuple[LoopbackTransport, PeerId, TransferId, Region]:
    transport = make()
    target = np.zeros(MIB, np.uint8)
    region = region_of(target)
    transport.register(region)
    peer = transport.connect(remote.address())
    transfer = transport.read(peer, endless(region, remote.region), notify)
    assert transport.poll([transfer]) == [Status(state=State.PENDING)]
    # The region keeps no memory alive; the transport's attribute does, for this test.
    transport.kept = target  # type: ignore[attr-defined]
    return transport, peer, transfer, region


def test_cancel_ends_a_transfer_that_runs(make: MakeTransport, remote: Neighbour | Peer) -> None:
    transport, peer, transfer, region = in_flight(make, remote)
    transport.cancel(transfer)
    (status,) = transport.poll([transfer])
    assert status.state in (State.DOOMED, State.FAILED)
    assert isinstance(status.error, TransferCancelledError)
    status = wait(transport, transfer)
    assert status.state is State.FAILED
    assert isinstance(status.error, TransferCancelledError)
    transport.cancel(transfer)
    # And the transport goes on.
    assert done(transport, transport.read(peer, batch(region, remote.region, [0], [0], [MIB])))


def test_cancel_ends_one_that_has_not_begun(make: MakeTransport, remote: Neighbour | Peer) -> None:
    transport, peer, running, region = in_flight(make, remote)
    waiting = transport.read(peer, endless(region, remote.region))
    transport.cancel(waiting)
    (first, second) = transport.poll([running, waiting])
    assert first.state is State.PENDING
    assert second.state is State.FAILED
    transport.cancel(running)


def test_small_transfers_do_not_wait_for_large_ones(
    make: MakeTransport, remote: Neighbour | Peer
) -> None:
    transport, peer, large, region = in_flight(make, remote)
    small = transport.read(peer, batch(region, remote.region, [0], [0], [8]))
    assert transport.poll([small, large]) == [
        Status(state=State.DONE),
        Status(state=State.PENDING),
    ]
    transport.cancel(large)


def test_disconnect_fails_what_runs_and_what_waits(
    make: MakeTransport, remote: Neighbour | Peer
) -> None:
    transport, peer, running, region = in_flight(make, remote)
    waiting = transport.read(peer, endless(region, remote.region))
    transport.disconnect(peer)
    for status in transport.poll([running, waiting]):
        assert status.state is State.FAILED
        assert isinstance(status.error, PeerLostError)
    with pytest.raises(TransportUsageError, match="no peer"):
        transport.read(peer, endless(region, remote.region))
    with pytest.raises(TransportUsageError, match="no peer"):
        transport.disconnect(peer)


def test_disconnect_leaves_other_peers_alone(make: MakeTransport, shared_peer: Peer) -> None:
    neighbour = Neighbour(make())
    transport, peer, transfer, region = in_flight(make, shared_peer)
    other = transport.connect(neighbour.address())
    waiting = transport.read(other, batch(region, neighbour.region, [0], [0], [MIB]))
    transport.disconnect(peer)
    assert transport.poll([transfer])[0].state is State.FAILED
    assert done(transport, waiting)


def test_nothing_changes_after_a_final_state(make: MakeTransport, remote: Neighbour | Peer) -> None:
    transport, _, transfer, _ = in_flight(make, remote)
    transport.cancel(transfer)
    wait(transport, transfer)
    target: Bytes = transport.kept  # type: ignore[attr-defined]
    target[:] = 0
    thread_had_time = transport.connect(transport.address())
    transport.disconnect(thread_had_time)
    assert not target.any()


def test_ids_are_refused_when_they_mean_nothing(
    transport: LoopbackTransport, local: Region
) -> None:
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


def test_only_final_transfers_can_be_forgotten(
    make: MakeTransport, remote: Neighbour | Peer
) -> None:
    transport, _, transfer, _ = in_flight(make, remote)
    with pytest.raises(TransportUsageError, match="not final"):
        transport.forget(transfer)
    transport.cancel(transfer)


@pytest.mark.parametrize("side", ["local", "remote"])
def test_refuses_a_range_outside_its_region_and_moves_nothing(
    transport: LoopbackTransport,
    buffer: Bytes,
    local: Region,
    remote: Neighbour | Peer,
    side: str,
) -> None:
    peer = transport.connect(remote.address())
    offset = MIB - 4
    here, there = ([0, offset], [0, 0]) if side == "local" else ([0, 0], [0, offset])
    copies = batch(local, remote.region, here, there, [8, 8])
    for start in (transport.read, transport.write):
        with pytest.raises(TransportUsageError, match=f"copy 1 leaves its {side} region"):
            start(peer, copies)
    assert not buffer.any()
    assert remote.bytes_at(0, 8) == remote.content[:8].tobytes()


@pytest.mark.parametrize("nbytes", [MIB - 1, MIB + 4096])
def test_refuses_regions_that_were_never_registered(
    transport: LoopbackTransport, local: Region, remote: Neighbour | Peer, nbytes: int
) -> None:
    peer = transport.connect(remote.address())
    no_local = Region(address=local.address, nbytes=nbytes)
    no_remote = Region(address=remote.region.address, nbytes=nbytes)
    with pytest.raises(TransportUsageError, match="is not registered"):
        transport.read(peer, batch(no_local, remote.region, [0], [0], [8]))
    with pytest.raises(TransportUsageError, match=r"is not among the [12] regions"):
        transport.read(peer, batch(local, no_remote, [0], [0], [8]))


def test_a_bound_notification_is_refused_with_the_transfer(
    transport: LoopbackTransport, buffer: Bytes, local: Region, remote: Neighbour | Peer
) -> None:
    peer = transport.connect(remote.address())
    copies = batch(local, remote.region, [0], [0], [8])
    for bad in (b"", bytes(transport.capabilities.max_notification + 1)):
        with pytest.raises(TransportUsageError, match="a notification is"):
            transport.read(peer, copies, bad)
    assert not buffer.any()


def test_a_bug_in_a_thread_is_a_failed_transfer(
    make: MakeTransport, shared_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = make(inline_bytes=0)
    target = np.zeros(MIB, np.uint8)
    transport.register(region_of(target))
    peer = transport.connect(shared_peer.address())
    copies = batch(region_of(target), shared_peer.region, [0], [0], [MIB])
    with monkeypatch.context() as patched:
        patched.setattr("kvferry.drivers.loopback.reach.vm_copy", lambda *_, **__: 1 / 0)
        status = run(transport, transport.read(peer, copies))
    assert status.state is State.FAILED
    assert isinstance(status.error, TransportError)
    assert done(transport, transport.read(peer, copies))
