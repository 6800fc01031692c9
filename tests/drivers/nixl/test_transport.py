"""What is NIXL's own: options, telemetry, what it prints, and how its process ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvferry.core.endpoint.slot_reads import fitting
from kvferry.core.errors import DriverError, TransportUsageError
from kvferry.core.memory import Region, region_of
from kvferry.core.messages import Release, encode
from kvferry.core.transport import Quiescence, State, TransferId, registry
from kvferry.core.transport.copies import Copies, Segment, copies_between
from kvferry.drivers.nixl import NixlTransport
from kvferry.testing.contract.killed_peers import killed_soon
from kvferry.testing.peers import Process

pytestmark = pytest.mark.nixl

Make = Callable[..., NixlTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[NixlTransport] = []

    def transport(**options: object) -> NixlTransport:
        made.append(NixlTransport(**options))
        return made[-1]

    yield transport
    for one in made:
        one.close()


def test_the_registry_finds_it() -> None:
    [info] = [one for one in registry.installed() if one.name == "nixl"]
    report = registry.describe(info)
    assert report.reason is None
    assert report.capabilities is not None
    assert "cpu" in report.capabilities.memory
    assert report.capabilities.quiescence is Quiescence.AFTER_DISCONNECT


@pytest.mark.parametrize("name", ["x" * 100, "x" * 200])
def test_what_is_said_of_forty_holds_fits_its_notifications(make: Make, name: str) -> None:
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
def test_options_that_it_does_not_have_are_refused_with_those_that_it_has(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(DriverError, match=said):
        registry.create("nixl", options)


@pytest.mark.parametrize("threads", [0, "1"])
def test_a_backend_takes_its_parameters(make: Make, threads: object) -> None:
    _moved(make(backend_options={"num_threads": threads, "num_workers": 2}), make())


def test_telemetry_of_what_is_done(make: Make) -> None:
    transport = make(telemetry=True)
    transfer = _moved(transport, make())
    [found] = transport.telemetry(transfer)
    assert found.nbytes == 1 << 16
    assert found.descriptors >= 1
    assert 0 <= found.post_seconds <= found.seconds
    transport.forget(transfer)
    with pytest.raises(TransportUsageError, match="never started, or forgotten"):
        transport.telemetry(transfer)


def test_no_telemetry_unless_asked(make: Make) -> None:
    transport = make()
    with pytest.raises(TransportUsageError, match="set driver_options: telemetry"):
        transport.telemetry(_moved(transport, make()))


def test_a_part_whose_memory_is_gone_costs_no_connection_with_itself(make: Make) -> None:
    """It can't be lost, so nothing would bring it back."""
    transport, rows = make(), 3 * 4096
    here, there, other = (np.full(rows * 64, value, np.uint8) for value in (0, 1, 7))
    local, gone, stays = map(region_of, (here, there, other))
    for region in (local, gone, stays):
        transport.register(region)
    peer = transport.connect(transport.address())
    places = [(local.address + 64 * i, gone.address + 64 * i, 32) for i in range(rows)]
    begun = transport.read(peer, copies_between(places, local=local, remote=gone))
    transport.deregister(gone)
    _ended(transport, begun)
    place = [(local.address, stays.address, 4096)]
    after = transport.read(peer, copies_between(place, local=local, remote=stays))
    assert _ended(transport, after) is State.DONE
    assert (here[:4096] == 7).all()


def test_a_peer_that_comes_back_again_and_again_takes_no_more_descriptors(make: Make) -> None:
    transport, other = make(), make()

    def visited() -> int:
        """How many there are; a connection has five on either side."""
        _moved(transport, other)
        transport.disconnect(transport.connect(other.address()))
        return _descriptors()

    first = [visited() for _ in range(3)][-1]
    assert max(visited() for _ in range(10)) < first + 3 * AN_AGENT


