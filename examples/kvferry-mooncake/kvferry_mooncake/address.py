"""What a transport tells its peers: where it is, and what it has registered."""

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
        name: the transport's.
        segment: what its engine is called among engines: ``host:port``.
        host, port: where its notifications go.
        secret: only who was given the address may send any.
        regions: address and length of each.
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
    """The bytes that peers get."""
    return msgspec.msgpack.encode(address)


def decode(data: bytes) -> tuple[Address, frozenset[Region]]:
    """Parse untrusted bytes: the address, and its regions.

    Raises:
        ConnectError: they are no address of this driver.
    """
    if len(data) > MAX_ADDRESS_BYTES:
        raise ConnectError(f"an address of {len(data)} bytes; {MAX_ADDRESS_BYTES} is the most")
    try:
        address = _decoder.decode(data)
        regions = frozenset(Region(address=at, nbytes=size) for at, size in address.regions)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, LayoutError) as exc:
        raise ConnectError(
            f"not an address of the mooncake driver ({exc}): both sides must use the same driver"
        ) from exc
    return address, regions
