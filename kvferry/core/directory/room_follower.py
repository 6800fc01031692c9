"""Follow the rooms of producers, for the scheduler half of a consumer engine.

A room names a request that a router sends to both engines at once. ``RoomFollower`` asks the
producer about it until the ticket has come or there will be none.

A request may name a producer that is not there, or a room that never opens. So where a limit is
reached, the host goes short of which most requests, engines or bytes wait in vain.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import closing

from msgspec import UNSET

from kvferry.core.directory.handshake_queue import backoff_seconds, dialer, forget_frames
from kvferry.core.directory.room_inbox import FollowedRoom, RoomInbox, RoomUser
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
from kvferry.core.handshake.poller import Steps, Wait, pause, start
from kvferry.core.handshake.sockets import place
from kvferry.core.lifecycle.rooms import RoomId
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.options import EndpointOptions
from kvferry.core.side_channel_messages import (
    MAX_FOLLOWED_PROMPTS,
    MAX_WAIT_MS,
    Follow,
    Followed,
    Reply,
    RoomNews,
)

MAX_PRODUCERS = 1 << 8
"""The most producers whose rooms are followed at once."""
MAX_AT_HOST = MAX_PRODUCERS // 2
"""The most of these at one host."""
MAX_SILENT_PRODUCERS = 3 * MAX_PRODUCERS // 4
"""The most producers that are followed and have never answered."""
MAX_SILENT_AT_HOST = 1 << 5
"""The most of these at one host."""
MAX_REQUESTS = 1 << 10
"""The most requests whose rooms are followed at once."""
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


class RoomFollower:
    """Follow rooms of producers. No method blocks. Used by one thread only.

    A room that its producer does not know fails after ``load_timeout``, as does one that has not
    changed for that time after its first part; rooms of a silent producer after
    ``handshake_timeout``.
    """

    def __init__(
        self, options: EndpointOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._inbox = RoomInbox(clock)
        self._lock = self._inbox.lock
        self._producers: dict[PeerKey, _Producer] = {}
        self._requests: dict[Hashable, tuple[_Producer | None, RoomId, FollowedRoom]] = {}
        self._due = math.inf
        """No request is late before this time."""

    @property
    def following(self) -> int:
        """Return the number of requests whose rooms are followed."""
        return len(self._requests)

    @property
    def pending(self) -> bool:
        """Return whether a request has news that ``news`` has not returned."""
        self._fail_late()
        return bool(self._inbox.changed)

    def follow(self, request: Hashable, room: RoomId, producer: PeerKey) -> None:
        """Follow a request's room until ``end``; raise ``ValueError`` if it follows one already."""
        if request in self._requests:
            raise ValueError(f"request {request!r} follows a room already: call end() first")
        with self._lock:
            following, error = self._place(producer)
            found = FollowedRoom(error=error) if following is None else following.enter(room)
            found.requests[request] = RoomUser(since=self._clock())
            self._requests[request] = following, room, found
            if found.error is not None or found.news is not None:
                self._inbox.changed.add(request)
            self._due = min(self._due, self._late_at(request, found))
        if following is not None:
            following.wake()

    def news(self, request: Hashable) -> RoomNews | KVFerryError | None:
        """Return what is new of a request's room, or why it is not followed; else ``None``."""
        self._fail_late()
        if request not in self._inbox.changed:
            return None
        _, _, room = self._requests[request]
        with self._lock:
            news = room.news
            if news is None or not room.is_unseen(request):
                return room.error
            room.requests[request].seen = room.version
            self._inbox.trim(room)
            if room.error is None:
                self._inbox.changed.discard(request)
            self._due = min(self._due, self._late_at(request, room))
            return news

    def end(self, request: Hashable) -> None:
        """Follow a request's room no more; ignored if it follows none."""
        following, name, room = self._requests.pop(request, (None, None, None))
        if room is None:
            return
        with self._lock:
            self._inbox.changed.discard(request)
            del room.requests[request]
            self._inbox.trim(room)
            if following is not None and name is not None and not room.requests:
                following.leave(name, room)

    def close(self) -> None:
        """Follow nothing any more; return at once."""
        with self._lock:
            producers = list(self._producers.values())
            self._producers.clear()
        for producer in producers:
            producer.end()

    def _late_at(self, request: Hashable, room: FollowedRoom) -> float:
        """Return when a request is late if nothing is heard of its room; the lock is held."""
        if room.is_over or room.is_unseen(request):
            return math.inf
        follower = room.requests[request]
        if not follower.seen:
            return follower.since + self._options.load_timeout
        may_hang = room.has_part and not room.is_last
        return room.changed + self._options.load_timeout if may_hang else math.inf

    def _fail_late(self) -> None:
        now = self._clock()
        if now < self._due:
            return
        self._due = math.inf
        with self._lock:
            for request, (_, name, room) in list(self._requests.items()):
                late_at = self._late_at(request, room)
                if late_at > now:
                    self._due = min(self._due, late_at)
                    continue
                seconds = self._options.load_timeout
                if room.requests[request].seen:
                    self._inbox.fail([room], _stalled(seconds))
                else:
                    self._part_from(request, name, room, _unknown(seconds))

    def _part_from(
        self, request: Hashable, name: RoomId, room: FollowedRoom, error: KVFerryError
    ) -> None:
        """Fail one request of a room, and not the others; the lock is held."""
        following, _, _ = self._requests[request]
        alone = FollowedRoom(error=error)
        alone.requests[request] = room.requests.pop(request)
        self._requests[request] = None, name, alone
        self._inbox.changed.add(request)
        if following is not None and not room.requests:
            following.leave(name, room)

    def _place(self, key: PeerKey) -> tuple[_Producer | None, KVFerryError | None]:
        """Return what follows a producer's rooms; or why a request's room cannot be followed."""
        if len(self._requests) >= MAX_REQUESTS and not self._make_way():
            return None, HandshakeError(
                f"{MAX_REQUESTS} requests wait here while they are computed by prefill engines, "
                "which is the most: use more decode engines"
            )
        known = self._producers.get(key)
        if known is not None:
            return known, None
        if (error := self._reason_against(key)) is not None:
            return None, error
        if len(self._producers) >= MAX_PRODUCERS and not self._evict():
            return None, HandshakeError(
                f"requests of {MAX_PRODUCERS} prefill engines wait here, which is the most: use "
                "more decode engines"
            )
        try:
            made = _Producer(key, self._options, self._inbox, self._forget)
        except HandshakeError as exc:
            forget_frames(exc)
            return None, exc
        self._producers[key] = made
        return made, None

    def _make_way(self) -> bool:
        """Return whether a further request fits in, maybe in place of one; the lock is held."""
        # The one fails that has waited longest for a room that its producer does not know, at the
        # host with most of them.
        followed, unknown = 0, defaultdict[str, list[Hashable]](list)
        for request, (following, _, room) in self._requests.items():
            if following is not None and room.error is None:
                followed += 1
                if not room.version:
                    unknown[room.host].append(request)
        if followed < MAX_REQUESTS:
            return True
        if not unknown:
            return False
        oldest, *_ = max(unknown.values(), key=len)
        following, name, room = self._requests[oldest]
        if following is None:
            return False
        seconds = self._clock() - room.requests[oldest].since
        self._part_from(oldest, name, room, _displaced(following.key, seconds))
        return True

    def _reason_against(self, key: PeerKey) -> HandshakeError | None:
        busy = [each for each, producer in self._producers.items() if producer.rooms]
        if sum(each.host == key.host for each in busy) >= MAX_AT_HOST:
            return HandshakeError(
                f"requests of {MAX_AT_HOST} prefill engines at {key.host} wait here, which is the "
                "most at one host: look which engines the router names there (remote_engine_id)"
            )
        if self._inbox.answered.get(key):
            return None
        silent = [each for each in busy if not self._inbox.answered.get(each)]
        return _too_many_silent(key, silent)

    def _evict(self) -> bool:
        for key, producer in self._producers.items():
            if not producer.rooms:
                del self._producers[key]
                producer.end()
                return True
        return False

    def _forget(self, producer: _Producer) -> None:
        if self._producers.get(producer.key) is producer:
            del self._producers[producer.key]