def test_a_peer_that_comes_back_with_other_memory(make: Make) -> None:
    """Some of what NIXL knows of it is gone by then, and some is new."""
    transport, other = make(), make()
    for _ in range(3):
        gone = np.full(4096, 1, np.uint8)
        other.register(region_of(gone))
        _moved(transport, other)
        transport.disconnect(transport.connect(other.address()))
        other.deregister(region_of(gone))
    _moved(transport, other)


def _ended(transport: NixlTransport, transfer: TransferId) -> State:
    while (state := transport.poll([transfer])[0].state) is State.PENDING:
        time.sleep(0.001)
    return state


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


AN_AGENT = 10
"""More file descriptors than this come with each; UCX opens and closes a few in between."""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _fall_to(threads: int) -> bool:
    """Wait until so many are left: the kernel lists one that was joined for a moment."""
    deadline = time.monotonic() + 10
    while _threads() > threads and time.monotonic() < deadline:
        pass
    return _threads() <= threads


def test_its_threads_end_when_it_is_closed_whoever_still_holds_it(make: Make) -> None:
    make().close()  # some threads come with the library, and stay
    before = _threads()
    transport, other = make(), make()
    transfer = _moved(transport, other)
    with pytest.raises(TransportUsageError) as kept:
        transport.telemetry(transfer)
    gc.disable()
    try:
        transport.close()
        other.close()
        assert _fall_to(before)
    finally:
        gc.enable()
    assert kept.traceback


class Pages:
    """Blocks of 4 KiB, each with its own number in it, registered with two transports."""

    n, size = 5000, 4096

    def __init__(self, transport: NixlTransport, other: NixlTransport) -> None:
        self.transport, self.other = transport, other
        self.mine, self.theirs = np.zeros((2, self.n, self.size), np.uint8)
        self.theirs[:] = np.arange(self.n)[:, None] % 251
        self.local, self.remote = region_of(self.mine), region_of(self.theirs)
        transport.register(self.local)
        other.register(self.remote)

    def read(self) -> TransferId:
        """Read all of them in any order; see that they are right."""
        self.mine[:] = 0
        offsets = np.random.default_rng(0).permutation(self.n).astype(np.uint64) * np.uint64(
            self.size
        )
        far = offsets + np.uint64(self.remote.address)
        copies = _blocks(self.local, offsets, self.remote, far, self.size)
        peer = self.transport.connect(self.other.address())
        transfer = self.transport.read(peer, copies)
        assert _known(self.transport, transfer) is State.DONE
        np.testing.assert_array_equal(self.mine, self.theirs)
        return transfer

    def leave(self) -> None:
        """Undo what was done for them."""
        self.transport.disconnect(self.transport.connect(self.other.address()))
        self.transport.deregister(self.local)
        self.other.deregister(self.remote)


def _bereave(transport: NixlTransport, local: Region) -> None:
    """Kill a peer in the middle of a read that is large enough for UCX's threads."""
    with Process("kvferry.drivers.nixl:NixlTransport", {}, "cpu", 1 << 20) as process:
        dead = transport.connect(process.address())
        same = np.zeros(4096, np.uint64)
        far = process.region
        copies = _blocks(local, same, far, same + np.uint64(far.address), 1 << 20)
        with killed_soon(process):
            transfer = transport.read(dead, copies)
        assert _known(transport, transfer) is State.FAILING
        transport.disconnect(dead)
    assert transport.poll([transfer])[0].state is State.FAILED


