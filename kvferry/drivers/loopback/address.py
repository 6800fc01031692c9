"""The address of a loopback transport, and the registry of its regions, which its peers read.

The address names the process, the regions and the registry: memory with 16 random bytes, the
*instance*, then a row (key, address, length) for each registered region. A peer reads the registry
together with the bytes of every chunk of a transfer, and once more after the last. So no other
process is taken for the owner: one with the same pid, a restarted one, and a forked child (whose
copy the kernel wipes) do not have the instance at that address. And the bytes of a deregistered
region do not count, as an RDMA device refuses an old key; keys are never used twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import operator
import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from kvferry.core.errors import PeerLostError, TransportError
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


INSTANCE_BYTES = 16
_ROW = struct.Struct("3Q")
_KEY, _REST = struct.Struct("Q"), struct.Struct("2Q")
_MADV_WIPEONFORK = 18
_slot = operator.attrgetter("slot")


# Not frozen: to make a frozen dataclass takes a microsecond.
@dataclass(slots=True, eq=False)
class ExpectedRows:
    """What a transfer expects in its peer's registry: the instance, and the rows of some regions.

    With the instance, a peer reads the ``nbytes`` from ``start`` on, which hold all those rows.
    """

    rows: list[LoopbackRegion]
    start: int  # the offset of the first row in the registry
    nbytes: int
    expected: bytes  # the instance and the rows, which is found unless others lie between them

    def check(self, found: bytes, owner: str) -> None:
        """Check the instance and the rows that were read from a peer's registry.

        Raise ``PeerLostError`` if the owner is closed or restarted, ``TransportError`` if a region
        was deregistered.
        """
        if found == self.expected:
            return
        if found[:INSTANCE_BYTES] != self.expected[:INSTANCE_BYTES]:
            raise PeerLostError(f"{owner} has been closed, or its process has restarted")
        for row in self.rows:
            at = INSTANCE_BYTES + _offset(row.slot) - self.start
            if found[at : at + _ROW.size] != _packed(row):
                raise TransportError(
                    f"{owner} no longer has {row.region()} registered as its address said: connect "
                    "again with its new address"
                )


def expected_rows(instance: bytes, rows: Iterable[LoopbackRegion]) -> ExpectedRows:
    """Return what to expect in a peer's registry; without any row, only the instance counts."""
    ordered = sorted(rows, key=_slot)
    if not ordered:
        return ExpectedRows(ordered, _offset(0), 0, instance)
    start, end = _offset(ordered[0].slot), _offset(ordered[-1].slot + 1)
    return ExpectedRows(ordered, start, end - start, instance + b"".join(map(_packed, ordered)))


def _offset(slot: int) -> int:
    return INSTANCE_BYTES + _ROW.size * slot


def _packed(row: LoopbackRegion) -> bytes:
    return _ROW.pack(row.key, row.address, row.nbytes)


class RegionRegistry:
    """The registry of one transport of this process; ``address`` is that of its memory."""

    def __init__(self, instance: bytes | None = None) -> None:
        self.instance = instance or secrets.token_bytes(INSTANCE_BYTES)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, _offset(MAX_REGIONS), flags=flags)
        with contextlib.suppress(OSError):  # before Linux 4.14
            self._memory.madvise(_MADV_WIPEONFORK)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._memory[:INSTANCE_BYTES] = self.instance
        self._unused = iter(range(MAX_REGIONS))
        self._erased: list[int] = []
        self._last_key = 0

    def add(self, region: Region) -> LoopbackRegion:
        """Write a row with a new key for a region, of which at most ``MAX_REGIONS`` have one."""
        slot = self._erased.pop() if self._erased else next(self._unused)
        self._last_key += 1
        # The key comes last: a row without its key is not valid.
        _REST.pack_into(self._memory, _offset(slot) + _KEY.size, region.address, region.nbytes)
        _KEY.pack_into(self._memory, _offset(slot), self._last_key)
        return LoopbackRegion(region.address, region.nbytes, region.device, slot, self._last_key)

    def remove(self, row: LoopbackRegion) -> None:
        """Erase a region's row, so that reads of the region fail from now on."""
        _ROW.pack_into(self._memory, _offset(row.slot), 0, 0, 0)
        self._erased.append(row.slot)

    def close(self) -> None:
        """Erase the instance, so that every later check of a peer fails."""
        self._memory[:INSTANCE_BYTES] = bytes(INSTANCE_BYTES)
