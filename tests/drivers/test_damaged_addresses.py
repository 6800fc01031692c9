"""Addresses that were damaged on their way are refused before UCX or NIXL reads them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ConnectError
from kvferry.core.memory import Region
from kvferry.drivers.nixl import address as nixl
from kvferry.drivers.nixl.agents import RegisteredSpan
from kvferry.drivers.ucx import address as ucx
from kvferry.drivers.ucx.address import ProcessIdentity, UcxAddress, UcxRegion

WHOLE = Region(address=4096, nbytes=1 << 20)
ENCODED = {
    nixl: nixl.encode(
        name="one",
        backend="UCX",
        metadata=b"NIXL's own",
        spans=[RegisteredSpan(whole=WHOLE, key=1)],
        regions=(WHOLE, Region(address=8192, nbytes=16)),
    ),
    ucx: ucx.encode(
        UcxAddress(
            name="one",
            instance=bytes(16),
            process=ProcessIdentity.of_this_process(),
            ucx="1.22.0",
            worker=b"UCX's own",
            withdrawn=3,
            regions=[UcxRegion(4096, 1 << 20, "cpu", 0, 7, b"a key")],
        )
    ),
}


def packed(address: Any) -> object:
    """Return what the library made."""
    if isinstance(address, UcxAddress):
        return address.worker, [row.packed for row in address.regions]
    return address.metadata


@pytest.mark.parametrize("wire", ENCODED, ids=["nixl", "ucx"])
@given(at=st.floats(0, 1, exclude_max=True), change=st.sampled_from(["cut", "changed", "longer"]))
def test_damaged_address_is_refused_or_has_what_the_library_made(
    wire: Any, at: float, change: str
) -> None:
    right = ENCODED[wire]
    start = right[: int(at * len(right))]
    wrong = {"cut": start, "changed": start + b"\xff" + right[len(start) + 1 :]}
    try:
        found = wire.decode(wrong.get(change, right + b"x"))
    except ConnectError:
        return
    assert packed(found) == packed(wire.decode(right))
