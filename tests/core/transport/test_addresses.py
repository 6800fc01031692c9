"""Decoding the addresses of peers: what is refused, and with which words."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.core.errors import ConnectError
from kvferry.core.memory import Region
from kvferry.core.transport.addresses import (
    Name,
    check_digest,
    decode_address,
    decode_regions,
    digest_of,
)


class Row(msgspec.Struct, frozen=True, array_like=True):
    address: int
    nbytes: int

    def region(self) -> Region:
        return Region(address=self.address, nbytes=self.nbytes)


class Address(msgspec.Struct, frozen=True):
    name: Name
    regions: list[Row]


DECODER = msgspec.msgpack.Decoder(Address)
GOOD = Address("one", [Row(4096, 8)])


def decoded(data: bytes) -> Address:
    return decode_address("mine", DECODER, data, 1 << 15)


def test_address_and_regions_round_trip() -> None:
    found = decoded(msgspec.msgpack.encode(GOOD))
    assert found == GOOD
    assert decode_regions("one", found.regions) == {Region(address=4096, nbytes=8): Row(4096, 8)}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        msgspec.msgpack.encode(GOOD)[:-1],
        msgspec.msgpack.encode(GOOD) + b"\0",
        msgspec.msgpack.encode(GOOD).replace(b"one", b"\xff\xfeo"),  # not UTF-8
        msgspec.msgpack.encode(Address("x" * 129, [])),
        b"\x91" * 10_000,  # deeply nested lists
        bytes((1 << 15) + 1),
    ],
)
def test_a_malformed_or_oversized_address_is_refused(data: bytes) -> None:
    words = "not an address of the mine driver .*: both sides must use the same"
    if len(data) > 1 << 15:
        words = "of 32769 bytes; one of the mine driver has at most"
    with pytest.raises(ConnectError, match=words):
        decoded(data)


@pytest.mark.parametrize("row", [Row(0, 8), Row(8, 0), Row((1 << 63) - 1, 2)])
def test_region_that_cannot_be_is_refused(row: Row) -> None:
    with pytest.raises(ConnectError, match="the address of one names no valid region"):
        decode_regions("one", [row])


def test_damaged_bytes_are_refused() -> None:
    digest = digest_of(b"some", b"bytes")
    check_digest("one", digest, b"some", b"bytes")
    for found, parts in ((digest, [b"some", b"byte"]), (b"", [b"some", b"bytes"])):
        with pytest.raises(ConnectError, match="the address of one was damaged on its way"):
            check_digest("one", found, *parts)
