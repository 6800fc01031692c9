"""The scheduler half of an engine that loads what others computed (DS in docs/protocol.md).

That is an engine that decodes what others prefilled, or, with ``bidirectional_kv_xfer``, one that
prefills the next turn of a conversation, whose earlier turns others have in their caches.

A refused ticket never raises here, because an exception in a scheduler's hook ends the engine. The
request gets blocks like any other, and the worker then reports its load as failed. Where a
conversation's ticket is refused, nothing fails: the engine computes the whole prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvferry.core.directory import Directory, RoomFollower
from kvferry.core.endpoint import Load
from kvferry.core.error_causes import on_one_line, with_remedy
from kvferry.core.errors import HandshakeError, KVFerryError, TicketError, TicketReason
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.host_pages import HostPages
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.metrics import REFUSED, LoadRecord, Metrics
from kvferry.integrations.vllm.adapter_files import AdapterError
from kvferry.integrations.vllm.cache_groups import NO_PAGES, CacheGroup, num_blocks
from kvferry.integrations.vllm.early_requests import EarlyRequest, EarlyRequests
from kvferry.integrations.vllm.metric_definitions import (
    EARLY_LOADS,
    EDITED_HISTORIES,
    FAILED,
    LOADS,
    TOKENS,
)
from kvferry.integrations.vllm.page_source import HostPageSource, NoHostPagesError, PageSource
from kvferry.integrations.vllm.prefix_cache import PrefixCache
from kvferry.integrations.vllm.prompts import common_tokens, handed_over_tokens, prompt_digest
from kvferry.integrations.vllm.request_ids import is_sample, prompt_index
from kvferry.integrations.vllm.request_reports import LoadingRequest, RequestReports
from kvferry.integrations.vllm.security import SecuritySettings
from kvferry.integrations.vllm.ticket_params import (
    KEY,
    Part,
    names_room,
    read_room,
    read_ticket,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_ID_LOGGED = 256
"""The most characters of a request's id in the log, where a ticket that was refused gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMessages:
    """The consumer's messages to the workers in one step.

    ``metadata.StepMetadata`` explains the attributes.
    """

    prepare: tuple[Ticket, ...] = ()
    loads: tuple[Load, ...] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)
    refused: tuple[tuple[str, str], ...] = ()
    aborted: tuple[str, ...] = ()


