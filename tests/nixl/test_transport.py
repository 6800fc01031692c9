"""The nixl driver on NIXL: options, telemetry, dead peers, output, and the end of the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvferry.core.endpoint.slot_reads import fitting
from kvferry.core.errors import DriverError, TransportUsageError
from kvferry.core.memory import Region, region_of
from kvferry.core.messages import Release
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import Quiescence, State, TransferId, registry
from kvferry.core.transport.copies import Copies, Segment, copies_between
from kvferry.drivers.nixl import NixlTransport
from kvferry.testing.contract.killed_peers import killed_soon
from kvferry.testing.peers import Process

Make = Callable[..., NixlTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[NixlTransport] = []

    def transport(**options: Any) -> NixlTransport:
        made.append(NixlTransport(**options))
        return made[-1]

    yield transport
    for one in made:
        one.close()


def test_registry_finds_driver() -> None:
    [info] = [one for one in registry.installed() if one.name == "nixl"]
    report = registry.describe(info)
    assert report.reason is None
    assert report.capabilities is not None
    assert "cpu" in report.capabilities.memory
    assert report.capabilities.quiescence is Quiescence.AFTER_DISCONNECT


@pytest.mark.parametrize("name", ["x" * 100, "x" * 200])
def test_releases_of_forty_holds_fit_its_notifications(make: Make, name: str) -> None:
    notes = [
        Release(incarnation=1, slot=slot, generation=1, engine=name, rank=0, expected=1)
        for slot in range(40)
    ]
    limit = make().capabilities.max_notification
    parts = list(fitting(notes, limit))
    assert [note for part in parts for note in part] == notes
    assert max(len(encode(part)) for part in parts) <= limit


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "XYZ"}, r"no backend 'XYZ'; nixl\w* [\d.]+ offers .*UCX"),
        ({"backend": "POSIX"}, "backend POSIX of .* reaches no other process"),
        ({"backend_options": {"threads": 2}}, "no parameter 'threads'; it has .*num_threads"),
        ({"backend_options": {"num_threads": [2]}}, r"backend_options"),
        (
            {"backend_options": {"ucx_error_handling_mode": "perhaps"}},
            "backend UCX of .* does not start with",
        ),
        ({"backend_options": {"num_threads": "four"}}, "num_threads is 'four', not a number"),
        ({"progress_milliseconds": -1}, "progress_milliseconds"),
        ({"threads": 2}, "unknown field `threads`; it has, with their defaults: backend"),
    ],
)
def test_invalid_options_are_refused_with_valid_ones_named(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(DriverError, match=said):
        registry.create("nixl", options)


@pytest.mark.parametrize("threads", [0, "1"])
def test_backend_options_are_accepted(make: Make, threads: object) -> None:
    _move_bytes(make(backend_options={"num_threads": threads, "num_workers": 2}), make())


def test_telemetry_of_finished_transfer(make: Make) -> None:
    transport = make(telemetry=True)
    transfer = _move_bytes(transport, make())
    [found] = transport.telemetry(transfer)
    assert found.nbytes == 1 << 16
    assert found.descriptors >= 1
    assert 0 <= found.post_seconds <= found.seconds
    transport.forget(transfer)
    with pytest.raises(TransportUsageError, match="never started, or forgotten"):
        transport.telemetry(transfer)


def test_telemetry_is_refused_unless_enabled(make: Make) -> None:
    transport = make()
    with pytest.raises(TransportUsageError, match="set driver_options: telemetry"):
        transport.telemetry(_move_bytes(transport, make()))


def test_path_says_that_nixl_does_not_report_the_transport(make: Make) -> None:
    transport = make()
    peer = transport.connect(make().address())
    assert transport.path(peer) == "UCX (transport not reported)"


def test_without_progress_thread_ucx_has_no_threads_and_polls_keep_notifications(
    make: Make,
) -> None:
    before = _threads()
    transport, other = make(progress_thread=False), make(progress_thread=False)
    more = _threads() - before
    with_threads = make()
    assert _threads() - before - more > more
    assert not transport.capabilities.background_progress
    assert with_threads.capabilities.background_progress
    other.notify(other.connect(transport.address()), b"kept")
    deadline = time.monotonic() + 60
    while not (found := transport.notifications()) and time.monotonic() < deadline:
        for one in (transport, other):
            one.poll([])
    assert [(one.sender, one.payload) for one in found] == [(other.name, b"kept")]


def test_deregistered_memory_does_not_break_connection_to_itself(make: Make) -> None:
    """A transport never loses the connection to itself, so it could not connect again either."""
    transport, rows = make(), 3 * 4096
    here, there, other = (np.full(rows * 64, value, np.uint8) for value in (0, 1, 7))
    local, gone, stays = map(region_of, (here, there, other))
    for region in (local, gone, stays):
        transport.register(region)
    peer = transport.connect(transport.address())
    places = [(local.address + 64 * i, gone.address + 64 * i, 32) for i in range(rows)]
    begun = transport.read(peer, copies_between(places, local=local, remote=gone))
    transport.deregister(gone)
    _wait_until_known(transport, begun)
    place = [(local.address, stays.address, 4096)]
    after = transport.read(peer, copies_between(place, local=local, remote=stays))
    assert _wait_until_known(transport, after) is State.DONE
    assert (here[:4096] == 7).all()


def test_reconnecting_peer_leaks_no_descriptors(make: Make) -> None:
    transport, other = make(), make()

    def connect_and_count() -> int:
        """Return the number of open descriptors; a connection has five on either side."""
        _move_bytes(transport, other)
        transport.disconnect(transport.connect(other.address()))
        return _descriptors()

    first = [connect_and_count() for _ in range(3)][-1]
    assert max(connect_and_count() for _ in range(10)) < first + 3 * DESCRIPTORS_PER_AGENT


def test_reconnecting_peer_with_other_memory_can_be_read(make: Make) -> None:
    """Some regions in the metadata that NIXL keeps are gone by then, and others are new."""
    transport, other = make(), make()
    for _ in range(3):
        gone = np.full(4096, 1, np.uint8)
        other.register(region_of(gone))
        _move_bytes(transport, other)
        transport.disconnect(transport.connect(other.address()))
        other.deregister(region_of(gone))
    _move_bytes(transport, other)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


DESCRIPTORS_PER_AGENT = 10
"""Every agent opens more file descriptors than this; UCX opens and closes a few in between."""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads_fall_to(threads: int) -> bool:
    """Wait until so few threads are left: the kernel lists a joined thread for a moment."""
    deadline = time.monotonic() + 60
    while _threads() > threads and time.monotonic() < deadline:
        pass
    return _threads() <= threads


def test_close_ends_threads_while_transport_is_still_referenced(make: Make) -> None:
    make().close()  # the library starts some threads that stay
    before = _threads()
    transport, other = make(), make()
    transfer = _move_bytes(transport, other)
    with pytest.raises(TransportUsageError) as kept:
        transport.telemetry(transfer)
    gc.disable()
    try:
        transport.close()
        other.close()
        assert _threads_fall_to(before)
    finally:
        gc.enable()
    assert kept.traceback


class NumberedBlocks:
    """Blocks of 4 KiB, each filled with its number, registered with two transports."""

    n, size = 5000, 4096

    def __init__(self, transport: NixlTransport, other: NixlTransport) -> None:
        self.transport, self.other = transport, other
        self.mine, self.theirs = np.zeros((2, self.n, self.size), np.uint8)
        self.theirs[:] = np.arange(self.n)[:, None] % 251
        self.local, self.remote = region_of(self.mine), region_of(self.theirs)
        transport.register(self.local)
        other.register(self.remote)

    def read(self) -> TransferId:
        """Read all blocks in random order and check their contents."""
        self.mine[:] = 0
        offsets = np.random.default_rng(0).permutation(self.n).astype(np.uint64) * np.uint64(
            self.size
        )
        far = offsets + np.uint64(self.remote.address)
        copies = _blocks(self.local, offsets, self.remote, far, self.size)
        peer = self.transport.connect(self.other.address())
        transfer = self.transport.read(peer, copies)
        assert _wait_until_known(self.transport, transfer) is State.DONE
        np.testing.assert_array_equal(self.mine, self.theirs)
        return transfer

    def leave(self) -> None:
        """Disconnect and deregister the memory."""
        self.transport.disconnect(self.transport.connect(self.other.address()))
        self.transport.deregister(self.local)
        self.other.deregister(self.remote)


def _kill_peer_during_read(transport: NixlTransport, local: Region) -> None:
    """Kill a peer during a read that is large enough for UCX's threads."""
    with Process("kvferry.drivers.nixl:NixlTransport", {}, "cpu", 1 << 20) as process:
        dead = transport.connect(process.address())
        same = np.zeros(4096, np.uint64)
        far = process.region
        copies = _blocks(local, same, far, same + np.uint64(far.address), 1 << 20)
        with killed_soon(process):
            transfer = transport.read(dead, copies)
        assert _wait_until_known(transport, transfer) is State.FAILING
        transport.disconnect(dead)
    assert transport.poll([transfer])[0].state is State.FAILED


