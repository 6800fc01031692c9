"""Strips that are malformed, or that leave their regions in some page, are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import TransportUsageError
from kvferry.core.memory import Region
from kvferry.core.transport import Segment, Strips, StripSide

LOCAL, REMOTE = Region(address=4096, nbytes=1000), Region(address=1 << 20, nbytes=500)
# Two strips of 10 bytes, in five pages, with two places in each local page: the last byte of the
# last strip is the last of its region on both sides.
SEGMENT = Segment(start=0, stop=2, local=LOCAL, remote=REMOTE)
SIDE = StripSide(
    start=np.array([4096, 4096 + 140], np.uint64),
    within=np.array([0, 50], np.int64),
    stride=200,
    pages=5,
)
GOOD: dict[str, Any] = {
    "nbytes": 10,
    "local": SIDE,
    "remote": replace(
        SIDE,
        start=np.array([1 << 20, (1 << 20) + 90], np.uint64),
        within=np.zeros(1, np.int64),
        stride=100,
    ),
    "segments": (SEGMENT,),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nbytes": 11}, "leave their local region"),
        ({"nbytes": 0}, "at least 1 byte"),
        ({"segments": ()}, "all must be in segments"),
        ({"segments": (replace(SEGMENT, stop=1),)}, "all must be in segments"),
        ({"segments": (SEGMENT, replace(SEGMENT, start=2))}, "all must be in segments"),
        ({"local": replace(SIDE, start=SIDE.start.astype(np.int64))}, "local strips begin at"),
        ({"remote": replace(SIDE, start=SIDE.start[:1])}, "remote strips begin at"),
        ({"local": replace(SIDE, within=SIDE.within.astype(float))}, "local strips begin at"),
        ({"local": replace(SIDE, within=SIDE.within[:0])}, "one place"),
        ({"local": replace(SIDE, within=SIDE.within - 1)}, "not negative int64"),
        ({"local": replace(SIDE, stride=-1)}, "no distance is negative"),
        ({"local": replace(SIDE, pages=0)}, "one page is needed"),
        ({"local": replace(SIDE, pages=6)}, "leave their local region"),
        ({"local": replace(SIDE, start=SIDE.start - np.uint64(1))}, "leave their local region"),
        ({"remote": replace(GOOD["remote"], stride=101)}, "leave their remote region"),
    ],
)
def test_strips_that_are_malformed_or_leave_their_regions_are_refused(
    change: dict[str, Any], message: str
) -> None:
    assert len(Strips(**GOOD)) == 2
    with pytest.raises(TransportUsageError, match=message):
        Strips(**GOOD | change)
