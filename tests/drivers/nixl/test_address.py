"""Addresses come from strangers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ConnectError
from kvferry.core.memory import Region
from kvferry.drivers.nixl import address as wire
from kvferry.drivers.nixl.registrations import Registrations
from tests.drivers.nixl.fake import FakeAgent

WHOLE = Region(address=4096, nbytes=1 << 20)
PART = Region(address=8192, nbytes=16)


def encoded() -> bytes:
    spans = Registrations(FakeAgent())
    spans.add(WHOLE, ())
    spans.add(PART, ())
    return wire.encode(
        name="one", backend="UCX", metadata=b"NIXL's own", spans=spans, regions=spans.regions
    )


def test_what_goes_in_comes_out() -> None:
    address = wire.decode(encoded())
    assert (address.name, address.metadata) == ("one", b"NIXL's own")
    assert wire.regions_of(address) == {WHOLE, PART}
    assert [(span.address, span.nbytes) for span in address.spans] == [(4096, 1 << 20)]


@given(st.data())
def test_damaged_ones_are_refused_or_as_good(data: st.DataObject) -> None:
    """NIXL never gets metadata that it did not make."""
    good = encoded()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(st.sampled_from([good[:at], good[:at] + b"\xff" + good[at + 1 :], good + b"x"]))
    try:
        address = wire.decode(bad)
        wire.regions_of(address)
    except ConnectError:
        return
    assert address.metadata == b"NIXL's own"


def test_a_loopback_address_is_refused_by_what_it_lacks() -> None:
    with pytest.raises(ConnectError, match="both sides must use the same driver"):
        wire.decode(msgspec.msgpack.encode({"magic": "kvferry-loopback-1", "name": "x"}))


def test_longer_than_any_is_refused_before_it_is_read() -> None:
    with pytest.raises(ConnectError, match="at most 1048576"):
        wire.decode(bytes(wire.MAX_ADDRESS_BYTES + 1))