def test_large_transfers_work_after_peer_died_during_one(make: Make) -> None:
    """Later transfers use a second agent, in as many chunks as before.

    What the transfer to the dead peer left behind is never touched again. The second agent is made
    once, however many peers die.
    """
    transport = make(telemetry=True)
    blocks = NumberedBlocks(transport, make())
    parts = len(transport.telemetry(blocks.read()))
    more = []
    for _ in range(2):
        _kill_peer_during_read(transport, blocks.local)
        before = _descriptors()
        assert len(transport.telemetry(blocks.read())) == parts
        more.append(_descriptors() - before)
    assert more[0] >= DESCRIPTORS_PER_AGENT > more[1]
    # A peer that comes back has another address.
    with Process("kvferry.drivers.nixl:NixlTransport", {}, "cpu", 1 << 20) as process:
        peer, far = transport.connect(process.address()), process.region
        span = (blocks.local.address, far.address, 1 << 20)
        copies = copies_between([span], local=blocks.local, remote=far)
        assert _wait_until_known(transport, transport.read(peer, copies)) is State.DONE
        np.testing.assert_array_equal(blocks.mine.ravel()[: 1 << 20], process.get())


def test_regions_and_peers_change_after_peer_died(make: Make) -> None:
    transport, other = make(), make()
    blocks = NumberedBlocks(transport, other)
    blocks.read()
    _kill_peer_during_read(transport, blocks.local)
    more, itself = NumberedBlocks(transport, other), NumberedBlocks(transport, transport)
    for _ in range(2):
        more.read()
        blocks.read()
        itself.read()
    more.leave()
    blocks.read()
    blocks.leave()
    NumberedBlocks(transport, other).read()
    NumberedBlocks(transport, make()).read()


