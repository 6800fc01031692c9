"""The handshakes with producers: concurrent, with pauses after failures."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

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
    """A producer that is being asked, or is to be."""

    key: PeerKey
    since: float  # by the queue's clock
    # Those for which it is asked, which genuine proofs name.
    incarnations: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_TICKETS))
    task: Task | None = None


class HandshakeQueue:
    """Make handshakes, in the order in which they are due. Used by one thread only.

    After a failure, the next one with that producer waits: briefly at first, since an engine may
    restart, and longer each time. One that has not begun after ``patience`` seconds, when nobody
    waits for it any more, fails. ``shake`` returns the steps of a handshake; ``over`` is called
    with its outcome on the thread that runs what ``post`` gets.
    """

    def __init__(
        self,
        shake: Callable[[PeerKey], Steps[EncodedReply]],
        over: Callable[[Asking, EncodedReply | KVFerryError], None],
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        patience: float,
    ) -> None:
        self._shake = shake
        self._on_over = over
        self._post = post
        self._clock = clock
        self._patience = patience
        self._asked: dict[PeerKey, Asking] = {}
        self._places = asyncio.Semaphore(MAX_HANDSHAKES)
        self._failed = LRUCache[tuple[int, float]](MAX_REMEMBERED)
        """How often a handshake has failed since one succeeded, and until when there is none."""

    @property
    def newest(self) -> float:
        """When the producer was asked that was asked last; ``-inf`` if none is being asked."""
        return max((each.since for each in self._asked.values()), default=-math.inf)

    def ask(self, key: PeerKey, incarnation: int | None = None) -> None:
        """Ask for a handshake with a producer, unless it is being asked, for an incarnation."""
        asking = self._asked.get(key)
        if asking is None:
            asking = self._asked[key] = Asking(key=key, since=self._clock())
            self._start(asking)
        if incarnation is not None and incarnation not in asking.incarnations:
            asking.incarnations.append(incarnation)

    def succeeded(self, key: PeerKey) -> None:
        """Forget the failures of a producer, so that no pause delays it."""
        if self._failed.get(key):
            self._failed.put(key, (0, 0.0))

    def close(self) -> None:
        """End all handshakes; return at once."""
        for asking in self._asked.values():
            if asking.task is not None:
                asking.task.cancel()

    def _failures(self, key: PeerKey) -> tuple[int, float]:
        return self._failed.get(key) or (0, 0.0)

    def _start(self, asking: Asking) -> None:
        def over(outcome: EncodedReply | Exception) -> None:
            result = outcome if isinstance(outcome, EncodedReply) else kept(outcome)
            self._post(lambda: self._over(asking, result))

        _, until = self._failures(asking.key)
        try:
            asking.task = start(partial(self._shaken, asking.key, until - asking.since), over)
        except HandshakeError as exc:
            over(exc)

    async def _shaken(self, key: PeerKey, pause: float) -> EncodedReply:
        try:
            async with asyncio.timeout(self._patience):
                await asyncio.sleep(pause)
                await self._places.acquire()
        except TimeoutError:
            raise HandshakeError(
                f"engine {key.engine!r} was not asked within {self._patience:g} s, since "
                f"{MAX_HANDSHAKES} others that tickets name had not answered yet: look which do "
                "not run any more, or set a shorter handshake_timeout"
            ) from None
        try:
            return await self._shake(key)
        finally:
            self._places.release()

    def _over(self, asking: Asking, result: EncodedReply | KVFerryError) -> None:
        del self._asked[asking.key]
        if isinstance(result, KVFerryError):
            failures, _ = self._failures(asking.key)
            until = self._clock() + backoff_seconds(failures)
            self._failed.put(asking.key, (failures + 1, until))
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
