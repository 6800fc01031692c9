"""The address that a transport gives its peers: where it is, and what it has registered."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvferry.core.errors import ConnectError, LayoutError
from kvferry.core.memory import Region

MAX_ADDRESS_BYTES = 1 << 20

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Secret = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Port = Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
_Regions = Annotated[list[tuple[int, int]], msgspec.Meta(max_length=1 << 14)]


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """An address, as msgpack.

    Attributes:
        name: the transport's name.
        segment: the name of its engine among engines: ``host:port``.
        host: where notifications to it go, with ``port``.
        secret: 16 random bytes; whoever sends notifications shows that it has the address.
        regions: the address and the length in bytes of each registered region.
    """

    magic: Literal["kvferry-mooncake-1"] = "kvferry-mooncake-1"
    name: Name
    segment: _Host
    host: _Host
    port: _Port
    secret: Secret
    regions: _Regions


_decoder = msgspec.msgpack.Decoder(Address)


def encode(address: Address) -> bytes:
    """Return the bytes that peers get."""
    return msgspec.msgpack.encode(address)


def decode(data: bytes) -> Address:
    """Parse untrusted bytes.

    Raises:
        ConnectError: they are no address of this driver.
    """
    if len(data) > MAX_ADDRESS_BYTES:
        raise ConnectError(f"an address of {len(data)} bytes; {MAX_ADDRESS_BYTES} is the most")
    try:
        address = _decoder.decode(data)
        regions_of(address)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, LayoutError) as exc:
        raise ConnectError(
            f"not an address of the mooncake driver ({exc}): both sides must use the same driver"
        ) from exc
    return address


def regions_of(address: Address) -> frozenset[Region]:
    """Return the regions of a peer.

    Raises:
        LayoutError: one is no region; ``decode`` has refused such an address.
    """
    return frozenset(Region(address=at, nbytes=size) for at, size in address.regions)
