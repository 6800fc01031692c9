"""Reads by messages: the rows of a request are checked before anything is sent."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.core.memory import Region, U64Array, region_of
from kvferry.drivers.ucx.address import KeyId
from kvferry.drivers.ucx.message_transfer import (
    build_rows,
    check_rows,
    consecutive,
    needs_messages,
)
from kvferry.drivers.ucx.messages import MAX_RELAY_BYTES, MAX_RELAY_ROWS
from kvferry.drivers.ucx.posting import PlainPoster

KEY = KeyId(7)
Row = tuple[int, int, int]


def copy(targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
    """Copy as the driver does without numba."""
    PlainPoster.copy(None, targets, sources, nbytes)  # type: ignore[arg-type]


def table(rows: list[Row]) -> U64Array:
    keys, addresses, nbytes = np.array(rows, np.uint64).reshape(-1, 3).T
    return build_rows(keys, addresses, nbytes)


def refusal(rows: list[Row], regions: dict[KeyId, Region]) -> str:
    return check_rows(table(rows).tobytes(), regions)[0]


def test_bytes_are_gathered_in_order() -> None:
    source, packed = np.arange(64, dtype=np.uint8), np.zeros(7, np.uint8)
    region = region_of(source)
    rows: list[Row] = [
        (KEY, region.address + 5, 3),
        (KEY, region.end, 0),
        (KEY, region.address + 40, 4),
    ]
    refused, addresses, lengths = check_rows(table(rows).tobytes(), {KEY: region})
    assert refused == ""
    copy(consecutive(packed.ctypes.data, lengths), addresses, lengths)
    np.testing.assert_array_equal(packed, np.concatenate([source[5:8], source[40:44]]))


def test_fetch_rows_must_lie_in_registered_memory() -> None:
    target = np.zeros(64, np.uint8)
    region = region_of(target)
    rows = table([(KEY, region.address + 8, 3), (KEY, region.address, 2)])
    refused, addresses, nbytes = check_rows(rows.tobytes(), {KEY: region})
    assert refused == ""
    assert addresses.tolist() == [region.address + 8, region.address]
    assert nbytes.tolist() == [3, 2]
    refused, addresses, nbytes = check_rows(rows.tobytes(), {})
    assert refused == "a region has been deregistered"
    assert len(addresses) == len(nbytes) == 0


@pytest.mark.parametrize("nbytes", [MAX_RELAY_BYTES, MAX_RELAY_BYTES + 1, (1 << 64) - 1])
def test_fetch_of_more_than_one_message_holds_is_refused(nbytes: int) -> None:
    """A small request could otherwise ask for a large reply."""
    target = np.zeros(MAX_RELAY_BYTES, np.uint8)
    region = region_of(target)
    rows: list[Row] = [(KEY, region.address, nbytes), (KEY, region.address, 1)]
    refused, addresses, _ = check_rows(table(rows).tobytes(), {KEY: region})
    assert "at most" in refused
    assert not len(addresses)


def test_no_rows_are_accepted() -> None:
    assert refusal([], {}) == ""


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ((8, 0, 4), "deregistered"),
        ((KEY, 61, 4), "leave"),
        ((KEY, -1, 4), "leave"),
        ((KEY, (1 << 64) - (1 << 47), 4), "leave"),
    ],
)
def test_one_bad_row_is_refused(second: Row, why: str) -> None:
    target = np.zeros(64, np.uint8)
    region = region_of(target)
    key, offset, nbytes = second
    rows = [(KEY, region.address, 4), (key, (region.address + offset) % (1 << 64), nbytes)]
    assert why in refusal(rows, {KEY: region})


def test_malformed_rows_are_refused() -> None:
    assert "bytes" in check_rows(bytes(23), {})[0]
    assert "bytes" in check_rows(bytes(24 * MAX_RELAY_ROWS + 24), {})[0]


def test_device_memory_is_refused() -> None:
    target = np.zeros(64, np.uint8)
    region = Region(address=target.ctypes.data, nbytes=64, kind="cuda")
    assert "leave" in refusal([(KEY, region.address, 4)], {KEY: region})


@pytest.mark.parametrize(
    ("transports", "kinds", "expected"),
    [
        ({"tcp"}, {"cpu"}, True),
        ({"tcp", "cma"}, {"cpu"}, False),
        ({"rc_mlx5", "ud_mlx5"}, {"cpu"}, False),
        ({"ud_mlx5"}, {"cpu"}, True),
        ({"tcp"}, set(), False),
    ],
)
def test_cpu_memory_goes_by_messages_unless_a_transport_reaches_it(
    transports: set[str], kinds: set[str], expected: bool
) -> None:
    assert needs_messages(frozenset(transports), frozenset(kinds)) == expected


@pytest.mark.parametrize("transports", [{"tcp"}, {"tcp", "cma"}, {"rc_mlx5"}, {"tcp", "cuda_ipc"}])
@pytest.mark.parametrize("kinds", [{"cuda"}, {"cpu", "cuda"}])
def test_device_memory_never_goes_by_messages(transports: set[str], kinds: set[str]) -> None:
    assert not needs_messages(frozenset(transports), frozenset(kinds))
