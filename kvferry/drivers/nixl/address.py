"""What a NIXL transport tells its peers: NIXL's metadata, and what it has registered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from kvferry.core.errors import ConnectError, LayoutError
from kvferry.core.memory import ADDRESS_LIMIT, Region
from kvferry.core.messages import DECODE_ERRORS
from kvferry.drivers.nixl.registrations import RegisteredSpan

MAX_ADDRESS_BYTES = 1 << 20
MAX_REGIONS = 1 << 14
_DIGEST_BYTES = 16

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=ADDRESS_LIMIT - 1)]


class Range(msgspec.Struct, frozen=True, array_like=True):
    """A region, or a span with its key; the key of a region is 0."""

    address: _Word
    nbytes: _Word
    kind: Annotated[str, msgspec.Meta(max_length=16)]
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    key: _Word = 0


_Ranges = Annotated[list[Range], msgspec.Meta(max_length=MAX_REGIONS)]


class NixlAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address, as msgpack. Fields that a later version adds are ignored.

    Attributes:
        name: the transport's, which is also its agent's.
        backend: its NIXL backend; both sides must have the same.
        metadata: the agent's, as NIXL writes it.
        digest: of the metadata. NIXL drops a peer that it knew when it cannot read what it is
            given, so bytes that were cut or changed on the way must not reach it.
        spans: what is registered with NIXL.
        regions: what the transport's user has registered.
    """

    magic: Literal["kvferry-nixl-1"] = "kvferry-nixl-1"
    name: Name
    backend: Name
    metadata: bytes
    digest: bytes
    spans: _Ranges
    regions: _Ranges


_decoder = msgspec.msgpack.Decoder(NixlAddress)


def encode(
    *,
    name: str,
    backend: str,
    metadata: bytes,
    spans: Iterable[RegisteredSpan],
    regions: Iterable[Region],
) -> bytes:
    """The bytes that peers get."""
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
    """Parse untrusted bytes.

    Raises:
        ConnectError: they are no address of this driver.
    """
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
    """The regions of a peer.

    Raises:
        ConnectError: one is not a region.
    """
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
    """Return what makes bytes that were changed on the way known before NIXL reads them."""
    return hashlib.blake2b(metadata, digest_size=_DIGEST_BYTES).digest()
