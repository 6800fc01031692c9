"""The nixl driver on NIXL: options, dead peers, output, and the end of the process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.errors import DriverError, TransportUsageError
from kvferry.core.transport import Notification, PeerId, State, registry
from kvferry.drivers.nixl import NixlTransport
from kvferry.testing.peers import Process
from tests.drivers.pairs import (
    LEFT_OPEN,
    MIB,
    Pair,
    closed_at_end,
    notifications_of,
    paired,
    run_python,
    until,
)
from tests.nixl.test_contract import FACTORY

Make = Callable[..., NixlTransport]
NixlPair = Pair[NixlTransport, NixlTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    with closed_at_end(NixlTransport) as make_one:
        yield make_one


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


def test_backend_options_are_accepted(make: Make) -> None:
    options = {"num_threads": "1", "num_workers": 2}
    assert paired(make(backend_options=options), make()).works()


def test_path_names_the_backend(make: Make) -> None:
    pair = paired(make(telemetry=True), make())
    assert pair.works()
    assert pair.reader.path(pair.peer) == "UCX (transport not reported)"


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
    found: list[Notification] = []

    def arrives() -> bool:
        other.poll([])
        transport.poll([])
        found.extend(transport.notifications())
        return bool(found)

    assert until(arrives)
    assert [(one.sender, one.payload) for one in found] == [(other.name, b"kept")]


def test_deregistered_memory_does_not_break_connection_to_itself(make: Make) -> None:
    """A transport never loses the connection to itself, so it could not connect again either."""
    transport = make()
    gone, stays = (paired(transport, transport) for _ in range(2))
    begun = gone.read([(64 * i, 64 * i, 32) for i in range(3 * 4096)])
    transport.deregister(gone.remote)
    gone.known(begun)
    assert stays.works()


def test_reconnecting_peer_leaks_no_descriptors(make: Make) -> None:
    transport, other = make(), make()

    def connect_and_count() -> int:
        """Return the number of open descriptors; a connection has five on either side."""
        pair = paired(transport, other)
        assert pair.works()
        transport.disconnect(pair.peer)
        return _descriptors()

    first = [connect_and_count() for _ in range(3)][-1]
    assert max(connect_and_count() for _ in range(10)) < first + 3 * DESCRIPTORS_PER_AGENT


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


DESCRIPTORS_PER_AGENT = 10
"""Every agent opens more file descriptors than this; UCX opens and closes a few in between."""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_close_ends_threads_while_transport_is_still_referenced(make: Make) -> None:
    make().close()  # the library starts some threads that stay
    before = _threads()
    pair = paired(make(), make())
    transfer = pair.read()
    assert pair.final(transfer).state is State.DONE
    with pytest.raises(TransportUsageError) as kept:
        pair.reader.disconnect(PeerId(pair.peer + 1))
    gc.disable()
    try:
        pair.reader.close()
        pair.other.close()
        # The kernel lists a joined thread for a moment.
        assert until(lambda: _threads() <= before)
    finally:
        gc.enable()
    assert kept.traceback


def reads_scattered(pair: NixlPair, notify: bytes | None = None) -> bool:
    """Connect with the newest address; return whether 5,000 blocks in random order arrive."""
    blocks = len(pair.mine) // 4096
    rows = [(4096 * at, 4096 * at, 4096) for at in np.random.default_rng(0).permutation(blocks)]
    pair = replace(pair, peer=pair.reader.connect(pair.other.address()))
    pair.mine[:] = 0
    return pair.moved(rows, notify).state is State.DONE and bool((pair.mine == pair.theirs).all())


def _kill_peer_during_read(transport: NixlTransport) -> None:
    """Kill a peer during a read that is large enough for UCX's threads."""
    with Process(FACTORY, {}, "cpu", MIB) as process:
        pair = paired(transport, process)
        with process.killed_soon():
            transfer = pair.read(times=4096)
        assert pair.known(transfer).state is State.FAILING
        transport.disconnect(pair.peer)
    assert pair.status(transfer).state is State.FAILED


def test_all_goes_on_after_peers_died_during_large_transfers(make: Make) -> None:
    """Later transfers use a second agent, which is made once, however many peers die.

    What the transfer to the dead peer left behind is never touched again. Regions and peers may
    change, and bound notifications keep their sender.
    """
    transport, other = make(), make()
    pair: NixlPair = paired(transport, other, 5000 * 4096)
    assert reads_scattered(pair)
    more = []
    for _ in range(2):
        _kill_peer_during_read(transport)
        before = _descriptors()
        assert reads_scattered(pair)
        more.append(_descriptors() - before)
    assert more[0] >= DESCRIPTORS_PER_AGENT > more[1]
    gone: NixlPair = paired(transport, other, MIB)
    for one in (gone, pair, paired(transport, transport), paired(transport, make())):
        assert reads_scattered(one, b"read")
    notes = notifications_of(other, 2)
    assert [(note.sender, note.payload) for note in notes] == [(transport.name, b"read")] * 2
    transport.disconnect(gone.peer)
    transport.deregister(gone.local)
    other.deregister(gone.remote)
    assert reads_scattered(pair)


ENDING = """
import gc
from kvferry.drivers.nixl import NixlTransport
from kvferry.testing.peers import Process
from tests.drivers.pairs import MIB, paired

with Process("kvferry.drivers.nixl:NixlTransport", {}, "cpu", MIB) as process:
    pair = paired(NixlTransport(), process)
    transfer = pair.read(times=4096)
    process.kill()
    pair.known(transfer)
    pair.reader.disconnect(pair.peer)
    pair.final(transfer)
    pair.reader.close()
del pair
gc.collect()
print("the end")
"""


def test_process_survives_dead_peers_and_exits_cleanly() -> None:
    """UCX would abort a process that destroys what a broken connection left behind."""
    run = run_python(ENDING)
    # UCX writes to stdout, too.
    assert run.stdout.endswith("the end\n"), run.stderr
    assert run.returncode == 0, run.stderr


def test_transport_prints_nothing_and_process_exits_cleanly_with_one_open() -> None:
    """NIXL brings libraries that many machines also have in another version."""
    run = run_python(LEFT_OPEN, "nixl")
    assert run.stdout == "the end True\n"
    assert "INFO" not in run.stderr
    assert run.returncode == 0, run.stderr


def test_nixl_log_level_is_respected() -> None:
    run = run_python(LEFT_OPEN, "nixl", NIXL_LOG_LEVEL="INFO")
    assert "NIXL version: " in run.stdout + run.stderr
    assert run.returncode == 0, run.stderr
