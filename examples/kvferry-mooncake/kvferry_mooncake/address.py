"""The address that a transport gives its peers: where it is, and what it has registered."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvferry.core.memory import Region
from kvferry.core.transport.addresses import Name, decode_address, decode_regions

MAX_ADDRESS_BYTES = 1 << 20

Secret = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Port = Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A registered region: its address and its length in bytes."""

    address: int
    nbytes: int

    def region(self) -> Region:
        """Return the region; raise ``LayoutError`` if none can be so."""
        return Region(address=self.address, nbytes=self.nbytes)


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A transport's address, as msgpack: its engine (``segment``), its mailbox, its regions.

    ``secret`` are 16 random bytes: whoever sends notifications shows that it has the address.
    """

    magic: Literal["kvferry-mooncake-1"] = "kvferry-mooncake-1"
    name: Name
    segment: _Host
    host: _Host
    port: _Port
    secret: Secret
    regions: Annotated[list[Row], msgspec.Meta(max_length=1 << 14)]


_decoder = msgspec.msgpack.Decoder(Address)


def encode(address: Address) -> bytes:
    """Return the bytes that peers get."""
    return msgspec.msgpack.encode(address)


def decode(data: bytes) -> Address:
    """Parse untrusted bytes; raise ``ConnectError`` if they are no address of this driver."""
    address = decode_address("mooncake", _decoder, data, MAX_ADDRESS_BYTES)
    regions_of(address)
    return address


def regions_of(address: Address) -> frozenset[Region]:
    """Return the regions of a peer."""
    return frozenset(decode_regions(address.name, address.regions))
