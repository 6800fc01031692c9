"""The address of a loopback transport: its process, and the regions that it has registered."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvferry.core.memory import Region
from kvferry.core.transport.addresses import Device, Instance, Name, Pid, Word, decode_address

MAX_REGIONS = 1 << 16
MAX_ADDRESS_BYTES = 64 * MAX_REGIONS

_Short = Annotated[str, msgspec.Meta(max_length=128)]
_Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_REGIONS)]


class LoopbackRegion(msgspec.Struct, frozen=True, array_like=True):
    """A registered region, and its row's index (``slot``) and ``key`` in the owner's registry.

    No two rows of a registry have ever had the same key, and a free one has key 0.
    """

    address: Word
    nbytes: Word
    device: Device
    slot: _Slot
    key: Word

    def region(self) -> Region:
        """Return the region; raise ``LayoutError`` if none can be so."""
        return Region(address=self.address, nbytes=self.nbytes, device=self.device)


class LoopbackAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a loopback transport, as msgpack. Fields of later versions are ignored."""

    magic: Literal["kvferry-loopback-1"] = "kvferry-loopback-1"
    name: Name
    boot: _Short  # ``procfs.boot_id``
    pid_namespace: Word  # inode of the namespace in which ``pid`` is valid
    pid: Pid
    start_time: Word  # in clock ticks since boot; a later process with this pid has another
    # 16 random bytes. The registry begins with them, so a reader knows whose it is; the first
    # message to ``socket`` must have them, so only who has this address can notify.
    instance: Instance
    socket: _Short  # name of the notification socket in the abstract namespace
    board: Word  # memory address of the registry
    regions: Annotated[list[LoopbackRegion], msgspec.Meta(max_length=MAX_REGIONS)]


_decoder = msgspec.msgpack.Decoder(LoopbackAddress)


def encode(address: LoopbackAddress) -> bytes:
    """Return the address of a transport, encoded for its peers."""
    return msgspec.msgpack.encode(address)


def decode(data: bytes) -> LoopbackAddress:
    """Parse an address from untrusted bytes; raise ``ConnectError`` if they are none."""
    return decode_address("loopback", _decoder, data, MAX_ADDRESS_BYTES)
