"""Follow the requests whose prompts another engine is still computing, until it has made a ticket.

A router that sends both legs of a request at once names a room: what the engine that prefills says
of the request on its side channel. ``EarlyRequests`` follows the rooms, and checks each part
against the request's own prompt. ``Consumer`` decides what is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvferry.core.directory import RoomFollower
from kvferry.core.errors import KVFerryError, TicketError, TicketReason
from kvferry.core.lifecycle.rooms import RoomId, room_id
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.integrations.vllm.prompts import whole_prompt_digest
from kvferry.integrations.vllm.security import SecuritySettings
from kvferry.integrations.vllm.ticket_params import Part, read_part

if TYPE_CHECKING:
    from vllm.v1.request import Request

EARLY_SHARE = 0.5
"""The most of the engine's cache, as a share of its blocks, that early loads may have together.

They wait for prefill with their blocks. Further requests wait for their tickets without any.
"""


@dataclass(slots=True, kw_only=True)
class EarlyRequest:
    """A request whose room is followed.

    Attributes:
        request: vLLM's request.
        room: The room.
        producer: The engine that prefills, and its side channel.
        may_begin: Whether its load may begin before the ticket comes: not if other requests name
            the same room, since only the last of them may end the hold.
        part: The newest part; ``None`` while the request is in prefill's queue.
        blocks: How many blocks its early load has; 0 if none has begun.
        unused: Why nothing will be loaded, so that the hold is ended as soon as the ticket comes;
            ``None`` if the request waits for its load, or has one.
    """

    request: Request
    room: RoomId
    producer: PeerKey
    may_begin: bool = True
    part: Part | None = None
    blocks: int = 0
    unused: str | None = None


class EarlyRequests:
    """Follow the rooms of requests.

    Args:
        follower: Asks the side channels; ``None`` to refuse requests that name a room.
        security: Has the secrets with which parts must be signed, if any.
        check: Raises ``TicketError`` if a part does not fit a request.
        blocks: How many blocks the engine has.
    """

    def __init__(
        self,
        follower: RoomFollower | None,
        *,
        security: SecuritySettings,
        check: Callable[[Request, Part], None],
        blocks: int,
    ) -> None:
        self._follower = follower
        self._security = security
        self._check = check
        self._most_blocks = int(EARLY_SHARE * blocks)
        self._blocks = 0
        self._requests: dict[str, EarlyRequest] = {}
        self._rooms = Counter[RoomId]()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[EarlyRequest]:
        """Yield the requests; they may end meanwhile."""
        return iter(list(self._requests.values()))

    @property
    def pending(self) -> bool:
        """Whether there is news of a request that ``take`` has not returned."""
        return self._follower is not None and self._follower.pending

    @property
    def waits_to_release(self) -> bool:
        """Whether a request that loads nothing is followed, which may have ended already."""
        return any(early.unused is not None for early in self._requests.values())

    def get(self, request_id: str) -> EarlyRequest | None:
        """Return a request whose room is followed; ``None`` if it is not."""
        return self._requests.get(request_id)

    def follow(self, request: Request, name: str, producer: PeerKey, *, may_begin: bool) -> None:
        """Follow a request's room until ``end``.

        Args:
            request: vLLM's request.
            name: The router's name of the room.
            producer: The engine that prefills, and its side channel.
            may_begin: Whether its load may begin before the ticket comes.

        Raises:
            TicketError: No rooms are followed.
        """
        if self._follower is None:
            raise TicketError("it has none, and this engine follows no rooms")
        self.end(request.request_id)
        room = room_id(name, whole_prompt_digest(request))
        early = EarlyRequest(request=request, room=room, producer=producer, may_begin=may_begin)
        self._requests[request.request_id] = early
        self._rooms[early.room] += 1
        self._follower.follow(request.request_id, early.room, producer)

    def take(self, early: EarlyRequest) -> Part | KVFerryError | None:
        """Return the newest part of a request since the last call, checked.

        Args:
            early: The request.

        Returns:
            The part; why there will be none that can be used, or why it is refused; ``None`` if
            nothing is new. After the last part, and after an error, call ``end``.
        """
        if self._follower is None:
            return None
        news = self._follower.news(early.request.request_id)
        if news is None or isinstance(news, KVFerryError):
            return news
        if not news.part:
            return None
        try:
            part = read_part(
                news.part,
                self._security.secrets,
                is_last=news.is_last,
                prompt=early.request.num_prompt_tokens,
            )
            self._check_continues(early, part)
            self._check(early.request, part)
        except TicketError as error:
            return error
        early.part = replace(part, ticket=self._routed(early, part.ticket))
        return early.part

    def has_room(self, early: EarlyRequest, blocks: int) -> bool:
        """Return whether a load may begin now, before the ticket has come.

        Args:
            early: The request.
            blocks: How many blocks it needs.
        """
        is_alone = early.may_begin and self._rooms[early.room] == 1
        return is_alone and self._blocks + blocks <= self._most_blocks

    def begin(self, early: EarlyRequest, blocks: int) -> None:
        """Record that a load begins before the ticket has come.

        Args:
            early: The request.
            blocks: How many blocks it has.
        """
        early.blocks = blocks
        self._blocks += blocks

    def end(self, request_id: str) -> None:
        """Follow a request's room no longer.

        Args:
            request_id: vLLM's id of the request; ignored if its room is not followed.
        """
        early = self._requests.pop(request_id, None)
        if early is None:
            return
        if self._follower is not None:
            self._follower.end(request_id)
        self._blocks -= early.blocks
        self._rooms[early.room] -= 1
        if not self._rooms[early.room]:
            del self._rooms[early.room]

    def _check_continues(self, early: EarlyRequest, part: Part) -> None:
        """Refuse a part of another engine than the one that is followed, or for other tokens.

        Raises:
            TicketError: The part is refused.
        """
        if part.ticket.engine != early.producer.engine:
            raise TicketError(
                f"the side channel of engine {early.producer.engine!r} has a part of a ticket of "
                f"engine {part.ticket.engine!r}",
                reason=TicketReason.MISMATCH,
            )
        if early.part is not None and part.total != early.part.total:
            raise TicketError(
                f"a part of the ticket is for {part.total} tokens; the one before was for "
                f"{early.part.total}",
                reason=TicketReason.MISMATCH,
            )

    def _routed(self, early: EarlyRequest, ticket: Ticket) -> Ticket:
        """Return a ticket that can also be asked for at the address that the router gave.

        A signed ticket names the only address at which it may be.
        """
        address = early.producer.host, early.producer.port
        if self._security.secrets is not None or address == (ticket.host, ticket.port):
            return replace(ticket, routed=None)
        return replace(ticket, routed=address)
