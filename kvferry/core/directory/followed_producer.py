"""The rooms of a producer that are followed, the task that asks about them, and what it hears."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from msgspec import UNSET

from kvferry.core.directory.handshake_queue import backoff_seconds, dialer, forget_frames
from kvferry.core.errors import (
    AdmissionError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    RefusedError,
)
from kvferry.core.lifecycle.rooms import RoomId
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.lru_cache import LRUCache
from kvferry.core.options import EndpointOptions
from kvferry.core.side_channel.connection import connected, explained, unexpected
from kvferry.core.side_channel.poller import Steps, pause, start, wait_for
from kvferry.core.side_channel_messages import (
    MAX_FOLLOWED_PROMPTS,
    MAX_WAIT_MS,
    Follow,
    Followed,
    Reply,
    RoomNews,
)

MAX_UNSEEN_BYTES = 1 << 27
"""The most bytes of parts that requests have not fetched yet, of all rooms together."""
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
class RoomUser:
    """A request that follows a room; without a room if it has failed alone, by the error.

    Attributes:
        since: when it began to.
        seen: the version of the news that it has seen; 0 if it has seen none.
    """

    since: float
    room: FollowedRoom | None = None
    seen: int = 0
    error: KVFerryError | None = None

    @property
    def has_news(self) -> bool:
        """Return whether there is news of the room that the request has not seen."""
        room = self.room
        return room is not None and room.news is not None and self.seen < room.version


@dataclass(slots=True, kw_only=True, eq=False)
class FollowedRoom:
    """A room that is followed.

    Attributes:
        version: the version of the newest news, which came when it ``changed``; 0 if there was
            none.
        news: the newest news; ``None`` if all requests have seen it.
        is_wanted: whether ``news`` is to be asked for again, for a request that came later.
        is_last: whether the newest news is the ticket.
        has_part: whether there was news with a part.
    """

    name: RoomId
    producer: FollowedProducer
    version: int = 0
    changed: float = 0.0
    news: RoomNews | None = None
    is_wanted: bool = False
    is_last: bool = False
    has_part: bool = False
    error: KVFerryError | None = None
    users: dict[Hashable, RoomUser] = field(default_factory=dict)

    @property
    def known(self) -> int:
        """Return the version to name when the room is asked about."""
        return 0 if self.is_wanted else self.version

    @property
    def is_over(self) -> bool:
        """Return whether nothing is asked about the room any more."""
        return self.error is not None or (self.is_last and not self.is_wanted)


class RoomInbox:
    """The news that requests have not seen yet; ``lock`` guards it and all rooms.

    The methods are called with the lock held. ``changed`` are the requests with news or an error,
    ``answered`` the producers that have answered.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[FollowedRoom, int] = {}
        """The rooms with news, and how many bytes these have."""
        self.lock = threading.Lock()
        self.changed: set[Hashable] = set()
        self.answered = LRUCache[bool](MAX_ANSWERED)

    def keep(self, room: FollowedRoom, news: RoomNews) -> None:
        """Keep news of a room in place of older news."""
        self._drop(room)
        room.version, room.changed = news.version, self._clock()
        room.is_wanted = room.is_last = False
        if news.error:
            self.fail([room], HandshakeError(f"the prefill engine makes no ticket: {news.error}"))
            return
        room.news, room.is_last = news, news.is_last
        room.has_part = room.has_part or bool(news.part)
        self._kept[room] = len(news.part)
        self.changed.update(request for request, user in room.users.items() if user.has_news)
        while sum(self._kept.values()) > MAX_UNSEEN_BYTES:
            self._give_up_one(room)

    def fail(self, rooms: Iterable[FollowedRoom], error: KVFerryError) -> None:
        """Fail those of the rooms that are not over."""
        for room in rooms:
            if not room.is_over:
                room.error = error
                self.changed.update(room.users)

    def trim(self, room: FollowedRoom) -> None:
        """Drop a room's news if all requests have seen it."""
        if not any(user.has_news for user in room.users.values()):
            self._drop(room)

    def _give_up_one(self, newest: FollowedRoom) -> None:
        """Fail a room of the host whose news take most: the newest, or else the largest."""
        total = Counter[str]()
        for room, nbytes in self._kept.items():
            total[room.producer.key.host] += nbytes
        [(host, nbytes)] = total.most_common(1)
        rooms = [room for room in self._kept if room.producer.key.host == host]
        room = newest if newest in rooms else max(rooms, key=self._kept.__getitem__)
        self._drop(room)
        room.is_last = False
        self.fail([room], _too_much(host, nbytes))

    def _drop(self, room: FollowedRoom) -> None:
        self._kept.pop(room, None)
        room.news = None


