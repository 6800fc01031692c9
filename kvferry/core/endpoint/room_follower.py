"""Follow the rooms of producers, for the scheduler half of a consumer engine.

A router that sends a request to both engines at once names it by a room. ``RoomFollower`` asks the
producer's side channel what it knows about the room, again and again, until the ticket has come or
the producer says that there will be none. Each producer is asked on a thread of its own, over one
connection, for all of its rooms.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

from kvferry.core.endpoint.handshakes import dialer
from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.endpoint.peer_key import PeerKey
from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import (
    AdmissionError,
    DeadlineError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    RefusedError,
)
from kvferry.core.handshake.connection import SideChannelConnection
from kvferry.core.handshake.exchange import explained, unexpected
from kvferry.core.lifecycle.rooms import RoomId
from kvferry.core.side_channel_messages import (
    MAX_FOLLOWED,
    MAX_WAIT_MS,
    Follow,
    Followed,
    Reply,
    RoomNews,
)

MAX_PRODUCERS = 1 << 8
"""The most producers whose rooms are followed at once."""
MAX_REQUESTS = 1 << 10
"""The most requests whose rooms are followed at once."""
LINGER_SECONDS = 10.0
"""How long a connection is kept without a room to follow."""
TURN_MS = 20
"""How long an answer may be delayed if there are more rooms than one request can name."""
SHORTEST_SECONDS = 0.002
"""The least time between two questions, also if a producer answers at once, though without news."""
PAUSE_SECONDS = 0.1
"""The pause after an attempt that failed."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Room:
    """A room that is followed.

    Attributes:
        since: when that began.
        version: the version of the newest news; 0 if there was none.
        news: the newest news.
        error: why the room is not followed any more.
        requests: the requests that follow it, each with the version that it has seen.
    """

    since: float
    version: int = 0
    news: RoomNews | None = None
    error: KVFerryError | None = None
    requests: dict[Hashable, int] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Return whether nothing is asked about the room any more."""
        return self.error is not None or (self.news is not None and self.news.is_last)


class RoomFollower:
    """Follow rooms of producers. No method blocks.

    Args:
        options: timeouts, this engine's keys, and the networks that it may connect to. A room that
            its producer does not know fails after ``load_timeout``; all rooms of a producer that
            does not answer fail after ``handshake_timeout``.
        clock: seconds, monotonic.
    """

    def __init__(
        self, options: EndpointOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._producers: dict[PeerKey, _Producer] = {}
        self._requests: dict[Hashable, tuple[_Producer | None, RoomId, _Room]] = {}
        self._is_closed = False

    @property
    def following(self) -> int:
        """Return the number of requests whose rooms are followed."""
        return len(self._requests)

    @property
    def pending(self) -> bool:
        """Return whether a request has news that ``news`` has not returned."""
        with self._lock:
            return any(
                self._is_news(request, room) for request, (_, _, room) in self._requests.items()
            )

    def follow(self, request: Hashable, room: RoomId, producer: PeerKey) -> None:
        """Follow a request's room from now on.

        Args:
            request: identifies the request until ``end``.
            room: the room.
            producer: the engine that computes the request, and its side channel.

        Raises:
            ValueError: the request follows a room already.
        """
        if request in self._requests:
            raise ValueError(f"request {request!r} follows a room already: call end() first")
        with self._lock:
            following, error = self._producer(producer)
            if following is None:
                found = _Room(since=self._clock(), error=error)
            else:
                found = following.rooms.setdefault(room, _Room(since=self._clock()))
            found.requests[request] = 0
            self._requests[request] = following, room, found
        if following is not None:
            following.wake()

    def news(self, request: Hashable) -> RoomNews | KVFerryError | None:
        """Return what is new about a request's room since the last call.

        Args:
            request: the request.

        Returns:
            The newest news, or why the room is not followed any more; ``None`` if nothing is new.
        """
        if request not in self._requests:
            return None
        _, _, room = self._requests[request]
        with self._lock:
            if not self._is_news(request, room):
                return None
            if room.news is not None and room.requests[request] < room.version:
                room.requests[request] = room.version
                return room.news
            return room.error or _unknown(self._options.load_timeout)

    def end(self, request: Hashable) -> None:
        """Follow a request's room no more; ignored if it follows none."""
        following, name, room = self._requests.pop(request, (None, None, None))
        if room is None:
            return
        with self._lock:
            del room.requests[request]
            if following is not None and name is not None and not room.requests:
                following.rooms.pop(name, None)

    def close(self) -> None:
        """Follow nothing any more; return at once."""
        with self._lock:
            self._is_closed = True
            producers = list(self._producers.values())
            for producer in producers:
                producer.rooms.clear()
        for producer in producers:
            producer.wake()

    def _is_news(self, request: Hashable, room: _Room) -> bool:
        unseen = room.requests[request] < room.version
        late = self._clock() - room.since >= self._options.load_timeout
        return unseen or room.error is not None or (late and not room.version)

    def _producer(self, key: PeerKey) -> tuple[_Producer | None, KVFerryError | None]:
        """Return what follows a producer's rooms; or why these cannot be followed."""
        known = self._producers.get(key)
        has_room = known is not None or len(self._producers) < MAX_PRODUCERS
        if not has_room or len(self._requests) >= MAX_REQUESTS:
            return None, HandshakeError(
                f"more than {MAX_REQUESTS} requests, or requests of more than {MAX_PRODUCERS} "
                "engines, wait for their prefill here: use more decode engines"
            )
        if known is not None:
            return known, None
        try:
            made = _Producer(key, self._options, self._lock, self._forget)
        except (OSError, RuntimeError) as exc:  # no file descriptor or no thread is left
            return None, HandshakeError(f"{exc}; {RAISE_LIMITS}")
        self._producers[key] = made
        return made, None

    def _forget(self, producer: _Producer) -> bool:
        """Forget a producer without rooms, or any when this object is closed; the lock is held.

        Returns:
            Whether it was forgotten, so that its thread ends.
        """
        if producer.rooms and not self._is_closed:
            return False
        if self._producers.get(producer.key) is producer:
            del self._producers[producer.key]
        return True


