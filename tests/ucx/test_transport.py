"""What is UCX's own: options, memory that goes away, peers that stop, and other UCXs beside it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import ConnectError, DriverError, TransportUsageError
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import State, registry
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.merged_copies import MergedCopies, merge_copies
from kvferry.drivers.ucx import UcxTransport, transport
from kvferry.testing.peer_process import PeerServer
from kvferry.testing.peers import Process
from tests.drivers.pairs import (
    LEFT_OPEN,
    MIB,
    closed_at_end,
    copies_of,
    paired,
    run_python,
    stop,
    until,
    until_accepted,
)

FACTORY = "kvferry.drivers.ucx:UcxTransport"
# On a machine with much else to do, an answer may take longer than one would wait for it in use.
PATIENT: dict[str, Any] = {"connect_seconds": 60.0}
TCP: dict[str, Any] = PATIENT | {"transports": ["tcp"]}
# Who stops has others stop in the middle of a message.
NARROW: dict[str, Any] = TCP | {"settings": {"TCP_SNDBUF": "16k", "TCP_RCVBUF": "16k"}}

Make = Callable[..., UcxTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    with closed_at_end(lambda **options: UcxTransport(**PATIENT | options)) as make_one:
        yield make_one


# Options.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threads": 3}, "threads"),
        ({"speed": 9}, "unknown field `speed`; it has, with their defaults: transports"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"settings": {"NO_SUCH": "1"}}, "does not take NO_SUCH='1'"),
        ({"settings": {"UCX_KEEPALIVE_INTERVAL": "soon"}}, "KEEPALIVE_INTERVAL='soon'"),
        ({"transports": ["carrier_pigeon"]}, "TLS.*carrier_pigeon.*that this machine has"),
        ({"devices": ["pigeon0"], "transports": ["tcp"]}, "NET_DEVICES.*pigeon0"),
        ({"library": "/no/such/libucp.so.0"}, "library.*/no/such/libucp.so.0"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(
    options: Mapping[str, object], said: str
) -> None:
    with pytest.raises(DriverError, match=said):
        registry.create("ucx", options)


def test_two_in_one_process_have_each_its_own_settings(make: Make) -> None:
    before = dict(os.environ)
    plain, over_tcp = make(), make(**TCP)
    assert dict(os.environ) == before
    assert len(plain._server.worker.address) > len(over_tcp._server.worker.address)
    assert paired(plain, make()).works()
    assert paired(over_tcp, make(**TCP)).works()


def test_a_way_that_cannot_tell_that_a_peer_died_is_not_taken(make: Make) -> None:
    one, other = make(transports=["posix", "cma"]), make(transports=["posix", "cma"])
    with pytest.raises(ConnectError, match=r"unreachable.*driver_options: transports"):
        one.connect(other.address())


def test_a_small_read_of_memory_that_was_deregistered_fails(make: Make) -> None:
    pair = paired(make(), make(), 4096)
    pair.other.deregister(pair.remote)
    assert pair.moved().state is State.FAILED
    assert not pair.mine.any()


@pytest.mark.parametrize("available", [1, 2])
def test_a_large_read_within_a_host_is_copied_by_two_threads_on_two_cores(
    make: Make, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(available)))
    pair = paired(make(), make(), 8 * MIB)
    places = np.random.default_rng(5).permutation(8 * MIB // 4096)
    rows = [(4096 * i, 4096 * int(place), 4096) for i, place in enumerate(places)]
    for seed in range(3):
        pair.mine[:] = 0
        assert pair.moved(rows, b"%d" % seed).state is State.DONE
        np.testing.assert_array_equal(
            pair.mine.reshape(-1, 4096), pair.theirs.reshape(-1, 4096)[places]
        )
    assert (pair.reader._peers[pair.peer].second_connection is None) == (available < 2)
    # What is deregistered is used on neither.
    pair.other.deregister(pair.remote)
    assert pair.moved(rows).state is State.FAILED


# Memory that goes away, and peers that stop.


class Mapped(PeerServer):
    """A peer process that can also register memory, and unmap it so that any access crashes."""

    def map(self, nbytes: int) -> Region:
        self.memory = mmap.mmap(-1, nbytes)
        region = region_of(np.frombuffer(self.memory, np.uint8))
        self.transport.register(region)
        return region

    def unmap(self, region: Region) -> None:
        self.transport.deregister(region)
        self.memory.close()


def test_memory_that_is_unmapped_while_it_is_moved_harms_nobody(make: Make) -> None:
    """Over tcp it is the other side that carries transfers out, and checks nothing."""
    with Process(FACTORY, TCP, "cpu", MIB, server="tests.ucx.test_transport:Mapped") as process:
        region: Region = process.ask("map", 4 * MIB)
        pair = paired(make(**TCP), process)
        copies = copies_of(pair.local, region, times=1 << 14)
        transfer = pair.reader.read(pair.peer, copies)
        process.ask("unmap", region)
        status = pair.final(transfer)
        assert status.state is State.FAILED
        assert "deregistered" in str(status.error)
        # Nor does one that does not know it yet.
        assert pair.final(pair.reader.read(pair.peer, copies)).state is State.FAILED
        assert process.process.poll() is None
        assert pair.works()


def test_a_region_that_the_peer_deregisters_while_a_read_begins_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread connects with the peer's new address after the base has found the region."""
    pair = paired(make(), make())

    def merged(copies: Copies) -> MergedCopies:
        pair.other.deregister(pair.remote)
        assert pair.reader.connect(pair.other.address()) == pair.peer
        return merge_copies(copies)

    monkeypatch.setattr(transport, "merge_copies", merged)
    with pytest.raises(TransportUsageError, match="no longer among the regions of"):
        pair.read()
    assert not pair.mine.any()