class Consumer:
    """Follow requests with a ticket from their arrival to the end of their load.

    Args:
        groups: The engine's cache groups that are transferred.
        metrics: Where loads and refused tickets are counted.
        engine: This engine's id.
        may_load: Whether the engine's ``kv_role`` lets it load; only then does vLLM free blocks in
            an order that is safe for loads.
        continues: Whether the next turn of a conversation loads from the engine that answered.
        recompute_threshold: The least number of tokens that such a turn loads; fewer are computed.
        verify_prompt: Whether tickets that were made for another prompt are refused.
        backoff: How many tokens at a prompt's end a producer leaves to this engine; see
            ``prefill_backoff``.
        security: The secrets, keys and networks that decide which tickets are accepted.
        adapter_content: Returns the content of a request's LoRA adapter (``Adapters.content``).
        lora_enabled: Whether the engine accepts requests with LoRA adapters.
        reports: Logs each request's load.
        directory: Asks the engines that made tickets what the workers need of them; ``None`` if
            somebody else does.
        follower: Follows requests that are prefilled while they wait here; ``None`` to refuse them.
        blocks: How many blocks this engine has.
        is_staged: Whether loads fill host pages, from which blocks are copied. No load begins
            before its ticket has come then. ``set_host_pages`` says which host pages there are.
        prefix_cache: Keeps pages that a load has not filled whole out of vLLM's prefix cache.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        metrics: Metrics,
        engine: str,
        may_load: bool,
        continues: bool = False,
        recompute_threshold: int = 0,
        verify_prompt: bool,
        backoff: int,
        security: SecuritySettings = SecuritySettings(),  # noqa: B008 - frozen
        adapter_content: Callable[[Request], bytes | None] = lambda request: None,
        lora_enabled: bool = False,
        reports: RequestReports | None = None,
        directory: Directory | None = None,
        follower: RoomFollower | None = None,
        blocks: int = 0,
        is_staged: bool = False,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._pages: PageSource = HostPageSource(groups, use="loads") if is_staged else PageSource()
        self._prefix_cache = prefix_cache or PrefixCache(groups)
        self._directory = directory
        self._reports = reports or RequestReports()
        self._lora_enabled = lora_enabled
        self._adapter_content = adapter_content
        self._groups = groups
        self._needs_exact_length = any(group.needs_exact_length for group in groups)
        self._metrics = metrics
        self._engine = engine
        self._may_load = may_load
        self._continues = continues
        self._recompute_threshold = recompute_threshold
        self._verify_prompt = verify_prompt
        self._backoff = backoff
        self._security = security
        # Requests that wait for blocks: the ticket of each, or why its ticket was refused.
        self._waiting: dict[str, Ticket | TicketError] = {}
        # Requests whose load is under way; None if the ticket was refused.
        self._loading: dict[str, LoadingRequest | None] = {}
        # Requests whose load is over, and of which vLLM has computed no token since.
        self._loaded: set[str] = set()
        # Requests with a page that its load has not filled whole: for each group, the first token
        # that the load has written.
        self._first_tokens: dict[str, tuple[int, ...]] = {}
        self._users = HoldUsers()
        self._prepare: list[Ticket] = []
        self._loads: list[Load] = []
        self._early = EarlyRequests(
            follower, security=security, check=self._check_part, blocks=blocks
        )
        self._parts: dict[str, Part] = {}
        self._refused: list[tuple[str, str]] = []
        self._aborted: list[str] = []

    def on_new_request(self, request: Request) -> None:
        """Check the ticket of a request of which another engine has computed a part.

        If the ticket is accepted, the workers connect to that engine before the request has
        blocks. If the ticket is refused, the request's load will be reported as failed; but if it
        is a conversation's, nothing is loaded.

        Args:
            request: vLLM's request; ignored unless it asks for ``do_remote_prefill``, or continues
                a conversation with the ticket of its last answer.
        """
        if not self.has_ticket(request):
            return
        if request.abort_immediately:
            # vLLM refused the request earlier and dropped its prompt, so the ticket cannot be
            # checked against the prompt. Releasing the hold could hurt another request; the lease
            # ends it (ADR 7).
            return
        if self._is_turn(request):
            self._begin_turn(request)
            return
        try:
            if names_room(request.kv_transfer_params):
                self._follow(request)
                return
            ticket = self._admit(request)
        except TicketError as error:
            self._refuse(request, error)
        else:
            self._wait(request, ticket)

    def has_ticket(self, request: Request) -> bool:
        """Return whether another engine has computed a part of a request, or is to do so.

        Args:
            request: vLLM's request.
        """
        is_prefilled = (request.kv_transfer_params or {}).get("do_remote_prefill")
        return bool(is_prefilled) or self._is_turn(request)

    def _refuse(self, request: Request, error: TicketError) -> None:
        """Log and count that a ticket is refused; the request's load will be reported as failed."""
        _log_refusal(request, error)
        self._waiting[request.request_id] = error
        self._metrics.add(REFUSED, reason=error.reason.value)

    def _follow(self, request: Request) -> None:
        """Follow the room of a request whose prompt another engine is to compute meanwhile.

        Raises:
            TicketError: This engine may not load, or not from the engine that the request names.
        """
        self._check_may_load()
        name, producer = read_room(request.kv_transfer_params)
        self._check_maker(producer.engine, producer.key)
        may_begin = not (is_sample(request.request_id) or self._pages.is_staged)
        self._early.follow(request, name, producer, may_begin=may_begin)

    def _begin_turn(self, request: Request) -> None:
        """Check the ticket with which a request continues a conversation.

        If the ticket is refused, or the prompt has another beginning, nothing is loaded, and the
        engine computes the whole prompt.
        """
        try:
            ticket = self._admit_maker(request)
            common = self._common_tokens(request, ticket)
        except TicketError as error:
            _log_turn_refusal(request, error)
            self._metrics.add(REFUSED, reason=error.reason.value)
            return
        if common < ticket.tokens:
            self._metrics.add(EDITED_HISTORIES)
        if common:
            self._wait(request, replace(ticket, tokens=common, blocks=None))
        else:
            self._reports.nothing_loaded(
                request.request_id,
                ticket,
                f"the prompt does not begin with its {ticket.tokens} tokens",
            )

    def _wait(self, request: Request, ticket: Ticket) -> None:
        """Record that a request waits for blocks, to load from the hold of its ticket."""
        self._waiting[request.request_id] = ticket
        self._users.add(RequestId(request.request_id), ticket)
        self._prepare.append(ticket)
        if self._directory is not None:
            self._directory.begin(request.request_id, ticket)

    def num_matched_tokens(self, request: Request, computed: int) -> int | None:
        """Return how many tokens of a request, beyond the cached ones, are to be loaded.

        The tokens of a refused ticket count, too, so that vLLM waits for a load, which is then
        reported as failed. The next turn of a conversation loads nothing if fewer tokens than
        ``recompute_threshold`` are to be loaded. vLLM may call this several times for a request; a
        call changes nothing.

        Args:
            request: vLLM's request.
            computed: How many of the request's tokens are cached here already.

        Returns:
            The number of tokens; 0 if the request has no ticket. ``None`` if the request has to
            wait for the engine that prefills: until that has begun, or, if the load may not begin
            early, until it has made the ticket. Also ``None`` while it waits for host pages; if it
            has waited too long, its load fails.
        """
        early = self._early.get(request.request_id)
        if early is not None:
            self._take_news(early)
        entry = self._waiting.get(request.request_id)
        if entry is None:
            return self._num_early_tokens(early, computed) if early is not None else 0
        tokens = max(0, self._tokens_to_have(request, entry) - computed)
        if tokens and isinstance(entry, Ticket) and self._waits_for_host_pages(request, entry):
            return None
        return 0 if self._is_turn(request) and tokens < self._recompute_threshold else tokens

    def set_host_pages(self, host: HostPages) -> None:
        """Set the host pages that loads fill, where the cache is staged.

        Args:
            host: The host pages; none is taken.
        """
        self._pages = HostPageSource(self._groups, host, use="loads")

    def update_metrics(self) -> None:
        """Set the metrics of the host pages, where the cache is staged."""
        self._pages.update_metrics(self._metrics)

    def _waits_for_host_pages(self, request: Request, ticket: Ticket) -> bool:
        """Return whether a request must wait for host pages before it gets blocks.

        If it has waited too long, its load will be reported as failed.

        Args:
            request: vLLM's request.
            ticket: Its ticket.
        """
        try:
            return self._pages.waits(request.request_id, self._tokens_to_have(request, ticket))
        except NoHostPagesError as error:
            del self._waiting[request.request_id]
            self._refuse_host_pages(request, ticket, error)
            return False

    def _refuse_host_pages(self, request: Request, ticket: Ticket, error: NoHostPagesError) -> None:
        """Give up the ticket of a request that does not wait any more."""
        self._release_unused(request.request_id, ticket, "it has no host pages")
        self._refuse(request, TicketError(str(error), reason=TicketReason.HOST_PAGES))

    def _num_early_tokens(self, early: EarlyRequest, computed: int) -> int | None:
        """Return ``num_matched_tokens`` of a request whose ticket has not come."""
        if early.unused is not None:  # vLLM has preempted it since
            return 0
        if early.part is None:
            return None
        tokens = max(0, self._tokens_to_have(early.request, early.part) - computed)
        if tokens and not self._early.has_room(early, num_blocks(self._groups, tokens)):
            return None
        return tokens

    def _take_news(self, early: EarlyRequest) -> None:
        """Act on what the engine that prefills a request has said since the last call."""
        news = self._early.take(early)
        if isinstance(news, Part):
            self._take_part(early, news)
        elif news is not None:
            self._early.end(early.request.request_id)
            self._give_up_early(early, news)

    def _take_part(self, early: EarlyRequest, part: Part) -> None:
        """Use a newer part of a request's ticket, or the ticket.

        Args:
            early: The request.
            part: The part.
        """
        request, ticket = early.request, part.ticket
        loading = self._loading.get(request.request_id) if early.blocks else None
        if part.is_last:
            self._early.end(request.request_id)
        if loading is not None:
            self._parts[request.request_id] = part
            loading.ticket = ticket
            if part.is_last:  # So that requests which come with the same ticket know of this load.
                self._users.add(RequestId(request.request_id), ticket)
                self._users.order(RequestId(request.request_id))
        elif part.is_last:
            self._wait(request, ticket)
            if early.unused is not None:
                del self._waiting[request.request_id]
                self._release_unused(request.request_id, ticket, early.unused)
        elif self._directory is not None and early.unused is None:
            self._directory.begin(request.request_id, ticket)

    def _give_up_early(self, early: EarlyRequest, error: KVFerryError) -> None:
        """Have a request fail whose ticket will not come, or whose part of it is refused.

        Args:
            early: The request, which is not followed any more.
            error: Why.
        """
        request = early.request
        if early.unused is not None:  # it has ended, or needed nothing
            return
        if early.blocks:
            _log_no_ticket(early, error)
            self._parts.pop(request.request_id, None)
            self._aborted.append(request.request_id)
            return
        if self._directory is not None:
            self._directory.end(request.request_id)
        if isinstance(error, TicketError):
            self._refuse(request, error)
        else:
            _log_no_ticket(early, error)
            self._metrics.add(FAILED)
            self._waiting[request.request_id] = TicketError(str(error))

    def blocks_allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Queue the load of a request, or only a "done" to the producer if nothing is to be loaded.

        After "done", the producer frees the pages that it has kept for the request. If the ticket
        was refused, the failure of the load is queued instead. Called when vLLM has allocated
        blocks for the request. ``drain`` returns what is queued.

        Args:
            request: vLLM's request; ignored if it has no ticket.
            blocks: The request's blocks.
            external: How many of the request's tokens are to be loaded into the blocks.
        """
        entry = self._waiting.pop(request.request_id, None)
        if entry is None:
            self._early_blocks_allocated(request.request_id, blocks, external)
        elif isinstance(entry, Ticket):
            if external:
                self._begin_load(request, entry, blocks, external)
            else:
                self._release_unused(request.request_id, entry, "it needs none, or too few tokens")
        elif external:
            self._loading[request.request_id] = None
            self._refused.append((request.request_id, str(entry)))

    def _early_blocks_allocated(
        self, request_id: str, blocks: KVCacheBlocks, external: int
    ) -> None:
        """Queue the load of a request whose ticket has not come, if its room is followed.

        Args:
            request_id: vLLM's id of the request.
            blocks: The request's blocks.
            external: How many of the request's tokens are to be loaded into the blocks.
        """
        early = self._early.get(request_id)
        if early is None or early.blocks or early.unused is not None:
            return
        if external and early.part is not None:
            self._early.begin(early, num_blocks(self._groups, external))
            self._begin_load(early.request, early.part, blocks, external)
        else:
            early.unused = "it needs none, or too few tokens"

    def request_finished(self, request: Request) -> None:
        """Abort the load of a request that ended, or tell the producer that none will come.

        Called when vLLM has finished or aborted the request. If the request never had a load, the
        producer is told "done", so that it frees the pages, unless other requests may load them. If
        the producer has not made the ticket yet, it is told when it has. Nothing happens if the
        load is over.

        Args:
            request: vLLM's request.
        """
        self._end_early(request.request_id)
        self._pages.cancel(request.request_id)
        entry = self._waiting.pop(request.request_id, None)
        if isinstance(entry, Ticket):
            self._release_unused(request.request_id, entry, "it ended before it had blocks")
        elif request.request_id in self._loading:
            self._aborted.append(request.request_id)
            if (loading := self._loading[request.request_id]) is not None:
                loading.is_aborted = True
        self._loaded.discard(request.request_id)
        self._first_tokens.pop(request.request_id, None)

    def first_tokens(self, request_id: str) -> tuple[int, ...]:
        """Return, for each group, the first token that a request's load has written.

        Returns:
            The tokens' indices; empty if the load has filled all pages whole, or there was none.
        """
        return self._first_tokens.get(request_id, ())

    def _end_early(self, request_id: str) -> None:
        """End an early load of a request that ended, or wait for its ticket to give it back."""
        early = self._early.get(request_id)
        if early is None:
            return
        if early.blocks:
            self._early.end(request_id)
            self._parts.pop(request_id, None)
        else:
            early.unused = "it ended before it had blocks"
            if self._directory is not None:
                self._directory.end(request_id)

    def loads_reported(self, records: Mapping[str, LoadRecord]) -> None:
        """Record the figures of loads that have ended on some ranks, for ``loads_finished``.

        Args:
            records: The figures of each request's load on the ranks that report it in this step.
        """
        for request_id, record in records.items():
            if (loading := self._loading.get(request_id)) is not None:
                before = loading.record
                loading.record = record if before is None else before.combine(record)

    def loads_finished(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> None:
        """Count loads that have ended on all workers, as succeeded or failed.

        Args:
            request_ids: vLLM's ids of the requests; those of other connectors are ignored.
            failed: Those of ``request_ids`` whose load failed.
        """
        for request_id in request_ids:
            loading = self._loading.pop(request_id, None)
            self._pages.give_back(request_id)
            if loading is None:
                continue
            self._early.end(request_id)  # if it has failed before its ticket came
            self._parts.pop(request_id, None)
            # vLLM calls this when every rank has reported the load. Ranks end loads in different
            # orders, some before they hear of the next load. Only a load that all ranks have
            # reported counts as over: no rank reads for it any more when "done" is sent.
            loaded = request_id not in failed
            self._users.over(RequestId(request_id), loaded=loaded)
            if self._directory is not None:
                self._directory.end(request_id)
            if not loading.is_aborted:
                self._loaded.add(request_id)
                if loaded and loading.record is not None and loading.record.first_tokens:
                    self._keep_partial_pages_out(request_id, loading.record.first_tokens)
            if request_id in failed:
                self._metrics.add(FAILED)
                self._reports.failed(loading)
            else:
                self._metrics.add(LOADS)
                self._metrics.add(TOKENS, loading.tokens)
                self._metrics.add(EARLY_LOADS, int(loading.is_early))
                self._reports.loaded(loading)

    def _keep_partial_pages_out(self, request_id: str, first_tokens: Sequence[int]) -> None:
        """Keep the pages that a load has not filled whole out of the prefix cache."""
        if self._prefix_cache.keep_out(request_id, first_tokens):
            self._first_tokens[request_id] = tuple(first_tokens)

    def loaded_request_waits(self, scheduler_output: SchedulerOutput) -> bool:
        """Return whether a request whose load is over waits for blocks for the rest of its prompt.

        vLLM calls no hook for such a request. It waits for blocks if it is not computed although
        nothing else is. While other requests are computed, it may wait for its turn; and they will
        lack blocks before long, or end.

        Must be called once, at the end of each scheduling pass.

        Args:
            scheduler_output: vLLM's plan of the step.
        """
        if not self._loaded:
            return False
        self._loaded.difference_update(scheduler_output.num_scheduled_tokens)
        return bool(self._loaded) and scheduler_output.total_num_scheduled_tokens == 0

    def drain(self) -> LoadMessages:
        """Return the messages to the workers that were queued since the last call."""
        if self._early.pending:
            for early in self._early:
                self._take_news(early)
        for ticket in self._users.take_unused():
            self._loads.append(self._release_only(ticket.request, ticket, shared=False))
            if self._directory is not None:
                self._directory.ask(ticket)
        messages = LoadMessages(
            prepare=tuple(self._prepare),
            loads=tuple(self._loads),
            parts=dict(self._parts),
            refused=tuple(self._refused),
            aborted=tuple(self._aborted),
        )
        for sent in (self._prepare, self._loads, self._parts, self._refused, self._aborted):
            sent.clear()
        return messages

    @property
    def pending(self) -> bool:
        """Whether ``drain`` has messages to return, or will have some that no request waits for."""
        messages = self._prepare or self._loads or self._parts or self._refused or self._aborted
        early = self._early.pending or self._early.waits_to_release
        return bool(messages) or self._users.pending or early

    @property
    def follows(self) -> bool:
        """Whether requests wait for what the engines that prefill them say."""
        return bool(self._early)

    def follows_request(self, request_id: str) -> bool:
        """Return whether a request, which may have ended, waits for what its prefill engine says.

        Args:
            request_id: vLLM's id of the request.
        """
        return self._early.get(request_id) is not None

    def _admit(self, request: Request) -> Ticket:
        """Check the ticket in a request's ``kv_transfer_params``, and return it.

        Raises:
            TicketError: This engine may not load; or the ticket is malformed, is not signed as
                required, is of this engine itself or of one to which this engine may not connect,
                or was made for another prompt or number of tokens.
        """
        ticket = self._admit_maker(request)
        if self._verify_prompt:
            self._check_prompt(request, ticket)
        self._check_tokens(request, ticket.tokens)
        return ticket

    def _common_tokens(self, request: Request, ticket: Ticket) -> int:
        """Return how many first tokens of a prompt can be loaded with a conversation's ticket.

        They are compared with ``verify_prompt`` false, too.

        Args:
            request: vLLM's request, the conversation's next turn.
            ticket: The ticket.

        Returns:
            The number of tokens; 0 if the model has recurrent states or attention windows, which
            can be used after exactly the ticket's tokens, and the prompt has not all of these.

        Raises:
            TicketError: The content of the request's LoRA adapter is not known here.
        """
        try:
            adapter = self._adapter_content(request)
        except AdapterError as exc:
            raise TicketError(str(exc), reason=TicketReason.ADAPTER) from exc
        common = common_tokens(request, ticket, adapter)
        return 0 if self._needs_exact_length and common != ticket.tokens else common

    def _is_turn(self, request: Request) -> bool:
        """Return whether a request continues a conversation with the ticket of its last answer.

        That is a request that is prefilled here for another engine, with a ticket in its params.
        """
        params = request.kv_transfer_params or {}
        is_prefill = params.get("do_remote_decode") and not params.get("do_remote_prefill")
        has_ticket = KEY in params or params.get("remote_block_ids")
        return self._continues and bool(is_prefill and has_ticket)

    def _admit_maker(self, request: Request) -> Ticket:
        """Return the ticket in a request's ``kv_transfer_params`` if its maker is admitted.

        Raises:
            TicketError: This engine may not load; or the ticket is malformed, is not signed as
                required, or is of this engine itself or of one to which this engine may not
                connect.
        """
        self._check_may_load()
        ticket = read_ticket(
            request.kv_transfer_params, self._security.secrets, prompt=request.num_prompt_tokens
        )
        self._check_maker(ticket.engine, ticket.key)
        return ticket

    def _check_part(self, request: Request, part: Part) -> None:
        """Refuse a part of a ticket that does not fit a request.

        The prompt is compared with ``verify_prompt`` false, too: it is not the router that hands
        over a part, and an older build has one ticket for all requests with one ``transfer_id``.

        Raises:
            TicketError: This engine may not connect to the one that made it; or it was made for
                another prompt or number of tokens.
        """
        self._check_maker(part.ticket.engine, part.ticket.key)
        self._check_prompt(
            request,
            part.ticket,
            hint=", or its transfer_id was used for another request within the last minute, which "
            "an engine of an older kvferry cannot tell from this one: let the router use each once",
        )
        self._check_tokens(request, part.total)

    def _check_may_load(self) -> None:
        """Refuse any ticket if this engine's ``kv_role`` does not let it load.

        Raises:
            TicketError: This engine may not load.
        """
        if not self._may_load:
            raise TicketError(
                'this engine\'s kv_role is "kv_producer", so it may not load: set "kv_consumer" or '
                '"kv_both"',
                reason=TicketReason.ROLE,
            )

    def _check_prompt(self, request: Request, ticket: Ticket, hint: str = "") -> None:
        """Refuse a ticket that was made for another prompt, or with another LoRA adapter.

        Args:
            request: vLLM's request.
            ticket: The ticket.
            hint: What else may be the reason, for the error.

        Raises:
            TicketError: The digests differ, or the content of the adapter here is not known.
        """
        try:
            adapter = self._adapter_content(request)
        except AdapterError as exc:
            raise TicketError(str(exc), reason=TicketReason.ADAPTER) from exc
        if prompt_digest(request, ticket.tokens, adapter) != ticket.digest:
            if index := prompt_index(request.request_id):
                raise TicketError(
                    f"it is that of the first prompt of a list, and this is prompt {index + 1} of "
                    "it: vLLM answers a completion request with the first prompt's ticket only, so "
                    "send each prompt in a request of its own, or set kv_load_failure_policy to "
                    "'recompute'",
                    reason=TicketReason.LIST,
                )
            hints = f"{_media_hint(request)}{self._adapter_hint(request)}{hint}"
            raise TicketError(
                f"it was made for another prompt than this one of {request.num_prompt_tokens} "
                f"tokens{hints} (producer's request {ticket.request!r}, {ticket.tokens} tokens)",
                reason=TicketReason.PROMPT,
            )

    def _adapter_hint(self, request: Request) -> str:
        """Return how LoRA adapters may be the reason for another digest; empty without LoRA."""
        if (lora := request.lora_request) is not None:
            return f", or with other weights than adapter {lora.lora_name[:64]!r} has here"
        if self._lora_enabled:
            return ", or with a LoRA adapter, while this request has none"
        return ""

    def _check_maker(self, engine: str, key: bytes) -> None:
        """Refuse a ticket of this very engine, or of one to which it may not connect.

        Args:
            engine: The id of the engine that the ticket names.
            key: The public key of its side channel.

        Raises:
            TicketError: The ticket is refused.
        """
        try:
            self._security.access.check_server(key)
        except HandshakeError as exc:
            raise TicketError(f"engine {engine!r}: {exc}", reason=TicketReason.ADMISSION) from exc
        if engine == self._engine:
            raise TicketError(
                f"it was made by this very engine, {self._engine!r}", reason=TicketReason.OWN
            )

    def _check_tokens(self, request: Request, tokens: int) -> None:
        """Refuse a ticket that covers another number of tokens than this engine needs.

        The number matters only if the model has recurrent states or attention windows: these can be
        used only after exactly the tokens that they were computed for. For a request with
        ``skip_reading_prefix_cache``, the number never matters, because vLLM loads nothing.

        Args:
            request: vLLM's request.
            tokens: How many of the prompt's tokens the ticket covers.

        Raises:
            TicketError: The number matters, and ``tokens`` is not ``handed_over_tokens``.
        """
        expected = handed_over_tokens(request, self._backoff)
        if (
            self._needs_exact_length
            and tokens != expected
            and not request.skip_reading_prefix_cache
        ):
            raise TicketError(
                f"its states and windows are those after {tokens} tokens, and this engine needs "
                f"those after {expected} of the prompt's {request.num_prompt_tokens}",
                reason=TicketReason.TOKENS,
            )

    def _tokens_to_have(self, request: Request, entry: Ticket | Part | TicketError) -> int:
        """Return how many of a prompt's first tokens are not computed here, but cached or loaded.

        Args:
            request: vLLM's request.
            entry: The request's ticket, a part of it, or why it was refused.
        """
        if self._is_turn(request):  # prefilled here, so its prompt is truncated already
            total = request.num_prompt_tokens
        else:
            total = handed_over_tokens(request, self._backoff)
        if isinstance(entry, Ticket):
            total = min(total, entry.tokens)
        elif isinstance(entry, Part):
            total = min(total, entry.total)
        # The last token is computed here, from the states before it. A prompt too short to be
        # truncated was computed whole, so its states are past that token and cannot be used.
        return 0 if self._needs_exact_length and total >= request.num_prompt_tokens else total

    def _begin_load(
        self, request: Request, made: Ticket | Part, blocks: KVCacheBlocks, tokens: int
    ) -> None:
        """Queue the load that fills a request's blocks.

        Args:
            request: vLLM's request.
            made: The request's ticket, or the part that has come of it.
            blocks: The request's blocks.
            tokens: How many tokens are to be loaded.
        """
        try:
            load = self._load(request, made, blocks, tokens)
        except NoHostPagesError as error:
            self._fail_unplaced(request, made, error)
            return
        self._loads.append(load)
        self._loading[request.request_id] = LoadingRequest(
            request_id=request.request_id,
            ticket=load.ticket,
            tokens=tokens,
            begun=time.time(),
            headers=request.trace_headers,
            is_early=load.is_early,
        )

    def _fail_unplaced(
        self, request: Request, made: Ticket | Part, error: NoHostPagesError
    ) -> None:
        """Queue the failure of a load for which there are too few host pages."""
        if isinstance(made, Ticket):  # always, where the cache is staged
            self._refuse_host_pages(request, made, error)
        refusal = self._waiting.pop(request.request_id, None)
        self._loading[request.request_id] = None
        self._refused.append((request.request_id, str(refusal)))

    def _load(
        self, request: Request, made: Ticket | Part, blocks: KVCacheBlocks, tokens: int
    ) -> Load:
        """Return the load that fills a request's blocks.

        Raises:
            NoHostPagesError: There are too few.
        """
        is_early = isinstance(made, Part)
        last = self._tokens_to_have(request, made)
        wanted = [group.consumer_pages(blocks.blocks[group.index], last) for group in self._groups]
        lists = [pages.ids.tolist() for _, pages in wanted]
        placed, copy = self._pages.place(request.request_id, lists, tokens)
        return Load(
            request=RequestId(request.request_id),
            ticket=made.ticket if isinstance(made, Part) else made,
            ranges=tuple(tokens for tokens, _ in wanted),
            local=tuple(
                replace(pages, ids=np.array(ids, dtype=np.int64))
                for ids, (_, pages) in zip(placed, wanted, strict=True)
            ),
            shared=not is_early and self._shares(request.request_id),
            is_early=is_early,
            copy=copy,
        )

    def _shares(self, request_id: str) -> bool:
        """Record that a request's load is queued, and return whether others may load from its hold.

        Returns:
            Whether other requests may still load from the same hold (the pages that the producer
            keeps). If so, this load must not tell the producer "done"; a later load will.
        """
        return self._users.order(RequestId(request_id), siblings=is_sample(request_id))

    def _release_unused(self, request_id: str, ticket: Ticket, why: str) -> None:
        """Queue a "done" to the producer for a request that loads nothing (``_release_only``).

        The producer keeps the pages if other requests may still load them.

        Args:
            request_id: vLLM's id of the request.
            ticket: The request's ticket.
            why: Why it loads nothing, for the log.
        """
        self._reports.nothing_loaded(request_id, ticket, why)
        self._pages.cancel(request_id)
        shared = self._shares(request_id)
        self._loads.append(self._release_only(request_id, ticket, shared=shared))
        self._users.over(RequestId(request_id), loaded=False)
        if self._directory is not None:
            self._directory.end(request_id)

    def _release_only(self, request_id: str, ticket: Ticket, *, shared: bool) -> Load:
        """Return a load that reads nothing, and only tells the producer that it may free the pages.

        Args:
            request_id: vLLM's id of the request.
            ticket: The request's ticket.
            shared: Whether other requests may still load these pages. Then the load does not let
                the producer free them.
        """
        groups = len(self._groups)
        return Load(
            request=RequestId(request_id),
            ticket=ticket,
            ranges=(None,) * groups,
            local=(NO_PAGES,) * groups,
            report=False,
            shared=shared,
        )


def _media_hint(request: Request) -> str:
    """Return how media may be the reason for another digest; empty for a prompt of text."""
    if not request.mm_features:
        return ""
    return ", or for other media (vLLM up to 0.30 identifies media otherwise than later versions)"


def _log_refusal(request: Request, error: TicketError) -> None:
    """Log that a request's ticket was refused, with the cause and what made the ticket."""
    params = request.kv_transfer_params or {}
    logger.warning(
        "request %s: ticket refused: %s (stage ticket, cause %s, of engine %s, request %s)",
        on_one_line(request.request_id),
        with_remedy(error),
        error.reason,
        _named(params.get("remote_engine_id"), 64),
        _named(params.get("remote_request_id"), MAX_ID_LOGGED),
    )


