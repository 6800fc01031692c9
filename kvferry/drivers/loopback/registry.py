"""The registry of a transport's regions, in memory that its peers read themselves.

A registry is a table in the memory of its owner, the transport whose regions it lists: 16 random
bytes, the *instance*, then one row (key, address, length) for each registered region. A peer reads
the table with the same system call as the data: before each chunk of a transfer (but for a small
read of one copy), and after the last chunk. So

- no other process is taken for the owner: a process that got the same pid, a restarted process and
  a forked child (whose copy of the registry the kernel wipes) do not have the instance at the
  registry's address;
- a deregistered region is refused at once, as an RDMA device refuses an old key, even if the peer
  does not know yet that it was deregistered. Keys are never used twice.
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
    """Which row a region has in the registry, its owner's table of registered regions.

    Attributes:
        slot: the index of the region's row.
        key: the key in that row, which the owner never uses for another registration. A row
            without a region has the key 0.
    """

    slot: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Claims:
    """The rows that a transfer expects in the registry, the peer's table of registered regions.

    Attributes:
        regions: the n remote regions that the transfer uses.
        slots: (n,) int64, the index of each region's row.
        rows: the bytes of an (n, 3) uint64 array: the row that is expected for each region, (key,
            address, length).
        words: how many 8-byte words of the registry a check reads: from its beginning to the end of
            the last row that is expected.
    """

    regions: tuple[Region, ...]
    slots: I64Array
    rows: bytes
    words: int


def claims_of(entries: Iterable[tuple[Region, Entry]]) -> Claims:
    """Return the rows that a transfer expects in its peer's registry.

    Args:
        entries: the peer's regions that the transfer uses, each with its entry in the peer's
            registry. May be empty: then only the instance is checked.
    """
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
    """Return the bytes of the row that a registry has for a region.

    Args:
        region: the region.
        entry: its entry; the row begins ``row_offset(entry)`` bytes after the registry's first.
    """
    return _ROW.pack(entry.key, region.address, region.nbytes)


def row_offset(entry: Entry) -> int:
    """Return how many bytes of a registry come before a region's row."""
    return 8 * (INSTANCE_WORDS + ROW_WORDS * entry.slot)


def check_claims(words: U64Array, instance: bytes, claims: Claims, owner: str) -> None:
    """Check that a peer's registry still has the rows that a transfer expects.

    Args:
        words: (n,) uint64, the first n words of the registry, n at least ``claims.words``.
        instance: the 16 bytes that the owner's registry begins with.
        claims: what the transfer expects.
        owner: the name of the owner's transport, for the errors' texts.

    Raises:
        PeerLostError: ``words`` does not begin with ``instance``: the owner has closed, or its
            process has restarted.
        TransportError: the owner has deregistered one of the regions in ``claims``.
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
    """The registry of one transport of this process: the regions that it has registered.

    Attributes:
        instance: 16 random bytes that identify the transport.
        lock: held while a copy within this process uses the owner's memory, so that no such copy
            touches a region once ``remove`` has returned.
    """

    instance: bytes = field(default_factory=lambda: secrets.token_bytes(16))
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
        """Write a row with a new key for a region, and return the region's entry.

        Raises:
            TransportError: no row is free.
        """
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
        """Erase the instance (the first 16 bytes), so that every later check of a peer fails."""
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
