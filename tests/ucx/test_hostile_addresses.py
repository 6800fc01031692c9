"""A sample of the hostile addresses that ``tests.drivers.hostile_addresses`` makes."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.core.errors import ConnectError, PeerLostError
from kvferry.core.transport import procfs
from kvferry.drivers.ucx import UcxTransport
from kvferry.drivers.ucx import address as wire
from kvferry.drivers.ucx.address import ProcessIdentity
from kvferry.testing.peers import Process
from tests.drivers.hostile_addresses import COUNT, crash_no_process
from tests.ucx.test_transport import FACTORY, PATIENT, Make, make

__all__ = ["make"]


@pytest.mark.timeout(300 + COUNT)
@pytest.mark.parametrize("side", ["ucx", "ucx-server"])
def test_hostile_addresses_crash_no_process(side: str) -> None:
    crash_no_process(side)


def with_fields(address: bytes, **changes: object) -> bytes:
    return wire.encode(msgspec.structs.replace(wire.decode(address), **changes))


def test_malformed_worker_address_is_refused_with_reason(make: Make) -> None:
    good = make().address()
    with pytest.raises(ConnectError, match="holds what UCX did not pack: its version is 15"):
        make().connect(with_fields(good, worker=b"\x2f" + wire.decode(good).worker[1:]))


def test_address_with_another_peers_instance_does_not_replace_that_peer(make: Make) -> None:
    one, honest, other = make(), make(), make()
    peer = one.connect(honest.address())
    forged = with_fields(other.address(), instance=wire.decode(honest.address()).instance)
    with pytest.raises(ConnectError):
        with_short_timeout(one).connect(forged)
    assert one._peers[peer].address.worker == honest._server.worker.address
    assert one.connect(honest.address()) == peer


def test_an_altered_address_of_a_connected_peer_is_refused_and_changes_nothing(make: Make) -> None:
    one, other = make(), make()
    peer = one.connect(other.address())
    before = one._peers[peer].address
    # That its process has ended would prove that nothing arrives any more.
    ended = ProcessIdentity(procfs.boot_id(), procfs.pid_namespace(), 1, 1)
    for name, value in (("name", "another"), ("ucx", "1.99.0"), ("process", ended)):
        with pytest.raises(ConnectError, match="name, process or UCX is another"):
            one.connect(with_fields(other.address(), **{name: value}))
        assert one._peers[peer].address is before
    assert one.connect(other.address()) == peer


def test_an_address_that_cannot_reopen_a_lost_connection_changes_nothing(make: Make) -> None:
    one, other = make(), make()
    peer = one.connect(other.address())
    before = one._peers[peer].address
    with one._client.lock:
        one._peers[peer].connection.close(PeerLostError("cut by this test"))
    with pytest.raises(ConnectError, match="the address is too old"):
        one.connect(with_fields(other.address(), withdrawn=1))
    assert one._peers[peer].address is before
    assert one.connect(other.address()) == peer


def with_short_timeout(transport: UcxTransport) -> UcxTransport:
    transport._client._connect_timeout = 0.5
    return transport


def test_address_of_former_instance_is_refused_with_reason(make: Make) -> None:
    one = make(connect_seconds=0.5)
    with Process(FACTORY, PATIENT, "cpu", 4096) as process:
        late = with_fields(process.address(), instance=bytes(16))
        with pytest.raises(ConnectError, match="another is there by now: connect with a new"):
            one.connect(late)
