"""Checks of what UCX packs: samples of several versions pass, malformed ones are refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.drivers.ucx_format import (
    MAX_ENTRIES,
    MAX_KEY_TAIL,
    FormatError,
    check_key,
    check_worker_address,
    is_known,
)

ADDRESSES = {
    "1.20.0": (
        "20cf949c871db89ef00000637577cc2b320040975000000000004f030088b98b67a20c1192c801060202c000"
        "0202cf1917b751389763344bd7e037370013230082edaf01120302a0edb3e3e3a4be93f9ffffef00000000cf"
        "1917b75138539e3e4bd7e03737011323008282090208a0edb3e3e3a4be138d5377cc2b320000705077ccab33"
        "004f2300880200b700000000000308a0edb3e3e3a4be13a7d377cc2b320000705077ccab33004f230088441d"
        "0000040000c00408a0edb3e3e3a4be13478bbd37063600242e5077ccab330092210084441d00008480"
    ),
    "1.21.0, version 2": (
        "510289a322d295956250000063754426000080001b0088c2198f4f7ae6a32d01060002c0000202cf190c015a"
        "0080008b0082849101120102a0edb3e3e3a4be93f9ffffef00000000cf190c015a0180008b008291490208a0"
        "edb3e3e3a4be138d5344e5430081009b00883a80b700000000000308a0edb3e3e3a4be13a7d344e543008100"
        "9b0088681d0080060000c00488a0edb3e3e3a4be13478bfb5543000000990084681d0000"
    ),
    "1.22.0": (
        "2047425bcbbba582d70000637577cc2b320040975000000000004f030088ea4042abe639124301060002c000"
        "0202cf1917b751389763344bd7e0373700132300829fc9010e0102a0edb3e3e3a4be93f9ffffefcf1917b751"
        "38539e3e4bd7e037370113230082e7e30208a0edb3e3e3a4be138d5377cc2b320000705077ccab33004f2300"
        "8817000000000000000308a0edb3e3e3a4be13a7d377cc2b320000705077ccab33004f230088fd1a00000400"
        "00c00408a0edb3e3e3a4be13478bbd37063600242e5077ccab330092210084fd1a00008680"
    ),
}
UNIFIED = bytes.fromhex(
    "2064bc6f2f6670f89f000063758000000000d0afd8a5b8aada8f01060002c0000202cf1981d7e037378c4b010e0102a0"
    "edb3e3e3a4be93f9ffffefcf1982d7e0373799a30408a0edb3e3e3a4be13478b8577ccab33212e00008680"
)
KEYS = {"three domains": "130000000000000000000000", "1.22.0": "01000000000000000000ff"}
HEADER = b"\x20" + bytes(8)
SELF = bytes.fromhex("637577cc2b320040975000000000004f0300")
"""Name and figures of a transport; the length of its address follows."""
ONE = HEADER + b"\x00\x80" + SELF + b"\x88" + bytes(8)
"""One device, the last, with one transport, the last."""


@pytest.mark.parametrize("data", ADDRESSES.values(), ids=ADDRESSES)
def test_addresses_of_all_versions_pass_and_truncated_ones_are_refused(data: str) -> None:
    good = bytes.fromhex(data)
    check_worker_address(good)
    for end in range(len(good)):
        with pytest.raises(FormatError):
            check_worker_address(good[:end])
    with pytest.raises(FormatError, match="1 bytes follow its end"):
        check_worker_address(good + b"\0")


def test_smallest_address_passes() -> None:
    check_worker_address(ONE)
    assert is_known(ONE)


def figures(overhead: float, bandwidth: float, latency: float) -> bytes:
    return SELF[:2] + struct.pack("<fff", overhead, bandwidth, latency) + SELF[14:]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (b"\x22" + ONE[1:], "its version is 2"),
        (b"\x2f" + ONE[1:], "its version is 15"),
        (b"\x00" + ONE[1:], "the flags 0x0"),
        (b"\xa0" + ONE[1:], "the flags 0xa"),
        (HEADER + b"\xff", "within a value"),
        (HEADER + b"\x80\x80", "it names no transport"),
        (HEADER + b"\x00\xc0\x00" + ONE[11:], "a device has no paths"),
        (HEADER + b"\x00\x80" + SELF + b"\xc8" + bytes(8), "it is an endpoint's"),
        (HEADER + b"\x00\x80" + SELF + b"\x87" + bytes(7), "an interface's address has 7 bytes"),
        (HEADER + b"\x00\x80" + (SELF + b"\x08" + bytes(8)) * 200, "more than 128"),
        (HEADER + b"\x80\x00" * 200, "more than 128"),
        (HEADER + b"\x40\x00" + ONE[11:] + b"\x86\x80", "memory domain 64"),
        (HEADER + b"\x00\x80" + figures(0, 0, 0) + ONE[-9:], "0 B/s"),
        (HEADER + b"\x00\x80" + figures(0, -1e9, 0) + ONE[-9:], "B/s"),
        (HEADER + b"\x00\x80" + figures(0, 1e30, 0) + ONE[-9:], "B/s"),
        (HEADER + b"\x00\x80" + figures(0, float("nan"), 0) + ONE[-9:], "nan B/s"),
        (HEADER + b"\x00\x80" + figures(float("nan"), 1e9, 0) + ONE[-9:], "nan s"),
        (HEADER + b"\x00\x80" + figures(-1, 1e9, 0) + ONE[-9:], "-1 s"),
        (HEADER + b"\x00\x80" + figures(2, 1e9, 0) + ONE[-9:], "2 s"),
        (HEADER + b"\x00\x80" + figures(0, 1e9, -1) + ONE[-9:], "-1 s"),
        (HEADER + b"\x00\x80" + figures(0, 1e9, 2) + ONE[-9:], "2 s"),
    ],
)
def test_malformed_address_is_refused(wrong: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        check_worker_address(wrong)


def test_unusual_but_valid_addresses_pass() -> None:
    """Many transports, and several paths, pass."""
    more = SELF + b"\x08" + bytes(8)
    check_worker_address(HEADER + b"\x00\x80" + more * (MAX_ENTRIES - 1) + ONE[11:])
    check_worker_address(HEADER + b"\x00\xe0\x02\x07" + ONE[11:])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_figures_of_version_2_must_be_numbers(at: int) -> None:
    good = bytearray.fromhex(ADDRESSES["1.21.0, version 2"])
    figure = 2 + 8 + 2 + 2 + at
    good[figure] = 0x0F
    with pytest.raises(FormatError, match="not numbers"):
        check_worker_address(bytes(good))


def test_unified_format_is_not_known() -> None:
    assert not is_known(UNIFIED)


@pytest.mark.parametrize("data", KEYS.values(), ids=KEYS)
def test_keys_of_all_versions_pass_and_truncated_ones_are_refused(data: str) -> None:
    good = bytes.fromhex(data)
    check_key(good)
    check_key(good, frozenset({0}))
    for end in range(9):
        with pytest.raises(FormatError):
            check_key(good[:end])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (bytes(8) + b"\x10", "kind 16"),
        (b"\xff" * 9, "kind 255"),
        (b"\xff" * 8 + b"\0" + bytes(63), "within a value"),
        (b"\x01" + bytes(8) + b"\x05" + bytes(4), "within a value"),
        (bytes(9 + MAX_KEY_TAIL + 1), "195 bytes follow"),
    ],
)
def test_malformed_key_is_refused(wrong: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        check_key(wrong)


def test_key_must_have_the_stated_memory_kind() -> None:
    cuda = bytes(8) + b"\x01"
    check_key(cuda, frozenset({1}))
    with pytest.raises(FormatError, match="kind 1"):
        check_key(cuda, frozenset({0}))


@given(st.sampled_from([b"", HEADER, ONE, *map(bytes.fromhex, ADDRESSES.values())]), st.binary())
def test_arbitrary_bytes_pass_or_are_refused(begin: bytes, rest: bytes) -> None:
    for check in (check_worker_address, check_key):
        try:
            check(begin[: len(begin) - len(rest)] + rest)
        except FormatError:
            continue