class FollowedProducer:
    """Follow the rooms of one producer, in a task; ``inbox.lock`` guards ``rooms``.

    ``forget`` is called with the lock held, when there are no rooms any more. Raises
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
        self.rooms: dict[RoomId, FollowedRoom] = {}
        self._options = options
        self._inbox = inbox
        self._lock = inbox.lock
        self._forget = forget
        self._incarnation = 0
        self._answered = time.monotonic()
        """When an answer came last, or there was a room to ask about after there was none."""
        self._turns = itertools.count()
        self._address = 0
        """The index of the address that is asked."""
        self._failures: dict[int, KVFerryError] = {}
        """Since the last answer: how each address has failed last, the latest at the end."""
        self._attempts = 0
        """The attempts since the last answer."""
        self._is_woken = False
        self._task = start(self._follow(), self._over)

    def enter(self, name: RoomId) -> FollowedRoom:
        """Return a room that a request is about to follow; the lock is held."""
        if not self._is_busy():
            self._answered = time.monotonic()
            self._failures.clear()
        room = self.rooms.setdefault(name, FollowedRoom(name=name, producer=self))
        if room.news is None and room.version and room.error is None:
            room.is_wanted = True
        return room

    def wake(self) -> None:
        """Ask again at once: there is another room."""
        self._is_woken = True
        self._task.wake()

    def end(self) -> None:
        """End the connection: there are no rooms."""
        self._task.cancel()

    def _follow(self) -> Steps[None]:
        while True:
            with self._lock:
                if not self.rooms:
                    self._forget(self)  # at once, so that no room can be entered any more
                    return
                is_busy = self._is_busy()
            if not is_busy:
                yield from self._sleep(time.monotonic() + LINGER_SECONDS)
                continue
            try:
                yield from self._connect_and_follow()
            except KVFerryError as exc:
                self._failed(exc)
            except Exception as exc:  # noqa: BLE001  the requests must hear of any failure
                self._failed(HandshakeError(f"failed: {exc!r}"))
            seconds = backoff_seconds(self._attempts, LONGEST_PAUSE_SECONDS)
            self._attempts += 1
            yield from pause(seconds)

    def _is_busy(self) -> bool:
        """Return whether there is a room to ask about; the lock is held."""
        return any(not room.is_over for room in self.rooms.values())

    def _over(self, _: object) -> None:
        with self._lock:
            self._forget(self)
            ended = HandshakeError("the thread that follows this engine's rooms has ended")
            self._inbox.fail(self.rooms.values(), ended)

    def _connect_and_follow(self) -> Steps[None]:
        """Follow the rooms over one connection, until none was left for a while."""
        addresses = self.key.places
        address = addresses[self._address]
        # The addresses of the producer share the timeout, as those of a handshake do.
        timeout = self._options.handshake_timeout
        share = timeout / len(addresses)
        call = dialer(address, share, self._options)
        with explained(address.engine, call), closing((yield from connected(call))) as connection:
            begun = time.monotonic()
            until = begun + LINGER_SECONDS
            while time.monotonic() < until:
                rooms, wait_ms = self._asked()
                if not rooms:
                    yield from self._sleep(until)
                    continue
                until = time.monotonic() + LINGER_SECONDS
                follow = _question(self.key.engine, rooms, wait_ms)
                silent_since = self._answered
                deadline = min(max(silent_since, begun) + share, silent_since + timeout)
                reply = yield from connection.ask_unless(self._has_more, follow, deadline)
                yield from pause(SHORTEST_SECONDS)
                self._is_woken = False
                if reply is not None:
                    self._hear(reply, [room for room, _ in rooms])

    def _asked(self) -> tuple[list[tuple[RoomId, int]], int]:
        """Return the rooms to ask about next, with their versions, and how long to wait."""
        with self._lock:
            rooms = [(name, r.known) for name, r in self.rooms.items() if not r.is_over]
        if len(rooms) <= MAX_FOLLOWED_PROMPTS:
            return rooms, MAX_WAIT_MS
        first = next(self._turns) * MAX_FOLLOWED_PROMPTS % len(rooms)
        return [*rooms[first:], *rooms[:first]][:MAX_FOLLOWED_PROMPTS], TURN_MS

    def _hear(self, reply: Reply, asked: Sequence[RoomId]) -> None:
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
                known = [room for room in self.rooms.values() if room.version]
                restarted = PeerLostError(f"engine {self.key.engine} was restarted")
                self._inbox.fail(known, restarted)
                return
            for news, name in _heard(reply.rooms, asked):
                room = self.rooms.get(name)
                if room is not None and not room.is_over and news.version > room.known:
                    self._inbox.keep(room, news)

    def _failed(self, error: KVFerryError) -> None:
        """Fail all rooms if all addresses have refused this engine, or were silent too long."""
        forget_frames(error)
        with self._lock:
            self._failures.pop(self._address, None)
            self._failures[self._address] = error
            self._address = (self._address + 1) % len(self.key.places)
            failures = list(self._failures.values())
            refusals = [each for each in failures if isinstance(each, FINAL)]
            is_silent = time.monotonic() >= self._answered + self._options.handshake_timeout
            if len(refusals) == len(self.key.places) or is_silent:
                self._inbox.fail(self.rooms.values(), _joined(failures))

    def _has_more(self) -> bool:
        return self._is_woken

    def _sleep(self, until: float) -> Steps[None]:
        yield from wait_for(self._has_more, until)
        self._is_woken = False


def _question(engine: str, rooms: Sequence[tuple[RoomId, int]], wait_ms: int) -> Follow:
    prompts = [room.prompt for room, _ in rooms]
    return Follow(
        engine=engine,
        rooms=[(room.name, version) for room, version in rooms],
        wait_ms=wait_ms,
        prompts=prompts if any(prompts) else UNSET,
    )


def _heard(news: Iterable[RoomNews], asked: Sequence[RoomId]) -> Iterator[tuple[RoomNews, RoomId]]:
    """Yield news with the room that they are for."""
    # Older builds do not say for which prompt: then news are for all rooms of that name, and
    # whoever reads the part looks for which prompt it was made.
    named = defaultdict[bytes, list[RoomId]](list)
    for room in asked:
        named[room.name].append(room)
    for each in news:
        is_for = [RoomId(each.room, each.prompt)] if each.prompt else named.get(each.room, ())
        yield from ((each, room) for room in is_for)


def _joined(failures: Sequence[KVFerryError]) -> KVFerryError:
    last = failures[-1]
    text = "; and ".join(map(str, failures))
    if all(isinstance(each, RefusedError) for each in failures):
        return RefusedError(
            f"{text}. An engine that prefills for requests with a transfer_id needs a kvferry that "
            "has early tickets: upgrade it, or let the router send requests to prefill first"
        )
    return last if len(failures) == 1 else type(last)(text)


def _too_much(host: str, nbytes: int) -> HandshakeError:
    return HandshakeError(
        f"the parts of tickets that no request has taken yet would take more than "
        f"{MAX_UNSEEN_BYTES} bytes, and most of them, {nbytes} bytes, are of prefill engines at "
        f"{host}: use more decode engines"
    )