def _log_no_ticket(early: EarlyRequest, error: KVFerryError) -> None:
    """Log that a request fails because its ticket does not come, or a part of it is refused."""
    logger.warning(
        "request %s: the engine that prefills it made no ticket that can be used: %s (stage early, "
        "cause %s, of engine %s)",
        on_one_line(early.request.request_id),
        with_remedy(error),
        error.cause,
        on_one_line(early.producer.engine, 64),
    )


def _log_turn_refusal(request: Request, error: TicketError) -> None:
    """Log that the ticket of a conversation was refused, so that the whole prompt is computed."""
    params = request.kv_transfer_params or {}
    logger.warning(
        "request %s: ticket of the last answer refused, so the whole prompt is computed: %s "
        "(stage ticket, cause %s, of engine %s, request %s)",
        on_one_line(request.request_id),
        error,
        error.reason,
        _named(params.get("remote_engine_id"), 64),
        _named(params.get("remote_request_id"), MAX_ID_LOGGED),
    )


def _named(value: object, limit: int) -> str:
    """Return a client's value for the log: a text's beginning, or only the type of anything else.

    Other values may be large, and the scheduler must not spend seconds on their text.

    Args:
        value: The value, from the JSON of a request.
        limit: The most characters of a text.
    """
    return on_one_line(value, limit) if isinstance(value, str) else f"({type(value).__name__})"
