"""Addresses of the nixl driver: encoding, and refusal of damaged ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ConnectError
from kvferry.core.memory import Region
from kvferry.drivers.nixl import address as wire
from kvferry.drivers.nixl.registrations import Registrations
from tests.drivers.damaged_addresses import damaged
from tests.drivers.nixl.fake_agent import FakeAgent

WHOLE = Region(address=4096, nbytes=1 << 20)
PART = Region(address=8192, nbytes=16)


def encoded() -> bytes:
    registrations = Registrations(FakeAgent())
    registrations.add(WHOLE, ())
    registrations.add(PART, ())
    return wire.encode(
        name="one",
        backend="UCX",
        metadata=b"NIXL's own",
        spans=registrations,
        regions=(WHOLE, PART),
    )


@given(st.data())
def test_damaged_address_is_refused_or_decodes_equal(data: st.DataObject) -> None:
    """NIXL never gets metadata that was changed."""
    try:
        address = wire.decode(data.draw(damaged(encoded())))
    except ConnectError:
        return
    assert address.metadata == b"NIXL's own"
