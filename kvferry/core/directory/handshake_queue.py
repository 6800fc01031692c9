"""The handshakes with producers: concurrent, with pauses after failures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from kvferry.core.directory.news import EncodedReply
from kvferry.core.errors import HandshakeError, KVFerryError, WireError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.options import EndpointOptions
from kvferry.core.security.proof import load_library
from kvferry.core.side_channel.client import ReplyLimits, payloads
from kvferry.core.side_channel.connection import explained
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel.poller import Steps, Task, start
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


def backoff_seconds(failures: int, longest: float = LONGEST_BACKOFF_SECONDS) -> float:
    """Return the pause after so many earlier failures."""
    return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 16), longest)


@dataclass(slots=True, kw_only=True, eq=False)
class Asking:
    """A producer that is being asked, or is to be once it is due.

    Attributes:
        since, due: by the queue's clock.
        incarnations: those for which it is asked, which genuine proofs name.
    """

    key: PeerKey
    since: float
    due: float
    incarnations: dict[int, None] = field(default_factory=dict)
    has_begun: bool = False
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
        self._asked: dict[PeerKey, Asking] = {}
        """The longest asked first."""
        self._running = 0
        self._failed: dict[PeerKey, tuple[int, float]] = {}
        """How often a handshake has failed since one succeeded, and until when there is none."""
        self._is_turn_of_oldest = False

    @property
    def newest(self) -> float:
        """When the producer was asked that was asked last; ``-inf`` if none is being asked."""
        asked = next(reversed(self._asked.values()), None)
        return -math.inf if asked is None else asked.since

    def ask(self, key: PeerKey) -> Asking:
        """Ask for a handshake with a producer, unless it is being asked."""
        if key not in self._asked:
            now = self._clock()
            _, until = self._failed.get(key, (0, now))
            asking = self._asked[key] = Asking(key=key, since=now, due=max(now, until))
            self.progress(now)
            return asking
        return self._asked[key]

    def progress(self, now: float) -> None:
        """Start the handshakes whose pause is over, as far as ``MAX_HANDSHAKES`` allows."""
        while self._running < MAX_HANDSHAKES:
            waiting = [each for each in self._asked.values() if not each.has_begun]
            due = [each for each in waiting if each.due <= now]
            if not due:
                return
            self._start(self._first(due))

    def succeeded(self, key: PeerKey) -> None:
        """Forget the failures of a producer, so that no pause delays it."""
        self._failed.pop(key, None)

    def drop(self, since: float) -> None:
        """Drop the handshakes that were asked for until then and have not begun."""
        late = takewhile(lambda each: each.since <= since, self._asked.values())
        for asking in [each for each in late if not each.has_begun]:
            del self._asked[asking.key]

    def close(self) -> None:
        """Start no more handshakes, and end those under way; return at once."""
        self.drop(math.inf)
        for asking in self._asked.values():
            if asking.task is not None:
                asking.task.cancel()

    def _first(self, due: Sequence[Asking]) -> Asking:
        # Every second time the one with the fewest failures, so that producers that never answer do
        # not delay others; otherwise the one that has waited longest, so that tickets with ever new
        # engine names do not delay it for ever.
        oldest, self._is_turn_of_oldest = self._is_turn_of_oldest, not self._is_turn_of_oldest
        if oldest:
            return min(due, key=lambda each: each.due)
        return min(due, key=lambda each: self._failed.get(each.key, (0, 0.0))[0])

    def _start(self, asking: Asking) -> None:
        asking.has_begun = True
        self._running += 1

        def over(outcome: EncodedReply | Exception) -> None:
            result = _contained(outcome)
            self._post(lambda: self._over(asking, result))

        try:
            asking.task = start(self._shake(asking.key), over)
        except HandshakeError as exc:
            over(exc)

    def _over(self, asking: Asking, result: EncodedReply | KVFerryError) -> None:
        del self._asked[asking.key]
        self._running -= 1
        now = self._clock()
        if isinstance(result, KVFerryError):
            failures, _ = self._failed.pop(asking.key, (0, now))
            if len(self._failed) >= MAX_REMEMBERED:
                del self._failed[next(iter(self._failed))]
            self._failed[asking.key] = failures + 1, now + backoff_seconds(failures)
        self.progress(now)
        self._on_over(asking, result)


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
            found = yield from payloads(call, place.engine, limits)
            with explained(place.engine, call):
                incarnation = _incarnation_of(found.ranks[0], place.engine)
            # Another key means another engine with the same id: a loopback address, for instance,
            # leads to another engine on each host.
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
