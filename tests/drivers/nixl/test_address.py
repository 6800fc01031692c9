"""Addresses of the nixl driver: refusal of damaged ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ConnectError
from kvferry.core.memory import Region
from kvferry.drivers.nixl import address as wire
from kvferry.drivers.nixl.agents import RegisteredSpan
from tests.drivers.damaged_addresses import damaged

WHOLE = Region(address=4096, nbytes=1 << 20)
ENCODED = wire.encode(
    name="one",
    backend="UCX",
    metadata=b"NIXL's own",
    spans=[RegisteredSpan(whole=WHOLE, key=1)],
    regions=(WHOLE, Region(address=8192, nbytes=16)),
)


@given(st.data())
def test_damaged_address_is_refused_or_decodes_equal(data: st.DataObject) -> None:
    """NIXL never gets metadata that was changed."""
    try:
        address = wire.decode(data.draw(damaged(ENCODED)))
    except ConnectError:
        return
    assert address.metadata == b"NIXL's own"
