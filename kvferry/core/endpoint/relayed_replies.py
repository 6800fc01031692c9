"""Replies of producers' side channels that an engine's scheduler half has fetched for its ranks."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.messages import shape_of

MAX_STORED_BYTES = 1 << 24
"""The most bytes of new relayed replies, and of used ones, that a rank keeps: the newest."""
MAX_WATCHES = 1 << 12
"""The most watches that a rank remembers; the scheduler half has fewer (``most_peers``)."""
# Kept longer, an error would fail later requests.
ERROR_SECONDS = 1.0
"""How long a handshake's error is kept; it may come in the same step as the ticket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedReply:
    """What an engine's side channel answered, as it came; untrusted.

    Attributes:
        place: the address that answered, one of ``PeerKey.places``.
        ranks: every rank's encoded payload, in rank order.
        ticket_key: the public key that proves the engine's tickets; empty if they have no proofs.
        numeric: the IP address of the side channel.
        seconds: how long the scheduler half's handshake took.
        watch: number of the watch by which the scheduler half pings; ``None`` if each rank must.
    """

    place: PeerKey
    ranks: tuple[bytes, ...]
    ticket_key: bytes = b""
    numeric: str = ""
    seconds: float = 0.0
    watch: int | None = None

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all payloads."""
        return sum(map(len, self.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedHandshakes:
    """What a scheduler half tells the endpoints of its ranks about producers, in one step.

    Attributes:
        unwatched: watches that have ended, with the error, or ``None`` if nothing used the
            producer.
        expected: producers that are asked from now on; each is in ``outcomes``, maybe later.
        outcomes: producers that were asked, each with its reply or with the error.
        is_asking: whether the scheduler half waits for a reply.
        is_quick: whether such a reply may come within milliseconds.
    """

    unwatched: tuple[tuple[int, KVFerryError | None], ...] = ()
    expected: tuple[PeerKey, ...] = ()
    outcomes: tuple[tuple[PeerKey, EncodedReply | KVFerryError], ...] = ()
    is_asking: bool = False
    is_quick: bool = False

    def __bool__(self) -> bool:
        return bool(self.unwatched or self.expected or self.outcomes)


class RelayedReplies:
    """Keep relayed replies, and the watches that last. Safe to use from any thread.

    Replies that were used are kept as long as the watch lasts that they name, others until they are
    taken, and those without a watch for ``keep`` seconds at most.
    """

    def __init__(self, keep: float, clock: Callable[[], float]) -> None:
        self._keep = keep
        self._clock = clock
        self._lock = threading.Lock()
        self._new: dict[PeerKey, EncodedReply | KVFerryError] = {}
        """What was not taken yet, in the order in which it came."""
        self._until: dict[PeerKey, float] = {}
        """Until when to keep those of them that name no watch."""
        self._used = _UsedReplies()
        self._watches: dict[int, None] = {}

    def put(self, key: PeerKey, outcome: EncodedReply | KVFerryError) -> None:
        """Keep a producer's reply, or the error of the scheduler half's handshake."""
        with self._lock:
            self._drop_old()
            self._drop(key)
            self._used.drop(key)
            self._new[key] = outcome
            if not isinstance(outcome, EncodedReply):
                self._until[key] = self._clock() + ERROR_SECONDS
            elif outcome.watch is None:
                self._until[key] = self._clock() + self._keep
            else:
                self._watches[outcome.watch] = None
            while len(self._watches) > MAX_WATCHES:
                self._end({next(iter(self._watches))})
            while sum(map(_nbytes, self._new.values())) > MAX_STORED_BYTES:
                self._drop(next(iter(self._new)))

    def take(self, key: PeerKey) -> EncodedReply | None:
        """Return a producer's reply if there is a good one; raise the handshake's error."""
        with self._lock:
            self._drop_old()
            outcome = self._new.get(key) or self._used.get(key)
            self._drop(key)
        if isinstance(outcome, KVFerryError):
            raise outcome
        return outcome

    def used(self, key: PeerKey, reply: EncodedReply) -> None:
        """Keep a reply that was taken and found to be good, while its watch lasts."""
        ends = tuple(map(shape_of, reply.ranks))
        with self._lock:
            if reply.watch in self._watches:
                self._used.put(key, reply, ends)

    def end_watches(self, numbers: Sequence[int]) -> None:
        """Forget watches that have ended, and the replies that name them."""
        with self._lock:
            self._end(set(numbers))

    def is_watched(self, number: int) -> bool:
        """Return whether a watch lasts."""
        with self._lock:
            return number in self._watches

    def progress(self) -> None:
        """Drop what no handshake took in time."""
        if self._until:
            with self._lock:
                self._drop_old()

    def _end(self, numbers: Set[int]) -> None:
        for number in numbers & self._watches.keys():
            del self._watches[number]
        for key, outcome in list(self._new.items()) if numbers else ():
            if isinstance(outcome, EncodedReply) and outcome.watch in numbers:
                self._drop(key)
        if numbers:
            self._used.end(numbers)

    def _drop_old(self) -> None:
        now = self._clock()
        for key in [key for key, until in self._until.items() if until < now]:
            self._drop(key)

    def _drop(self, key: PeerKey) -> None:
        self._new.pop(key, None)
        self._until.pop(key, None)


class _UsedReplies:
    """Replies whose payloads were split, since those of a deployment have the same ends."""

    def __init__(self) -> None:
        self._heads: dict[PeerKey, tuple[EncodedReply, tuple[bytes, ...]]] = {}
        """Replies without the ends of their payloads, and these; the oldest first."""
        self._ends: dict[bytes, tuple[bytes, int]] = {}
        """Each end as the object that all replies share, and its uses."""
        self.nbytes = 0

    def put(self, key: PeerKey, reply: EncodedReply, ends: tuple[bytes, ...]) -> None:
        self.drop(key)
        pairs = list(zip(reply.ranks, ends, strict=True))
        ranks = tuple(data[: len(data) - len(end)] for data, end in pairs)
        heads = replace(reply, ranks=ranks)
        self._heads[key] = heads, tuple(map(self._shared, ends))
        self.nbytes += heads.nbytes
        while self.nbytes > MAX_STORED_BYTES:
            self.drop(next(iter(self._heads)))

    def get(self, key: PeerKey) -> EncodedReply | None:
        if key not in self._heads:
            return None
        heads, ends = self._heads[key]
        return replace(heads, ranks=tuple(map(operator.add, heads.ranks, ends)))

    def drop(self, key: PeerKey) -> None:
        heads, ends = self._heads.pop(key, (None, ()))
        self.nbytes -= 0 if heads is None else heads.nbytes
        for end in ends:
            _, uses = self._ends.pop(end)
            if uses > 1:
                self._ends[end] = end, uses - 1
            else:
                self.nbytes -= len(end)

    def end(self, watches: Set[int]) -> None:
        for key in [key for key, (heads, _) in self._heads.items() if heads.watch in watches]:
            self.drop(key)

    def _shared(self, end: bytes) -> bytes:
        end, uses = self._ends.get(end, (end, 0))
        self._ends[end] = end, uses + 1
        self.nbytes += 0 if uses else len(end)
        return end


def _nbytes(outcome: EncodedReply | KVFerryError) -> int:
    return outcome.nbytes if isinstance(outcome, EncodedReply) else 0
