"""Addresses with a valid digest and something hostile inside: a sample; see ``hostile``."""

from __future__ import annotations

import os
import threading

import msgspec
import numpy as np
import pytest

from kvferry.core.errors import ConnectError
from kvferry.core.memory import region_of
from kvferry.core.transport import PeerId, State
from kvferry.core.transport.copies import copies_between
from kvferry.drivers.nixl import NixlTransport
from kvferry.drivers.nixl import address as wire
from kvferry.drivers.nixl.agent import Agent
from kvferry.drivers.nixl.idle_peers import IdlePeers
from kvferry.drivers.nixl.peer import NixlPeer
from tests.drivers.hostile import counted
from tests.drivers.nixl.test_transport import Make, make
from tests.drivers.ucx.helpers import ended, until

__all__ = ["make"]

pytestmark = pytest.mark.nixl

COUNT = int(os.environ.get("KVFERRY_HOSTILE", "300"))


@pytest.mark.timeout(300 + COUNT)
def test_a_hostile_address_ends_no_process() -> None:
    outcomes, tried = counted("nixl", COUNT)
    assert tried.deaths == []
    assert set(outcomes) <= {"refused", "connected"}
    assert outcomes["refused"]


def changed(address: bytes, **changes: object) -> bytes:
    made = msgspec.structs.replace(wire.decode(address), **changes)
    return msgspec.msgpack.encode(
        msgspec.structs.replace(made, digest=wire.digest_of(made.metadata))
    )


def reads(one: NixlTransport, honest: NixlTransport) -> bool:
    """Whether ``one`` reads what ``honest`` has, without connecting anew."""
    mine, theirs = np.zeros(4096, np.uint8), np.full(4096, 7, np.uint8)
    local, remote = region_of(mine), region_of(theirs)
    one.register(local)
    honest.register(remote)
    peer = one.connect(honest.address())
    for wrong in (
        changed(honest.address(), name="somebody else"),
        changed(honest.address(), metadata=wire.decode(honest.address()).metadata[:-1]),
    ):
        with pytest.raises(ConnectError):
            one.connect(wrong)
    copies = copies_between([(local.address, remote.address, 4096)], local=local, remote=remote)
    assert until(ended(one, one.read(peer, copies), State.DONE))
    return bool((mine == theirs).all())


def test_honest_metadata_under_another_name_takes_no_connection_away(make: Make) -> None:
    assert reads(make(), make())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "other"}, "an address of other that holds NIXL's metadata of nixl-"),
        ({"metadata": b"nixlSerDes|"}, "holds what NIXL did not write"),
    ],
)
def test_what_is_wrong_is_refused_before_nixl_reads_it(
    make: Make, changes: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, honest = make(), make()
    monkeypatch.setattr(one._agent, "add", None)
    with pytest.raises(ConnectError, match=why):
        one.connect(changed(honest.address(), **changes))


def test_a_name_that_is_connected_leads_to_one_agent(make: Make) -> None:
    one, honest, other = make(), make(), make()
    peer = one.connect(honest.address())
    theirs = wire.decode(other.address()).metadata
    forged = theirs.replace(other.name.encode(), honest.name.encode())
    with pytest.raises(ConnectError, match="which is connected, leads elsewhere"):
        one.connect(changed(honest.address(), metadata=forged))
    assert one.connect(honest.address()) == peer
    mine = changed(one.address(), metadata=theirs.replace(other.name.encode(), one.name.encode()))
    with pytest.raises(ConnectError, match="which is this side, leads elsewhere"):
        one.connect(mine)


def test_one_that_nixl_did_not_take_is_taken_when_it_is_right(make: Make) -> None:
    """NIXL keeps how an agent is reached when it cannot use the rest of what it was told."""
    one, honest, other = make(), make(), make()
    theirs = wire.decode(other.address()).metadata
    forged = theirs.replace(other.name.encode(), honest.name.encode())
    # It names no way that this side has.
    way = b"\xcf\x19"
    assert way in forged
    for known in (way, b"cu", b"\x8dS", b"\xa7\xd3", b"G\x8b"):
        forged = forged.replace(known, b"\0\0")
    with pytest.raises(ConnectError, match="NIXL does not connect"):
        one.connect(changed(honest.address(), metadata=forged))
    assert reads(one, honest)


def test_two_addresses_of_one_peer_that_come_at_once_lead_to_one_connection(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of one of them would be the end of what the other one reads."""
    one, honest = make(), make()
    address, found = honest.address(), list[PeerId]()
    second = threading.Thread(target=lambda: found.append(one.connect(changed(address))))
    connect = IdlePeers.connect

    def beside(idle: IdlePeers, peer: NixlPeer, agent: Agent) -> None:
        if second.ident is None:
            second.start()
            second.join(0.5)  # it has to wait for this one
        connect(idle, peer, agent)

    monkeypatch.setattr(IdlePeers, "connect", beside)
    first = one.connect(address)
    second.join()
    assert found == [first]