class _Producer:
    """Follow the rooms of one producer, in a task; ``inbox.lock`` guards ``rooms``."""

    def __init__(
        self,
        key: PeerKey,
        options: EndpointOptions,
        inbox: RoomInbox,
        forget: Callable[[_Producer], None],
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
        self._place = 0
        """The index of the address that is asked."""
        self._failures: dict[int, KVFerryError] = {}
        """Since the last answer: how each address has failed last, the latest at the end."""
        self._attempts = 0
        """The attempts since the last answer."""
        self._is_woken = False
        self._task = start(self._follow(), self._over)

    def enter(self, name: RoomId) -> FollowedRoom:
        """Return a room that a request is about to follow; the lock is held."""
        was_busy = any(not room.is_over for room in self.rooms.values())
        room = self.rooms.setdefault(name, FollowedRoom(host=self.key.host))
        if room.news is None and room.version and room.error is None:
            room.is_wanted = True
        if not was_busy:
            self._answered = time.monotonic()
            self._failures.clear()
        return room

    def leave(self, name: RoomId, room: FollowedRoom) -> None:
        if self.rooms.get(name) is room:
            del self.rooms[name]

    def wake(self) -> None:
        """Ask again at once: there is another room."""
        self._is_woken = True
        self._task.wake()

    def end(self) -> None:
        """End the connection: there are no rooms."""
        self._task.cancel()

    def _follow(self) -> Steps[None]:
        while not self._is_over():
            yield from self._turn()

    def _over(self, _: object) -> None:
        with self._lock:
            self._forget(self)
            ended = HandshakeError("the thread that follows this engine's rooms has ended")
            self._inbox.fail(self.rooms.values(), ended)

    def _is_over(self) -> bool:
        with self._lock:
            if not self.rooms:
                self._forget(self)  # at once, so that no room can be entered any more
            return not self.rooms

    def _turn(self) -> Steps[None]:
        if not self._has_rooms():
            yield from self._sleep(time.monotonic() + LINGER_SECONDS)
            return
        try:
            yield from self._connect_and_follow()
        except KVFerryError as exc:
            self._failed(exc)
        except Exception as exc:  # noqa: BLE001  the requests must hear of any failure
            self._failed(HandshakeError(f"failed: {exc!r}"))
        seconds = backoff_seconds(self._attempts, LONGEST_PAUSE_SECONDS)
        self._attempts += 1
        yield from pause(seconds)

    def _connect_and_follow(self) -> Steps[None]:
        """Follow the rooms over one connection, until none was left for a while."""
        places = self.key.places
        place = places[self._place]
        # The addresses of the producer share the timeout, as those of a handshake do.
        timeout = self._options.handshake_timeout
        call = dialer(place, timeout / len(places), self._options)
        with explained(place.engine, call), closing(SideChannelConnection(call)) as connection:
            yield from connection.open()
            begun = time.monotonic()
            until = begun + LINGER_SECONDS
            while time.monotonic() < until:
                rooms, wait_ms = self._asked()
                if not rooms:
                    yield from self._sleep(until)
                    if not self._has_rooms():
                        return
                    continue
                until = time.monotonic() + LINGER_SECONDS
                follow = _question(self.key.engine, rooms, wait_ms)
                silent_since = self._answered
                deadline = min(
                    max(silent_since, begun) + timeout / len(places), silent_since + timeout
                )
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
            self._failures.pop(self._place, None)
            self._failures[self._place] = error
            self._place = (self._place + 1) % len(self.key.places)
            failures = list(self._failures.values())
            refusals = [each for each in failures if isinstance(each, FINAL)]
            is_silent = time.monotonic() >= self._answered + self._options.handshake_timeout
            if len(refusals) == len(self.key.places) or is_silent:
                self._inbox.fail(self.rooms.values(), _joined(failures))

    def _has_rooms(self) -> bool:
        with self._lock:
            return any(not room.is_over for room in self.rooms.values())

    def _has_more(self) -> bool:
        return self._is_woken

    def _sleep(self, until: float) -> Steps[None]:
        while time.monotonic() < until and not self._is_woken:
            yield Wait(until)
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


def _too_many_silent(key: PeerKey, silent: Sequence[PeerKey]) -> HandshakeError | None:
    at = Counter(each.host for each in silent)
    if at[key.host] < MAX_SILENT_AT_HOST and len(silent) < MAX_SILENT_PRODUCERS:
        return None
    host = key.host if at[key.host] >= MAX_SILENT_AT_HOST else at.most_common(1)[0][0]
    return HandshakeError(
        f"engine {key.engine!r} at {place(key.host, key.port)} is not asked, since of the prefill "
        f"engines that requests here name, {len(silent)} have never answered (at most "
        f"{MAX_SILENT_PRODUCERS}), {at[host]} of them at {host} (at most {MAX_SILENT_AT_HOST} at "
        "one host): look whether a side channel of kvferry listens wherever the router's "
        "remote_bootstrap_addr says, and with that remote_engine_id"
    )


def _displaced(key: PeerKey, seconds: float) -> DeadlineError:
    return DeadlineError(
        f"engine {key.engine!r} at {place(key.host, key.port)} has said nothing of a request with "
        f"this transfer_id and prompt for {seconds:.1f} s, and {MAX_REQUESTS} requests wait here, "
        "which is the most: look whether the router sends both legs of each request, or use more "
        "decode engines"
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


def _stalled(seconds: float) -> DeadlineError:
    return DeadlineError(
        f"the prefill engine has computed nothing of this request for {seconds:g} s "
        "(load_timeout), though its side channel answers: look whether it hangs or has preempted "
        "the request, or set a longer load_timeout"
    )


def _unknown(seconds: float) -> DeadlineError:
    return DeadlineError(
        f"no request with this transfer_id and prompt came to the prefill engine within "
        f"{seconds:g} s (load_timeout): look whether the router sends the same prompt (text, "
        "media, adapter, cache_salt) to that engine, or set a longer load_timeout on the engine "
        "that decodes"
    )