class _Producer:
    """Follow the rooms of one producer, on a thread of its own.

    Args:
        key: the producer.
        options: see ``RoomFollower``.
        lock: guards ``rooms``, and is held when ``forget`` is called.
        forget: called when there was nothing to follow for a while; returns whether the thread is
            to end.

    Attributes:
        key: the producer.
        rooms: the rooms to follow.
    """

    def __init__(
        self,
        key: PeerKey,
        options: EndpointOptions,
        lock: threading.Lock,
        forget: Callable[[_Producer], bool],
    ) -> None:
        self.key = key
        self.rooms: dict[RoomId, _Room] = {}
        self._options = options
        self._lock = lock
        self._forget = forget
        self._incarnation = 0
        self._answered = time.monotonic()
        self._turns = itertools.count()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        name = f"kvferry-rooms-{key.engine[:16]}"
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:
            os.close(self._woken)
            raise

    def wake(self) -> None:
        """Have the thread look for rooms now."""
        with self._lock, suppress(OSError):
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    def _run(self) -> None:
        while True:
            if self._has_rooms():
                try:
                    self._connect_and_follow()
                except KVFerryError as exc:
                    self._failed(exc)
                except Exception as exc:  # noqa: BLE001  the requests must hear of any failure
                    self._failed(HandshakeError(f"failed: {exc!r}"))
                time.sleep(PAUSE_SECONDS)
            else:
                self._sleep(LINGER_SECONDS)
            with self._lock:
                if self._forget(self):
                    woken, self._woken = self._woken, -1
                    os.close(woken)
                    return

    def _connect_and_follow(self) -> None:
        """Follow the rooms over one connection, until none was left for a while.

        Raises:
            KVFerryError: the connection cannot be made, or has ended.
        """
        place = self.key.places[next(self._turns) % len(self.key.places)]
        call = dialer(place, self._options.handshake_timeout, self._options)
        with explained(place.engine, call), closing(SideChannelConnection(call)) as connection:
            until = time.monotonic() + LINGER_SECONDS
            while time.monotonic() < until:
                rooms, wait_ms = self._asked()
                if not rooms:
                    self._sleep(max(0.0, until - time.monotonic()))
                    if not self._has_rooms():
                        return
                    continue
                until = time.monotonic() + LINGER_SECONDS
                follow = Follow(engine=self.key.engine, rooms=rooms, wait_ms=wait_ms)
                deadline = time.monotonic() + self._options.handshake_timeout
                reply = connection.ask_until(follow, self._woken, deadline)
                time.sleep(SHORTEST_SECONDS)
                self._clear()
                if reply is not None:
                    self._hear(reply)

    def _asked(self) -> tuple[list[tuple[bytes, int]], int]:
        """Return the rooms to ask about next, with their versions, and how long to wait."""
        with self._lock:
            rooms = [(name, r.version) for name, r in self.rooms.items() if not r.is_over]
        if len(rooms) <= MAX_FOLLOWED:
            return [(bytes(name), version) for name, version in rooms], MAX_WAIT_MS
        first = next(self._turns) * MAX_FOLLOWED % len(rooms)
        turned = [*rooms[first:], *rooms[:first]][:MAX_FOLLOWED]
        return [(bytes(name), version) for name, version in turned], TURN_MS

    def _hear(self, reply: Reply) -> None:
        """Keep the news of an answer, which is a peer's.

        Raises:
            HandshakeError: it is no answer to what was asked.
            PeerLostError: it is from another start of the engine.
        """
        if not isinstance(reply, Followed):
            raise unexpected(reply)
        self._answered = time.monotonic()
        with self._lock:
            is_new = self._incarnation not in (0, reply.incarnation)
            self._incarnation = reply.incarnation
            known = [room for room in self.rooms.values() if room.version]
            for news in () if is_new else reply.rooms:
                room = self.rooms.get(RoomId(news.room))
                if room is not None and not room.is_over and news.version > room.version:
                    _keep(room, news)
        if is_new:
            self._fail(known, PeerLostError(f"engine {self.key.engine} was restarted"))

    def _failed(self, error: KVFerryError) -> None:
        """Fail all rooms if it makes no sense to ask again."""
        silent = time.monotonic() - self._answered
        is_final = isinstance(error, RefusedError | AdmissionError)
        if not is_final and silent < self._options.handshake_timeout:
            return
        if isinstance(error, RefusedError):
            error = RefusedError(
                f"{error}. An engine that prefills for requests with a transfer_id needs a kvferry "
                "that has early tickets: upgrade it, or let the router send requests to prefill "
                "first"
            )
        with self._lock:
            rooms = list(self.rooms.values())
        self._fail(rooms, error)

    def _fail(self, rooms: Sequence[_Room], error: KVFerryError) -> None:
        with self._lock:
            for room in rooms:
                if not room.is_over:
                    room.error = error

    def _has_rooms(self) -> bool:
        with self._lock:
            has = any(not room.is_over for room in self.rooms.values())
        if not has:
            self._answered = time.monotonic()
        return has

    def _sleep(self, seconds: float) -> None:
        """Wait for ``wake``."""
        select.select([self._woken], [], [], seconds)
        self._clear()

    def _clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._woken)


def _keep(room: _Room, news: RoomNews) -> None:
    """Keep news of a room; an older version never comes back."""
    room.version, room.news = news.version, news
    if news.error:
        room.error = HandshakeError(f"the prefill engine makes no ticket: {news.error}")
        room.news = None
        room.version = 0


def _unknown(seconds: float) -> DeadlineError:
    """Return the error of a room that its producer has not known for ``load_timeout`` seconds."""
    return DeadlineError(
        f"no request with this transfer_id came to the prefill engine within {seconds:g} s "
        "(load_timeout): look whether the router sends it to that engine, or set a longer "
        "load_timeout on the engine that decodes"
    )
