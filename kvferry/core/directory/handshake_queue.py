"""The handshakes with producers: concurrent, with pauses after failures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Set
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from kvferry.core.directory.news import EncodedReply
from kvferry.core.errors import HandshakeError, KVFerryError, WireError
from kvferry.core.handshake.client import payloads
from kvferry.core.handshake.dialer import Dialer
from kvferry.core.handshake.exchange import explained
from kvferry.core.handshake.poller import Steps, Task, start
from kvferry.core.handshake.reply_limits import ReplyLimits
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.options import EndpointOptions
from kvferry.core.security.proof import load_library
from kvferry.core.side_channel_messages import MAX_PAYLOAD_BYTES, RandomBits, decode

# High, because clients choose which hosts tickets name, and hosts that never answer must not delay
# others. Limited, because each handshake may receive a reply of ``MAX_SHORT_REPLY_BYTES``, which is
# in memory two or three times meanwhile.
MAX_HANDSHAKES = 64
"""The most handshakes that run at once."""
FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 5.0
"""The pause after a failure doubles with each failure up to this."""
MAX_REMEMBERED = 1 << 12
"""The most engines whose failures are remembered."""

Shake = Callable[[PeerKey], Steps[EncodedReply]]
"""Returns the steps of a handshake."""
Over = Callable[[PeerKey, EncodedReply | KVFerryError], None]
"""Called with the outcome of a handshake."""


def backoff_seconds(failures: int, longest: float = LONGEST_BACKOFF_SECONDS) -> float:
    """Return the pause after so many earlier failures."""
    return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 16), longest)


@dataclass(slots=True, kw_only=True)
class _Backoff:
    """The pause before the next handshake with a producer, after ``failures`` pauses."""

    failures: int = 0
    until: float = 0.0


class HandshakeQueue:
    """Start handshakes, at most ``MAX_HANDSHAKES`` at once. Used by one thread only.

    After a failure, the next one with that producer waits: briefly at first, since an engine may
    restart, and longer each time. ``over`` is called on the thread that runs what ``post`` gets.
    """

    def __init__(
        self,
        shake: Shake,
        over: Over,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._shake = shake
        self._on_over = over
        self._post = post
        self._clock = clock
        self._queued: deque[PeerKey] = deque()
        self._delayed: dict[PeerKey, float] = {}
        self._backoffs: dict[PeerKey, _Backoff] = {}
        self._running: dict[PeerKey, Task | None] = {}
        self._is_turn_of_oldest = False

    def ask(self, key: PeerKey) -> None:
        """Ask for a handshake with a producer that is not being asked."""
        backoff = self._backoffs.get(key)
        self._delayed[key] = backoff.until if backoff is not None else 0.0
        self.progress(self._clock())

    def progress(self, now: float) -> None:
        """Start the handshakes whose pause is over, as far as ``MAX_HANDSHAKES`` allows."""
        for key in [key for key, due in self._delayed.items() if due <= now]:
            del self._delayed[key]
            self._queued.append(key)
        while self._queued and len(self._running) < MAX_HANDSHAKES:
            self._start(self._take())

    def succeeded(self, key: PeerKey) -> None:
        """Forget the failures of a producer, so that no pause delays it."""
        self._backoffs.pop(key, None)

    def cancel(self, keys: Set[PeerKey]) -> Set[PeerKey]:
        """Cancel handshakes that have not begun, without calling back; return their producers."""
        cancelled = (self._delayed.keys() | set(self._queued)) & keys
        self._queued = deque(key for key in self._queued if key not in cancelled)
        for key in cancelled:
            self._delayed.pop(key, None)
        return cancelled

    def close(self) -> None:
        """Start no more handshakes, and end those under way; return at once."""
        self._queued.clear()
        self._delayed.clear()
        for task in self._running.values():
            if task is not None:
                task.cancel()

    def _take(self) -> PeerKey:
        # Every second time the one with the fewest failures, so that producers that never answer do
        # not delay others; otherwise the one that has waited longest, so that tickets with ever new
        # engine names do not delay it for ever.
        oldest, self._is_turn_of_oldest = self._is_turn_of_oldest, not self._is_turn_of_oldest
        key = self._queued[0] if oldest else min(self._queued, key=self._failures)
        self._queued.remove(key)
        return key

    def _failures(self, key: PeerKey) -> int:
        backoff = self._backoffs.get(key)
        return backoff.failures if backoff is not None else 0

    def _start(self, key: PeerKey) -> None:
        self._running[key] = None

        def over(outcome: EncodedReply | Exception) -> None:
            result = _contained(outcome)
            self._post(lambda: self._over(key, result))

        try:
            self._running[key] = start(self._shake(key), over)
        except HandshakeError as exc:
            over(exc)

    def _over(self, key: PeerKey, result: EncodedReply | KVFerryError) -> None:
        del self._running[key]
        if isinstance(result, KVFerryError):
            self._failed(key)
        self.progress(self._clock())
        self._on_over(key, result)

    def _failed(self, key: PeerKey) -> None:
        now = self._clock()
        if key not in self._backoffs and len(self._backoffs) >= MAX_REMEMBERED:
            del self._backoffs[next(iter(self._backoffs))]
        backoff = self._backoffs.setdefault(key, _Backoff())
        if now >= backoff.until:
            backoff.until = now + backoff_seconds(backoff.failures)
            backoff.failures += 1


def _contained(outcome: EncodedReply | Exception) -> EncodedReply | KVFerryError:
    if isinstance(outcome, EncodedReply):
        return outcome
    error = outcome
    if not isinstance(error, KVFerryError):
        error = HandshakeError(f"failed: {outcome!r}")
    forget_frames(error)
    return error


def forget_frames(error: BaseException | None) -> None:
    """Remove the tracebacks from an error and its causes."""
    # The error is kept until the requests that it fails are reported, and the frames' local
    # variables would keep replies in memory.
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def fetched(key: PeerKey, options: EndpointOptions, limits: ReplyLimits) -> Steps[EncodedReply]:
    """Return a producer's reply, of the first address that has ``key.ticket_key``.

    The last address's reply is returned whatever its key is; the addresses share the timeout.

    Raises:
        HandshakeError: no address has that key, and the last did not answer; says why each failed.
    """
    deadline = time.monotonic() + options.handshake_timeout
    begun = time.perf_counter()
    places, failures = list(key.places), list[HandshakeError]()
    while True:
        place, left = places.pop(0), max(deadline - time.monotonic(), 0.0)
        call = dialer(place, left / (1 + len(places)), options)
        try:
            with ExitStack() as held:
                found = yield from payloads(call, place.engine, limits, held)
                with explained(place.engine, call):
                    incarnation = _incarnation_of(found.ranks[0], place.engine)
                # Another key means another engine with the same id: a loopback address, for
                # instance, leads to another engine on each host.
                if found.ticket_key == key.ticket_key or not places:
                    if found.ticket_key:
                        load_library()
                    reply = EncodedReply(
                        place=place,
                        incarnation=incarnation,
                        ranks=tuple(found.ranks),
                        ticket_key=found.ticket_key,
                        numeric=call.found,
                        seconds=time.perf_counter() - begun,
                    )
                    limits.made(reply.nbytes)
                    return reply
        except HandshakeError as exc:
            failures.append(exc)
            if not places:
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


def dialer(place: PeerKey, timeout: float, options: EndpointOptions) -> Dialer:
    """Return a ``Dialer`` for an address of ``PeerKey.places``; ``timeout`` is for each step."""
    return Dialer(
        host=place.host,
        port=place.port,
        timeout=timeout,
        access=options.access,
        key=place.key,
    )
