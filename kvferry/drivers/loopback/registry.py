"""The registry of a transport's regions, in memory that its peers read themselves.

It is 16 random bytes, the *instance*, then a row (key, address, length) for each registered region.
A peer reads it before each chunk of a transfer (but for a small read of one copy), and after the
last. So no other process is taken for the owner: one with the same pid, a restarted one, and a
forked child (whose copy the kernel wipes) do not have the instance at that address. And a
deregistered region is refused at once, as an RDMA device refuses an old key; keys are never used
twice.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.memory import I64Array, Region, U64Array

MAX_REGIONS = 1 << 16
INSTANCE_WORDS = 2
ROW_WORDS = 3
_MADV_WIPEONFORK = 18
_ROW = struct.Struct("3Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The index and the key of a region's row in its owner's registry; a free row has key 0."""

    slot: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Claims:
    """The rows that a transfer expects in its peer's registry."""

    regions: tuple[Region, ...]
    slots: I64Array  # (n,) the index of each region's row
    rows: bytes  # of an (n, 3) uint64 array: the expected key, address and length of each
    words: int  # 8-byte words of the registry until the end of the last of these rows


def claims_of(entries: Iterable[tuple[Region, Entry]]) -> Claims:
    """Return the rows to expect for a peer's regions; without any, only the instance counts."""
    table = list(entries)
    slots = [entry.slot for _, entry in table]
    rows = [(entry.key, region.address, region.nbytes) for region, entry in table]
    return Claims(
        regions=tuple(region for region, _ in table),
        slots=np.array(slots, np.int64),
        rows=np.array(rows, np.uint64).tobytes(),
        words=INSTANCE_WORDS + ROW_WORDS * (max(slots, default=-1) + 1),
    )


def row_of(region: Region, entry: Entry) -> bytes:
    """Return the bytes of the row that a registry has for a region."""
    return _ROW.pack(entry.key, region.address, region.nbytes)


def row_offset(entry: Entry) -> int:
    """Return how many bytes of a registry come before a region's row."""
    return 8 * (INSTANCE_WORDS + ROW_WORDS * entry.slot)


def check_claims(words: U64Array, instance: bytes, claims: Claims, owner: str) -> None:
    """Check a peer's registry, of which ``words`` are the first, ``claims.words`` or more.

    Raise ``PeerLostError`` if the owner is closed or restarted, ``TransportError`` if a region was
    deregistered.
    """
    if words[:INSTANCE_WORDS].tobytes() != instance:
        raise PeerLostError(f"{owner} has been closed, or its process has restarted")
    rows = words[INSTANCE_WORDS : claims.words].reshape(-1, ROW_WORDS)[claims.slots]
    if rows.tobytes() != claims.rows:
        expected = np.frombuffer(claims.rows, np.uint64).reshape(-1, ROW_WORDS)
        gone = claims.regions[int((rows != expected).any(axis=1).argmax())]
        raise TransportError(
            f"{owner} no longer has {gone} registered as its address said: connect again with "
            "its new address"
        )


@dataclass(slots=True, eq=False)
class RegionRegistry:
    """The registry of one transport of this process."""

    instance: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    # Held by copies within this process, so that none touches a region once ``remove`` has
    # returned.
    lock: threading.Lock = field(default_factory=threading.Lock)
    _words: U64Array = field(init=False)
    _free: Iterator[int] = field(init=False)
    _erased: list[int] = field(default_factory=list)
    _last_key: int = 0

    def __post_init__(self) -> None:
        nbytes = 8 * (INSTANCE_WORDS + ROW_WORDS * MAX_REGIONS)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # before Linux 4.14
            memory.madvise(_MADV_WIPEONFORK)
        self._words = np.frombuffer(memory, np.uint64)
        self._words[:INSTANCE_WORDS] = np.frombuffer(self.instance, np.uint64)
        self._free = iter(range(MAX_REGIONS))
        _registries[self.instance] = self

    @property
    def address(self) -> int:
        """The address of the registry in this process's memory."""
        return int(self._words.ctypes.data)

    @property
    def words(self) -> U64Array:
        """The whole registry, instance and rows: (n,) uint64, a view of its memory."""
        return self._words

    def add(self, region: Region) -> Entry:
        """Write a row with a new key for a region; raise ``TransportError`` if no row is free."""
        slot = self._erased.pop() if self._erased else next(self._free, None)
        if slot is None:
            raise TransportError(
                f"{MAX_REGIONS} regions are registered, which is the limit: deregister some, or "
                "register fewer and larger ones"
            )
        self._last_key += 1
        # The key comes last: a row without its key is not valid.
        self._row(slot)[1:] = region.address, region.nbytes
        self._row(slot)[0] = self._last_key
        return Entry(slot=slot, key=self._last_key)

    def remove(self, entry: Entry) -> None:
        """Erase a region's row, and return once no copy within this process uses the region."""
        with self.lock:
            self._row(entry.slot)[:] = 0
        self._erased.append(entry.slot)

    def close(self) -> None:
        """Erase the instance, so that every later check of a peer fails."""
        _registries.pop(self.instance, None)
        with self.lock:
            self._words[:INSTANCE_WORDS] = 0

    def _row(self, slot: int) -> U64Array:
        start = INSTANCE_WORDS + ROW_WORDS * slot
        return self._words[start : start + ROW_WORDS]


_registries: dict[bytes, RegionRegistry] = {}


def registry_in_this_process(instance: bytes) -> RegionRegistry | None:
    """Return this process's registry that begins with these 16 bytes; ``None`` if none does."""
    return _registries.get(instance)