def test_large_transfers_work_after_a_peer_died_during_one(make: Make) -> None:
    """Those after it go another way, as large as before: what the dead one's left behind is never
    touched again. That other way is made once, however many die."""
    transport = make(telemetry=True)
    pages = Pages(transport, make())
    parts = len(transport.telemetry(pages.read()))
    more = []
    for _ in range(2):
        _bereave(transport, pages.local)
        before = _descriptors()
        assert len(transport.telemetry(pages.read())) == parts
        more.append(_descriptors() - before)
    assert more[0] >= AN_AGENT > more[1]
    # Who comes back does so at another address.
    with Process("kvferry.drivers.nixl:NixlTransport", {}, "cpu", 1 << 20) as process:
        peer, far = transport.connect(process.address()), process.region
        span = (pages.local.address, far.address, 1 << 20)
        copies = copies_between([span], local=pages.local, remote=far)
        assert _known(transport, transport.read(peer, copies)) is State.DONE
        np.testing.assert_array_equal(pages.mine.ravel()[: 1 << 20], process.get())


def test_memory_and_peers_come_and_go_after_a_peer_died(make: Make) -> None:
    transport, other = make(), make()
    pages = Pages(transport, other)
    pages.read()
    _bereave(transport, pages.local)
    more, itself = Pages(transport, other), Pages(transport, transport)
    for _ in range(2):
        more.read()
        pages.read()
        itself.read()
    more.leave()
    pages.read()
    pages.leave()
    Pages(transport, other).read()
    Pages(transport, make()).read()


def test_what_is_bound_to_a_transfer_comes_from_the_same_sender_after_a_peer_died(
    make: Make,
) -> None:
    transport, other = make(), make()
    pages = Pages(transport, other)
    _bereave(transport, pages.local)
    peer = transport.connect(other.address())
    copies = copies_between(
        [(pages.local.address, pages.remote.address, pages.local.nbytes)],
        local=pages.local,
        remote=pages.remote,
    )
    pages.mine[:] = 7
    assert _known(transport, transport.write(peer, copies, b"written")) is State.DONE
    while not (found := other.notifications()):
        pass
    assert (pages.theirs == 7).all()
    assert [(one.sender, one.payload) for one in found] == [(transport.name, b"written")]


ENDING = """
import gc
from kvferry.testing.contract.workbench import MIB, Workbench, settings_of
from kvferry.testing.contract.killed_peers import killed_soon
from kvferry.testing.peers import Process
from tests.drivers.nixl.test_contract import TestNixl

made = settings_of(TestNixl)
for op in ("read", "write"):
    with Workbench(made) as lab, Process(made.factory, made.options, "cpu", MIB) as process:
        peer = lab.transport.connect(process.address())
        with killed_soon(process):
            transfer = lab.start(op, peer, lab.lasting(process))
        lab.settled(transfer, peer)
    gc.collect()
print("the end")
"""


def test_the_process_survives_the_peers_that_died_and_ends_well() -> None:
    """UCX aborts the process in which what a broken connection has left behind is destroyed."""
    run = _run(ENDING)
    # UCX writes there, too.
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
def test_it_prints_nothing_and_its_process_ends_well(closed: bool) -> None:
    """Although NIXL brings libraries that many machines have, too, in another version."""
    run = _run(CODE.replace("{closed}", str(closed)))
    assert run.stdout == "the end True\n"
    assert "INFO" not in run.stderr
    assert run.returncode == 0, run.stderr


def test_it_says_more_when_asked() -> None:
    run = _run(CODE.replace("{closed}", "True"), NIXL_LOG_LEVEL="INFO")
    assert "Initialized NIXL agent" in run.stdout + run.stderr


def _blocks(
    local: Region, here: np.ndarray, remote: Region, there: np.ndarray, size: int
) -> Copies:
    """Copies of one size, by offsets here and by addresses there."""
    n = len(here)
    return Copies(
        local=here + np.uint64(local.address),
        remote=there,
        nbytes=np.full(n, size, np.uint64),
        segments=(Segment(start=0, stop=n, local=local, remote=remote),),
    )


def _known(transport: NixlTransport, transfer: TransferId) -> State:
    while (state := transport.poll([transfer])[0].state) is State.PENDING:
        pass
    return state


def _moved(transport: NixlTransport, other: NixlTransport) -> TransferId:
    """A transfer of 64 KiB that is done."""
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
