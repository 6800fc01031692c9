"""The scheduler half of an engine that prefills for other engines (PS in docs/protocol.md).

A request that asks for ``do_remote_decode`` is prefilled here. When the request finishes, its
blocks are held and its ``kv_transfer_params`` become a ticket, with which another engine reads the
blocks. The hold ends when that engine has read them, when the lease runs out, or when this engine
needs the blocks. A hold is silent if no consumer has given a sign of life for it for some time.
While a request is computed, ``PromptParts`` publishes what is computed already.

With ``bidirectional_kv_xfer``, the answers to requests that were prefilled elsewhere get tickets,
too: for the engine that prefills the next turn of their conversation. See
docs/protocol.md, "The second turn".
"""

from __future__ import annotations

import logging
import math
import secrets as randomness
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.core.error_causes import on_one_line
from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.digest import SALT_BYTES, BlockDigests, digest_block
from kvferry.core.lifecycle.holds import EndedHold, Hold, HoldEnd, RequestId
from kvferry.core.lifecycle.host_pages import HostPages, Reservation
from kvferry.core.lifecycle.rooms import Rooms
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.silent_holds import BlockPressure, Silence
from kvferry.core.metrics import Metric, Metrics
from kvferry.core.security import TicketKey, TicketSecrets
from kvferry.integrations.vllm.adapter_files import AdapterError
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.metric_definitions import (
    CONVERSATION_HOLDS,
    CONVERSATION_PAGES,
    HELD,
    HELD_FRACTION,
    HOLDS,
    NO_TICKETS,
    HoldOutcome,
    NoTicket,
)
from kvferry.integrations.vllm.prompt_parts import PromptParts
from kvferry.integrations.vllm.prompts import (
    block_digests,
    cuts_media,
    has_chain,
    prompt_digest,
    truncate_prompt,
)
from kvferry.integrations.vllm.request_ids import is_sample, prompt_index, without_sample
from kvferry.integrations.vllm.request_reports import HeldRequest, RequestReports
from kvferry.integrations.vllm.staging import count_host_pages, place, reserve_count, why_none
from kvferry.integrations.vllm.ticket_params import ParallelSizes, TicketParams, room_name

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvferry.integrations.vllm.side_channel import EngineSideChannel

logger = logging.getLogger(__name__)

COMPLETE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Names of vLLM's ``RequestStatus`` for requests that ended with their whole prompt computed."""

COPY_SECONDS = 1.0
"""For how long after its ticket a request's blocks count as soon free, where they are copied."""

LOGGED_ONCE = frozenset({NoTicket.ROLE, NoTicket.CUT_MEDIA, NoTicket.LIST})
"""The reasons of which only the first is logged, because every further request would log the same.

The router's settings, the prompts' template or what clients ask for are the cause.
"""

MAX_ENGINES_LOGGED = 4
"""How many engines one log line names."""

TRUNCATED = "_p_side_truncated"
"""Key in a request's params that marks its prompt as truncated already.

A preempted request passes ``on_new_request`` again, and its prompt must not shrink twice.
"""


