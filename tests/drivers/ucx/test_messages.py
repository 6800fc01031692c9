"""Reads by messages: the rows of a request are checked before anything is sent."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.memory import Region, U64Array, region_of
from kvferry.drivers.ucx.address import KeyId
from kvferry.drivers.ucx.messages import (
    MAX_RELAY_BYTES,
    MAX_RELAY_ROWS,
    build_rows,
    check_rows,
    consecutive,
    reaches_cpu_memory,
)
from kvferry.testing.memory import Bytes

KEY = KeyId(7)
Row = tuple[int, int, int]


def copy(targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
    for target, source, size in zip(targets, sources, nbytes, strict=True):
        ctypes.memmove(int(target), int(source), int(size))


def table(rows: list[Row]) -> U64Array:
    keys, addresses, nbytes = np.array(rows, np.uint64).reshape(-1, 3).T
    return build_rows(keys, addresses, nbytes)


def refusal(rows: list[Row], regions: dict[KeyId, Region]) -> str:
    return check_rows(table(rows).tobytes(), regions)[0]


@pytest.fixture
def memory() -> Bytes:
    return np.arange(64, dtype=np.uint8)


@pytest.fixture
def region(memory: Bytes) -> Region:
    return region_of(memory)


def test_bytes_are_gathered_in_order(memory: Bytes, region: Region) -> None:
    packed = np.zeros(7, np.uint8)
    rows: list[Row] = [
        (KEY, region.address + 5, 3),
        (KEY, region.end, 0),
        (KEY, region.address + 40, 4),
    ]
    refused, addresses, lengths = check_rows(table(rows).tobytes(), {KEY: region})
    assert (refused, lengths.tolist()) == ("", [3, 0, 4])
    copy(consecutive(packed.ctypes.data, lengths), addresses, lengths)
    np.testing.assert_array_equal(packed, np.concatenate([memory[5:8], memory[40:44]]))


@pytest.mark.parametrize("nbytes", [MAX_RELAY_BYTES, MAX_RELAY_BYTES + 1, (1 << 64) - 1])
def test_fetch_of_more_than_one_message_holds_is_refused(nbytes: int) -> None:
    """A small request could otherwise ask for a large reply."""
    region = region_of(np.zeros(MAX_RELAY_BYTES, np.uint8))
    rows: list[Row] = [(KEY, region.address, nbytes), (KEY, region.address, 1)]
    refused, addresses, _ = check_rows(table(rows).tobytes(), {KEY: region})
    assert "at most" in refused
    assert not len(addresses)


def test_no_rows_are_accepted() -> None:
    assert refusal([], {}) == ""


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ((8, 0, 4), "a region has been deregistered"),
        ((KEY, 61, 4), "leave"),
        ((KEY, -1, 4), "leave"),
        ((KEY, (1 << 64) - (1 << 47), 4), "leave"),
    ],
)
def test_one_bad_row_is_refused(region: Region, second: Row, why: str) -> None:
    key, offset, nbytes = second
    rows = [(KEY, region.address, 4), (key, (region.address + offset) % (1 << 64), nbytes)]
    refused, addresses, lengths = check_rows(table(rows).tobytes(), {KEY: region})
    assert why in refused
    assert len(addresses) == len(lengths) == 0


def test_malformed_rows_are_refused() -> None:
    assert "bytes" in check_rows(bytes(23), {})[0]
    assert "bytes" in check_rows(bytes(24 * MAX_RELAY_ROWS + 24), {})[0]


def test_device_memory_is_refused(region: Region) -> None:
    assert "leave" in refusal([(KEY, region.address, 4)], {KEY: replace(region, kind="cuda")})


@pytest.mark.parametrize(
    ("transports", "expected"),
    [
        ({"tcp"}, False),
        ({"tcp", "cma"}, True),
        ({"rc_mlx5", "ud_mlx5"}, True),
        ({"ud_mlx5"}, False),
        (set(), False),
    ],
)
def test_cpu_memory_goes_by_messages_unless_a_transport_reaches_it(
    transports: set[str], expected: bool
) -> None:
    assert reaches_cpu_memory(frozenset(transports)) == expected
