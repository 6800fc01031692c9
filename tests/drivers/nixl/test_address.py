"""Metadata that NIXL writes is parsed, and malformed metadata is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.drivers.nixl.address import parsed
from kvferry.drivers.ucx_format import FormatError
from tests.drivers.test_ucx_format import KEYS, ONE

KEY = bytes.fromhex(KEYS["1.22.0"])
DESCRIPTOR = bytes(24)


def tagged(tag: bytes, value: bytes) -> bytes:
    """Return a tagged value as ``nixlSerDes`` writes it."""
    return tag + struct.pack("<Q", len(value)) + value + b"|"


def number(tag: bytes, value: int) -> bytes:
    return tagged(tag, struct.pack("<Q", value))


def section(*descriptors: bytes, backend: bytes = b"UCX", count: int | None = None) -> bytes:
    return (
        tagged(b"bknd", backend)
        + tagged(b"nixlDList", b"nixlSDList")
        + tagged(b"t", bytes(4))
        + number(b"n", len(descriptors) if count is None else count)
        + b"".join(tagged(b"", one) for one in descriptors)
    )


def agent_metadata(
    agent: bytes = b"one",
    backend: bytes = b"UCX",
    connection: bytes = ONE,
    sections: bytes = b"",
    count: int = 0,
) -> bytes:
    return (
        b"nixlSerDes|"
        + tagged(b"Agent", agent)
        + number(b"Conns", 1)
        + tagged(b"t", backend)
        + tagged(b"c", connection)
        + tagged(b"", b"MemSection")
        + number(b"nixlSecElms", count)
        + sections
    )


GOOD = agent_metadata(sections=section(DESCRIPTOR + KEY, DESCRIPTOR + KEY), count=1)


def test_valid_metadata_is_parsed() -> None:
    for good in (GOOD, agent_metadata()):
        assert parsed(good) == ("one", ONE)


def test_truncated_metadata_is_refused() -> None:
    for end in range(len(GOOD)):
        with pytest.raises(FormatError):
            parsed(GOOD[:end])
    with pytest.raises(FormatError, match="1 bytes follow its end"):
        parsed(GOOD + b"|")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (b"nixlSerDes:" + GOOD[11:], "does not begin with b'nixlSerDes"),
        (agent_metadata(agent=b""), "b'Agent' is empty"),
        (agent_metadata(agent=b"\xff"), "b'Agent' is no text"),
        (GOOD.replace(number(b"Conns", 1), number(b"Conns", 0)), "b'Conns' is 0"),
        (GOOD.replace(number(b"Conns", 1), number(b"Conns", 1 << 63)), "1 to 1 can be"),
        (GOOD.replace(number(b"Conns", 1), tagged(b"Conns", b"\1")), "b'Conns' is 1"),
        (GOOD.replace(number(b"Conns", 1), number(b"Conns", 2)), "b'Conns' is 2"),
        (agent_metadata(connection=b""), "within a value"),
        (agent_metadata(backend=b"OBJ", connection=b""), "has no connection"),
        (agent_metadata(connection=b"UCX's own"), "its version is 5"),
        (GOOD.replace(b"MemSection", b"NoSections"), "no section of memory"),
        (agent_metadata(count=1 << 40), "b'nixlSecElms' is 1099511627776"),
        (agent_metadata(count=1), "within a value"),
        (agent_metadata(sections=section(), count=1), "b'n' is 0"),
        (agent_metadata(sections=section(DESCRIPTOR, count=1 << 62), count=1), "b'n' is"),
        (agent_metadata(sections=section(bytes(23)), count=1), "has 23 bytes"),
        (agent_metadata(sections=section(DESCRIPTOR + KEY, bytes(8)), count=1), "has 8 bytes"),
        (agent_metadata(sections=section(DESCRIPTOR + b"x"), count=1), "within a value"),
        (GOOD.replace(b"nixlSDList", b"nixlBDList"), "no list of descriptors"),
        (GOOD.replace(tagged(b"t", bytes(4)), tagged(b"t", b"\x09\0\0\0")), "no kind of memory"),
        (GOOD.replace(tagged(b"t", bytes(4)), tagged(b"t", bytes(8))), "no kind of memory"),
    ],
)
def test_malformed_metadata_is_refused(wrong: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        parsed(wrong)


def test_sections_of_other_backends_are_not_checked() -> None:
    other = agent_metadata(
        backend=b"Libfabric",
        connection=b"its own",
        sections=section(DESCRIPTOR + b"its own", backend=b"Libfabric"),
        count=1,
    )
    assert parsed(other) == ("one", b"its own")


@given(st.integers(0, len(GOOD)), st.binary())
def test_arbitrary_metadata_is_parsed_or_refused(at: int, rest: bytes) -> None:
    try:
        parsed(GOOD[:at] + rest + GOOD[at + len(rest) :])
    except FormatError:
        return
