"""The requests to a side channel that follow rooms and wait for news."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict, deque
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
        self._by_name: dict[bytes, set[bytes]] = defaultdict(set)
        self._by_address = Counter[str]()
        self._changed: deque[RoomId] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        rooms.listen(self._hear)

    def add(self, envelope: Sequence[bytes], follow: Follow, address: str = "") -> None:
        """Answer a request if there is news, or have it wait in place of its connection's last."""
        client = bytes(envelope[0])
        self._remove(client)
        news = self._news(follow)
        if news or not follow.wait_ms:
            self._answer(envelope, news)
            return
        until = time.monotonic() + follow.wait_ms / 1000
        self._waiting[client] = _Waiting(
            envelope=envelope, follow=follow, until=until, address=address
        )
        self._by_address[address] += 1
        for name, _ in follow.rooms:
            self._by_name[name].add(client)
        if len(self._waiting) > MAX_WAITING:
            self._answer(self._remove(self._displaced()), [])

    def pause(self, longest: int | None) -> int | None:
        """Return the milliseconds until ``progress`` is due, but no more than ``longest``."""
        if not self._waiting:
            return longest
        soonest = min(each.until for each in self._waiting.values())
        left = max(0, int((soonest - time.monotonic()) * 1000) + 1)
        return left if longest is None else min(left, longest)

    def progress(self) -> None:
        """Answer the requests for which there is news, and those whose time is over."""
        if not self._waiting and not self._changed:
            return
        clients: dict[bytes, None] = {}
        while self._changed:
            clients.update(dict.fromkeys(self._by_name.get(self._changed.popleft().name, ())))
        for client in clients:
            if news := self._news(self._waiting[client].follow):
                self._answer(self._remove(client), news)
        now = time.monotonic()
        for client in [each for each, one in self._waiting.items() if one.until <= now]:
            self._answer(self._remove(client), [])

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
                self._changed.append(room)
                os.eventfd_write(self.descriptor, 1)

    def _news(self, follow: Follow) -> list[RoomNews]:
        prompts = [b""] * len(follow.rooms) if follow.prompts is UNSET else follow.prompts
        return self._rooms.news(
            (RoomId(name, prompt), version)
            for (name, version), prompt in zip(follow.rooms, prompts, strict=True)
        )

    def _displaced(self) -> bytes:
        """Return the client that has waited longest at the address with the most clients."""
        [(most, _)] = self._by_address.most_common(1)
        return next(client for client, one in self._waiting.items() if one.address == most)

    def _remove(self, client: bytes) -> Sequence[bytes]:
        """Forget the request that waits on a connection, if there is one; return its envelope."""
        one = self._waiting.pop(client, None)
        if one is None:
            return ()
        self._by_address[one.address] -= 1
        if not self._by_address[one.address]:
            del self._by_address[one.address]
        for name, _ in one.follow.rooms:
            clients = self._by_name[name]
            clients.discard(client)
            if not clients:
                del self._by_name[name]
        return one.envelope
