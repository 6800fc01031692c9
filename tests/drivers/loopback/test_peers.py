"""Peers that die, restart, stop, close or forge an address; forks; and closing a transport."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.core.errors import (
    ConnectError,
    PeerLostError,
    TransportError,
)
from kvferry.core.memory import Region
from kvferry.core.transport import State, procfs
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.contract.copy_batches import batch
from tests.drivers.loopback.conftest import LocalPeer, MakeTransport
from tests.drivers.loopback.helpers import done, endless, run, wait
from tests.drivers.loopback.peer import Bytes, Peer

MIB = 1 << 20


def read_reports_lost_peer(transport: LoopbackTransport, copies: Any, peer: Any) -> bool:
    """Return whether a read fails with ``PeerLostError``."""
    status = run(transport, transport.read(peer, copies))
    return status.state is State.FAILED and isinstance(status.error, PeerLostError)


def test_path_names_how_peer_is_reached(transport: LoopbackTransport, shared_peer: Peer) -> None:
    itself, other = (transport.connect(a) for a in (transport.address(), shared_peer.address()))
    assert [transport.path(peer) for peer in (itself, other)] == ["memcpy", "process_vm"]


# Killed and stopped peers.


def test_connect_to_killed_peer_is_refused(transport: LoopbackTransport, peer: Peer) -> None:
    address = peer.address()
    peer.kill()
    with pytest.raises(ConnectError, match="has ended or restarted"):
        transport.connect(address)


def test_connect_to_zombie_is_refused(transport: LoopbackTransport, peer: Peer) -> None:
    address = peer.address()
    peer.process.kill()
    # Wait until it has ended, without reaping it.
    os.waitid(os.P_PID, peer.process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ConnectError, match="has ended or restarted"):
        transport.connect(address)


def test_peer_killed_while_idle_is_lost(
    transport: LoopbackTransport, local: Region, peer: Peer
) -> None:
    address = peer.address()
    known = transport.connect(address)
    peer.kill()
    transport.notify(known, b"nobody hears this, which is no error")
    assert read_reports_lost_peer(transport, batch(local, peer.region, [0], [0], [8]), known)
    assert read_reports_lost_peer(transport, batch(local, peer.region, [0], [0], [MIB]), known)
    assert read_reports_lost_peer(transport, batch(local, peer.region, [], [], []), known)
    with pytest.raises(ConnectError, match="has ended or restarted"):
        transport.connect(address)
    transport.disconnect(known)


def test_stopped_peer_can_be_connected_to_and_read(
    transport: LoopbackTransport, buffer: Bytes, local: Region, peer: Peer
) -> None:
    address = peer.address()
    peer.stop()
    known = transport.connect(address)
    transfer = transport.read(known, batch(local, peer.region, [0], [0], [MIB]), b"done")
    assert done(transport, transfer)
    np.testing.assert_array_equal(buffer, peer.content)
    peer.go_on()
    (seen,) = peer.notifications(1)
    assert (seen.sender, seen.payload) == (transport.name, b"done")


# Addresses of another process.


@pytest.fixture
def forge(shared_peer: Peer) -> Callable[..., bytes]:
    """The address of ``shared_peer`` with some fields replaced."""
    fields = msgspec.msgpack.decode(shared_peer.address())
    return lambda **changes: msgspec.msgpack.encode(fields | changes)


def test_reused_pid_is_refused(
    transport: LoopbackTransport, shared_peer: Peer, forge: Callable[..., bytes]
) -> None:
    started = procfs.start_time(shared_peer.process.pid)
    assert started is not None
    with pytest.raises(ConnectError, match="has ended or restarted"):
        transport.connect(forge(start_time=started - 1))
    with pytest.raises(ConnectError, match="has ended or restarted"):
        transport.connect(forge(pid=1))


def test_address_with_another_instance_is_refused(
    transport: LoopbackTransport, forge: Callable[..., bytes]
) -> None:
    with pytest.raises(ConnectError, match="closed, or its process has restarted"):
        transport.connect(forge(instance=bytes(16)))


def test_address_with_unmapped_registry_is_refused(
    transport: LoopbackTransport, forge: Callable[..., bytes]
) -> None:
    for board in (0, 8, 1 << 47, (1 << 63) - 1):
        with pytest.raises(ConnectError, match="has ended or restarted"):
            transport.connect(forge(board=board))


def test_peer_that_executed_another_program_is_lost(
    transport: LoopbackTransport, local: Region, peer: Peer
) -> None:
    """exec keeps pid, start time and open descriptors: only the registry in memory is gone."""
    known = transport.connect(peer.address())
    peer.tell("become", "/bin/sleep", "60")
    command = Path(f"/proc/{peer.process.pid}/cmdline")
    while not command.read_bytes().startswith(b"/bin/sleep"):
        time.sleep(0.001)
    assert procfs.start_time(peer.process.pid) is not None
    assert read_reports_lost_peer(transport, batch(local, peer.region, [0], [0], [8]), known)


def test_peers_of_other_hosts_and_containers_are_refused_with_reason(
    transport: LoopbackTransport, forge: Callable[..., bytes]
) -> None:
    with pytest.raises(ConnectError, match="another host"):
        transport.connect(forge(boot="0"))
    with pytest.raises(ConnectError, match="another pid namespace"):
        transport.connect(forge(pid_namespace=1))
    with pytest.raises(ConnectError, match="another network namespace"):
        transport.connect(forge(socket="kvferry-nobody-listens-here"))


@pytest.mark.parametrize(
    ("code", "scope", "said"),
    [
        ("EPERM", 2, "kernel.yama.ptrace_scope is 2; set it to 1"),
        ("EPERM", 1, "or set kernel.yama.ptrace_scope to 0"),
        ("EPERM", 0, "CAP_SYS_PTRACE"),
        ("ENOSYS", 0, "seccomp"),
        ("ENOMEM", 0, "Cannot allocate memory"),
    ],
)
def test_forbidden_memory_access_is_reported_with_setting_to_change(
    transport: LoopbackTransport,
    shared_peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    scope: int,
    said: str,
) -> None:
    number = getattr(errno, code)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("kvferry.drivers.loopback.process_memory.vm_read", refuse)
    monkeypatch.setattr("kvferry.drivers.loopback.process_memory._ptrace_scope", lambda: scope)
    with pytest.raises(ConnectError, match=said):
        transport.connect(shared_peer.address())


def test_memory_access_forbidden_across_users_is_reported_with_uids(
    transport: LoopbackTransport, shared_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("kvferry.drivers.loopback.process_memory.vm_read", refuse)
    monkeypatch.setattr("kvferry.drivers.loopback.process_memory._uid", lambda _: 12345)
    with pytest.raises(ConnectError, match="it runs as uid 12345 and this process as uid"):
        transport.connect(shared_peer.address())


# Malformed and forged addresses.


def test_malformed_addresses_are_refused(transport: LoopbackTransport, local: Region) -> None:
    good = transport.address()
    fields = msgspec.msgpack.decode(good)
    rows = fields["regions"]
    bad_fields: list[dict[str, object]] = [
        {"magic": "kvferry-loopback-2"},
        {"name": ""},
        {"name": "x" * 1000},
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 40},
        {"instance": b"short"},
        {"socket": "x" * 1000},
        {"board": -1},
        {"board": 1 << 63},
        {"regions": [[0, 8, 0, 0, 1]]},
        {"regions": [[8, 0, 0, 0, 1]]},
        {"regions": [[(1 << 63) - 1, (1 << 63) - 1, 0, 0, 1]]},
        {"regions": [[4096, 8, 0, 1 << 30, 1]]},
        {"regions": [[4096, 8, 0]]},
        {"regions": rows * 70_000},
        {"regions": None},
    ]
    forged = [msgspec.msgpack.encode(fields | change) for change in bad_fields]
    forged.append(good.replace(b"loopback-", b"\xff\xfeopback-"))  # not UTF-8
    forged.append(b"\x91" * 10_000)  # deeply nested lists
    for garbage in (b"", b"\0", b"garbage", good[:-1], good + b"\0", bytes(1 << 23), *forged):
        with pytest.raises(ConnectError):
            transport.connect(garbage)
    assert transport.connect(good) == transport.connect(good)


def test_forged_range_with_valid_key_is_refused(
    transport: LoopbackTransport, buffer: Bytes, local: Region, remote: LocalPeer | Peer
) -> None:
    """Without the check, a wrong range in this process would crash it.

    What another process says of its memory is checked after the copy, so its bytes may have come.
    """
    fields = msgspec.msgpack.decode(remote.address())
    for row in fields["regions"]:
        row[0] = row[0] + MIB if row[0] == remote.region.address else row[0]
    peer = transport.connect(msgspec.msgpack.encode(fields))
    beyond = Region(address=remote.region.address + MIB, nbytes=MIB)
    status = run(transport, transport.read(peer, batch(local, beyond, [0], [0], [8])))
    assert status.state is State.FAILED
    assert isinstance(status.error, TransportError)
    if isinstance(remote, LocalPeer):
        assert not buffer.any()


# Closing and forking.


def test_closed_peer_is_lost(
    transport: LoopbackTransport, local: Region, make: MakeTransport, peer: Peer
) -> None:
    local_peer = LocalPeer(make())
    here, there = transport.connect(local_peer.address()), transport.connect(peer.address())
    stale = local_peer.address()
    local_peer.transport.close()
    peer.close()
    assert read_reports_lost_peer(transport, batch(local, local_peer.region, [0], [0], [8]), here)
    assert read_reports_lost_peer(transport, batch(local, peer.region, [0], [0], [8]), there)
    with pytest.raises(ConnectError, match="is gone: this process has closed it"):
        transport.connect(stale)


def test_local_peer_may_close_during_a_read(
    transport: LoopbackTransport, local: Region, make: MakeTransport
) -> None:
    local_peer = LocalPeer(make())
    peer = transport.connect(local_peer.address())
    transfer = transport.read(peer, endless(local, local_peer.region))
    local_peer.transport.close()
    del local_peer
    status = wait(transport, transfer)
    assert isinstance(status.error, PeerLostError)


def test_close_releases_threads_and_descriptors(make: MakeTransport) -> None:
    def threads_and_descriptors() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = threads_and_descriptors()
    transport = LoopbackTransport(inline_bytes=0)
    local_peer = LocalPeer(transport)
    peer = transport.connect(local_peer.address())
    whole = batch(local_peer.region, local_peer.region, [0], [1], [MIB - 1])
    assert done(transport, transport.read(peer, whole, b"x"))
    transport.close()
    assert threads_and_descriptors() == before


def test_disconnect_releases_descriptors(transport: LoopbackTransport, shared_peer: Peer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        transport.disconnect(transport.connect(shared_peer.address()))
    assert len(os.listdir("/proc/self/fd")) == before


FORK = """
import os, sys
import numpy as np
from kvferry.core.transport.copies import copies_between
from kvferry.core.errors import TransportUsageError
from kvferry.core.memory import region_of
from kvferry.drivers.loopback import LoopbackTransport

