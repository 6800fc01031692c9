"""Follow the requests whose prompts another engine is still computing, until it has made a ticket.

A router that sends both legs of a request at once names a room: what the engine that prefills says
of the request on its side channel. ``PartFollower`` follows the rooms, and checks each part
against the request's own prompt. ``Consumer`` decides what is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvferry.core.directory import RoomFollower
from kvferry.core.errors import KVFerryError, TicketError, TicketReason
from kvferry.core.lifecycle.rooms import RoomId, room_id
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.side_channel_messages import RoomNews
from kvferry.integrations.vllm.prompts import whole_prompt_digest
from kvferry.integrations.vllm.request_ids import is_sample
from kvferry.integrations.vllm.ticket_admission import TicketAdmission
from kvferry.integrations.vllm.ticket_format import Part, read_part

if TYPE_CHECKING:
    from vllm.v1.request import Request

EARLY_SHARE = 0.5
"""The most of the engine's cache, as a share of its blocks, that early loads may have together.

They wait for prefill with their blocks. Further requests wait for their tickets without any.
"""


@dataclass(slots=True, kw_only=True)
class _EarlyRequest:
    """A request whose room, of the engine ``producer``, is followed."""

    request: Request
    room: RoomId
    producer: PeerKey
    total: int | None = None
    """How many tokens its ticket will cover; ``None`` while it is in prefill's queue."""
    blocks: int = 0
    """How many blocks its early load has; 0 if none has begun."""


class PartFollower:
    """Follow the rooms of requests; ``checks`` checks each part. The engine has ``blocks``."""

    def __init__(self, follower: RoomFollower, *, checks: TicketAdmission, blocks: int) -> None:
        self._follower = follower
        self._checks = checks
        self._blocks_left = int(EARLY_SHARE * blocks)
        self._requests: dict[str, _EarlyRequest] = {}
        self._rooms = Counter[RoomId]()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[str]:
        """Yield the ids of the requests; they may end meanwhile."""
        return iter(list(self._requests))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    @property
    def pending(self) -> bool:
        """Whether there is news of a request that ``take`` has not returned."""
        return self._follower.pending

    def follow(self, request: Request) -> None:
        """Follow a request's room until ``end``, or raise ``TicketError``."""
        name, producer = self._checks.admit_room(request)
        room = room_id(name, whole_prompt_digest(request))
        early = _EarlyRequest(request=request, room=room, producer=producer)
        self._requests[request.request_id] = early
        self._rooms[room] += 1
        self._follower.follow(request.request_id, room, producer)

    def take(self, request_id: str) -> Part | KVFerryError | None:
        """Return the newest part of a request since the last call, or why none can be used.

        After the last part, and after an error, the request is not followed any more.
        """
        news = self._follower.news(request_id)
        found: Part | KVFerryError | None = None
        if isinstance(news, KVFerryError):
            found = news
        elif news is not None and news.part:
            try:
                found = self._read(self._requests[request_id], news)
            except TicketError as error:
                found = error
        if isinstance(found, KVFerryError) or (found is not None and found.is_last):
            self.end(request_id)
        return found

    def _read(self, early: _EarlyRequest, news: RoomNews) -> Part:
        """Return a part that can be used, or raise ``TicketError``."""
        secrets, prompt = self._checks.secrets, early.request.num_prompt_tokens
        part = read_part(news.part, secrets, is_last=news.is_last, prompt=prompt)
        if part.ticket.engine != early.producer.engine:
            raise TicketError(
                f"the side channel of engine {early.producer.engine!r} has a part of a ticket of "
                f"engine {part.ticket.engine!r}",
                reason=TicketReason.MISMATCH,
            )
        if early.total not in (None, part.total):
            raise TicketError(
                f"a part of the ticket is for {part.total} tokens; the one before was for "
                f"{early.total}",
                reason=TicketReason.MISMATCH,
            )
        self._checks.check_part(early.request, part)
        early.total = part.total
        return replace(part, ticket=self._routed(early, part.ticket))

    def may_begin_early(self, request_id: str, blocks: int) -> bool:
        """Return whether a load of so many blocks may begin now, before the ticket has come.

        Not if other requests name the same room, since only the last of them may end the hold.
        """
        is_alone = self._rooms[self._requests[request_id].room] == 1 and not is_sample(request_id)
        return is_alone and blocks <= self._blocks_left

    def begin(self, request_id: str, blocks: int) -> None:
        """Record that a load of so many blocks begins before the ticket has come."""
        self._requests[request_id].blocks = blocks
        self._blocks_left -= blocks

    def end(self, request_id: str) -> None:
        """Follow a request's room no longer; ignored if it is not followed."""
        early = self._requests.pop(request_id, None)
        if early is None:
            return
        self._follower.end(request_id)
        self._blocks_left += early.blocks
        self._rooms[early.room] -= 1
        if not self._rooms[early.room]:
            del self._rooms[early.room]

    def _routed(self, early: _EarlyRequest, ticket: Ticket) -> Ticket:
        """Return a ticket that can also be asked for where the router says, unless it is signed."""
        address = early.producer.host, early.producer.port
        is_known = self._checks.secrets is not None or address == (ticket.host, ticket.port)
        return replace(ticket, routed=None if is_known else address)
