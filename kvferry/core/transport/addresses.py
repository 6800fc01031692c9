"""Decode the addresses of peers, which are untrusted msgpack: what all drivers do alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Protocol, TypeVar

import msgspec

from kvferry.core.errors import ConnectError, LayoutError
from kvferry.core.memory import ADDRESS_LIMIT, Region
from kvferry.core.side_channel_messages import DECODE_ERRORS

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
"""The name of a transport."""
Instance = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""16 random bytes, which only those know who have a transport's address."""
Word = Annotated[int, msgspec.Meta(ge=0, le=ADDRESS_LIMIT - 1)]
"""An address in memory, a length in bytes, or a number."""
Kind = Annotated[str, msgspec.Meta(max_length=16)]
"""The kind of memory of a region."""
Device = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
"""The device index of a region."""
Pid = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]

_DIGEST_BYTES = 16


class RegionRow(Protocol):
    """A region as an address has it, with what the driver needs to reach it."""

    def region(self) -> Region:
        """Return the region; raise ``LayoutError`` if none can be so."""


class MemoryRow(msgspec.Struct, frozen=True, array_like=True):
    """A region of any kind of memory; a driver's subclass adds what it needs to reach it."""

    address: Word
    nbytes: Word
    kind: Kind
    device: Device

    def region(self) -> Region:
        """Return the region; raise ``LayoutError`` if none can be so."""
        return Region(address=self.address, nbytes=self.nbytes, kind=self.kind, device=self.device)


AddressT = TypeVar("AddressT")
RowT = TypeVar("RowT", bound=RegionRow)


def decode_address(
    driver: str, decoder: msgspec.msgpack.Decoder[AddressT], data: bytes, most: int
) -> AddressT:
    """Decode an untrusted address of at most ``most`` bytes, or raise ``ConnectError``."""
    if len(data) > most:
        raise ConnectError(
            f"an address of {len(data)} bytes; one of the {driver} driver has at most {most}"
        )
    try:
        return decoder.decode(data)
    except DECODE_ERRORS as exc:
        raise ConnectError(
            f"not an address of the {driver} driver ({exc}): both sides must use the same driver"
        ) from exc


def decode_regions(name: str, rows: Iterable[RowT]) -> dict[Region, RowT]:
    """Return the regions in the address of a peer; raise ``ConnectError`` if one cannot be."""
    try:
        return {row.region(): row for row in rows}
    except LayoutError as exc:
        raise ConnectError(f"the address of {name} names no valid region: {exc}") from exc


def digest_of(*parts: bytes) -> bytes:
    """Return a digest by which ``check_digest`` detects damage, before a C library reads bytes."""
    return hashlib.blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()


def check_digest(name: str, found: bytes, *parts: bytes) -> None:
    """Raise ``ConnectError`` if bytes in the address of a peer have another digest."""
    if found != digest_of(*parts):
        raise ConnectError(
            f"the address of {name[:64]} was damaged on its way: its digest is another"
        )
