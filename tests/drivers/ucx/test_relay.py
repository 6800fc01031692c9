"""By messages: a stranger's bytes are stored whole and where they may be, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.core.memory import Region, U64Array, region_of
from kvferry.drivers.ucx.address import KeyId
from kvferry.drivers.ucx.messages import MAX_RELAY_BYTES, Fetch, Store
from kvferry.drivers.ucx.relay import fetch, gathered, reached_natively, store

KEY = KeyId(7)
Row = tuple[int, int, int]


def message(rows: list[Row], data: bytes) -> Store:
    table: U64Array = np.array(rows, np.uint64).reshape(-1, 3)
    return Store(bytes(16), 1, table.tobytes(), data)


def test_bytes_are_gathered_and_stored_in_order() -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    region = region_of(target)
    at = source.ctypes.data
    data = gathered([at + 5, at, at + 40], [3, 0, 4])
    rows: list[Row] = [
        (KEY, region.address + 60, 3),
        (KEY, region.end, 0),
        (KEY, region.address, 4),
    ]
    assert store(message(rows, data), {KEY: region}) == ""
    expected = np.zeros(64, np.uint8)
    expected[60:63], expected[:4] = source[5:8], source[40:44]
    np.testing.assert_array_equal(target, expected)


def test_what_is_fetched_is_what_was_stored() -> None:
    target = np.zeros(64, np.uint8)
    region = region_of(target)
    rows: list[Row] = [(KEY, region.address + 8, 3), (KEY, region.address, 2)]
    assert store(message(rows, b"abcde"), {KEY: region}) == ""
    assert fetch(Fetch(bytes(16), 2, message(rows, b"").rows), {KEY: region}) == ("", b"abcde")
    assert fetch(Fetch(bytes(16), 2, message(rows, b"").rows), {}) == (
        "a region has been deregistered",
        b"",
    )


def test_more_at_once_than_fits_into_a_message_is_not_fetched() -> None:
    """Though a small question asks for it."""
    target = np.zeros(MAX_RELAY_BYTES, np.uint8)
    region = region_of(target)
    rows: list[Row] = [(KEY, region.address, region.nbytes)] * 2
    refusal, data = fetch(Fetch(bytes(16), 1, message(rows, b"").rows), {KEY: region})
    assert "at most" in refusal
    assert data == b""


def test_nothing_at_all_is_stored() -> None:
    assert store(message([], b""), {}) == ""


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ((8, 0, 4), "deregistered"),
        ((KEY, 61, 4), "leave"),
        ((KEY, -1, 4), "leave"),
        ((KEY, (1 << 64) - (1 << 47), 4), "leave"),
        ((KEY, 0, 5), "a store of 8 bytes for 9"),
        ((KEY, 0, 3), "a store of 8 bytes for 7"),
    ],
)
def test_one_bad_row_and_nothing_is_stored(second: Row, why: str) -> None:
    target = np.zeros(64, np.uint8)
    region = region_of(target)
    key, offset, nbytes = second
    rows = [(KEY, region.address, 4), (key, (region.address + offset) % (1 << 64), nbytes)]
    assert why in store(message(rows, b"12345678"), {KEY: region})
    assert not target.any()


def test_rows_that_are_none_are_refused() -> None:
    assert "bytes" in store(Store(bytes(16), 1, bytes(23), b""), {})


def test_device_memory_is_not_stored_to() -> None:
    target = np.zeros(64, np.uint8)
    region = Region(address=target.ctypes.data, nbytes=64, kind="cuda")
    assert "leave" in store(message([(KEY, region.address, 4)], b"1234"), {KEY: region})
    assert not target.any()


@pytest.mark.parametrize(
    ("transports", "kinds", "natively"),
    [
        ({"tcp"}, {"cpu"}, False),
        ({"tcp", "cma"}, {"cpu"}, True),
        ({"rc_mlx5", "ud_mlx5"}, {"cpu", "cuda"}, True),
        ({"tcp", "cma"}, {"cpu", "cuda"}, False),
        ({"tcp", "cuda_ipc"}, {"cuda"}, True),
        ({"ud_mlx5"}, {"cpu"}, False),
        ({"rc_mlx5"}, {"xpu"}, False),
        ({"tcp"}, set(), True),
    ],
)
def test_which_transports_need_no_help(
    transports: set[str], kinds: set[str], natively: bool
) -> None:
    assert reached_natively(frozenset(transports), frozenset(kinds)) == natively
