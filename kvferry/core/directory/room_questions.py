"""The requests that follow rooms of a producer, the task that asks for them, and what it hears."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from msgspec import UNSET

from kvferry.core.backoff import backoff_seconds
from kvferry.core.errors import (
    AdmissionError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    RefusedError,
    kept,
)
from kvferry.core.lifecycle.rooms import RoomId
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.lru_cache import LRUCache
from kvferry.core.options import EndpointOptions
from kvferry.core.side_channel.connection import (
    SideChannelConnection,
    connected,
    explained,
    unexpected,
)
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel.tasks import post, start
from kvferry.core.side_channel_messages import (
    MAX_FOLLOWED_PROMPTS,
    MAX_WAIT_MS,
    Follow,
    Followed,
    Reply,
    RoomNews,
)

MAX_ANSWERED = 1 << 12
"""The most producers that are known to have answered; those that were used last."""
LINGER_SECONDS = 10.0
"""How long a connection is kept without a room to follow."""
TURN_MS = 20
"""How long an answer may be delayed if there are more rooms than one request can name."""
SHORTEST_SECONDS = 0.002
"""The least time between two questions, also if a producer answers at once without news."""
LONGEST_PAUSE_SECONDS = 0.8
"""The pause after an attempt that failed doubles with each up to this, until an answer comes."""
FINAL = (RefusedError, AdmissionError)
"""What an address that answers so will answer the next time, too."""


@dataclass(slots=True, kw_only=True, eq=False)
class FollowedRequest:
    """A request that follows a room."""

    id: Hashable
    room: RoomId
    key: PeerKey
    since: float
    producer: FollowedProducer | None = None  # what asks for it; ``None`` if nothing could
    version: int = 0  # of the newest news that came, when it ``changed``; 0 if none came
    changed: float = 0.0
    news: RoomNews | None = None  # the newest, until ``RoomFollower.news`` returns it
    has_part: bool = False  # whether there was news with a part
    is_last: bool = False  # whether the newest news is the ticket
    error: KVFerryError | None = None

    @property
    def is_over(self) -> bool:
        """Return whether nothing is asked for the request any more."""
        return self.is_last or self.error is not None


class RoomInbox:
    """The news that requests have not taken yet; ``lock`` guards it and all requests.

    The methods are called with the lock held. ``changed`` are the requests with news or an error,
    ``answered`` the producers that have answered.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.lock = threading.Lock()
        self.changed: set[Hashable] = set()
        self.answered = LRUCache[bool](MAX_ANSWERED)

    def keep(self, request: FollowedRequest, news: RoomNews) -> None:
        """Keep news for a request in place of older news."""
        request.version, request.changed = news.version, self._clock()
        if news.error:
            why = f"the prefill engine makes no ticket: {news.error}"
            self.fail([request], HandshakeError(why))
            return
        request.news, request.is_last = news, news.is_last
        request.has_part = request.has_part or bool(news.part)
        self.changed.add(request.id)

    def fail(self, requests: Iterable[FollowedRequest], error: KVFerryError) -> None:
        """Fail those of the requests that are not over."""
        for request in requests:
            if not request.is_over:
                request.error = error
                self.changed.add(request.id)


