"""Peers that end, restart or stop, and forged addresses."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import ConnectError, PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import State, procfs
from kvferry.drivers.loopback import LoopbackTransport
from tests.drivers.loopback.peer import Peer
from tests.drivers.pairs import MIB, Pair, copies_of, paired, until


def lost(pair: Pair[LoopbackTransport, Any]) -> bool:
    """Return whether a small, a large and an empty read, with a notification, fail as they must."""
    transfers = [
        pair.read([(0, 0, 8)]),
        pair.read(),
        pair.reader.read(pair.peer, copies_of(pair.local, pair.remote, times=0), b"x"),
    ]
    return all(isinstance(pair.final(each).error, PeerLostError) for each in transfers)


def test_killed_peer_is_lost_and_leaves_no_socket(transport: LoopbackTransport, peer: Peer) -> None:
    pair, address = paired(transport, peer), peer.address()
    socket = "@" + msgspec.msgpack.decode(address)["socket"]
    unix_sockets = Path("/proc/net/unix")
    assert socket in unix_sockets.read_text()
    peer.process.kill()
    # Wait until it has ended, without reaping it: a zombie has ended, too.
    os.waitid(os.P_PID, peer.process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ConnectError, match="has ended or restarted"):
        transport.connect(address)
    peer.kill()
    transport.notify(pair.peer, b"nobody hears this, which is no error")
    assert lost(pair)
    assert socket not in unix_sockets.read_text()
    with pytest.raises(ConnectError, match="has ended or restarted"):
        transport.connect(address)


def test_peer_that_executed_another_program_is_lost(
    transport: LoopbackTransport, peer: Peer
) -> None:
    """exec keeps pid, start time and open descriptors: only the registry in memory is gone."""
    pair = paired(transport, peer)
    peer.tell("become", "/bin/sleep", "60")
    command = Path(f"/proc/{peer.process.pid}/cmdline")
    assert until(lambda: command.read_bytes().startswith(b"/bin/sleep"))
    assert procfs.start_time(peer.process.pid) is not None
    assert lost(pair)


# Malformed and forged addresses.


@pytest.fixture
def forge(shared_peer: Peer) -> Callable[..., bytes]:
    """The address of ``shared_peer`` with some fields replaced."""
    fields = msgspec.msgpack.decode(shared_peer.address())
    return lambda **changes: msgspec.msgpack.encode(fields | changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pid": 1}, "has ended or restarted"),
        ({"start_time": 1}, "has ended or restarted"),  # a pid that is used again
        *[({"board": at}, "has ended or restarted") for at in (0, 8, 1 << 47, (1 << 63) - 1)],
        ({"instance": bytes(16)}, "closed, or its process has restarted"),
        ({"boot": "0"}, "another host"),
        ({"pid_namespace": 1}, "another pid namespace"),
        ({"socket": "kvferry-nobody-listens-here"}, "another network namespace"),
    ],
)
def test_address_of_another_process_is_refused_with_reason(
    transport: LoopbackTransport, forge: Callable[..., bytes], changes: dict[str, object], why: str
) -> None:
    with pytest.raises(ConnectError, match=why):
        transport.connect(forge(**changes))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EPERM, "run both as one user; .*CAP_SYS_PTRACE"),
        (errno.ENOSYS, "seccomp"),
        (errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_forbidden_memory_access_is_reported_with_setting_to_change(
    transport: LoopbackTransport,
    shared_peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    said: str,
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("kvferry.drivers.loopback.process_memory.vm_read", refuse)
    with pytest.raises(ConnectError, match=said):
        transport.connect(shared_peer.address())


def test_forged_range_with_valid_key_is_refused(
    transport: LoopbackTransport, remote: LoopbackTransport | Peer
) -> None:
    pair = paired(transport, remote)
    fields = msgspec.msgpack.decode(remote.address())
    for row in fields["regions"]:
        row[0] += MIB
    assert transport.connect(msgspec.msgpack.encode(fields)) == pair.peer
    beyond = Region(address=pair.remote.address + MIB, nbytes=MIB)
    transfer = transport.read(pair.peer, copies_of(pair.local, beyond, [(0, 0, 8)]))
    status = pair.final(transfer)
    assert status.state is State.FAILED
    assert isinstance(status.error, TransportError)
    assert isinstance(remote, Peer) or not pair.mine.any()  # another process is checked afterwards
