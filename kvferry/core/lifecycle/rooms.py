"""The rooms of a producer engine: what its side channel tells about requests that it computes.

A room gets parts, and ends with the ticket or a reason (docs/protocol.md, "Early tickets"). Unlike
prompts have rooms of their own even under one name, so that nobody gets another's ticket.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from kvferry.core.side_channel_messages import MAX_PART_BYTES, MAX_VERSION, ROOM_BYTES, RoomNews


class RoomId(NamedTuple):
    """A room: a hash of the router's text, and the prompt's digest, empty if not known."""

    name: bytes
    prompt: bytes = b""


MAX_ROOMS = 1 << 12
"""The most rooms of an engine that are open."""
MAX_OVER = 1 << 12
"""The most rooms of an engine that are over. The oldest go first."""
KEPT_SECONDS = 60.0
"""How long a room that is over is kept for followers that come late."""
MAX_KEPT_BYTES = 1 << 26
"""The most bytes of the parts of rooms that are over. The oldest go first."""
MAX_ANSWER_BYTES = MAX_PART_BYTES
"""The most bytes of parts and errors in one answer. Those of a single room always fit."""
MAX_REASON = 1024
"""The longest reason, in characters."""


def room_id(text: str, prompt: bytes = b"") -> RoomId:
    """Return the room that a router names by a text, such as Mooncake's ``transfer_id``."""
    data = text.encode(errors="surrogatepass")
    name = hashlib.blake2b(data, digest_size=ROOM_BYTES, person=b"kvferry room").digest()
    return RoomId(name, prompt)


@dataclass(slots=True, kw_only=True)
class _Room:
    news: RoomNews
    over: float | None = None


class Rooms:
    """Keep the rooms of an engine. Thread-safe; no method blocks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rooms: dict[RoomId, _Room] = {}
        self._named: dict[bytes, RoomId] = {}
        """The room heard of by name without a prompt: the first opened, until it is over."""
        self._over: dict[RoomId, None] = {}
        """The rooms that are over, the first that was first."""
        self._kept_bytes = 0
        self._version = 0
        self._changed: Callable[[RoomId], None] = lambda _: None

    def __len__(self) -> int:
        """Return the number of rooms, including those that are over and kept."""
        return len(self._rooms)

    def listen(self, changed: Callable[[RoomId], None]) -> None:
        """Have a function called, in place of the last one, on the thread that changes a room."""
        self._changed = changed

    def open(self, room: RoomId) -> bool:
        """Begin a room; ``False`` if another request has it or there are too many.

        Then the request is served without a room; if there are too many, followers are told.
        """
        with self._lock:
            known = self._rooms.get(room)
            if known is not None and known.over is None:
                return False
            if known is not None:
                self._drop(room)
            error = ""
            if len(self._rooms) - len(self._over) >= MAX_ROOMS:
                error = (
                    f"it has {MAX_ROOMS} requests with a transfer_id in its queue or under way, "
                    "and no more can be followed: use more prefill engines, or let the router send "
                    "requests to prefill first, and pass the ticket on"
                )
            self._put(room, b"", is_last=bool(error), error=error)
            self._drop_old()
        self._changed(room)
        return not error

    def publish(self, room: RoomId, part: bytes) -> bool:
        """Publish an encoded part; ``False`` if the room is not open, or the part does not fit."""
        return bool(part) and self._replace(room, part, is_last=False)

    def finish(self, room: RoomId, ticket: bytes) -> bool:
        """End a room with its encoded ticket; if it does not fit, with an error, for ``False``."""
        if 0 < len(ticket) <= MAX_PART_BYTES:
            return self._replace(room, ticket, is_last=True)
        self.close(
            room,
            f"its ticket has {len(ticket)} bytes; 1 to {MAX_PART_BYTES} can be followed: let the "
            "router send the request to prefill first, and pass the ticket on",
        )
        return False

    def close(self, room: RoomId, reason: str) -> None:
        """End a room without a ticket. Ignored if it is not open."""
        text = reason[:MAX_REASON].encode(errors="replace").decode()
        self._replace(room, b"", is_last=True, error=text or "no reason was given")

    def news(self, asked: Iterable[tuple[RoomId, int]]) -> list[RoomNews]:
        """Return what is newer than the versions that a follower knows (0: nothing).

        As many rooms as fit into one answer. A room without a prompt stands for any of its name.
        """
        found, left = [], MAX_ANSWER_BYTES
        with self._lock:
            self._drop_old()
            for room, version in asked:
                known = self._find(room)
                if known is None and version:
                    forgotten = RoomNews(
                        room=room.name,
                        version=min(version + 1, MAX_VERSION),
                        is_last=True,
                        error="it is forgotten",
                        prompt=room.prompt,
                    )
                    found.append(forgotten)
                elif known is not None and known.news.version > version:
                    left -= len(known.news.part) + len(known.news.error.encode())
                    if left < 0:
                        break
                    found.append(replace(known.news, prompt=room.prompt))
        return found

    def _find(self, room: RoomId) -> _Room | None:
        """Return a room by name and prompt, or by its name where either side has no prompt."""
        known = self._rooms.get(room) or self._rooms.get(RoomId(room.name))
        if known is None and not room.prompt:
            return self._rooms.get(self._named.get(room.name, room))
        return known

    def _replace(self, room: RoomId, part: bytes, *, is_last: bool, error: str = "") -> bool:
        if len(part) > MAX_PART_BYTES:
            return False
        with self._lock:
            known = self._rooms.get(room)
            if known is None or known.over is not None:
                return False
            self._put(room, part, is_last=is_last, error=error)
            self._drop_old()
        self._changed(room)
        return True

    def _put(self, room: RoomId, part: bytes, *, is_last: bool = False, error: str = "") -> None:
        self._version = self._version % MAX_VERSION + 1
        news = RoomNews(
            room=room.name, version=self._version, part=part, is_last=is_last, error=error
        )
        self._rooms[room] = _Room(news=news, over=self._clock() if is_last else None)
        if self._named.setdefault(room.name, room) in self._over:
            self._named[room.name] = room
        if is_last:
            self._over[room] = None
            self._kept_bytes += len(part)

    def _drop_old(self) -> None:
        """Forget rooms that were over long ago, are too many, or take too much memory."""
        until = self._clock() - KEPT_SECONDS
        while self._over:
            oldest = next(iter(self._over))
            over = self._rooms[oldest].over
            is_within = len(self._over) <= MAX_OVER and self._kept_bytes <= MAX_KEPT_BYTES
            if is_within and over is not None and over > until:
                return
            self._drop(oldest)

    def _drop(self, room: RoomId) -> None:
        del self._over[room]
        self._kept_bytes -= len(self._rooms.pop(room).news.part)
        if self._named.get(room.name) == room:
            del self._named[room.name]