class FollowedProducer:
    """Follow the rooms of one producer, in a task; ``inbox.lock`` guards ``requests``.

    ``forget`` is called with the lock held, when there are no requests any more. Raises
    ``HandshakeError`` if the task cannot be started.
    """

    def __init__(
        self,
        key: PeerKey,
        options: EndpointOptions,
        inbox: RoomInbox,
        forget: Callable[[FollowedProducer], None],
    ) -> None:
        self.key = key
        self.requests: dict[Hashable, FollowedRequest] = {}
        self._options = options
        self._inbox = inbox
        self._lock = inbox.lock
        self._forget = forget
        self._incarnation = 0
        self._answered = time.monotonic()
        """When an answer came last, or there was a room to ask about after there was none."""
        self._turns = itertools.count()
        self._addresses = deque(key.addresses)
        """The one to ask first."""
        self._failures: dict[PeerKey, KVFerryError] = {}
        """Since the last answer: how each address has failed last, the latest at the end."""
        self._attempts = 0
        """The attempts since the last answer."""
        self._woken = asyncio.Event()
        self._task = start(self._follow, self._over)

    def enter(self, request: FollowedRequest) -> None:
        """Ask for a further request at once; the lock is held."""
        if not self._is_busy():
            self._answered = time.monotonic()
            self._failures.clear()
        self.requests[request.id] = request
        request.producer = self
        post(self._woken.set)

    def end(self) -> None:
        """End the connection: there are no requests."""
        self._task.cancel()

    async def _follow(self) -> None:
        while True:
            with self._lock:
                if not self.requests:
                    self._forget(self)  # at once, so that none can enter any more
                    return
                is_busy = self._is_busy()
            if not is_busy:
                await self._sleep(time.monotonic() + LINGER_SECONDS)
                continue
            try:
                await self._connect_and_follow()
            except Exception as exc:  # noqa: BLE001  the requests must hear of any failure
                self._failed(kept(exc))
            seconds = backoff_seconds(self._attempts, LONGEST_PAUSE_SECONDS)
            self._attempts += 1
            await asyncio.sleep(seconds)

    def _is_busy(self) -> bool:
        """Return whether there is a room to ask about; the lock is held."""
        return any(not request.is_over for request in self.requests.values())

    def _over(self, _: object) -> None:
        with self._lock:
            self._forget(self)
            ended = HandshakeError("the thread that follows this engine's rooms has ended")
            self._inbox.fail(self.requests.values(), ended)

    async def _connect_and_follow(self) -> None:
        """Follow the rooms over one connection, until none was left for a while."""
        address = self._addresses[0]
        # The addresses of the producer share the timeout, as those of a handshake do.
        timeout = self._options.handshake_timeout
        share = timeout / len(self._addresses)
        dialer = Dialer.to(address, share, self._options.access)
        with (
            explained(address.engine, dialer),
            closing(await connected(dialer)) as connection,
        ):
            begun = time.monotonic()
            until = begun + LINGER_SECONDS
            while time.monotonic() < until:
                rooms, wait_ms = self._asked()
                if not rooms:
                    await self._sleep(until)
                    continue
                until = time.monotonic() + LINGER_SECONDS
                follow = _question(self.key.engine, rooms, wait_ms)
                silent_since = self._answered
                deadline = min(max(silent_since, begun) + share, silent_since + timeout)
                reply = await self._answer(connection, follow, deadline)
                await asyncio.sleep(SHORTEST_SECONDS)
                self._woken.clear()
                if reply is not None:
                    self._hear(reply)

    def _asked(self) -> tuple[list[tuple[RoomId, int]], int]:
        """Return the rooms to ask about next, with known versions, and how long to wait."""
        known: dict[RoomId, int] = {}
        with self._lock:
            for each in self.requests.values():
                if not each.is_over:
                    # Who came last may know less than others do.
                    known[each.room] = min(each.version, known.get(each.room, each.version))
        rooms = list(known.items())
        if len(rooms) <= MAX_FOLLOWED_PROMPTS:
            return rooms, MAX_WAIT_MS
        first = next(self._turns) * MAX_FOLLOWED_PROMPTS % len(rooms)
        return [*rooms[first:], *rooms[:first]][:MAX_FOLLOWED_PROMPTS], TURN_MS

    def _hear(self, reply: Reply) -> None:
        """Keep the news of an answer, which is a peer's, or refuse it."""
        if not isinstance(reply, Followed):
            raise unexpected(reply)
        with self._lock:
            self._answered = time.monotonic()
            self._inbox.answered.put(self.key, True)
            self._failures.clear()
            self._attempts = 0
            is_new = self._incarnation not in (0, reply.incarnation)
            self._incarnation = reply.incarnation
            if is_new:
                known = [each for each in self.requests.values() if each.version]
                restarted = PeerLostError(f"engine {self.key.engine} was restarted")
                self._inbox.fail(known, restarted)
                return
            named = defaultdict[bytes, list[FollowedRequest]](list)
            for each in self.requests.values():
                named[each.room.name].append(each)
            for news in reply.rooms:
                for each in named[news.room]:
                    # Older builds do not say for which prompt: then news are for all rooms of that
                    # name, and whoever reads the part looks for which prompt it was made.
                    is_for = news.prompt in (b"", each.room.prompt)
                    if is_for and not each.is_over and news.version > each.version:
                        self._inbox.keep(each, news)

    def _failed(self, error: KVFerryError) -> None:
        """Fail all requests if all addresses have refused this engine, or were silent too long."""
        with self._lock:
            address = self._addresses[0]
            self._addresses.rotate(-1)
            self._failures.pop(address, None)
            self._failures[address] = error
            failures = list(self._failures.values())
            refusals = [each for each in failures if isinstance(each, FINAL)]
            is_silent = time.monotonic() >= self._answered + self._options.handshake_timeout
            if len(refusals) == len(self._addresses) or is_silent:
                self._inbox.fail(self.requests.values(), _joined(failures))

    async def _answer(
        self, connection: SideChannelConnection, follow: Follow, deadline: float
    ) -> Reply | None:
        """Ask; return the answer, or ``None`` if a request has entered before it came."""
        asking = asyncio.ensure_future(connection.ask(follow, deadline))
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait((asking, woken), return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            woken.cancel()
            await asyncio.gather(asking, woken, return_exceptions=True)

    async def _sleep(self, until: float) -> None:
        """Sleep until a time, or until a request enters."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._woken.wait()
        self._woken.clear()


def _question(engine: str, rooms: Sequence[tuple[RoomId, int]], wait_ms: int) -> Follow:
    prompts = [room.prompt for room, _ in rooms]
    return Follow(
        engine=engine,
        rooms=[(room.name, version) for room, version in rooms],
        wait_ms=wait_ms,
        prompts=prompts if any(prompts) else UNSET,
    )


def _joined(failures: Sequence[KVFerryError]) -> KVFerryError:
    last = failures[-1]
    text = "; and ".join(map(str, failures))
    if all(isinstance(each, RefusedError) for each in failures):
        return RefusedError(
            f"{text}. An engine that prefills for requests with a transfer_id needs a kvferry that "
            "has early tickets: upgrade it, or let the router send requests to prefill first"
        )
    return last if len(failures) == 1 else type(last)(text)
