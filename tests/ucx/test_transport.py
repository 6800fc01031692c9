"""What is UCX's own: options, memory that goes away, peers that stop, and other UCXs beside it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import (
    ConnectError,
    DriverError,
    TransportUsageError,
)
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import Quiescence, State, registry
from kvferry.core.transport.copies import Copies, copies_between
from kvferry.drivers.ucx import UcxTransport, client, server, transport
from kvferry.drivers.ucx.merged_copies import MergedCopies, merge_copies
from kvferry.drivers.ucx.ucp import BRIEF_BYTES
from kvferry.testing.peers import Process
from tests.drivers.ucx.helpers import MIB, again_and_again, at_last, ended, moves, stop, until

FACTORY = "kvferry.drivers.ucx:UcxTransport"
MAPPED = "tests.drivers.ucx.serving:Mapped"
# On a machine with much else to do, an answer may take longer than one would wait for it in use.
PATIENT = {"connect_seconds": 60.0}
TCP = PATIENT | {"transports": ["tcp"]}
# Who stops has others stop in the middle of a message.
NARROW = TCP | {"settings": {"TCP_SNDBUF": "16k", "TCP_RCVBUF": "16k"}}

Make = Callable[..., UcxTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[UcxTransport] = []

    def make_one(**options: Any) -> UcxTransport:
        made.append(UcxTransport(**PATIENT | options))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


# Options.


def test_the_registry_finds_it() -> None:
    [info] = [one for one in registry.installed() if one.name == "ucx"]
    report = registry.describe(info)
    assert report.reason is None
    assert report.capabilities is not None
    assert "cpu" in report.capabilities.memory
    assert report.capabilities.quiescence is Quiescence.AFTER_DISCONNECT


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
    moves(plain, make(), 1)
    moves(over_tcp, make(**TCP), 3)


def test_a_way_that_cannot_tell_that_a_peer_died_is_not_taken(make: Make) -> None:
    one, other = make(transports=["posix", "cma"]), make(transports=["posix", "cma"])
    with pytest.raises(ConnectError, match=r"unreachable.*driver_options: transports"):
        one.connect(other.address())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", [{}, TCP], ids=["shared memory", "tcp"])
def test_many_runs_through_compiled_loops(
    make: Make, options: Mapping[str, object], threads: int
) -> None:
    one, other = make(**options, threads=threads), make(**options)
    assert one._poster.compiled, "llvmlite, which the extra ucx installs, is missing"
    n, size = 30_000, 16
    mine, theirs = np.zeros(2 * n * size, np.uint8), np.zeros(2 * n * size, np.uint8)
    local, remote = region_of(mine), region_of(theirs)
    one.register(local)
    other.register(remote)
    peer = one.connect(other.address())
    places = np.random.default_rng(1).permutation(2 * n)[:n]
    rows = [(local.address + size * int(p), remote.address + size * int(p), size) for p in places]
    content = np.random.default_rng(2).integers(1, 255, (2 * n, size), np.uint8)
    expected = np.zeros((2 * n, size), np.uint8)
    expected[places] = content[places]
    theirs[:] = content.reshape(-1)
    transfer = one.read(peer, copies_between(rows, local=local, remote=remote))
    assert until(ended(one, transfer, State.DONE))
    np.testing.assert_array_equal(mine.reshape(-1, size), expected)


@pytest.mark.parametrize("nbytes", [1, 8, BRIEF_BYTES, BRIEF_BYTES + 1])
@pytest.mark.parametrize("options", [{}, TCP], ids=["shared memory", "tcp"])
def test_small_reads_move_all_bytes_and_then_notify(
    make: Make, options: Mapping[str, object], nbytes: int
) -> None:
    one, other = make(**options), make(**options)
    source = np.random.default_rng(6).integers(1, 255, MIB, np.uint8)
    target = np.zeros_like(source)
    local, remote = region_of(target), region_of(source)
    one.register(local)
    other.register(remote)
    peer = one.connect(other.address())
    row = (local.address + 3, remote.address + 5, nbytes)
    transfers = []
    for number in range(20):
        copies = copies_between([row], local=local, remote=remote)
        transfers.append(one.read(peer, copies, b"%d" % number))
        assert until(ended(one, transfers[-1], State.DONE))
    np.testing.assert_array_equal(target[3 : 3 + nbytes], source[5 : 5 + nbytes])
    assert not target[:3].any()
    assert not target[3 + nbytes :].any()
    arrived: list[bytes] = []

    def all_arrived() -> bool:
        arrived.extend(one.payload for one in other.notifications())
        return len(arrived) == len(transfers)

    assert until(all_arrived)
    assert arrived == [b"%d" % number for number in range(20)]
    # A finished transfer does not keep polls from making progress in others.
    whole = one.read(peer, again_and_again(local, remote, 1))
    assert until(lambda: all(s.state is State.DONE for s in one.poll([*transfers, whole])))


def test_a_small_read_of_memory_that_was_deregistered_fails(make: Make) -> None:
    one, other = make(), make()
    mine, theirs = np.zeros(4096, np.uint8), np.ones(4096, np.uint8)
    local, remote = region_of(mine), region_of(theirs)
    one.register(local)
    other.register(remote)
    peer = one.connect(other.address())
    other.deregister(remote)
    transfer = one.read(peer, again_and_again(local, remote, 1))
    assert until(ended(one, transfer, State.FAILED))
    assert not mine.any()


@pytest.mark.parametrize("available", [1, 2])
def test_a_large_read_within_a_host_is_copied_by_two_threads_on_two_cores(
    make: Make, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr(client, "available_cores", lambda: available)
    one, other = make(), make()
    assert one._poster.compiled, "llvmlite, which the extra ucx installs, is missing"
    source = np.random.default_rng(4).integers(0, 255, (8 * MIB // 4096, 4096), np.uint8)
    target = np.zeros_like(source)
    local, remote = region_of(target), region_of(source)
    one.register(local)
    other.register(remote)
    peer = one.connect(other.address())
    places = np.random.default_rng(5).permutation(len(source))
    rows = [
        (local.address + 4096 * i, remote.address + 4096 * int(p), 4096)
        for i, p in enumerate(places)
    ]
    for seed in range(8):
        target[:] = 0
        transfer = one.read(peer, copies_between(rows, local=local, remote=remote), b"%d" % seed)
        assert until(ended(one, transfer, State.DONE))
        np.testing.assert_array_equal(target, source[places])
    assert (one._peers[peer].second_connection is None) == (available < 2)
    # What is deregistered is used on neither.
    other.deregister(remote)
    transfer = one.read(peer, copies_between(rows, local=local, remote=remote))
    assert until(ended(one, transfer, State.FAILED))


# Memory that goes away, and peers that stop.


def test_memory_that_is_unmapped_while_it_is_moved_harms_nobody(make: Make) -> None:
    """Over tcp it is the other side that carries transfers out, and checks nothing."""
    one, buffer = make(**TCP), np.ones(MIB, np.uint8)
    one.register(region_of(buffer))
    with Process(FACTORY, TCP, "cpu", MIB, server=MAPPED) as process:
        region: Region = process.ask("map", 4 * MIB)
        peer = one.connect(process.address())
        copies = again_and_again(region_of(buffer), region)
        transfer = one.read(peer, copies)
        process.ask("unmap", region)
        assert until(ended(one, transfer, State.FAILED))
        assert "deregistered" in str(one.poll([transfer])[0].error)
        # Nor does one that does not know it yet.
        after = one.read(peer, copies)
        assert until(ended(one, after, State.FAILED))
        assert process.process.poll() is None
        whole = again_and_again(region_of(buffer), process.region, 1)
        transfer = one.read(peer, whole)
        assert until(ended(one, transfer, State.DONE))
        np.testing.assert_array_equal(buffer, process.content)


def test_a_region_that_the_peer_deregisters_while_a_read_begins_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread connects with the peer's new address after the base has found the region."""
    one, other = make(), make()
    mine, theirs = np.zeros(MIB, np.uint8), np.ones(MIB, np.uint8)
    local, remote = region_of(mine), region_of(theirs)
    one.register(local)
    other.register(remote)
    peer = one.connect(other.address())

    def merged(copies: Copies) -> MergedCopies:
        other.deregister(remote)
        assert one.connect(other.address()) == peer
        return merge_copies(copies)

    monkeypatch.setattr(transport, "merge_copies", merged)
    with pytest.raises(TransportUsageError, match="no longer among the regions of"):
        one.read(peer, again_and_again(local, remote, 1))
    assert not mine.any()


