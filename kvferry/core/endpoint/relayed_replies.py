"""Replies of producers' side channels that an engine's scheduler half has fetched for its ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.ticket import PeerKey

MAX_STORED_BYTES = 1 << 24
"""The most bytes of relayed replies that a rank keeps for its handshakes, the newest."""
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
    """Keep relayed replies for ``keep`` seconds or until they are taken, and the watches that last.

    Safe to use from any thread.
    """

    def __init__(self, keep: float, clock: Callable[[], float]) -> None:
        self._keep = keep
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: dict[PeerKey, tuple[float, EncodedReply | KVFerryError]] = {}
        self._watches: dict[int, None] = {}

    def put(self, key: PeerKey, outcome: EncodedReply | KVFerryError) -> None:
        """Keep a producer's reply, or the error of the scheduler half's handshake."""
        with self._lock:
            self._stored.pop(key, None)
            self._stored[key] = self._clock(), outcome
            if isinstance(outcome, EncodedReply) and outcome.watch is not None:
                self._watches[outcome.watch] = None
            while len(self._watches) > MAX_WATCHES:
                del self._watches[next(iter(self._watches))]
            self._drop_old()

    def take(self, key: PeerKey) -> EncodedReply | None:
        """Remove and return a producer's reply if it is good; raise the handshake's error."""
        with self._lock:
            self._drop_old()
            _, outcome = self._stored.pop(key, (0.0, None))
            if isinstance(outcome, KVFerryError):
                raise outcome
            if outcome is None or outcome.watch is None or outcome.watch in self._watches:
                return outcome
            return None

    def end_watches(self, numbers: Sequence[int]) -> None:
        """Forget watches that have ended, so that replies which name them are not used."""
        with self._lock:
            for number in numbers:
                self._watches.pop(number, None)

    def is_watched(self, number: int) -> bool:
        """Return whether a watch lasts."""
        with self._lock:
            return number in self._watches

    def progress(self) -> None:
        """Drop replies that no handshake took in time."""
        if self._stored:
            with self._lock:
                self._drop_old()

    def _drop_old(self) -> None:
        """Drop what is too old, and the oldest replies while all together are too long."""
        now, nbytes = self._clock(), 0
        for key, (since, outcome) in reversed(list(self._stored.items())):
            keep = ERROR_SECONDS
            if isinstance(outcome, EncodedReply):
                nbytes += outcome.nbytes
                keep = self._keep
            if now - since > keep or nbytes > MAX_STORED_BYTES:
                del self._stored[key]