class Producer:
    """Hold the blocks of requests that other engines decode, and make their tickets.

    Args:
        groups: The engine's cache groups that are transferred.
        metrics: Counts tickets that were not made, and holds by how they ended.
        slots: How many requests can be held at once; the engine's number of blocks.
        lease: Seconds for which a ticket's pages are held unless the consumer renews the lease.
        conversation_ttl: Seconds for which an answer's pages are held until the next turn claims
            them; ``None`` if answers get no tickets.
        backoff: How many tokens at a prompt's end are left to the consumer; see
            ``prefill_backoff``.
        computed: Whether nothing writes to a request's pages after its last token was sampled, so
            that the pages are complete when the ticket is made.
        sizes: The engine's parallelism, for the ticket.
        max_held: How many blocks may be held at once; ``None`` for no limit.
        secrets: The secrets that sign tickets; ``None`` leaves tickets unsigned.
        hands_over: Whether the engine's ``kv_role`` lets other engines load from it.
        adapter_content: Returns the content of a request's LoRA adapter (``Adapters.content``).
        clock: Returns monotonic seconds.
        ticket_key: The key that proves that this engine made a ticket; ``None`` leaves out the
            proof.
        reports: Logs how each request's hold ended.
        rooms: The rooms in which parts of tickets are published; ``None`` for none.
        lookahead: How many tokens behind a chunk of a prompt drafts are written for; see
            ``PromptParts``.
        is_staged: Whether tickets name host pages, to which the blocks are copied. No parts of
            tickets are published then. ``set_host_pages`` says which host pages there are.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        metrics: Metrics,
        slots: int,
        lease: float,
        conversation_ttl: float | None = None,
        backoff: int,
        computed: bool,
        sizes: ParallelSizes,
        max_held: int | None = None,
        secrets: TicketSecrets | None = None,
        hands_over: bool = True,
        clock: Callable[[], float] = time.monotonic,
        ticket_key: TicketKey | None = None,
        adapter_content: Callable[[Request], bytes | None] = lambda request: None,
        reports: RequestReports | None = None,
        rooms: Rooms | None = None,
        lookahead: int = 0,
        is_staged: bool = False,
    ) -> None:
        self._is_staged = is_staged
        self._host = HostPages(range(HOLE + 1, HOLE + 1), patience=0.0)
        # Requests whose blocks are being copied to host pages, with the time of their ticket.
        self._copying: dict[str, float] = {}
        if is_staged:
            max_held = None
        self._adapter_content = adapter_content
        self._reports = reports or RequestReports()
        # Requests with a ticket that not all workers have reported as sent.
        self._held: dict[str, HeldRequest] = {}
        # Of several samples of a prompt, by the id that they share: the one whose pages are held,
        # the prompt's digest, and the ticket. vLLM answers with the ticket of the sample that ends
        # last, so all have this one.
        self._sample_tickets: dict[str, tuple[str, bytes, dict[str, Any]]] = {}
        self._groups = groups
        self._metrics = metrics
        self._needs_exact_length = any(group.needs_exact_length for group in groups)
        self._holds = SchedulerHolds(slots, max_pages=max_held)
        self._max_held = max_held
        self._may_hold = max(slots if max_held is None else max_held, 1)
        self._lease = lease
        self._conversation_ttl = conversation_ttl
        if conversation_ttl is not None and self._needs_exact_length and not computed:
            self._conversation_ttl = None
            logger.warning(
                "bidirectional_kv_xfer: answers get no tickets, because drafts take the states and "
                "windows of this model past an answer's last token; start without "
                "speculative_config"
            )
        # A digest covers whole blocks of every group. States and windows are used for all tokens of
        # a ticket or for none, so that models with these need no digests.
        self._digest_unit = math.lcm(*(group.tokens for group in groups if not group.is_state))
        self._backoff = backoff
        self._computed = computed
        self._sizes = sizes
        self._secrets = secrets
        self._hands_over = hands_over
        self._logged_reasons: set[NoTicket] = set()
        self._clock = clock
        self._pressure = BlockPressure(slots)
        # Requests to which vLLM gave no blocks in this scheduling pass: how many blocks each needs.
        self._blocks_needed: dict[str, int] = {}
        self._running_request_waits = False
        # Those of the last pass. vLLM may pass over a request once for other reasons than blocks.
        self._waited_before: set[str] = set()
        self._ticket_key = ticket_key
        self._parts = PromptParts(
            groups,
            holds=self._holds,
            rooms=Rooms() if rooms is None else rooms,
            lookahead=lookahead,
        )
        # How often each request was preempted before it got the blocks that it has.
        self._preemptions: dict[str, int] = {}

    def on_new_request(self, request: Request) -> None:
        """Remove the last ``backoff`` tokens of a prompt that is prefilled for another engine.

        A prompt stays as it is if it was truncated before, if it is not longer than ``backoff``, if
        the request asks for ``prompt_logprobs``, or if an image would be cut. If this engine's
        ``kv_role`` forbids that other engines load from it, or if nobody would get the ticket, the
        request is counted and logged as one without a ticket. If the request names a room, the room
        is opened.

        Args:
            request: vLLM's request, changed in place.
        """
        params = request.kv_transfer_params or {}
        if self._is_handed_over(request):
            self._parts.open(request)
        if _asks_for_remote_decode(request):
            if not self._hands_over:
                self._refuse_role(request)
            elif prompt_index(request.request_id):
                self._refuse_later_prompt(request)
        if not self._is_handed_over(request) or not self._must_be_truncated(request):
            return
        if cuts_media(request, self._backoff):  # _ticket_tokens then refuses a ticket.
            return
        truncate_prompt(request, self._backoff)
        # Several samples of one prompt may share one dictionary, so it is replaced, not changed.
        request.kv_transfer_params = {**params, TRUNCATED: True}

    def take_on(self, request: Request) -> None:
        """Give a hold (a slot and random bits) to a request that may get a ticket.

        Called when vLLM has allocated blocks for the request. After a preemption, vLLM allocates
        blocks again, and the request gets a new hold: what was published of its pages was of
        others. vLLM calls this also when it goes on with a request whose load has ended, and which
        has its blocks already.

        Args:
            request: vLLM's request; ignored unless it asks for ``do_remote_decode``, or its answer
                is held for the next turn of its conversation.
        """
        if not self._is_handed_over(request) and not self._is_conversation(request):
            return
        if self._preemptions.get(request.request_id) != request.num_preemptions:
            self._preemptions[request.request_id] = request.num_preemptions
            self._holds.take_on(RequestId(request.request_id))

    def request_finished(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        serving: EngineSideChannel,
        first_tokens: Sequence[int] = (),
    ) -> dict[str, Any] | None:
        """Make the ticket of a request that ended, or end its hold if it gets no ticket.

        Args:
            request: vLLM's request.
            block_ids: The ids of the request's blocks, one list per cache group of vLLM.
            serving: This engine and the address of its side channel.
            first_tokens: For each group, the first token that the request's own load has written;
                empty if that has filled all pages whole, or there was none.

        Returns:
            The ticket as ``kv_transfer_params`` for the decoding engine, or ``None`` if no ticket
            is made and vLLM may free the blocks at once. The ticket may be another sample's, whose
            blocks are held instead (``holds``).
        """
        self._preemptions.pop(request.request_id, None)
        ticket = self._make_ticket(request, block_ids, serving, first_tokens)
        self._host.cancel(RequestId(request.request_id))
        self._parts.end(request, ticket)
        return ticket

    def _make_ticket(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        serving: EngineSideChannel,
        first_tokens: Sequence[int],
    ) -> dict[str, Any] | None:
        """Make the ticket of a request that ended, or end its hold; see ``request_finished``."""
        request_id = RequestId(request.request_id)
        is_conversation = self._is_conversation(request)
        if is_conversation:
            tokens = self._conversation_tokens(request)
        else:
            tokens = self._ticket_tokens(request) if self._is_handed_over(request) else 0
        digests = self._ticket_digests(request, tokens) if tokens else None
        shares = is_sample(request_id) and not is_conversation and not _has_room(request)
        if shares and digests is not None:
            shared = self._sample_ticket(request_id, digests[0])
            if shared is not None:
                self._holds.drop(request_id)
                return shared
        held = self._ticket_hold(request, tokens, block_ids) if digests is not None else None
        if held is None or digests is None:
            self._holds.drop(request_id)
            return None
        hold, page_lists = held
        missing = [
            group.missing_tokens(first, token)
            for group, (first, _), token in zip(
                self._groups, page_lists, first_tokens, strict=False
            )
        ]
        logger.debug("request %s: %d tokens in %s are held", request_id, tokens, hold)
        params = self._params(
            serving,
            request=request_id,
            hold=hold,
            pages=[ids for _, ids in page_lists],
            first_index=[first for first, _ in page_lists],
            tokens=tokens,
            digest=digests[0],
            # A ticket with an adapter may be revoked until the next step begins, so nobody may read
            # before that. With asynchronous scheduling, a step that is under way writes the KV of
            # an answer's last token. Host pages are filled later still.
            computed=self._computed
            and request.lora_request is None
            and not (is_conversation or self._is_staged),
            blocks=digests[1],
            missing=missing,
        )
        if shares:
            self._sample_tickets[without_sample(request_id)] = request_id, digests[0], params
        return params

    def _sample_ticket(self, request_id: str, digest: bytes) -> dict[str, Any] | None:
        """Return the ticket of another sample of a prompt, if its pages can still be read.

        Not if the ticket is old: its lease began when that sample ended.
        """
        found = self._sample_tickets.get(without_sample(request_id))
        if found is None or found[1] != digest:
            return None
        sample, _, ticket = found
        held = self._held.get(sample)
        if held is None or held.ended is not None or not self._holds.stands(RequestId(sample)):
            return None
        return ticket if self._clock() < held.made + self._lease / 2 else None

    def holds(self, request_id: str) -> bool:
        """Return whether the blocks of a request that ended are kept for another engine.

        Args:
            request_id: vLLM's id of the request.
        """
        return request_id in self._held

    def _params(self, serving: EngineSideChannel, **facts: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return a ticket or a part of one as ``kv_transfer_params``, proven and signed.

        Args:
            serving: This engine and the address of its side channel.
            facts: The other attributes of ``TicketParams``.
        """
        return TicketParams(
            engine=serving.engine,
            incarnation=serving.incarnation,
            host=serving.host,
            port=serving.port,
            key=serving.key,
            sizes=self._sizes,
            **facts,
        ).params(self._secrets, self._ticket_key)

    def publish_parts(self, scheduler_output: SchedulerOutput, serving: EngineSideChannel) -> None:
        """Publish what the last step has computed of prompts that are decoded elsewhere.

        Where the cache is staged, nothing is published: host pages have nothing of a prompt before
        its end. Must be called once for each step, before ``drain``.

        Args:
            scheduler_output: vLLM's plan of the step.
            serving: This engine and the address of its side channel.
        """
        if self._is_staged:
            return
        for part in self._parts.next_step(scheduler_output):
            request, tokens = part.request, part.tokens
            params = self._params(
                serving,
                request=RequestId(request.request_id),
                hold=part.hold,
                pages=part.pages,
                first_index=[0] * len(part.pages),
                tokens=tokens,
                digest=prompt_digest(request, tokens),
                computed=False,
                total=request.num_prompt_tokens,
            )
            self._parts.publish(part, params)

    def revoke(self, request_ids: Sequence[str]) -> None:
        """End the holds of requests whose tickets were just made and must not be used.

        The tickets do not say ``computed``, so nobody reads the pages before the workers get the
        orders of the next step, which end these holds.

        Args:
            request_ids: vLLM's ids of the requests; those without a ticket are ignored.
        """
        for request_id in request_ids:
            held = self._held.get(request_id)
            is_conversation = held is not None and held.is_conversation
            if self._holds.revoke(RequestId(request_id)) and not is_conversation:
                self._metrics.add(NO_TICKETS, reason=NoTicket.ADAPTER.value)

    def _ticket_digests(
        self, request: Request, tokens: int
    ) -> tuple[bytes, BlockDigests | None] | None:
        """Return the digests for the ticket of a request, or ``None`` if it gets no ticket.

        Args:
            request: vLLM's request.
            tokens: How many tokens the ticket covers.

        Returns:
            The digest over all of these tokens, and for a conversation's ticket one for each block
            of them.
        """
        try:
            adapter = self._adapter_content(request)
        except AdapterError as exc:
            self._no_ticket(request, NoTicket.ADAPTER, str(exc))
            return None
        blocks = None
        if self._is_conversation(request):
            every = digest_block(tokens, self._digest_unit)
            covered = 0 if self._needs_exact_length else tokens
            salt = randomness.token_bytes(SALT_BYTES)
            blocks = block_digests(request, covered, every, salt, adapter)
        return prompt_digest(request, tokens, adapter), blocks

    def _ticket_hold(
        self, request: Request, tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> tuple[Hold, list[tuple[int, list[int]]]] | None:
        """Return hold and pages for the ticket of a request that ended, and count its blocks.

        They count against ``max_held``; if that is exceeded, the oldest holds are ended.

        Args:
            request: vLLM's request.
            tokens: How many tokens the ticket covers.
            block_ids: The ids of the request's blocks, one list per cache group of vLLM.

        Returns:
            The hold, and for each group the index of the first page and the pages; ``None`` if the
            request gets no ticket.
        """
        page_lists = [
            group.producer_pages(block_ids[group.index], tokens) for group in self._groups
        ]
        if self._is_staged:
            return self._staged_hold(request, tokens, page_lists)
        blocks = frozenset().union(*block_ids) - {HOLE}
        if not self._holds.fits(len(blocks)):
            self._no_ticket(
                request,
                NoTicket.TOO_LARGE,
                f"it has {len(blocks)} blocks, and {self._max_held} may be held: set a larger "
                "max_held_fraction, or decode it here",
            )
            return None
        is_conversation = self._is_conversation(request)
        if is_conversation and not self._holds.has_room(blocks):
            self._no_conversation_ticket(
                request,
                f"it has {len(blocks)} blocks, and with those held for prompts that would be more "
                f"than {self._max_held}, which may be held: set a larger max_held_fraction",
            )
            return None
        hold = self._holds.ticket(
            RequestId(request.request_id),
            self._lease,
            blocks,
            ttl=self._conversation_ttl if is_conversation else None,
        )
        if hold is None:
            self._no_hold(request)
            return None
        self._record_hold(request, tokens, len(blocks))
        return hold, page_lists

    def _staged_hold(
        self, request: Request, tokens: int, page_lists: Sequence[tuple[int, list[int]]]
    ) -> tuple[Hold, list[tuple[int, list[int]]]] | None:
        """Return hold and host pages for the ticket of a request that ended, and order the copy.

        Args:
            request: vLLM's request.
            tokens: How many tokens the ticket covers.
            page_lists: For each group, the index of the first block and the blocks.

        Returns:
            The hold, and ``page_lists`` with host pages; ``None`` if the request gets no ticket.
        """
        request_id = RequestId(request.request_id)
        placed = place(self._host, request_id, [ids for _, ids in page_lists])
        if placed is None:
            count = reserve_count(self._groups, request.num_prompt_tokens)
            why = why_none(self._host, request.request_id, count)
            self._no_ticket(request, NoTicket.HOST_PAGES, why)
            return None
        copy, lists = placed
        hold = self._holds.ticket(request_id, self._lease, frozenset(copy.pages), copy=copy)
        if hold is None:
            self._no_hold(request)
            self._host.give_back(request_id)
            return None
        self._record_hold(request, tokens, len(copy.pages))
        self._copying[request.request_id] = self._clock()
        firsts = [first for first, _ in page_lists]
        return hold, list(zip(firsts, lists, strict=True))

    def _no_hold(self, request: Request) -> None:
        """Count and log that a request gets no ticket because it has no hold."""
        self._no_ticket(
            request,
            NoTicket.NO_HOLD,
            "its id is that of a request whose pages another engine may still read, or no slot was "
            "free: give requests ids of their own",
        )

    def _record_hold(self, request: Request, tokens: int, pages: int) -> None:
        """Count and record the hold of a request that ended.

        Args:
            request: vLLM's request.
            tokens: How many tokens its ticket covers.
            pages: How many pages are held.
        """
        is_conversation = self._is_conversation(request)
        self._metrics.add(_holds_metric(is_conversation), outcome=HoldOutcome.MADE.value)
        self._held[request.request_id] = HeldRequest(
            request_id=request.request_id,
            tokens=tokens,
            blocks=pages,
            made=self._clock(),
            is_conversation=is_conversation,
            headers=request.trace_headers,
        )

    def _no_ticket(self, request: Request, reason: NoTicket, why: str) -> None:
        """Count and log that a request gets no ticket.

        Args:
            request: vLLM's request.
            reason: The reason, for metrics.
            why: The cause and the remedy, for the log.
        """
        if self._is_conversation(request):
            self._no_conversation_ticket(request, why)
            return
        self._metrics.add(NO_TICKETS, reason=reason.value)
        self._metrics.add(HOLDS, outcome=HoldOutcome.REFUSED.value)
        if reason in LOGGED_ONCE & self._logged_reasons:
            return
        self._logged_reasons.add(reason)
        logger.warning(
            "request %s: no ticket is made (stage prefill, cause %s): %s",
            on_one_line(request.request_id),
            reason,
            why,
        )

    def _no_conversation_ticket(self, request: Request, why: str) -> None:
        """Count and log that an answer gets no ticket, so that its conversation is computed again.

        Args:
            request: vLLM's request.
            why: The cause and the remedy, for the log.
        """
        self._metrics.add(CONVERSATION_HOLDS, outcome=HoldOutcome.REFUSED.value)
        self._reports.answer_not_held(request.request_id, why)

    def _refuse_role(self, request: Request) -> None:
        """Say that a request gets no ticket because of this engine's ``kv_role``."""
        self._refuse_early(
            request,
            NoTicket.ROLE,
            'this engine\'s kv_role is "kv_consumer", so no other engine would come for its pages, '
            'and they are not held: set "kv_producer" or "kv_both", or let the router send '
            "do_remote_decode to prefill engines only",
        )

    def _refuse_later_prompt(self, request: Request) -> None:
        """Say that a request gets no ticket because vLLM would not answer with it."""
        self._refuse_early(
            request,
            NoTicket.LIST,
            f"it is prompt {prompt_index(request.request_id) + 1} of a completion request with a "
            "list of prompts, and vLLM answers such a request with the first prompt's ticket only, "
            "so its pages are not held: let clients or the router send each prompt in a request of "
            "its own",
        )

    def _refuse_early(self, request: Request, reason: NoTicket, why: str) -> None:
        """Count and log that a request gets no ticket, and say so in its room."""
        self._no_ticket(request, reason, f"{why}; said once")
        self._parts.refuse(request, why)

    def _refuse_cut_media(self, request: Request) -> None:
        """Count and log that a request gets no ticket because an image would be cut."""
        self._no_ticket(
            request,
            NoTicket.CUT_MEDIA,
            f"its prompt ends with an image, and with this model the last {self._backoff} tokens "
            "are left to decode: an image cannot be computed in two parts, so decode computes the "
            "whole prompt; end prompts with text, as chat templates do; said once",
        )

    def _is_handed_over(self, request: Request) -> bool:
        """Return whether a request is prefilled here for another engine, as ``kv_role`` allows.

        Not if nobody would get its ticket.
        """
        is_asked = self._hands_over and _asks_for_remote_decode(request)
        return is_asked and not prompt_index(request.request_id)

    def _is_conversation(self, request: Request) -> bool:
        """Return whether a request's answer is held for the next turn of its conversation.

        Such a request was to be prefilled by another engine. Whether that succeeded does not
        matter: its pages are complete in the end.
        """
        params = request.kv_transfer_params or {}
        is_answered_here = params.get("do_remote_prefill") and not params.get("do_remote_decode")
        return self._conversation_ttl is not None and bool(is_answered_here)

    def _conversation_tokens(self, request: Request) -> int:
        """Return how many tokens the ticket of an answer covers, or 0 if it gets no ticket.

        The result is 0 if the answer did not come to its end, if the prompt has embeddings, or if
        the model has states or windows that are past the last token that is known. With
        asynchronous scheduling, a step that is under way computes the last token; its pages are
        complete when the device has finished that step, and only then does the slot word say so.
        """
        if request.status.name not in COMPLETE:
            return 0
        if not has_chain(request):
            self._no_conversation_ticket(request, "its prompt has embeddings")
            return 0
        computed: int = request.num_computed_tokens
        if not self._needs_exact_length:
            # A multi-token predictor's pages of the last tokens were made from tokens that are not
            # verified; whoever reads the ticket computes them itself (see ``prefill_backoff``).
            known: int = request.num_tokens
            return max(0, min(computed, known) - self._backoff)
        if computed > request.num_tokens:
            self._no_conversation_ticket(
                request,
                "more was computed than its tokens, so its states and windows are past them",
            )
            return 0
        return computed

    def _ticket_tokens(self, request: Request) -> int:
        """Return how many tokens the ticket of a prompt covers, or 0 if it gets no ticket.

        The result is 0 if the prompt was not computed to the end. The result is also 0 if the model
        has recurrent states or attention windows, and more tokens were computed than decode needs:
        the states and windows are then those of a later token. This is counted and logged, and so
        is a prompt that was not truncated because an image would have been cut.
        """
        if request.status.name not in COMPLETE:
            return 0
        tokens: int = min(request.num_computed_tokens, request.num_prompt_tokens)
        if self._would_cut_media(request):
            self._refuse_cut_media(request)
            return 0
        if self._needs_exact_length and request.num_computed_tokens != tokens:
            self._no_ticket(
                request,
                NoTicket.WENT_ON,
                f"{request.num_computed_tokens} tokens were computed, and the states and windows "
                f"of its prompt of {request.num_prompt_tokens} are gone: prefill with max_tokens 1",
            )
            return 0
        if self._needs_exact_length and self._was_left_whole(request):
            self._no_ticket(
                request,
                NoTicket.SCORED,
                f"it asked for prompt_logprobs, so all {tokens} tokens were computed, and the "
                "states and windows that decode starts from are gone: ask for them on decode, "
                "which then computes the prompt itself",
            )
            return 0
        return tokens

    def _must_be_truncated(self, request: Request) -> bool:
        """Return whether a prompt has to be truncated and was not truncated before."""
        if (request.kv_transfer_params or {}).get(TRUNCATED) or request.skip_reading_prefix_cache:
            return False
        tokens: int = request.num_prompt_tokens
        return bool(self._backoff) and tokens > self._backoff

    def _would_cut_media(self, request: Request) -> bool:
        """Return whether a prompt was not truncated because an image would have been cut."""
        return self._must_be_truncated(request) and cuts_media(request, self._backoff)

    def _was_left_whole(self, request: Request) -> bool:
        """Return whether ``prompt_logprobs`` kept a prompt from being truncated."""
        scored: bool = request.skip_reading_prefix_cache
        return scored and request.num_prompt_tokens > self._backoff

    def holds_ended(self, ended: Mapping[str, EndedHold]) -> None:
        """Record how ranks have ended holds, for ``sends_finished``.

        Args:
            ended: How the hold of each request ended on the ranks that report it in this step.
        """
        for request_id, hold in ended.items():
            if (held := self._held.get(request_id)) is not None:
                held.ended = hold if held.ended is None else held.ended.combine(hold)

    def sends_finished(self, request_ids: Iterable[str]) -> None:
        """Free the hold's slot of each request that all workers have reported as sent.

        Where the cache is staged, only the blocks of these requests are free, not their slots and
        host pages (``holds_over``).

        Args:
            request_ids: vLLM's ids of the requests.
        """
        if not self._is_staged:
            self._end(request_ids)
            return
        for request_id in request_ids:
            self._copying.pop(request_id, None)

    def holds_over(self, over: Mapping[int, Sequence[str]]) -> None:
        """Free slot and host pages of each request that all ranks have reported as over.

        Args:
            over: vLLM's ids of the requests whose host pages a rank no longer uses, by rank.
        """
        for rank, request_ids in over.items():
            self._end(each for each in request_ids if self._host.over(RequestId(each), rank))

    def _end(self, request_ids: Iterable[str]) -> None:
        """Free the hold's slot of requests, and report how their holds ended."""
        for request_id in request_ids:
            given_up = self._holds.sent(RequestId(request_id))
            if (held := self._held.pop(request_id, None)) is not None:
                self._report_ended(held, given_up)
            name = without_sample(request_id)
            if name in self._sample_tickets and self._sample_tickets[name][0] == request_id:
                del self._sample_tickets[name]

    def _report_ended(self, held: HeldRequest, given_up: HoldEnd | None) -> None:
        """Count and log how the hold of a request ended.

        If no rank has reported that, the pages were read: ranks may leave out this usual end.

        Args:
            held: The request.
            given_up: Why its ticket was given up; ``None`` if it was not.
        """
        found = held.ended.end if held.ended is not None else None
        end = given_up or found or HoldEnd.READ
        self._parts.hold_ended(held.request_id, used=end in (HoldEnd.READ, HoldEnd.ABANDONED))
        metric = _holds_metric(held.is_conversation)
        self._metrics.add(metric, outcome=HoldOutcome(end.value).value)
        self._reports.hold_ended(held, end, self._clock() - held.made)

    def reset(self) -> None:
        """End every hold that a ticket names: pages of these tickets can no longer be loaded.

        vLLM gets each request's blocks back when all workers have reported the request as sent.
        """
        self._holds.reset()

    def update_metrics(self) -> None:
        """Set the metrics of held blocks, and log the holds evicted since the last call.

        While more than ``max_held`` blocks are held, the oldest hold is ended (evicted).
        """
        if self._is_staged:
            count_host_pages(self._metrics, self._host, "holds")
        self._metrics.set(HELD, self._holds.held_pages)
        reclaimable = self._holds.reclaimable_pages
        if self._conversation_ttl is not None:
            self._metrics.set(CONVERSATION_PAGES, reclaimable)
        self._metrics.set(HELD_FRACTION, (self._holds.held_pages - reclaimable) / self._may_hold)
        for request_id in self._holds.take_evicted():
            logger.warning(
                "request %s: its ticket was given up before it was used (stage held, cause "
                "evicted): more than %s blocks were held for other engines; decode requests "
                "sooner, or set a larger max_held_fraction",
                on_one_line(request_id),
                self._max_held,
            )

    def drain(self) -> HoldOrders:
        """Return the queued orders to workers: which holds to begin, make readable or end."""
        return self._holds.drain()

    @property
    def pending(self) -> bool:
        """Whether host pages are held, so that ranks have to report when they are over."""
        return bool(self._host.taken)

    def set_host_pages(self, host: HostPages) -> None:
        """Set the host pages for the requests that are prefilled here, where the cache is staged.

        Args:
            host: The host pages; none is taken.
        """
        self._host = host
        self._may_hold = max(host.total, 1)
        self._pressure = BlockPressure(host.total, host.ranks)

    def waits_for_host_pages(self, request: Request) -> bool:
        """Return whether a request must wait for host pages before it gets blocks.

        Host pages for its whole prompt are reserved. If it has waited too long, it waits no longer
        and gets no ticket. vLLM lets a request that may not use cached prefixes (such as one with
        prompt_logprobs) begin whatever this returns; it keeps its turn for host pages meanwhile.

        Args:
            request: vLLM's request.
        """
        if not self._is_staged or not self._is_handed_over(request):
            return False
        count = reserve_count(self._groups, request.num_prompt_tokens)
        answer = self._host.reserve(RequestId(request.request_id), count)
        return answer is Reservation.WAITING

    # The methods below free held blocks when requests of this engine wait for blocks.

    def set_rank_count(self, ranks: int) -> None:
        """Set how many ranks report silent holds (``silence_reported``).

        Args:
            ranks: The number of ranks that published a layout; other ranks report nothing.
        """
        self._pressure.ranks = ranks

    def allocation_attempted(self, request: Request, computed: int) -> None:
        """Record that vLLM tries to allocate blocks for a request, and how many blocks it needs.

        If ``blocks_allocated`` does not follow in the same scheduling pass, the request counts as
        one that waits for blocks.

        Args:
            request: vLLM's request.
            computed: How many of the request's tokens are cached here already.
        """
        tokens = request.num_tokens - computed
        self._blocks_needed[request.request_id] = sum(
            1 if group.is_state else -(-tokens // group.tokens) for group in self._groups
        )

    def blocks_allocated(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Record that vLLM allocated blocks for a request, so that it no longer waits for blocks.

        Args:
            request: vLLM's request.
            blocks: All blocks that it has.
        """
        self._blocks_needed.pop(request.request_id, None)
        self._parts.place(request, blocks)

    def has_pending_block_frees(self) -> bool:
        """Record that a running request waits for a block, for ``relieve_block_pressure``.

        Holds of conversations are ended at once. Where the cache is staged, nothing is recorded.

        Returns:
            Whether held blocks will be free soon, so that vLLM need not preempt a request.
        """
        if self._is_staged:
            now = self._clock()
            return any(now < made + COPY_SECONDS for made in self._copying.values())
        self._running_request_waits = True
        if not self._holds.ending:
            self._holds.reclaim(self._pressure.enough(0))
        return self._holds.ending

    def relieve_block_pressure(self, *, request_waits: bool = False) -> bool:
        """If requests wait for blocks, end holds of conversations, and otherwise silent holds.

        The consumer of a silent hold seems to be gone. Where the cache is staged, requests that
        wait for host pages count, and no others.

        Must be called once, at the end of each scheduling pass.

        Args:
            request_waits: Whether a request waits for blocks of which neither
                ``allocation_attempted`` nor ``has_pending_block_frees`` says so.

        Returns:
            Whether the scheduler half must ask the ranks, in the coming step, for the holds that
            are silent now.
        """
        needed = sum(self._blocks_needed.values())
        waits_again = not self._waited_before.isdisjoint(self._blocks_needed)
        reclaims = waits_again or request_waits or self._running_request_waits
        if self._is_staged:
            needed, reclaims = self._host.lacking, False
        self._waited_before = set(self._blocks_needed)
        self._blocks_needed.clear()
        self._running_request_waits = False
        silent = self._pressure.take_silent()
        if not (needed or reclaims):
            return False
        if reclaims and not self._holds.reclaiming:
            self._holds.reclaim(self._pressure.enough(needed))
        if self._holds.conversations or self._holds.reclaiming:
            return False  # holds of prompts go only when none of conversations is left
        self._report_given_up(self._holds.give_up(silent, self._pressure.enough(needed)))
        return self._pressure.ask(self._clock(), held=self._holds.ticketed)

    def silence_reported(self, reports: Mapping[int, Sequence[Silence]]) -> None:
        """Store which holds the ranks report as silent, for ``relieve_block_pressure``.

        The consumer of a silent hold seems to be gone.

        Args:
            reports: The silent holds by rank; empty if the ranks were not asked.
        """
        if reports:
            self._pressure.answered(reports)

    def _report_given_up(self, holds: Sequence[Silence]) -> None:
        """Log the silent holds that were given up because requests waited for blocks."""
        if not holds:
            return
        engines = sorted({engine for each in holds for engine in each.engines})
        logger.warning(
            "the pages of %d requests were given back before anybody read them, since other "
            "requests wait for blocks (stage held, cause orphaned): %s, and gave no sign of life "
            "for %.1f to %.1f s; restart decode, or if it lives, look whether it reaches this "
            "engine, and hand it its tickets sooner",
            len(holds),
            _describe_claims(holds, engines),
            min(each.age for each in holds),
            max(each.age for each in holds),
        )


def _describe_claims(holds: Sequence[Silence], engines: Sequence[str]) -> str:
    """Return a text for the log: which engines claimed holds, and for how many none did.

    An engine claims a hold by saying, in a renewal of its lease, that it waits for the hold.

    Args:
        holds: The holds, each with the ids of the engines that claimed the hold.
        engines: The ids of all engines that claimed any of the holds, each once.
    """
    unclaimed = sum(not each.engines for each in holds)
    names = ", ".join(on_one_line(engine, 64) for engine in engines[:MAX_ENGINES_LOGGED])
    more = (
        f" and {len(engines) - MAX_ENGINES_LOGGED} more"
        if len(engines) > MAX_ENGINES_LOGGED
        else ""
    )
    claimed = f"{len(holds) - unclaimed} were claimed by engine {names}{more}"
    nobody = f"nobody had come for {unclaimed}"
    return ", ".join(([claimed] if engines else []) + ([nobody] if unclaimed else []))


def _holds_metric(is_conversation: bool) -> Metric:
    """Return the metric that counts holds of prompts, or those of conversations."""
    return CONVERSATION_HOLDS if is_conversation else HOLDS


def _has_room(request: Request) -> bool:
    """Return whether a request's ticket is published in a room, from whose parts it goes on."""
    return room_name(request.kv_transfer_params or {}) is not None


def _asks_for_remote_decode(request: Request) -> bool:
    """Return whether a request's params say that another engine decodes it."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))
