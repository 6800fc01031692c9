"""Messages of the ucx driver: their bounds; and processes that have ended."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.drivers.ucx import messages
from kvferry.drivers.ucx.address import ProcessIdentity


def test_only_a_process_of_this_host_is_said_to_have_ended() -> None:
    here = ProcessIdentity.of_this_process()
    assert not here.has_ended()
    assert msgspec.structs.replace(here, start_time=here.start_time + 1).has_ended()
    assert not ProcessIdentity("another", here.namespace, here.pid, 0).has_ended()
    assert not ProcessIdentity(here.boot, here.namespace + 1, here.pid, 0).has_ended()


@pytest.mark.parametrize(
    "longest",
    [
        messages.Note(bytes(16), b"x" * messages.MAX_NOTIFICATION),
        messages.Fetch(bytes(16), 1, bytes(24 * messages.MAX_RELAY_ROWS)),
    ],
)
def test_longest_messages_are_not_too_long(longest: messages.Message) -> None:
    data = messages.encode(longest)
    assert messages.decode(data) == longest
    assert len(data) <= messages.MAX_MESSAGE


@given(st.binary(max_size=64))
def test_arbitrary_bytes_decode_without_error(data: bytes) -> None:
    messages.decode(data)


def test_messages_out_of_bounds_are_dropped() -> None:
    for bad in (
        messages.Note(bytes(16), b""),
        messages.Note(bytes(16), bytes(messages.MAX_NOTIFICATION + 1)),
        messages.Note(bytes(15), b"x"),
        messages.Released(bytes(16), -1),
        messages.Hello(bytes(16), bytes(16), "", b"x", 0, 0),
        messages.Hello(bytes(16), bytes(16), "one", b"x", 0, 2),
    ):
        assert messages.decode(messages.encode(bad)) is None
