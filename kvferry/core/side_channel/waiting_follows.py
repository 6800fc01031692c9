"""The requests to a side channel that follow rooms and wait for news."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from kvferry.core.lifecycle.rooms import RoomId, Rooms
from kvferry.core.side_channel_messages import Follow, RoomNews

MAX_WAITING = 1 << 10
"""The most that wait, one per connection; beyond, the address with most has its oldest answered."""

Answer = Callable[[Sequence[bytes], list[RoomNews]], None]
"""Called with the frames that lead to a client, and the news for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A request; it is answered at ``until`` (``time.monotonic``) without news."""

    envelope: Sequence[bytes]
    follow: Follow
    names: frozenset[bytes]  # of the rooms
    until: float
    address: str


class WaitingFollows:
    """Answer requests that follow rooms, when there is news or their time is over.

    Used by the side channel's thread only. Hears of the rooms' changes until ``close``;
    ``descriptor`` becomes readable when one has changed.
    """

    def __init__(self, rooms: Rooms, answer: Answer) -> None:
        self._rooms = rooms
        self._answer = answer
        self._waiting: dict[bytes, _Waiting] = {}
        """By client, the one that has waited longest first."""
        self._soonest = math.inf
        """No request's time is over before this."""
        self._changed: deque[bytes] = deque()
        """The names of rooms that have changed."""
        self._lock = threading.Lock()
        self._is_closed = False
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        rooms.listen(self._hear)

    def add(self, envelope: Sequence[bytes], follow: Follow, address: str = "") -> None:
        """Answer a request if there is news, or have it wait in place of its connection's last."""
        client = bytes(envelope[0])
        self._waiting.pop(client, None)
        news = self._news(follow)
        if news or not follow.wait_ms:
            self._answer(envelope, news)
            return
        until = time.monotonic() + follow.wait_ms / 1000
        self._soonest = min(self._soonest, until)
        names = frozenset(name for name, _ in follow.rooms)
        self._waiting[client] = _Waiting(
            envelope=envelope, follow=follow, names=names, until=until, address=address
        )
        if len(self._waiting) > MAX_WAITING:
            self._end(self._displaced(), [])

    def pause(self, longest: int | None) -> int | None:
        """Return the milliseconds until ``progress`` is due, but no more than ``longest``."""
        if not self._waiting:
            return longest
        left = max(0, int((self._soonest - time.monotonic()) * 1000) + 1)
        return left if longest is None else min(left, longest)

    def progress(self) -> None:
        """Answer the requests for which there is news, and those whose time is over."""
        changed = {self._changed.popleft() for _ in range(len(self._changed))}
        now = time.monotonic()
        if not changed and now < self._soonest:
            return
        due = [
            client
            for client, each in self._waiting.items()
            if each.until <= now or not changed.isdisjoint(each.names)
        ]
        for client in due:
            each = self._waiting[client]
            news = [] if changed.isdisjoint(each.names) else self._news(each.follow)
            if news or each.until <= now:
                self._end(client, news)
        self._soonest = min((each.until for each in self._waiting.values()), default=math.inf)

    def hear(self) -> None:
        """Read from ``descriptor``, so that it becomes readable again with the next change."""
        os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Hear of no more changes. May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.descriptor)

    def _hear(self, room: RoomId) -> None:
        """Note that a room has changed; called on the thread that has changed it."""
        with self._lock:
            if not self._is_closed:
                self._changed.append(room.name)
                os.eventfd_write(self.descriptor, 1)

    def _news(self, follow: Follow) -> list[RoomNews]:
        prompts = [b""] * len(follow.rooms) if follow.prompts is UNSET else follow.prompts
        return self._rooms.news(
            (RoomId(name, prompt), version)
            for (name, version), prompt in zip(follow.rooms, prompts, strict=True)
        )

    def _displaced(self) -> bytes:
        """Return the client that has waited longest at the address with the most clients."""
        [(most, _)] = Counter(each.address for each in self._waiting.values()).most_common(1)
        return next(client for client, each in self._waiting.items() if each.address == most)

    def _end(self, client: bytes, news: list[RoomNews]) -> None:
        self._answer(self._waiting.pop(client).envelope, news)
