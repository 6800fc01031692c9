"""A sample of the hostile addresses that ``tests.drivers.hostile_addresses`` makes."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.core.errors import ConnectError
from kvferry.core.transport.addresses import digest_of
from kvferry.drivers.nixl import NixlTransport
from kvferry.drivers.nixl import address as wire
from tests.drivers.hostile_addresses import COUNT, crash_no_process
from tests.drivers.pairs import paired
from tests.nixl.test_transport import Make, make

__all__ = ["make"]


@pytest.mark.timeout(300 + COUNT)
def test_hostile_addresses_crash_no_process() -> None:
    crash_no_process("nixl")


def with_fields(address: bytes, **changes: object) -> bytes:
    made = msgspec.structs.replace(wire.decode(address), **changes)
    return msgspec.msgpack.encode(msgspec.structs.replace(made, digest=digest_of(made.metadata)))


def reads_despite_wrong_addresses(one: NixlTransport, honest: NixlTransport) -> bool:
    """Return whether ``one`` still reads from ``honest`` after it refused two wrong addresses."""
    pair = paired(one, honest)
    for wrong in (
        with_fields(honest.address(), name="somebody else"),
        with_fields(honest.address(), metadata=wire.decode(honest.address()).metadata[:-1]),
    ):
        with pytest.raises(ConnectError):
            one.connect(wrong)
    return pair.works()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "other"}, "an address of other that holds NIXL's metadata of nixl-"),
        ({"metadata": b"nixlSerDes|"}, "holds what NIXL did not write"),
    ],
)
def test_malformed_address_is_refused_before_nixl_reads_it(
    make: Make, changes: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, honest = make(), make()
    monkeypatch.setattr(one._agent, "add", None)
    with pytest.raises(ConnectError, match=why):
        one.connect(with_fields(honest.address(), **changes))


def test_name_of_connected_peer_cannot_lead_to_another_agent(make: Make) -> None:
    one, honest, other = make(), make(), make()
    peer = one.connect(honest.address())
    theirs = wire.decode(other.address()).metadata
    forged = theirs.replace(other.name.encode(), honest.name.encode())
    with pytest.raises(ConnectError, match="which is connected, leads elsewhere"):
        one.connect(with_fields(honest.address(), metadata=forged))
    assert one.connect(honest.address()) == peer
    mine = with_fields(
        one.address(), metadata=theirs.replace(other.name.encode(), one.name.encode())
    )
    with pytest.raises(ConnectError, match="which is this side, leads elsewhere"):
        one.connect(mine)


def test_peer_refused_by_nixl_connects_with_correct_metadata(make: Make) -> None:
    """NIXL keeps the connection of an agent even if it refuses the rest of the metadata."""
    one, honest, other = make(), make(), make()
    theirs = wire.decode(other.address()).metadata
    forged = theirs.replace(other.name.encode(), honest.name.encode())
    # Make the metadata name only network devices that this side lacks.
    way = b"\xcf\x19"
    assert way in forged
    for known in (way, b"cu", b"\x8dS", b"\xa7\xd3", b"G\x8b"):
        forged = forged.replace(known, b"\0\0")
    with pytest.raises(ConnectError, match="NIXL does not connect"):
        one.connect(with_fields(honest.address(), metadata=forged))
    assert reads_despite_wrong_addresses(one, honest)