def test_a_stopped_reader_does_not_keep_memory_and_harms_nobody_later(make: Make) -> None:
    """It is cut off; what it had asked for is dropped when it arrives."""
    owner, memory = make(**NARROW), mmap.mmap(-1, 4 * MIB)
    array = np.frombuffer(memory, np.uint8)
    region = region_of(array)
    owner.register(region)
    kept = np.ones(MIB, np.uint8)
    owner.register(region_of(kept))
    with Process(FACTORY, NARROW, "cpu", MIB) as process:
        peer = process.connect(owner.address())
        process.read(peer, copies_of(process.region, region, times=1 << 14), 0.0)
        stop(process)
        owner.deregister(region)
        del array
        memory.close()
        process.go_on()

        def reads() -> bool:
            # That it was cut off may be known a moment later.
            assert process.connect(owner.address()) == peer
            copies = copies_of(process.region, region_of(kept))
            done: bool = process.read(peer, copies, 20.0).state is State.DONE
            return done

        assert until(reads)
        assert (process.get() == 1).all()


def test_a_reader_that_is_killed_harms_nobody(make: Make) -> None:
    """What it had asked for arrives after its death: UCX's emulation of reads aborts then."""
    with Process(FACTORY, TCP, "cpu", MIB) as owner:
        with Process(FACTORY, TCP, "cpu", MIB) as process:
            places = 4096 * np.random.default_rng(3).permutation(MIB // 4096)
            rows = [(0, 0, MIB), *((place, place, 4096) for place in places)]
            peer = process.connect(owner.address())
            process.read(peer, copies_of(process.region, owner.region, rows, times=1 << 6), 0.0)
            stop(owner)
            process.kill()
        owner.go_on()
        assert paired(make(**TCP), owner).works()


def test_a_transfer_in_which_nothing_moves_fails_by_the_deadline(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_END_SECONDS", 0.2)
    with Process(FACTORY, TCP, "cpu", MIB) as process:
        pair = paired(make(**TCP, deadline_seconds=0.5), process)
        stop(process)
        transfer = pair.read()
        assert pair.comes_to(transfer, State.FAILING)
        assert "deadline_seconds" in str(pair.status(transfer).error)
        pair.reader.disconnect(pair.peer)
        assert pair.status(transfer).state is State.FAILED


def test_a_peer_that_does_not_answer_is_not_connected_to(make: Make) -> None:
    one = make(**TCP | {"connect_seconds": 0.5})
    with Process(FACTORY, TCP, "cpu", MIB) as process:
        address = process.address()
        stop(process)
        with pytest.raises(ConnectError, match=r"has not answered in 0\.5 s"):
            one.connect(address)
        process.go_on()
        until_accepted(lambda: one.connect(address))


# Its process.


def test_it_prints_nothing_and_its_process_ends_well_with_one_open() -> None:
    ran = run_python(LEFT_OPEN, "ucx")
    assert (ran.stdout, ran.stderr, ran.returncode) == ("the end True\n", "", 0)


BESIDE_NIXL = """
import sys
from kvferry.core.transport import State, registry
from tests.drivers.pairs import paired, received

pairs = []
for name in sys.argv[1:]:
    options = {"connect_seconds": 60.0} if name == "ucx" else {}
    pairs.append(paired(*(registry.create(name, options) for _ in range(2))))
for _ in range(3):
    for pair in pairs:
        assert pair.works()
        assert pair.moved(notify=b"x").state is State.DONE
        assert received(pair.other, 1) == [b"x"]
for pair in pairs:
    pair.reader.close()
    pair.other.close()
"""


@pytest.mark.parametrize("order", [["ucx", "nixl"], ["nixl", "ucx"]], ids=" ".join)
def test_it_and_nixl_which_brings_its_own_ucx_move_bytes_in_one_process(order: list[str]) -> None:
    ran = run_python(BESIDE_NIXL, *order)
    assert ran.returncode == 0, ran.stderr
