"""The scheduler half of an engine that loads what others computed (DS in docs/protocol.md).

That is an engine that decodes what others prefilled, or, with ``bidirectional_kv_xfer``, one that
prefills the next turn of a conversation, whose earlier turns others have in their caches.

A router that sends both legs of a request at once names a room: what the engine that prefills says
of the request on its side channel, until it has made the ticket. Such a load may begin early.

A refused ticket never raises here, because an exception in a scheduler's hook ends the engine. The
request gets blocks like any other, and the worker then reports its load as failed. Where a
conversation's ticket is refused, nothing fails: the engine computes the whole prompt.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvferry.core.directory import Directory, RoomFollower
from kvferry.core.endpoint import Load
from kvferry.core.error_causes import on_one_line, with_remedy
from kvferry.core.errors import KVFerryError, TicketError, TicketReason
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.rooms import RoomId, room_id
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.metrics import REFUSED, LoadRecord
from kvferry.core.side_channel_messages import RoomNews
from kvferry.integrations.vllm.cache_groups import NO_PAGES, num_blocks
from kvferry.integrations.vllm.engine_facts import EngineFacts
from kvferry.integrations.vllm.prefix_cache import PrefixCache
from kvferry.integrations.vllm.prompts import whole_prompt_digest
from kvferry.integrations.vllm.request_ids import is_sample
from kvferry.integrations.vllm.scheduler_metrics import (
    EARLY_LOADS,
    EDITED_HISTORIES,
    FAILED,
    LOADS,
    TOKENS,
)
from kvferry.integrations.vllm.staging import NoHostPagesError, PageSource
from kvferry.integrations.vllm.ticket_admission import TicketAdmission
from kvferry.integrations.vllm.ticket_format import Part, names_room

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

EARLY_SHARE = 0.5
"""The most of the engine's cache, as a share of its blocks, that early loads may have together.

They wait for prefill with their blocks. Further requests wait for their tickets without any.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMessages:
    """The messages to the workers about loads in one step.

    Attributes:
        prepare: Tickets of new requests. Workers connect to their engines before these have blocks.
        loads: Loads to start; one that reads nothing tells the producer that it may free the pages.
        parts: Newer parts of the tickets of requests whose loads are early, by request.
        refused: Ids of requests whose ticket was refused, each with the reason.
        aborted: Ids of requests that ended while their load was under way.
    """

    prepare: list[Ticket] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)


class PullStage(enum.Enum):
    """How far a request is that comes with a ticket, or with the name of a room."""

    FOLLOWED = enum.auto()  # another engine is to make its ticket; it has no blocks
    READY = enum.auto()  # its ticket was accepted; it waits for blocks
    REFUSED = enum.auto()  # its ticket was refused, or will not come; it waits for blocks
    LOADING = enum.auto()  # it has blocks, and a load fills them
    FAILING = enum.auto()  # it has blocks, and the workers report that they were not filled
    UNUSED = enum.auto()  # it loads nothing, or has ended; its ticket is given back when it comes


NO_ROOM, NOBODY = RoomId(b""), PeerKey("", "", 0)
WITHOUT_BLOCKS = (PullStage.FOLLOWED, PullStage.READY, PullStage.REFUSED)


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """A request that loads from another engine, until its load is over.

    It has room and producer if it came without a ticket.
    """

    request: Request
    stage: PullStage
    ticket: Ticket | None = None
    """Its ticket, or the newest part of it."""
    covered: int | None = None
    """How many tokens its ticket covers, or will cover; ``None`` if that is not known."""
    why: str = ""
    """Why its ticket was refused."""
    tokens: int = 0
    """How many tokens its load fills its blocks with."""
    begun: float = 0.0
    """When its load began, in seconds since the epoch."""
    is_early: bool = False
    """Whether its load began before its ticket came."""
    blocks: int = 0
    """How many blocks it has meanwhile."""
    room: RoomId = NO_ROOM
    producer: PeerKey = NOBODY
    """The room in which the engine that prefills it says what is computed, and that engine."""
    is_aborted: bool = False
    """Whether the request has ended while it loaded."""
    record: LoadRecord | None = None
    """The figures of the load, of the ranks that have reported them."""

    @property
    def request_id(self) -> RequestId:
        """The id that vLLM gives the request."""
        return RequestId(self.request.request_id)


