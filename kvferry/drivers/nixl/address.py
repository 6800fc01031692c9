"""The address of a NIXL transport: its agent's metadata, and the registered memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from kvferry.core.errors import ConnectError, LayoutError
from kvferry.core.memory import ADDRESS_LIMIT, Region
from kvferry.core.side_channel_messages import DECODE_ERRORS
from kvferry.drivers.nixl.registrations import RegisteredSpan

MAX_ADDRESS_BYTES = 1 << 20
MAX_REGIONS = 1 << 14
_DIGEST_BYTES = 16

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=ADDRESS_LIMIT - 1)]


class Range(msgspec.Struct, frozen=True, array_like=True):
    """A range of the peer's memory: a registered region, or a span (see ``registrations``)."""

    address: _Word
    nbytes: _Word
    kind: Annotated[str, msgspec.Meta(max_length=16)]
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    key: _Word = 0  # of a span: a peer sees by it that it was registered anew


_Ranges = Annotated[list[Range], msgspec.Meta(max_length=MAX_REGIONS)]


class NixlAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a NIXL transport, as msgpack. Fields of later versions are ignored."""

    magic: Literal["kvferry-nixl-1"] = "kvferry-nixl-1"
    name: Name  # also of the NIXL agent
    backend: Name  # both sides must have the same
    metadata: bytes
    # Metadata with another digest is refused before NIXL reads it: NIXL drops a connected peer if
    # it cannot read new metadata of that peer.
    digest: bytes
    spans: _Ranges
    regions: _Ranges  # each lies in one span


_decoder = msgspec.msgpack.Decoder(NixlAddress)


def encode(
    *,
    name: str,
    backend: str,
    metadata: bytes,
    spans: Iterable[RegisteredSpan],
    regions: Iterable[Region],
) -> bytes:
    """Return the address of a transport, encoded for its peers."""
    return msgspec.msgpack.encode(
        NixlAddress(
            name=name,
            backend=backend,
            metadata=metadata,
            digest=digest_of(metadata),
            spans=[_range(span.whole, span.key) for span in spans],
            regions=[_range(region) for region in regions],
        )
    )


def decode(data: bytes) -> NixlAddress:
    """Parse an untrusted address, but not its metadata; raise ``ConnectError`` if it is damaged."""
    if len(data) > MAX_ADDRESS_BYTES:
        raise ConnectError(
            f"an address of {len(data)} bytes; one of the nixl driver has at most "
            f"{MAX_ADDRESS_BYTES}"
        )
    try:
        address = _decoder.decode(data)
    except DECODE_ERRORS as exc:
        raise ConnectError(
            f"not an address of the nixl driver ({exc}): both sides must use the same driver"
        ) from exc
    if address.digest != digest_of(address.metadata):
        raise ConnectError(
            f"the address of {address.name[:64]} was damaged on its way: its digest is another"
        )
    return address


def regions_of(address: NixlAddress) -> frozenset[Region]:
    """Return the regions that an address names; raise ``ConnectError`` if one cannot be."""
    try:
        return frozenset(
            Region(address=row.address, nbytes=row.nbytes, kind=row.kind, device=row.device)
            for row in address.regions
        )
    except LayoutError as exc:
        raise ConnectError(f"the address of {address.name} names no valid region: {exc}") from exc


def _range(region: Region, key: int = 0) -> Range:
    return Range(region.address, region.nbytes, region.kind, region.device, key)


def digest_of(metadata: bytes) -> bytes:
    """Return a digest of metadata, to detect damaged bytes before NIXL reads them."""
    return hashlib.blake2b(metadata, digest_size=_DIGEST_BYTES).digest()