@pytest.mark.parametrize("options", [TCP, NARROW])
def test_a_stopped_reader_does_not_keep_memory_and_harms_nobody_later(
    make: Make, options: dict[str, object]
) -> None:
    """It is cut off; what it had asked for is dropped when it arrives."""
    owner, memory = make(**options), mmap.mmap(-1, 4 * MIB)
    array = np.frombuffer(memory, np.uint8)
    region = region_of(array)
    owner.register(region)
    kept = np.ones(MIB, np.uint8)
    owner.register(region_of(kept))
    with Process(FACTORY, options, "cpu", MIB, server=MAPPED) as process:
        peer = process.connect(owner.address())
        process.ask("start_only", peer, again_and_again(process.region, region))
        stop(process)
        owner.deregister(region)
        del array
        memory.close()
        process.go_on()
        assert until(lambda: process.ask("state") in ("failing", "failed"))
        assert process.connect(owner.address()) == peer

        def reads() -> bool:
            # That it was cut off may be known a moment later.
            process.begin(peer, again_and_again(process.region, region_of(kept), 1))
            return until(process.answered) and process.ended().state is State.DONE

        assert until(reads)
        assert (process.get() == 1).all()
        assert until(lambda: process.ask("state") == "failed")


@pytest.mark.parametrize("nbytes", [4096, MIB])
def test_a_reader_that_is_killed_harms_nobody(make: Make, nbytes: int) -> None:
    """What it had asked for arrives after its death: UCX's emulation of reads aborts then."""
    one, buffer = make(**TCP), np.zeros(MIB, np.uint8)
    one.register(region_of(buffer))
    with Process(FACTORY, TCP, "cpu", MIB) as owner:
        with Process(FACTORY, TCP, "cpu", MIB, server=MAPPED) as process:
            local, remote = process.region, owner.region
            places = np.random.default_rng(3).permutation(MIB // nbytes)
            rows = [
                (local.address + nbytes * int(p), remote.address + nbytes * int(p), nbytes)
                for p in np.tile(places, 1 << 6)
            ]
            peer = process.connect(owner.address())
            process.ask("start_only", peer, copies_between(rows, local=local, remote=remote))
            stop(owner)
            process.kill()
        owner.go_on()
        peer = one.connect(owner.address())
        transfer = one.read(peer, again_and_again(region_of(buffer), owner.region, 1))
        assert until(ended(one, transfer, State.DONE))
        np.testing.assert_array_equal(buffer, owner.get())


def test_a_flood_of_notifications_costs_its_sender_the_connection_and_nobody_else(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1 << 20
    monkeypatch.setattr(server, "MAX_BACKLOG", limit)
    one = make()
    with (
        Process(FACTORY, PATIENT, "cpu", MIB) as floods,
        Process(FACTORY, PATIENT, "cpu", MIB) as honest,
    ):
        there = floods.connect(one.address())
        mine = honest.connect(one.address())
        # Nearly all that is kept, so that the next notifications are too many.
        count = limit // (4096 + server._NOTIFICATION_BYTES)
        floods.notify(there, [bytes(4096)] * count)
        assert until(lambda: one._server._kept_bytes > limit - 4096 - server._NOTIFICATION_BYTES)
        honest.notify(mine, [b"done"] * 32)
        assert until(lambda: one._server._kept_bytes == 32 * (4 + server._NOTIFICATION_BYTES))
        assert [(note.sender, note.payload) for note in one.notifications()] == [
            (honest.name, b"done")
        ] * 32


def test_a_transfer_in_which_nothing_moves_fails_by_the_deadline(make: Make) -> None:
    one, buffer = make(**TCP, deadline_seconds=0.5), np.zeros(MIB, np.uint8)
    one.register(region_of(buffer))
    with Process(FACTORY, TCP, "cpu", MIB) as process:
        peer = one.connect(process.address())
        stop(process)
        transfer = one.read(peer, again_and_again(region_of(buffer), process.region, 1))
        assert until(ended(one, transfer, State.FAILING))
        assert "deadline_seconds" in str(one.poll([transfer])[0].error)
        one.disconnect(peer)
        assert one.poll([transfer])[0].state is State.FAILED


def test_a_peer_that_does_not_answer_is_not_connected_to(make: Make) -> None:
    one = make(**TCP | {"connect_seconds": 0.5})
    with Process(FACTORY, TCP, "cpu", MIB) as process:
        address = process.address()
        stop(process)
        with pytest.raises(ConnectError, match=r"has not answered in 0\.5 s"):
            one.connect(address)
        process.go_on()
        at_last(lambda: one.connect(address))


# Its process.

CODE = """
import logging
import numpy as np
from kvferry.core.memory import region_of
from kvferry.drivers.ucx import UcxTransport, client

one, other = UcxTransport(), UcxTransport()
buffer = np.zeros(4096, np.uint8)
one.register(region_of(buffer))
peer = other.connect(one.address())
other.notify(peer, b"x")
if {closed}:
    one.close()
    other.close()
print("the end")
"""


@pytest.mark.parametrize("closed", [True, False])
def test_it_prints_nothing_and_its_process_ends_well(closed: bool) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE.replace("{closed}", str(closed))],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (run.stdout, run.stderr, run.returncode) == ("the end\n", "", 0)


@pytest.mark.parametrize("first", ["ucx", "nixl"])
def test_it_and_nixl_which_brings_its_own_ucx_move_bytes_in_one_process(first: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import beside_nixl; beside_nixl({first!r})"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.returncode == 0, run.stderr


def beside_nixl(first: str) -> None:
    """Both drivers, by turns."""
    second = {"ucx": "nixl", "nixl": "ucx"}[first]
    options: dict[str, dict[str, Any]] = {"ucx": PATIENT, "nixl": {}}
    pairs = [[registry.create(name, options[name]) for _ in range(2)] for name in (first, second)]
    for seed in (1, 11, 21):
        for one, other in pairs:
            moves(one, other, seed)
    for pair in pairs:
        for one in pair:
            one.close()
