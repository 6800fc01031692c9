"""Metadata as NIXL writes it, and what it did not write."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.drivers.nixl.agent_metadata import MAX_CONNECTIONS, parsed
from kvferry.drivers.ucx_format import FormatError
from tests.drivers.test_ucx_format import KEYS, ONE

KEY = bytes.fromhex(KEYS["1.22.0"])
DESCRIPTOR = bytes(24)


def said(tag: bytes, value: bytes) -> bytes:
    """As ``nixlSerDes`` has it."""
    return tag + struct.pack("<Q", len(value)) + value + b"|"


def number(tag: bytes, value: int) -> bytes:
    return said(tag, struct.pack("<Q", value))


def section(*descriptors: bytes, backend: bytes = b"UCX", count: int | None = None) -> bytes:
    return (
        said(b"bknd", backend)
        + said(b"nixlDList", b"nixlSDList")
        + said(b"t", bytes(4))
        + number(b"n", len(descriptors) if count is None else count)
        + b"".join(said(b"", one) for one in descriptors)
    )


def written(
    agent: bytes = b"one",
    backend: bytes = b"UCX",
    connection: bytes = ONE,
    sections: bytes = b"",
    count: int = 0,
) -> bytes:
    return (
        b"nixlSerDes|"
        + said(b"Agent", agent)
        + number(b"Conns", 1)
        + said(b"t", backend)
        + said(b"c", connection)
        + said(b"", b"MemSection")
        + number(b"nixlSecElms", count)
        + sections
    )


GOOD = written(sections=section(DESCRIPTOR + KEY, DESCRIPTOR + KEY), count=1)


def test_what_was_written_is_read() -> None:
    found = parsed(GOOD)
    assert found.agent == "one"
    assert found.connections == {"UCX": ONE}
    assert parsed(written()).connections == {"UCX": ONE}


def test_parts_of_it_are_refused() -> None:
    for end in range(len(GOOD)):
        with pytest.raises(FormatError):
            parsed(GOOD[:end])
    with pytest.raises(FormatError, match="1 bytes follow its end"):
        parsed(GOOD + b"|")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (b"nixlSerDes:" + GOOD[11:], "does not begin with b'nixlSerDes"),
        (written(agent=b""), "b'Agent' is empty"),
        (written(agent=b"\xff"), "b'Agent' is no text"),
        (GOOD.replace(number(b"Conns", 1), number(b"Conns", 0)), "b'Conns' is 0"),
        (GOOD.replace(number(b"Conns", 1), number(b"Conns", 1 << 63)), "1 to 64 can be"),
        (GOOD.replace(number(b"Conns", 1), said(b"Conns", b"\1")), "b'Conns' is 1"),
        (GOOD.replace(number(b"Conns", 1), number(b"Conns", 2)), "does not begin with b't'"),
        (written(connection=b""), "within a value"),
        (written(backend=b"OBJ", connection=b""), "has no connection"),
        (written(connection=b"UCX's own"), "its version is 5"),
        (GOOD.replace(b"MemSection", b"NoSections"), "no section of memory"),
        (written(count=1 << 40), "b'nixlSecElms' is 1099511627776"),
        (written(count=1), "does not begin with b'bknd'"),
        (written(sections=section(), count=1), "b'n' is 0"),
        (written(sections=section(DESCRIPTOR, count=1 << 62), count=1), "b'n' is"),
        (written(sections=section(bytes(23)), count=1), "has 23 bytes"),
        (written(sections=section(DESCRIPTOR + KEY, bytes(8)), count=1), "has 8 bytes"),
        (written(sections=section(DESCRIPTOR + b"x"), count=1), "within a value"),
        (GOOD.replace(b"nixlSDList", b"nixlBDList"), "no list of descriptors"),
        (GOOD.replace(said(b"t", bytes(4)), said(b"t", b"\x09\0\0\0")), "no kind of memory"),
        (GOOD.replace(said(b"t", bytes(4)), said(b"t", bytes(8))), "no kind of memory"),
    ],
)
def test_what_nixl_did_not_write_is_refused(wrong: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        parsed(wrong)


def test_a_backend_is_connected_to_in_one_way() -> None:
    twice = said(b"t", b"UCX") + said(b"c", ONE)
    wrong = GOOD.replace(number(b"Conns", 1), number(b"Conns", 2)).replace(twice, twice * 2)
    with pytest.raises(FormatError, match="or two"):
        parsed(wrong)
    assert MAX_CONNECTIONS >= 2


def test_what_other_backends_say_is_theirs() -> None:
    other = written(
        backend=b"Libfabric",
        connection=b"its own",
        sections=section(DESCRIPTOR + b"its own", backend=b"Libfabric"),
        count=1,
    )
    assert parsed(other).connections == {"Libfabric": b"its own"}


def test_where_ucx_packs_in_another_way_its_part_is_not_looked_at() -> None:
    assert parsed(written(connection=b"UCX's own"), ucx=False).agent == "one"


@given(st.integers(0, len(GOOD)), st.binary())
def test_whatever_it_is_it_is_read_or_refused(at: int, rest: bytes) -> None:
    try:
        parsed(GOOD[:at] + rest + GOOD[at + len(rest) :])
    except FormatError:
        return