transport = LoopbackTransport()
memory = np.zeros(1 << 20, np.uint8)
region = region_of(memory)
transport.register(region)
peer = transport.connect(transport.address())
copies = copies_between([(region.address, region.address, 1 << 20)], local=region, remote=region)
transfer = transport.read(peer, copies)
child = os.fork()
if child == 0:
    refused = 0
    for call in (
        transport.address, transport.notifications, lambda: transport.poll([transfer]),
        lambda: transport.read(peer, copies), lambda: transport.connect(b""),
        lambda: transport.register(region), lambda: transport.disconnect(peer),
    ):
        try:
            call()
        except TransportUsageError as exc:
            refused += "fork" in str(exc)
    transport.close()
    # A transport of its own works, and the parent is another process to it.
    mine = LoopbackTransport()
    os._exit(refused if mine.address() else 99)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert transport.notifications() == []
assert done if (done := transport.connect(transport.address()) == peer) else False
transport.close()
"""


def test_forked_child_is_refused_and_parent_goes_on() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_killed_process_leaves_no_socket_behind(peer: Peer) -> None:
    socket = "@" + msgspec.msgpack.decode(peer.address())["socket"]
    assert socket in unix_sockets()
    peer.kill()
    assert socket not in unix_sockets()


def unix_sockets() -> str:
    with open("/proc/net/unix", encoding="ascii") as table:
        return table.read()
