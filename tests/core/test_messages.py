"""Decoding of messages: what is not valid raises ``WireError``.

``tests/pinned`` has the encodings of valid ones.
"""

from __future__ import annotations

import msgspec
import pytest

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.errors import WireError


def test_the_versions_of_an_invalid_payload_can_be_read() -> None:
    alien = msgspec.msgpack.encode({"oldest": 8, "newest": 9, "layout": "a picture"})
    assert wire.decode_versions(alien).spoken == "8 to 9"
    with pytest.raises(WireError):
        wire.decode_payload(alien)


def test_no_release_exceeds_its_bound() -> None:
    release = wire.Release(
        incarnation=(1 << 63) - 1,
        slot=(1 << 32) - 1,
        generation=(1 << 63) - 1,
        engine="\U0001f6a2" * 256,
        rank=(1 << 16) - 1,
        expected=1 << 16,
        abandoned=True,
    )
    assert len(side.encode(release)) <= wire.MAX_NOTE_BYTES
    full = [release] * wire.MAX_NOTES
    assert wire.decode_notes(side.encode(full)) == full


@pytest.mark.parametrize(
    ("mine", "theirs", "common"),
    [((1, 3), (2, 9), 3), ((1, 3), (3, 3), 3), ((1, 2), (3, 4), None), ((2, 5), (1, 9), 5)],
)
def test_both_sides_find_the_same_newest_common_version(
    mine: tuple[int, int], theirs: tuple[int, int], common: int | None
) -> None:
    one, two = (side.Versions(oldest=low, newest=high) for low, high in (mine, theirs))
    assert one.common(two) == two.common(one) == common