def test_bound_notifications_keep_their_sender_after_peer_died(
    make: Make,
) -> None:
    transport, other = make(), make()
    blocks = NumberedBlocks(transport, other)
    _kill_peer_during_read(transport, blocks.local)
    peer = transport.connect(other.address())
    copies = copies_between(
        [(blocks.local.address, blocks.remote.address, blocks.local.nbytes)],
        local=blocks.local,
        remote=blocks.remote,
    )
    blocks.theirs[:] = 7
    assert _wait_until_known(transport, transport.read(peer, copies, b"read")) is State.DONE
    while not (found := other.notifications()):
        pass
    assert (blocks.mine == 7).all()
    assert [(one.sender, one.payload) for one in found] == [(transport.name, b"read")]


ENDING = """
import gc
from kvferry.testing.contract.workbench import MIB, Workbench, settings_of
from kvferry.testing.contract.killed_peers import killed_soon
from kvferry.testing.peers import Process
from tests.nixl.test_contract import TestNixl

made = settings_of(TestNixl)
with Workbench(made) as lab, Process(made.factory, made.options, "cpu", MIB) as process:
    peer = lab.transport.connect(process.address())
    with killed_soon(process):
        transfer = lab.transport.read(peer, lab.lasting(process))
    lab.settled(transfer, peer)
gc.collect()
print("the end")
"""


def test_process_survives_dead_peers_and_exits_cleanly() -> None:
    """UCX would abort a process that destroys what a broken connection left behind."""
    run = _run(ENDING)
    # UCX writes to stdout, too.
    assert run.stdout.endswith("the end\n"), run.stderr
    assert run.returncode == 0, run.stderr


CODE = """
import logging
import numpy as np
from kvferry.core.memory import Region, region_of
from kvferry.drivers.nixl import NixlTransport

logging.basicConfig(level=logging.DEBUG)
one, other = NixlTransport(), NixlTransport()
buffer = np.zeros(4096, np.uint8)
one.register(region_of(buffer))
peer = other.connect(one.address())
other.notify(peer, b"x")
if {closed}:
    one.close()
    other.close()
print("the end", logging.raiseExceptions)
"""


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
    )


@pytest.mark.parametrize("closed", [True, False])
def test_transport_prints_nothing_and_process_exits_cleanly(closed: bool) -> None:
    """NIXL brings libraries that many machines also have in another version."""
    run = _run(CODE.replace("{closed}", str(closed)))
    assert run.stdout == "the end True\n"
    assert "INFO" not in run.stderr
    assert run.returncode == 0, run.stderr


def test_nixl_log_level_is_respected() -> None:
    run = _run(CODE.replace("{closed}", "True"), NIXL_LOG_LEVEL="INFO")
    assert "Initialized NIXL agent" in run.stdout + run.stderr


def _blocks(
    local: Region, here: np.ndarray, remote: Region, there: np.ndarray, size: int
) -> Copies:
    """Return copies of one size from remote addresses to local offsets."""
    n = len(here)
    return Copies(
        local=here + np.uint64(local.address),
        remote=there,
        nbytes=np.full(n, size, np.uint64),
        segments=(Segment(start=0, stop=n, local=local, remote=remote),),
    )


def _wait_until_known(transport: NixlTransport, transfer: TransferId) -> State:
    while (state := transport.poll([transfer])[0].state) is State.PENDING:
        time.sleep(0.001)
    return state


def _move_bytes(transport: NixlTransport, other: NixlTransport) -> TransferId:
    """Read 64 KiB and return the finished transfer."""
    mine, theirs = np.zeros(1 << 16, np.uint8), np.full(1 << 16, 7, np.uint8)
    local, remote = region_of(mine), region_of(theirs)
    transport.register(local)
    other.register(remote)
    peer = transport.connect(other.address())
    copies = copies_between([(local.address, remote.address, 1 << 16)], local=local, remote=remote)
    transfer = transport.read(peer, copies)
    while not (status := transport.poll([transfer])[0]).state.final:
        pass
    assert status.state is State.DONE
    assert (mine == 7).all()
    transport.deregister(local)
    return transfer
