"""The handshakes with producers: concurrent, with pauses after failures."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, takewhile

import msgspec

from kvferry.core.backoff import backoff_seconds
from kvferry.core.directory.news import EncodedReply
from kvferry.core.errors import HandshakeError, KVFerryError, WireError, kept
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.lru_cache import LRUCache
from kvferry.core.options import EndpointOptions
from kvferry.core.security.ticket_proof import load_library
from kvferry.core.side_channel.client import ReplyLimits, payloads
from kvferry.core.side_channel.connection import explained
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel.tasks import Steps, Task, start
from kvferry.core.side_channel_messages import MAX_PAYLOAD_BYTES, RandomBits, decode

# High, because clients choose which hosts tickets name, and hosts that never answer must not delay
# others. Limited, because each handshake may receive a reply of ``MAX_SHORT_REPLY_BYTES``, which is
# in memory two or three times meanwhile.
MAX_HANDSHAKES = 64
"""The most handshakes that run at once."""
MAX_REMEMBERED = 1 << 12
"""The most engines whose failures are remembered."""
MAX_TICKETS = 16
"""The most incarnations for which one handshake is made: the newest that tickets name."""


@dataclass(slots=True, kw_only=True, eq=False)
class Asking:
    """A producer that is being asked, or is to be once it is due."""

    key: PeerKey
    since: float  # by the queue's clock, as ``due``
    due: float
    # Those for which it is asked, which genuine proofs name.
    incarnations: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_TICKETS))
    task: Task | None = None


class HandshakeQueue:
    """Start handshakes, at most ``MAX_HANDSHAKES`` at once. Used by one thread only.

    After a failure, the next one with that producer waits: briefly at first, since an engine may
    restart, and longer each time. ``shake`` returns the steps of a handshake; ``over`` is called
    with its outcome on the thread that runs what ``post`` gets.
    """

    def __init__(
        self,
        shake: Callable[[PeerKey], Steps[EncodedReply]],
        over: Callable[[Asking, EncodedReply | KVFerryError], None],
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._shake = shake
        self._on_over = over
        self._post = post
        self._clock = clock
        self._waiting: dict[PeerKey, Asking] = {}
        """Those that have not begun, the longest asked first."""
        self._running: dict[PeerKey, Asking] = {}
        self._failed = LRUCache[tuple[int, float]](MAX_REMEMBERED)
        """How often a handshake has failed since one succeeded, and until when there is none."""
        self._is_turn_of_oldest = False

    @property
    def newest(self) -> float:
        """When the producer was asked that was asked last; ``-inf`` if none is being asked."""
        asked = chain(self._running.values(), self._waiting.values())
        return max((each.since for each in asked), default=-math.inf)

    def ask(self, key: PeerKey, incarnation: int | None = None) -> None:
        """Ask for a handshake with a producer, unless it is being asked, for an incarnation."""
        asking = self._running.get(key) or self._waiting.get(key)
        if asking is None:
            now = self._clock()
            _, until = self._failures(key)
            asking = self._waiting[key] = Asking(key=key, since=now, due=max(now, until))
            self.progress(now)
        if incarnation is not None and incarnation not in asking.incarnations:
            asking.incarnations.append(incarnation)

    def progress(self, now: float) -> None:
        """Start the handshakes whose pause is over, as far as ``MAX_HANDSHAKES`` allows."""
        while len(self._running) < MAX_HANDSHAKES:
            due = [each for each in self._waiting.values() if each.due <= now]
            if not due:
                return
            self._start(self._first(due))

    def succeeded(self, key: PeerKey) -> None:
        """Forget the failures of a producer, so that no pause delays it."""
        if self._failed.get(key):
            self._failed.put(key, (0, 0.0))

    def drop(self, since: float) -> None:
        """Drop the handshakes that were asked for until then and have not begun."""
        for asking in list(takewhile(lambda each: each.since <= since, self._waiting.values())):
            del self._waiting[asking.key]

    def close(self) -> None:
        """Start no more handshakes, and end those under way; return at once."""
        self._waiting.clear()
        for asking in self._running.values():
            if asking.task is not None:
                asking.task.cancel()

    def _failures(self, key: PeerKey) -> tuple[int, float]:
        return self._failed.get(key) or (0, 0.0)

    def _first(self, due: Sequence[Asking]) -> Asking:
        # Every second time the one with the fewest failures, so that producers that never answer do
        # not delay others; otherwise the one that has waited longest, so that tickets with ever new
        # engine names do not delay it for ever.
        oldest, self._is_turn_of_oldest = self._is_turn_of_oldest, not self._is_turn_of_oldest
        if oldest:
            return min(due, key=lambda each: each.due)
        return min(due, key=lambda each: self._failures(each.key)[0])

    def _start(self, asking: Asking) -> None:
        del self._waiting[asking.key]
        self._running[asking.key] = asking

        def over(outcome: EncodedReply | Exception) -> None:
            result = outcome if isinstance(outcome, EncodedReply) else kept(outcome)
            self._post(lambda: self._over(asking, result))

        try:
            asking.task = start(partial(self._shake, asking.key), over)
        except HandshakeError as exc:
            over(exc)

    def _over(self, asking: Asking, result: EncodedReply | KVFerryError) -> None:
        del self._running[asking.key]
        now = self._clock()
        if isinstance(result, KVFerryError):
            failures, _ = self._failures(asking.key)
            self._failed.put(asking.key, (failures + 1, now + backoff_seconds(failures)))
        self.progress(now)
        self._on_over(asking, result)


async def fetched(key: PeerKey, options: EndpointOptions, limits: ReplyLimits) -> EncodedReply:
    """Return a producer's reply, of the first address that has ``key.ticket_key``.

    The last address's reply is returned whatever its key is; the addresses share the timeout.
    Raises ``HandshakeError``, which says why each failed, if there is no reply to return.
    """
    deadline = time.monotonic() + options.handshake_timeout
    begun = time.perf_counter()
    addresses, failures = list(key.addresses), list[HandshakeError]()
    while True:
        address, left = addresses.pop(0), max(deadline - time.monotonic(), 0.0)
        dialer = Dialer.to(address, left / (1 + len(addresses)), options.access)
        try:
            found = await payloads(dialer, key.engine, limits)
            with explained(key.engine, dialer):
                incarnation = _incarnation_of(found.ranks[0], key.engine)
            # Another key means another engine with the same id: a loopback address, for instance,
            # leads to another engine on each host.
            if found.ticket_key == key.ticket_key or not addresses:
                if found.ticket_key:
                    load_library()
                reply = EncodedReply(
                    address=address,
                    incarnation=incarnation,
                    ranks=tuple(found.ranks),
                    ticket_key=found.ticket_key,
                    numeric=dialer.found,
                    seconds=time.perf_counter() - begun,
                )
                limits.made(reply.nbytes)
                return reply
        except HandshakeError as exc:
            failures.append(exc)
            if not addresses:
                raise type(exc)("; and ".join(map(str, failures))) from exc


class _PayloadStart(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a rank's payload before all of it is decoded and checked."""

    engine: str
    incarnation: RandomBits


_decoder = msgspec.msgpack.Decoder(_PayloadStart)


def _incarnation_of(payload: bytes, engine: str) -> Incarnation:
    """Return the incarnation in a payload, which is untrusted, or refuse the payload."""
    try:
        start = decode(_decoder, payload, MAX_PAYLOAD_BYTES, "payload")
    except WireError as exc:
        raise HandshakeError(f"payload of rank 0: {exc}") from exc
    if start.engine != engine:
        raise HandshakeError(f"it answered with the ranks of engine {start.engine!r}")
    return Incarnation(start.incarnation)
