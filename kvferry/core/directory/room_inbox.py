"""The rooms that a consumer engine follows, and the news that their requests have not seen yet."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from kvferry.core.errors import HandshakeError, KVFerryError
from kvferry.core.lru_cache import LRUCache
from kvferry.core.side_channel_messages import RoomNews

MAX_UNSEEN_BYTES = 1 << 27
"""The most bytes of parts that requests have not fetched yet, of all rooms together."""
MAX_ANSWERED = 1 << 12
"""The most producers that are known to have answered; those that were used last."""


@dataclass(slots=True, kw_only=True)
class RoomUser:
    """A request that follows a room: since when, and the version that it has seen (0: none)."""

    since: float
    seen: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class FollowedRoom:
    """A room that is followed.

    Attributes:
        host: of the producer's side channel; empty if the room is not asked about.
        version: the version of the newest news, which came when it ``changed``; 0 if there was
            none.
        news: the newest news; ``None`` if all requests have seen it.
        is_wanted: whether ``news`` is to be asked for again, for a request that came later.
        is_last: whether the newest news is the ticket.
        has_part: whether there was news with a part.
    """

    host: str = ""
    version: int = 0
    changed: float = 0.0
    news: RoomNews | None = None
    is_wanted: bool = False
    is_last: bool = False
    has_part: bool = False
    error: KVFerryError | None = None
    requests: dict[Hashable, RoomUser] = field(default_factory=dict)

    @property
    def known(self) -> int:
        """Return the version to name when the room is asked about."""
        return 0 if self.is_wanted else self.version

    @property
    def is_over(self) -> bool:
        """Return whether nothing is asked about the room any more."""
        return self.error is not None or (self.is_last and not self.is_wanted)

    def is_unseen(self, request: Hashable) -> bool:
        """Return whether there is news that a request has not seen."""
        return self.news is not None and self.requests[request].seen < self.version


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
        self.drop(room)
        room.version, room.changed = news.version, self._clock()
        room.is_wanted = room.is_last = False
        if news.error:
            self.fail([room], HandshakeError(f"the prefill engine makes no ticket: {news.error}"))
            return
        room.news, room.is_last = news, news.is_last
        room.has_part = room.has_part or bool(news.part)
        self._kept[room] = len(news.part)
        self.changed.update(request for request in room.requests if room.is_unseen(request))
        while sum(self._kept.values()) > MAX_UNSEEN_BYTES:
            self._give_up_one(room)

    def _give_up_one(self, newest: FollowedRoom) -> None:
        """Fail a room of the host whose news take most: the newest, or else the largest."""
        total = Counter[str]()
        for room, nbytes in self._kept.items():
            total[room.host] += nbytes
        [(host, nbytes)] = total.most_common(1)
        rooms = [room for room in self._kept if room.host == host]
        room = newest if newest in rooms else max(rooms, key=self._kept.__getitem__)
        self.drop(room)
        room.is_last = False
        self.fail([room], _too_much(host, nbytes))

    def fail(self, rooms: Iterable[FollowedRoom], error: KVFerryError) -> None:
        """Fail those of the rooms that are not over."""
        for room in rooms:
            if not room.is_over:
                room.error = error
                self.changed.update(room.requests)

    def trim(self, room: FollowedRoom) -> None:
        """Drop a room's news if all requests have seen it."""
        if not any(map(room.is_unseen, room.requests)):
            self.drop(room)

    def drop(self, room: FollowedRoom) -> None:
        """Drop a room's news, if it has any."""
        self._kept.pop(room, None)
        room.news = None


def _too_much(host: str, nbytes: int) -> HandshakeError:
    return HandshakeError(
        f"the parts of tickets that no request has taken yet would take more than "
        f"{MAX_UNSEEN_BYTES} bytes, and most of them, {nbytes} bytes, are of prefill engines at "
        f"{host}: use more decode engines"
    )