class Consumer:
    """Follow requests with a ticket from their arrival to the end of their load.

    ``directory`` asks the engines that made tickets what the workers need of them; ``follower``
    follows requests that are prefilled while they wait here. Where the cache is staged, loads fill
    host ``pages``, from which blocks are copied, and no load begins before its ticket has come.
    """

    def __init__(
        self,
        facts: EngineFacts,
        *,
        directory: Directory,
        follower: RoomFollower,
        prefix_cache: PrefixCache,
    ) -> None:
        self._facts = facts
        self._groups = facts.groups
        self._admission = TicketAdmission(facts)
        self._directory = directory
        self._follower = follower
        # Those whose rooms are followed, how many these are of each room, and what is left of
        # ``EARLY_SHARE``.
        self._followed: dict[str, Pull] = {}
        self._rooms = Counter[RoomId]()
        self._early_blocks = int(EARLY_SHARE * facts.blocks)
        self.pages = PageSource(facts, use="loads")
        self._prefix_cache = prefix_cache
        self._users = HoldUsers()
        self._pulls: dict[str, Pull] = {}
        self._messages = LoadMessages()
        # Requests whose load is over, and of which vLLM has computed no token since.
        self._loaded: set[str] = set()
        # Requests with a page that its load has not filled whole: for each group, the first token
        # that the load has written.
        self._first_tokens: dict[str, tuple[int, ...]] = {}
        # Requests with a LoRA adapter that load, or have loaded, from another engine.
        self._adapted: dict[str, Request] = {}

    # From a request's arrival to its blocks.

    def on_new_request(self, request: Request) -> None:
        """Check the ticket of a request of which another engine has computed a part, if it has one.

        Workers then connect to that engine before the request has blocks. The load of a refused
        ticket will be reported as failed; of a conversation's refused ticket, nothing is loaded.
        """
        # vLLM refuses some requests earlier, and drops the prompt against which the ticket has to
        # be checked. Releasing the hold could hurt another request; the lease ends it (ADR 7).
        if request.abort_immediately:
            return
        if (earlier := self._pulls.get(request.request_id)) is not None:  # it has ended
            self._end(earlier)
        params = request.kv_transfer_params or {}
        try:
            if self._admission.is_turn(request):
                self._begin_turn(request)
            elif params.get("do_remote_prefill") and names_room(params):
                self._follow(request)
            elif params.get("do_remote_prefill"):
                self._accept(request, self._admission.admit(request))
        except TicketError as error:
            self._refuse(request, error)

    def _follow(self, request: Request) -> None:
        """Follow a request's room until ``_unfollow``, or raise ``TicketError``."""
        name, producer = self._admission.admit_room(request)
        room = room_id(name, whole_prompt_digest(request))
        pull = Pull(request=request, stage=PullStage.FOLLOWED, room=room, producer=producer)
        self._pulls[pull.request_id] = self._followed[pull.request_id] = pull
        self._rooms[room] += 1
        self._follower.follow(pull.request_id, room, producer)

    def _unfollow(self, pull: Pull) -> None:
        """Follow a request's room no longer; ignored if it is not followed."""
        if self._followed.pop(pull.request_id, None) is None:
            return
        self._follower.end(pull.request_id)
        self._early_blocks += pull.blocks
        self._rooms[pull.room] -= 1
        if not self._rooms[pull.room]:
            del self._rooms[pull.room]

    def _begin_turn(self, request: Request) -> None:
        """Use the ticket of a conversation as far as the prompt has its tokens."""
        ticket, common = self._admission.admit_turn(request)
        if common < ticket.tokens:
            self._facts.metrics.add(EDITED_HISTORIES)
        if common:
            self._accept(request, replace(ticket, tokens=common, blocks=None))

    def _accept(self, request: Request, ticket: Ticket) -> Pull:
        """Record that a request waits for blocks, to load from the hold of its ticket."""
        pull = Pull(request=request, stage=PullStage.READY, ticket=ticket, covered=ticket.tokens)
        self._pulls[pull.request_id] = pull
        self._users.add(pull.request_id, ticket)
        self._messages.prepare.append(ticket)
        self._directory.begin(pull.request_id, ticket)
        return pull

    def _refuse(self, request: Request, error: KVFerryError) -> None:
        """Log and count that a ticket is refused, or will not come.

        The request's load will be reported as failed. A turn of a conversation loads nothing.
        """
        is_turn = self._admission.is_turn(request)
        if isinstance(error, TicketError):
            self._facts.metrics.add(REFUSED, reason=error.reason.value)
        else:
            self._facts.metrics.add(FAILED)
        _log_refusal(request, error, is_turn=is_turn)
        if not is_turn:
            pull = Pull(request=request, stage=PullStage.REFUSED, why=str(error))
            self._pulls[pull.request_id] = pull

    def num_matched_tokens(self, request: Request, computed: int) -> int | None:
        """Return how many tokens of a request, beyond the ``computed`` ones, are to be loaded.

        The tokens of a refused ticket count, too, so that vLLM waits for a load, which is then
        reported as failed. vLLM may call this several times for a request.

        ``None`` if the request has to wait for the engine that prefills: until that has begun, or,
        if the load may not begin early, until it has made the ticket. Also ``None`` while it waits
        for host pages; if it has waited too long, its load fails.
        """
        if (followed := self._followed.get(request.request_id)) is not None:
            self._take_news(followed)
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.stage not in WITHOUT_BLOCKS:
            return 0
        if pull.stage is PullStage.FOLLOWED and pull.covered is None:
            return None
        whole = self._admission.tokens_to_have(request, pull.covered)
        tokens = max(0, whole - computed)
        if tokens and self._waits(pull, whole, tokens):
            return None
        least = self._facts.config.kv_recompute_threshold if self._admission.is_turn(request) else 0
        return tokens if tokens >= least else 0

    def _waits(self, pull: Pull, whole: int, tokens: int) -> bool:
        """Return whether a request that could load so many tokens must wait, and gets no blocks."""
        if pull.stage is PullStage.FOLLOWED:
            # Of several that name a room, only the last may end the hold.
            is_alone = self._rooms[pull.room] == 1 and not is_sample(pull.request_id)
            fits = num_blocks(self._groups, tokens) <= self._early_blocks
            return self._facts.is_staged or not (is_alone and fits)
        if pull.stage is not PullStage.READY:
            return False
        try:
            return self.pages.waits(pull.request_id, whole)
        except NoHostPagesError as error:
            self._refuse_accepted(pull, TicketError(str(error), reason=TicketReason.HOST_PAGES))
            return False

    def _refuse_accepted(self, pull: Pull, error: TicketError) -> None:
        """Refuse a ticket after it was accepted."""
        self._give_back(pull)
        self._refuse(pull.request, error)

    def weights_changed(self) -> None:
        """Refuse tickets, and have loads fail, that are for other weights than the engine has."""
        for pull in list(self._pulls.values()):
            try:
                if pull.ticket is not None:
                    self._facts.weights.check(pull.ticket.weights)
            except TicketError as error:
                if pull.stage is PullStage.READY:
                    self._refuse_accepted(pull, error)
                elif pull.stage in (PullStage.FOLLOWED, PullStage.LOADING):
                    self._give_up(pull, error)

    def _take_news(self, pull: Pull) -> None:
        """Act on what the engine that prefills a request has said since the last call."""
        news = self._follower.news(pull.request_id)
        if isinstance(news, RoomNews) and news.part:
            try:
                part = self._admission.admit_part(pull.request, news, pull.producer, pull.covered)
            except TicketError as error:
                news = error
            else:
                if part.is_last:
                    self._unfollow(pull)
                self._take_part(pull, part)
        if isinstance(news, KVFerryError):
            self._unfollow(pull)
            self._give_up(pull, news)

    def _take_part(self, pull: Pull, part: Part) -> None:
        """Use a newer part of a request's ticket, or the ticket."""
        if pull.stage is PullStage.LOADING:
            self._messages.parts[pull.request_id] = part
            pull.ticket = part.ticket
            if part.is_last:  # So that requests which come with the same ticket know of this load.
                self._users.add(pull.request_id, part.ticket)
                self._users.order(pull.request_id)
        elif part.is_last:
            accepted = self._accept(pull.request, part.ticket)
            if pull.stage is PullStage.UNUSED:  # it was accepted only to be given back
                self._give_back(accepted)
        elif pull.stage is PullStage.FOLLOWED:
            pull.ticket, pull.covered = part.ticket, part.total
            self._directory.begin(pull.request_id, part.ticket)

    def _give_up(self, pull: Pull, error: KVFerryError) -> None:
        """Have a request fail whose ticket will not come, or whose part of it is refused."""
        if pull.stage is PullStage.LOADING:
            _log_refusal(pull.request, error)
            self._abort(pull)
            return
        self._end(pull)
        if pull.stage is not PullStage.UNUSED:
            self._refuse(pull.request, error)

    # From a request's blocks to the end of its load.

    def blocks_allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Queue the load of ``external`` tokens, or "done" if there are none.

        If the ticket was refused, the failure of the load is queued instead.
        """
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.stage not in WITHOUT_BLOCKS:
            return
        if not external:
            self._load_nothing(pull)
        elif pull.stage is PullStage.REFUSED:
            self._fail(pull)
        elif pull.ticket is not None:
            self._begin_load(pull, pull.ticket, blocks, external)

    def _load_nothing(self, pull: Pull) -> None:
        """Give back the ticket of a request that needs none, now or when it has come."""
        if pull.stage is PullStage.READY:
            self._give_back(pull)
        elif pull.stage is PullStage.REFUSED:
            self._end(pull)
        else:
            pull.stage = PullStage.UNUSED

    def _begin_load(self, pull: Pull, ticket: Ticket, blocks: KVCacheBlocks, external: int) -> None:
        """Queue the load that fills a request's blocks with so many tokens."""
        whole = self._admission.tokens_to_have(pull.request, pull.covered)
        wanted = [group.consumer_pages(blocks.blocks[group.index], whole) for group in self._groups]
        lists = [pages.ids for _, pages in wanted]
        try:
            placed, copy = self.pages.place(pull.request_id, lists, external)
        except NoHostPagesError as error:
            self._refuse_accepted(pull, TicketError(str(error), reason=TicketReason.HOST_PAGES))
            self._fail(self._pulls[pull.request_id])
            return
        pull.tokens, pull.begun = external, time.time()
        pull.is_early = pull.stage is PullStage.FOLLOWED
        if pull.is_early:
            pull.blocks = num_blocks(self._groups, external)
            self._early_blocks -= pull.blocks
        self._messages.loads.append(
            Load(
                request=pull.request_id,
                ticket=ticket,
                ranges=tuple(tokens for tokens, _ in wanted),
                local=tuple(
                    pages if ids is pages.ids else replace(pages, ids=np.array(ids, np.int64))
                    for ids, (_, pages) in zip(placed, wanted, strict=True)
                ),
                shared=not pull.is_early and self._order(pull.request_id),
                is_early=pull.is_early,
                copy=copy,
            )
        )
        if pull.request.lora_request is not None:
            self._adapted[pull.request_id] = pull.request
        pull.stage = PullStage.LOADING

    def _order(self, name: RequestId) -> bool:
        """Record that a load is queued; return whether it leaves "done" to others of its hold."""
        return self._users.order(name, siblings=is_sample(name))

    def _fail(self, pull: Pull) -> None:
        """Have the workers report that a request's blocks were not filled."""
        pull.stage = PullStage.FAILING
        self._messages.refused.append((pull.request_id, pull.why))

    def _abort(self, pull: Pull) -> None:
        """Have the workers end a load, which they report when no byte can land any more."""
        self._unfollow(pull)
        self._messages.aborted.append(pull.request_id)

    def abort_loads(self) -> None:
        """Have all loads fail that are under way, because vLLM clears its caches."""
        for pull in self._pulls.values():
            if pull.stage is PullStage.LOADING:
                self._abort(pull)

    @property
    def is_loading(self) -> bool:
        """Whether not all workers have reported the load of a request."""
        return any(
            pull.stage in (PullStage.LOADING, PullStage.FAILING) for pull in self._pulls.values()
        )

    def adapter_changed(self, request_id: str) -> bool:
        """Take notice that the adapter of a request has other weights than its ticket is for.

        A request without blocks loads nothing, as if its ticket had been refused.

        Returns:
            Whether the request must fail, because its first token would be computed with these
            weights, and with pages of the ticket's.
        """
        pull = self._pulls.get(request_id)
        if pull is not None and pull.stage is PullStage.READY:
            why = (
                "its adapter was loaded with other weights after this was checked: load changed "
                "weights from a new path"
            )
            self._refuse_accepted(pull, TicketError(why, reason=TicketReason.ADAPTER))
        request = self._adapted.get(request_id)
        if request is None or request.num_output_tokens:
            return False
        self._facts.metrics.add(REFUSED, reason=TicketReason.ADAPTER.value)
        return True

    def request_finished(self, request: Request) -> None:
        """Abort the load of a request that ended, or tell the producer that none comes."""
        self._adapted.pop(request.request_id, None)
        self._loaded.discard(request.request_id)
        self._first_tokens.pop(request.request_id, None)
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return
        if pull.stage not in (PullStage.LOADING, PullStage.FAILING):
            self._load_nothing(pull)
            return
        self._abort(pull)
        pull.is_aborted = True

    def loads_reported(self, records: Mapping[str, LoadRecord]) -> None:
        """Record the figures of loads that have ended on some ranks, for ``loads_finished``."""
        for request_id, record in records.items():
            pull = self._pulls.get(request_id)
            if pull is not None and pull.stage is PullStage.LOADING:
                before = pull.record
                pull.record = record if before is None else before.combine(record)

    def loads_finished(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> None:
        """End the pulls of requests whose load has ended on all workers; ``failed`` on some."""
        for request_id in request_ids:
            pull = self._pulls.get(request_id)
            if pull is None:
                continue
            # vLLM calls this when every rank has reported the load. Ranks end loads in different
            # orders, some before they hear of the next load. Only a load that all ranks have
            # reported counts as over: no rank reads for it any more when "done" is sent.
            if pull.stage is PullStage.LOADING:
                self.pages.give_back(pull.request_id)
                self._end(pull, is_loaded=request_id not in failed)
            elif pull.stage is PullStage.FAILING:
                self._end(pull)

    def _give_back(self, pull: Pull) -> None:
        """End a pull with a ticket that loads nothing: the producer may free the pages."""
        if pull.ticket is not None:
            self._release(pull.request_id, pull.ticket, shared=self._order(pull.request_id))
        self._end(pull)

    def _end(self, pull: Pull, *, is_loaded: bool = False) -> None:
        """End a request's pull, and tell everybody who knows of it; the only way out."""
        name = pull.request_id
        self._users.over(name, loaded=is_loaded)
        self._directory.end(name)
        self._unfollow(pull)
        self._messages.parts.pop(name, None)
        self.pages.cancel(name)
        if not is_loaded:
            self._adapted.pop(name, None)
        if pull.stage is PullStage.LOADING:
            self._report(pull, is_loaded=is_loaded)
        del self._pulls[name]

    def _release(self, name: RequestId, ticket: Ticket, *, shared: bool) -> None:
        """Queue a load that reads nothing, and tells the producer "done" unless it is shared."""
        groups = len(self._groups)
        self._messages.loads.append(
            Load(
                request=name,
                ticket=ticket,
                ranges=(None,) * groups,
                local=(NO_PAGES,) * groups,
                report=False,
                shared=shared,
            )
        )

    def _report(self, pull: Pull, *, is_loaded: bool) -> None:
        """Count and log a load that is over, and remember what it means for the request."""
        if not pull.is_aborted:
            self._loaded.add(pull.request_id)
            tokens = pull.record.first_tokens if is_loaded and pull.record else ()
            if tokens and self._prefix_cache.keep_out(pull.request_id, tokens):
                self._first_tokens[pull.request_id] = tuple(tokens)
        metrics = self._facts.metrics
        metrics.add(LOADS if is_loaded else FAILED)
        if is_loaded:
            metrics.add(TOKENS, pull.tokens)
            metrics.add(EARLY_LOADS, int(pull.is_early))
        self._facts.reports.load_ended(pull, is_loaded=is_loaded)

    def first_tokens(self, request_id: str) -> tuple[int, ...]:
        """Return, for each group, the first token that a request's load has written; () if all."""
        return self._first_tokens.get(request_id, ())

    # Once in each step.

    def loaded_request_waits(self, scheduler_output: SchedulerOutput) -> bool:
        """Return whether a request whose load is over waits for blocks for the rest of its prompt.

        vLLM calls no hook for it. It waits for blocks if it is not computed although nothing else
        is; otherwise it may wait for its turn. To be called once in each pass.
        """
        if not self._loaded:
            return False
        self._loaded.difference_update(scheduler_output.num_scheduled_tokens)
        return bool(self._loaded) and scheduler_output.total_num_scheduled_tokens == 0

    def drain(self) -> LoadMessages:
        """Return the messages to the workers that were queued since the last call."""
        if self._follower.pending:
            for pull in list(self._followed.values()):
                self._take_news(pull)
        for ticket in self._users.take_unused():
            self._release(RequestId(ticket.request), ticket, shared=False)
            self._directory.ask(ticket)
        messages, self._messages = self._messages, LoadMessages()
        return messages

    @property
    def pending(self) -> bool:
        """Whether ``drain`` has messages to return, or will have some that no request waits for."""
        return (
            self._messages != LoadMessages()
            or self._users.pending
            or self._follower.pending
            or any(pull.stage is PullStage.UNUSED for pull in self._followed.values())
        )

    @property
    def follows(self) -> bool:
        """Whether requests wait for what the engines that prefill them say."""
        return bool(self._followed)


def _log_refusal(request: Request, error: KVFerryError, *, is_turn: bool = False) -> None:
    """Log that a request's ticket is refused or does not come, and who made it, or was to."""
    if is_turn:
        what = "ticket of the last answer refused, so the whole prompt is computed"
    elif isinstance(error, TicketError):
        what = "ticket refused"
    else:
        what = "the engine that prefills it made no ticket"
    params = request.kv_transfer_params or {}
    logger.warning(
        "request %s: %s: %s (stage ticket, cause %s, of engine %s, request %s)",
        on_one_line(request.request_id),
        what,
        on_one_line(str(error)) if is_turn else with_remedy(error),
        error.reason if isinstance(error, TicketError) else error.cause,
        _named(params.get("remote_engine_id")),
        _named(params.get("remote_request_id")),
    )


def _named(value: object) -> str:
    """Return a client's text for the log, or the type of any other value, which may be large."""
    return on_one_line(value, 256) if isinstance(value, str) else f"({type(value).__name__})"
