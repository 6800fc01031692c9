"""The address of a loopback transport: its process, and the regions that it has registered."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvferry.core.errors import ConnectError, LayoutError
from kvferry.core.memory import ADDRESS_LIMIT, Region
from kvferry.core.side_channel_messages import DECODE_ERRORS

MAX_REGIONS = 1 << 16
MAX_ADDRESS_BYTES = 64 * MAX_REGIONS
MAX_NAME = 128

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Instance = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=ADDRESS_LIMIT - 1)]
_Short = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Pid = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
_Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_REGIONS)]


class LoopbackRegion(msgspec.Struct, frozen=True, array_like=True):
    """A registered region, and its row's index (``slot``) and ``key`` in the owner's registry.

    No two rows of a registry have ever had the same key, and a free one has key 0.
    """

    address: _Word
    nbytes: _Word
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    slot: _Slot
    key: _Word

    def region(self) -> Region:
        """Return the region; raise ``LayoutError`` if none can be so."""
        return Region(address=self.address, nbytes=self.nbytes, device=self.device)


class LoopbackAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a loopback transport, as msgpack. Fields of later versions are ignored."""

    magic: Literal["kvferry-loopback-1"] = "kvferry-loopback-1"
    name: Name
    boot: _Short  # ``procfs.boot_id``
    pid_namespace: _Word  # inode of the namespace in which ``pid`` is valid
    pid: _Pid
    start_time: _Word  # in clock ticks since boot; a later process with this pid has another
    # 16 random bytes. The registry begins with them, so a reader knows whose it is; the first
    # message to ``socket`` must have them, so only who has this address can notify.
    instance: Instance
    socket: _Short  # name of the notification socket in the abstract namespace
    board: _Word  # memory address of the registry
    regions: Annotated[list[LoopbackRegion], msgspec.Meta(max_length=MAX_REGIONS)]


_decoder = msgspec.msgpack.Decoder(LoopbackAddress)


def encode(address: LoopbackAddress) -> bytes:
    """Return the address of a transport, encoded for its peers."""
    return msgspec.msgpack.encode(address)


def decode(data: bytes) -> LoopbackAddress:
    """Parse an address from untrusted bytes; raise ``ConnectError`` if they are none."""
    if len(data) > MAX_ADDRESS_BYTES:
        raise ConnectError(
            f"an address of {len(data)} bytes; one of the loopback driver has at most "
            f"{MAX_ADDRESS_BYTES}"
        )
    try:
        return _decoder.decode(data)
    except DECODE_ERRORS as exc:
        raise ConnectError(
            f"not an address of the loopback driver ({exc}): both sides must use the same driver"
        ) from exc


def regions_of(address: LoopbackAddress) -> dict[Region, LoopbackRegion]:
    """Return the regions of an address with their rows; raise ``ConnectError`` if one cannot be."""
    try:
        return {row.region(): row for row in address.regions}
    except LayoutError as exc:
        raise ConnectError(f"the address of {address.name} names no valid region: {exc}") from exc
