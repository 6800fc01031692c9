"""The address of a NIXL transport: its agent's metadata, and the registered memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from kvferry.core.memory import Region
from kvferry.core.transport.addresses import (
    MemoryRow,
    Name,
    Word,
    check_digest,
    decode_address,
    digest_of,
)
from kvferry.drivers.nixl.agents import RegisteredSpan

MAX_ADDRESS_BYTES = 1 << 20
MAX_REGIONS = 1 << 14


class Range(MemoryRow, frozen=True, array_like=True):
    """A range of the peer's memory: a registered region, or a span (see ``agents``)."""

    key: Word = 0  # of a span: a peer sees by it that it was registered anew


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
    address = decode_address("nixl", _decoder, data, MAX_ADDRESS_BYTES)
    check_digest(address.name, address.digest, address.metadata)
    return address


def _range(region: Region, key: int = 0) -> Range:
    return Range(region.address, region.nbytes, region.kind, region.device, key)
