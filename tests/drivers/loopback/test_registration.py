"""Registration of memory, transfers of deregistered or unmapped memory, and driver options."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import (
    DriverError,
    TransportError,
    TransportUnsupportedError,
    TransportUsageError,
)
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import INTERFACE_VERSION, Quiescence, State
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.contract.copy_batches import batch
from tests.drivers.loopback.conftest import LocalPeer, MakeTransport
from tests.drivers.loopback.helpers import done, endless, run
from tests.drivers.loopback.peer import Bytes, Peer

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def test_only_cpu_memory_is_registered(transport: LoopbackTransport, buffer: Bytes) -> None:
    region = region_of(buffer)
    cuda = Region(address=region.address, nbytes=region.nbytes, kind="cuda")
    with pytest.raises(TransportUnsupportedError, match="reaches cpu memory, not cuda"):
        transport.register(cuda)
    transport.register(region)
    transport.register(Region(address=region.address, nbytes=region.nbytes))
    transport.deregister(region)
    for unknown in (region, cuda):
        with pytest.raises(TransportUsageError, match="is not registered"):
            transport.deregister(unknown)


def test_unmapped_memory_is_not_registered(transport: LoopbackTransport) -> None:
    with mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        base = np.frombuffer(memory, np.uint8).ctypes.data
        transport.register(Region(address=base + 1, nbytes=4 * PAGE - 1))
        inside = Region(address=base, nbytes=4 * PAGE)
        transport.register(inside)
        transport.deregister(inside)
    for gone in (inside, Region(address=8, nbytes=8), Region(address=1 << 62, nbytes=1 << 40)):
        with pytest.raises(TransportError, match="mapped in this process"):
            transport.register(gone)


def test_region_in_use_is_not_deregistered(
    transport: LoopbackTransport, local: Region, shared_peer: Peer
) -> None:
    peer = transport.connect(shared_peer.address())
    transfer = transport.read(peer, endless(local, shared_peer.region))
    with pytest.raises(TransportUsageError, match="an unfinished transfer uses"):
        transport.deregister(local)
    transport.cancel(transfer)
    run(transport, transfer)
    transport.deregister(local)


def test_transfers_of_region_deregistered_by_peer_fail(
    transport: LoopbackTransport, local: Region, peer: Peer
) -> None:
    known = transport.connect(peer.address())
    peer.register(peer.part(0, 8))
    peer.deregister(peer.region)
    for nbytes in (8, MIB):
        copies = batch(local, peer.region, [0], [0], [nbytes])
        status = run(transport, transport.read(known, copies, b"must not arrive"))
        assert status.state is State.FAILED
        assert "no longer has" in str(status.error)
    # After a refresh the region is known to be gone, and using it is an error of the caller.
    transport.connect(peer.address())
    with pytest.raises(TransportUsageError, match="is not among"):
        transport.read(known, batch(local, peer.region, [0], [0], [8]))


def test_region_registered_again_has_another_key(
    transport: LoopbackTransport, buffer: Bytes, local: Region, peer: Peer
) -> None:
    known = transport.connect(peer.address())
    peer.deregister(peer.region)
    peer.register(peer.region)
    copies = batch(local, peer.region, [0], [0], [MIB])
    assert run(transport, transport.read(known, copies)).state is State.FAILED
    transport.connect(peer.address())
    assert done(transport, transport.read(known, copies))
    np.testing.assert_array_equal(buffer, peer.content)


def test_deregistering_fails_transfers_of_local_peer(
    transport: LoopbackTransport, buffer: Bytes, local: Region, make: MakeTransport
) -> None:
    local_peer = LocalPeer(make())
    peer = transport.connect(local_peer.address())
    transfer = transport.read(peer, endless(local, local_peer.region))
    local_peer.transport.deregister(local_peer.region)
    arrived = buffer.copy()
    local_peer.buffer[:] = 7
    status = run(transport, transfer)
    assert status.state is State.FAILED
    assert "no longer has" in str(status.error)
    np.testing.assert_array_equal(buffer, arrived)


def test_deregistering_fails_transfers_of_another_process(
    transport: LoopbackTransport, local: Region, peer: Peer
) -> None:
    known = transport.connect(peer.address())
    transfer = transport.read(known, endless(local, peer.region))
    peer.deregister(peer.region)
    status = run(transport, transfer)
    assert status.state is State.FAILED
    assert "no longer has" in str(status.error)


@pytest.mark.parametrize("inline_bytes", [0, MIB])
def test_unmapped_memory_of_peer_fails_the_transfer(
    make: MakeTransport, peer: Peer, inline_bytes: int
) -> None:
    """The kernel reports a short count and no error."""
    transport = make(inline_bytes=inline_bytes)
    target = np.zeros(MIB, np.uint8)
    transport.register(region_of(target))
    known = transport.connect(peer.address())
    assert peer.ask("unmap", 8 * PAGE, PAGE) == 0
    starts = np.arange(0, 16 * PAGE, PAGE)
    around = batch(region_of(target), peer.region, starts, starts, np.full(16, PAGE))
    inside = batch(region_of(target), peer.region, [0], [8 * PAGE + 5], [8])
    for copies, moved in ((around, 8 * PAGE), (inside, 0)):
        status = run(transport, transport.read(known, copies, b"must not arrive"))
        assert status.state is State.FAILED
        assert f"copied {moved} of" in str(status.error)
        assert hex(peer.region.address + 8 * PAGE)[:-3] in str(status.error)
    before = batch(region_of(target), peer.region, [0], [0], [8 * PAGE])
    assert done(transport, transport.read(known, before, b"good"))
    assert peer.notifications(1)[0].payload == b"good"


def test_unmapped_local_memory_fails_the_transfer(make: MakeTransport, shared_peer: Peer) -> None:
    transport = make()
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region = Region(address=np.frombuffer(memory, np.uint8).ctypes.data, nbytes=4 * PAGE)
    transport.register(region)
    peer = transport.connect(shared_peer.address())
    memory.close()
    status = run(
        transport, transport.read(peer, batch(region, shared_peer.region, [0], [0], [2 * PAGE]))
    )
    assert status.state is State.FAILED
    assert "not mapped any more" in str(status.error)


def test_at_most_65536_regions_are_registered(
    transport: LoopbackTransport, make: MakeTransport
) -> None:
    local_peer = make()
    memory = np.zeros(70_000, np.uint8)
    base = memory.ctypes.data
    regions = [Region(address=base + i, nbytes=1) for i in range(1 << 16)]
    for region in regions:
        local_peer.register(region)
    with pytest.raises(TransportError, match="65536 regions are registered"):
        local_peer.register(Region(address=base, nbytes=2))
    peer = transport.connect(local_peer.address())
    target = np.zeros(1, np.uint8)
    transport.register(region_of(target))
    memory[65_535] = 5
    last = batch(region_of(target), regions[-1], [0], [0], [1])
    assert done(transport, transport.read(peer, last))
    assert target[0] == 5
    local_peer.deregister(regions[0])
    local_peer.register(Region(address=base, nbytes=2))


# Capabilities and options.


def test_capabilities(transport: LoopbackTransport) -> None:
    can = transport.capabilities
    assert can.memory == {"cpu"}
    assert can.cancel
    assert can.background_progress
    assert can.quiescence is Quiescence.ALWAYS
    assert can == transport.capabilities
    assert LoopbackTransport.interface_version[0] == INTERFACE_VERSION[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"treads": 2}, "unknown field `treads`.*inline_bytes.*chunk_bytes.*threads"),
        ({"threads": 0}, r"threads"),
        ({"threads": "two"}, r"threads"),
        ({"chunk_bytes": 1}, r"chunk_bytes"),
        ({"inline_bytes": -1}, r"inline_bytes"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DriverError, match=said):
        LoopbackTransport(**options)
