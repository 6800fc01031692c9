"""Publish, while a prompt is computed for another engine, which of its pages are computed already.

A router that sends both legs of a request at once gives them a common ``transfer_id``, which names
a room on the side channel of the engine that prefills. Decode follows the room. After each step
that computes a chunk of the prompt, a part is published there: a ticket for the tokens so far, with
the pages of full attention. The last part is the ticket. See docs/protocol.md, "Early tickets".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.rooms import RoomId, Rooms, room_id
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.integrations.vllm.engine_facts import EngineFacts
from kvferry.integrations.vllm.prompts import has_chain, prompt_digest, whole_prompt_digest
from kvferry.integrations.vllm.ticket_format import room_name

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """A request that has a room, and no ticket yet."""

    request: Request
    room: RoomId
    pages: list[list[int]] = field(default_factory=list)
    """The ids of its blocks in each group that is transferred."""
    due: int = 0
    """How many tokens are computed when the last step is over that computes any of them."""


class PartPublisher:
    """Open the rooms of requests, publish parts of their tickets, and then the tickets.

    ``params`` returns ``kv_transfer_params`` with the attributes of ``TicketParams`` of a part.
    """

    def __init__(
        self,
        facts: EngineFacts,
        *,
        holds: SchedulerHolds,
        rooms: Rooms,
        params: Callable[..., Mapping[str, Any]],
    ) -> None:
        self._groups = facts.groups
        self._lookahead = facts.lookahead
        # Host pages have nothing of a prompt before its end.
        self._publishes = not facts.is_staged and not all(
            group.needs_exact_length for group in facts.groups
        )
        self._holds = holds
        self._rooms = rooms
        self._params = params
        self._prompts: dict[str, _Prompt] = {}
        # Those of which the last step computed a chunk.
        self._computed: list[str] = []

    def open(self, request: Request) -> None:
        """Open the room of a request that is prefilled for another engine, if it names one."""
        # One that was preempted comes again, and keeps its room.
        if request.request_id not in self._prompts and (room := self._open(request)) is not None:
            self._prompts[request.request_id] = _Prompt(request=request, room=room)

    def refuse(self, request: Request, why: str) -> None:
        """Say in a request's room, if it names one, that it gets no ticket, and why."""
        if (room := self._open(request)) is not None:
            self._rooms.close(room, why)

    def _open(self, request: Request) -> RoomId | None:
        """Open the room that a request names; ``None`` if it names none, or cannot have it."""
        name = room_name(request.kv_transfer_params or {})
        room = None if name is None else room_id(name, whole_prompt_digest(request))
        return room if room is not None and self._rooms.open(room) else None

    def next_step(self, scheduler_output: SchedulerOutput) -> None:
        """Publish what the last step has computed, and record what this one will.

        Must be called once for each step, before the orders about holds are drained: they have the
        watermarks of the parts.
        """
        if not self._prompts or not self._publishes:
            return
        self._add_blocks(scheduler_output)
        computed, self._computed = self._computed, []
        for prompt in filter(None, map(self._prompts.get, computed)):
            self._publish(prompt)
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in self._prompts.keys() & scheduled.keys():
            prompt = self._prompts[request_id]
            prompt.due = prompt.request.num_computed_tokens + scheduled[request_id]
            self._computed.append(request_id)

    def end(self, request: Request, ticket: Mapping[str, Any] | None) -> None:
        """Publish the ticket of a request that has ended, or that there will be none."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return
        if ticket is None:
            self._rooms.close(prompt.room, f"its request is {request.status.name}")
        else:
            self._rooms.finish(prompt.room, msgspec.json.encode(ticket))

    def _add_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Record the blocks of requests that begin in this step, begin again, or get more."""
        placed = {each.req_id: each.block_ids for each in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids and added is not None:
                placed[request_id] = added
            elif (prompt := self._prompts.get(request_id)) is not None and added is not None:
                for group, pages in zip(self._groups, prompt.pages, strict=True):
                    pages.extend(added[group.index])
        for request_id in self._prompts.keys() & placed.keys():
            prompt, lists = self._prompts[request_id], placed[request_id]
            prompt.pages = [[*lists[group.index]] for group in self._groups]
            prompt.due = 0  # another request of this step may be computing what is cached of it

    def _publish(self, prompt: _Prompt) -> None:
        """Order the watermark of what the last step has computed of a prompt, and publish it."""
        request, tokens = prompt.request, prompt.due - self._lookahead
        was_preempted = request.num_computed_tokens < prompt.due
        # The ticket is for the end of the prompt.
        if was_preempted or not 0 < tokens < request.num_prompt_tokens:
            return
        # A ticket with an adapter may be revoked. A digest of embeddings for each part is slow.
        if request.lora_request or not has_chain(request):
            return
        hold = self._holds.mark(RequestId(request.request_id), tokens)
        if hold is None:
            return
        # The pages of windows and states change with the next chunk.
        pages = tuple(
            () if group.needs_exact_length else tuple(group.producer_pages(ids, tokens)[1])
            for group, ids in zip(self._groups, prompt.pages, strict=True)
        )
        part = self._params(
            request=request.request_id,
            hold=hold,
            pages=pages,
            first_index=(0,) * len(pages),
            tokens=tokens,
            digest=prompt_digest(request, tokens),
            computed=False,
            total=request.num_prompt_tokens,
        )
        self._rooms.publish(prompt.room, msgspec.json.encode(part))
