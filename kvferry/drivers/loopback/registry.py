"""The board: what a transport has registered, where its peers can read it themselves.

It is a small piece of the owner's memory: the instance, then one row (key, address, length) per
registered region. A peer reads it through the same call as the data, before and after, so that

- a process that merely got the same pid, a restarted one and a forked child (whose copy of the
  board the kernel wipes) are found out: they do not have the instance there;
- a region that was deregistered is refused at once, as an RDMA device refuses an old key, although
  the peer has not heard of it. Keys are never used twice.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a region stands on its owner's board, and the key that it stands under."""

    slot: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Claims:
    """What a transfer takes to be on its peer's board.

    Attributes:
        regions: the n remote regions.
        slots: (n,) their slots.
        rows: what must stand there: n rows of uint64, as bytes.
        words: how much of the board one has to see: the words up to the last slot.
    """

    regions: tuple[Region, ...]
    slots: I64Array
    rows: bytes
    words: int


def claims_of(entries: Iterable[tuple[Region, Entry]]) -> Claims:
    """The claims for some regions of a peer."""
    table = list(entries)
    slots = [entry.slot for _, entry in table]
    rows = [(entry.key, region.address, region.nbytes) for region, entry in table]
    return Claims(
        regions=tuple(region for region, _ in table),
        slots=np.array(slots, np.int64),
        rows=np.array(rows, np.uint64).tobytes(),
        words=INSTANCE_WORDS + ROW_WORDS * (max(slots, default=-1) + 1),
    )


def check(board: U64Array, instance: bytes, claims: Claims, owner: str) -> None:
    """Compare the words of a board (at least ``claims.words`` of them) with what is expected.

    Raises:
        PeerLostError: it is not the owner's board, or the owner has closed.
        TransportError: the owner has deregistered a region.
    """
    if board[:INSTANCE_WORDS].tobytes() != instance:
        raise PeerLostError(f"{owner} has been closed, or its process has restarted")
    found = board[INSTANCE_WORDS : claims.words].reshape(-1, ROW_WORDS)[claims.slots]
    if found.tobytes() != claims.rows:
        expected = np.frombuffer(claims.rows, np.uint64).reshape(-1, ROW_WORDS)
        gone = claims.regions[int((found != expected).any(axis=1).argmax())]
        raise TransportError(
            f"{owner} no longer has {gone} registered as its address said: connect again with "
            "its new address"
        )


@dataclass(slots=True, eq=False)
class RegionRegistry:
    """The board of one transport of this process.

    ``gate`` is held while a copy inside this process uses the owner's memory, so that a region is
    quiet once ``erase`` has returned. (In other processes it is the kernel that looks after them.)
    """

    instance: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    gate: threading.Lock = field(default_factory=threading.Lock)
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
        _boards[self.instance] = self

    @property
    def address(self) -> int:
        """Where it lies in memory."""
        return int(self._words.ctypes.data)

    @property
    def words(self) -> U64Array:
        """All of it."""
        return self._words

    def enter(self, region: Region) -> Entry:
        """Give a region a slot and a key.

        Raises:
            TransportError: all slots are taken.
        """
        slot = self._erased.pop() if self._erased else next(self._free, None)
        if slot is None:
            raise TransportError(
                f"{MAX_REGIONS} regions are registered, which is the limit: deregister some, or "
                "register fewer and larger ones"
            )
        self._last_key += 1
        # The key last: a row is nothing without it.
        self._row(slot)[1:] = region.address, region.nbytes
        self._row(slot)[0] = self._last_key
        return Entry(slot=slot, key=self._last_key)

    def erase(self, entry: Entry) -> None:
        """Take a region off; returns when no copy inside this process uses it."""
        with self.gate:
            self._row(entry.slot)[:] = 0
        self._erased.append(entry.slot)

    def wipe(self) -> None:
        """Take everything off, the instance too, for good."""
        _boards.pop(self.instance, None)
        with self.gate:
            self._words[:INSTANCE_WORDS] = 0

    def _row(self, slot: int) -> U64Array:
        start = INSTANCE_WORDS + ROW_WORDS * slot
        return self._words[start : start + ROW_WORDS]


_boards: dict[bytes, RegionRegistry] = {}


def board_in_this_process(instance: bytes) -> RegionRegistry | None:
    """The board of a transport of this process, if there is one."""
    return _boards.get(instance)
