"""Registration of memory, transfers of deregistered or unmapped memory, and driver options."""

from __future__ import annotations

import mmap
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.core.errors import DriverError
from kvferry.core.memory import Region
from kvferry.core.transport import Quiescence, State
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback import address as wire
from tests.drivers.loopback.conftest import Make
from tests.drivers.loopback.peer import Peer
from tests.drivers.pairs import MIB, copies_of, paired

PAGE = mmap.PAGESIZE


def mapped(nbytes: int) -> tuple[mmap.mmap, Region]:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, Region(address=np.frombuffer(memory, np.uint8).ctypes.data, nbytes=nbytes)


def test_reads_of_memory_that_the_peer_deregisters_fail(
    transport: LoopbackTransport, remote: LoopbackTransport | Peer
) -> None:
    """Before and during a read; registered again, it needs the new address."""
    pair = paired(transport, remote)
    running = pair.lasting()
    remote.deregister(pair.remote)
    statuses = [pair.final(running), pair.moved([(0, 0, 8)], b"no"), pair.moved(notify=b"no")]
    remote.register(pair.remote)
    statuses.append(pair.moved())
    for status in statuses:
        assert status.state is State.FAILED
        assert "no longer has" in str(status.error)
    assert transport.connect(remote.address()) == pair.peer
    assert pair.works()


@pytest.mark.parametrize("inline_bytes", [0, MIB])
def test_unmapped_memory_of_peer_fails_the_transfer(
    make: Make, peer: Peer, inline_bytes: int
) -> None:
    """The kernel reports a short count and no error."""
    pair = paired(make(inline_bytes=inline_bytes), peer)
    assert peer.ask("unmap", 8 * PAGE, PAGE) == 0
    around = [(start, start, PAGE) for start in range(0, 16 * PAGE, PAGE)]
    for rows, moved in ((around, 8 * PAGE), ([(0, 8 * PAGE + 5, 8)], 0)):
        status = pair.moved(rows, b"must not arrive")
        assert status.state is State.FAILED
        assert f"copied {moved} of" in str(status.error)
    assert pair.moved([(0, 0, 8 * PAGE)], b"good").state is State.DONE
    assert [note.payload for note in peer.notifications(1)] == [b"good"]


def test_unmapped_local_memory_fails_the_transfer(make: Make, shared_peer: Peer) -> None:
    transport = make()
    memory, region = mapped(4 * PAGE)
    transport.register(region)
    peer = transport.connect(shared_peer.address())
    memory.close()
    copies = copies_of(region, shared_peer.region, [(0, 0, 2 * PAGE)])
    [status] = transport.poll([transport.read(peer, copies)])
    assert status.state is State.FAILED
    assert "not mapped any more" in str(status.error)


def test_row_of_a_deregistered_region_is_used_again(
    transport: LoopbackTransport, make: Make
) -> None:
    pair = paired(transport, make())
    pair.other.deregister(pair.remote)
    again = paired(transport, pair.other)
    [row] = msgspec.msgpack.decode(pair.other.address())["regions"]
    assert row[3] == 0
    assert again.works()


def test_address_of_the_most_regions_is_not_too_long() -> None:
    last = (1 << 63) - 1
    region = wire.LoopbackRegion(last, last, (1 << 16) - 1, wire.MAX_REGIONS - 1, last)
    longest = wire.LoopbackAddress(
        name="x" * 128,
        boot="x" * 128,
        pid_namespace=last,
        pid=(1 << 31) - 1,
        start_time=last,
        instance=bytes(16),
        socket="x" * 128,
        board=last,
        regions=[region] * LoopbackTransport.max_regions,
    )
    assert len(wire.encode(longest)) <= wire.MAX_ADDRESS_BYTES


def test_capabilities_decide_what_the_conformance_suite_demands(
    transport: LoopbackTransport,
) -> None:
    can = transport.capabilities
    assert can.memory == {"cpu"}
    assert can.quiescence is Quiescence.ALWAYS
    assert (can.cancel, can.background_progress, can.concurrent_connect) == (True, True, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"treads": 2}, "unknown field `treads`.*inline_bytes.*chunk_bytes.*threads"),
        ({"threads": 0}, "threads"),
        ({"chunk_bytes": 1}, "chunk_bytes"),
        ({"inline_bytes": -1}, "inline_bytes"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DriverError, match=said):
        LoopbackTransport(**options)
