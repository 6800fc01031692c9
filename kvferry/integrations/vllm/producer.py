"""The scheduler half of an engine that prefills for other engines (PS in docs/protocol.md).

A request that asks for ``do_remote_decode`` is prefilled here. When it finishes, its blocks are
held, and its ``kv_transfer_params`` become a ticket, with which another engine reads the blocks.
The hold ends when that engine has read them, when the lease runs out, or when this engine needs the
blocks. A hold is silent if no consumer has given a sign of life for it for some time. With
``bidirectional_kv_xfer``, answers get tickets, too, for the engine that prefills the next turn.
"""

from __future__ import annotations

import logging
import math
import secrets as randomness
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvferry.core.error_causes import on_one_line
from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.holds import EndedHold, Hold, HoldEnd, RequestId
from kvferry.core.lifecycle.host_pages import HostPages
from kvferry.core.lifecycle.prompt_digest import SALT_BYTES, BlockDigests, digest_block
from kvferry.core.lifecycle.rooms import Rooms
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.silent_holds import BlockPressure, Silence
from kvferry.core.metrics import Metric
from kvferry.integrations.vllm.adapter_hashes import AdapterError
from kvferry.integrations.vllm.cache_groups import num_blocks
from kvferry.integrations.vllm.early_publishing import PartPublisher
from kvferry.integrations.vllm.eligibility import TRUNCATED, Eligibility, NoTicketError
from kvferry.integrations.vllm.engine_facts import EngineFacts
from kvferry.integrations.vllm.prompts import block_digests, prompt_digest, truncate_prompt
from kvferry.integrations.vllm.request_ids import is_sample, without_sample
from kvferry.integrations.vllm.request_reports import HeldRequest
from kvferry.integrations.vllm.scheduler_metrics import (
    CONVERSATION_HOLDS,
    CONVERSATION_PAGES,
    HELD,
    HELD_FRACTION,
    HOLD_MADE,
    HOLD_REFUSED,
    HOLDS,
    NO_TICKETS,
    NoTicket,
)
from kvferry.integrations.vllm.side_channel import EngineSideChannel
from kvferry.integrations.vllm.staging import NoHostPagesError, PageSource
from kvferry.integrations.vllm.ticket_format import TicketParams, room_name

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


LOGGED_ONCE = frozenset({NoTicket.ROLE, NoTicket.CUT_MEDIA, NoTicket.LIST})
"""The reasons of which only the first is a warning: settings, or what clients ask for."""


class Producer:
    """Hold the blocks of requests that other engines decode, and make their tickets.

    ``serving`` is this engine, as tickets name it; its address is set when the side channel opens.
    """

    def __init__(
        self,
        facts: EngineFacts,
        *,
        rooms: Rooms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config, groups = facts.config, facts.groups
        self.serving = EngineSideChannel(engine=facts.engine)
        self._facts = facts
        self._metrics = facts.metrics
        self._clock = clock
        self._eligibility = Eligibility(facts)
        if config.bidirectional_kv_xfer and not self._eligibility.keeps_answers:
            logger.warning(
                "bidirectional_kv_xfer: answers get no tickets, because drafts take the states and "
                "windows of this model past an answer's last token; start without "
                "speculative_config"
            )
        # A digest covers whole blocks of every group. States and windows are used for all tokens of
        # a ticket or for none, so that models with these need no digests.
        self._digest_unit = math.lcm(*(group.tokens for group in groups if not group.is_state))
        self._pages = PageSource(facts, use="holds")
        self._max_held = int(config.max_held_fraction * facts.blocks)
        self._may_hold = max(self._max_held, 1)
        self._holds = SchedulerHolds(
            facts.blocks, max_pages=None if facts.is_staged else self._max_held
        )
        self._parts = PartPublisher(facts, holds=self._holds, rooms=rooms, params=self._params)
        # Requests with a ticket that not all workers have reported as sent.
        self._held: dict[str, HeldRequest] = {}
        # Of several samples of a prompt, by the id that they share and the prompt's digest: the one
        # whose pages are held. vLLM answers with the ticket of the sample that ends last, so all
        # have its ticket.
        self._samples: dict[tuple[str, bytes], HeldRequest] = {}
        self._logged_reasons = frozenset[NoTicket]()
        # How often each request was preempted before it got the blocks that it has.
        self._preemptions: dict[str, int] = {}
        self._pressure = BlockPressure(facts.blocks)
        # Requests to which vLLM gave no blocks in this scheduling pass: how many blocks each needs.
        self._blocks_needed: dict[str, int] = {}
        self._running_request_waits = False
        # Those of the last pass. vLLM may pass over a request once for other reasons than blocks.
        self._waited_before: set[str] = set()

    def set_ranks(self, count: int, host: HostPages | None = None) -> None:
        """Set how many ranks published a layout, and the host pages if the cache is staged."""
        self._pressure.ranks = count
        if host is not None:
            self._pages.host = host
            self._may_hold = max(host.total, 1)
            self._pressure = BlockPressure(host.total, count)

    def on_new_request(self, request: Request) -> None:
        """Truncate a prompt that is prefilled for another engine; open the room that it names.

        A request for which no ticket can ever be made is counted and logged, and its room says so.
        """
        try:
            self._eligibility.check_arrival(request)
        except NoTicketError as error:
            self._no_ticket(request, error)
            self._parts.refuse(request, error.why)
        if not self._eligibility.is_handed_over(request):
            return
        self._parts.open(request)
        if self._eligibility.truncates(request):
            truncate_prompt(request, self._facts.backoff)
            # Several samples of one prompt may share one dictionary, so it is replaced.
            request.kv_transfer_params = {**(request.kv_transfer_params or {}), TRUNCATED: True}

    def waits_for_host_pages(self, request: Request) -> bool:
        """Return whether a request must wait for host pages for its prompt before it gets blocks.

        Not for ever: then it gets no ticket. vLLM lets a request with prompt_logprobs begin
        whatever this returns; it keeps its turn for host pages meanwhile.
        """
        if not self._eligibility.is_handed_over(request):
            return False
        try:
            return self._pages.waits(request.request_id, request.num_prompt_tokens)
        except NoHostPagesError:
            return False

    def take_on(self, request: Request) -> None:
        """Give a hold to a request that may get a ticket, when vLLM has allocated its blocks.

        After a preemption it gets another hold, as its pages are others.
        """
        self._blocks_needed.pop(request.request_id, None)
        rules = self._eligibility
        if not rules.is_handed_over(request) and not rules.is_answer(request):
            return
        if self._preemptions.get(request.request_id) != request.num_preemptions:
            self._preemptions[request.request_id] = request.num_preemptions
            self._holds.take_on(RequestId(request.request_id))

    def request_finished(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        first_tokens: Sequence[int] = (),
    ) -> dict[str, Any] | None:
        """Return the ticket of a request that ended, or end its hold if it gets no ticket.

        ``block_ids`` are those of its blocks, one list per cache group of vLLM. ``first_tokens``
        are, for each group, the first token that the request's own load has written; empty if that
        has filled all pages whole, or there was none. The ticket may be another sample's, whose
        blocks are held (``holds``).
        """
        self._preemptions.pop(request.request_id, None)
        ticket = None
        try:
            ticket = self._make_ticket(request, block_ids, first_tokens)
        except NoTicketError as error:
            self._no_ticket(request, error)
        self._holds.drop(RequestId(request.request_id))  # unless there is a ticket for it
        self._pages.cancel(request.request_id)
        self._parts.end(request, ticket)
        return ticket

    def _make_ticket(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        first_tokens: Sequence[int],
    ) -> dict[str, Any]:
        groups, request_id = self._facts.groups, request.request_id
        tokens = self._eligibility.tokens(request)
        is_answer = self._eligibility.is_answer(request)
        digest, blocks = self._digests(request, tokens)
        sample = without_sample(request_id), digest
        has_room = room_name(request.kv_transfer_params or {}) is not None  # of its own
        shares = is_sample(request_id) and not is_answer and not has_room
        if shares and (shared := self._sample_ticket(sample)) is not None:
            return shared
        lists = [group.producer_pages(block_ids[group.index], tokens) for group in groups]
        firsts = tuple(first for first, _ in lists)
        hold, pages = self._hold(request, tokens, block_ids, [ids for _, ids in lists])
        ticket = self._params(
            request=request_id,
            hold=hold,
            pages=tuple(map(tuple, pages)),
            first_index=firsts,
            tokens=tokens,
            digest=digest,
            # A ticket with an adapter may be revoked until the next step begins, so nobody may read
            # before that. With asynchronous scheduling, a step that is under way writes the KV of
            # an answer's last token. Host pages are filled later still.
            computed=not (
                self._facts.drafts
                or request.lora_request is not None
                or is_answer
                or self._facts.is_staged
            ),
            blocks=blocks,
            missing=tuple(
                group.missing_tokens(first, token)
                for group, first, token in zip(groups, firsts, first_tokens, strict=False)
            ),
        )
        if shares:
            self._samples[sample] = held = self._held[request_id]
            held.sample, held.ticket = sample, ticket
        return ticket

    def _sample_ticket(self, sample: tuple[str, bytes]) -> dict[str, Any] | None:
        """Return the ticket of another sample of a prompt, unless its lease is half over."""
        held = self._samples.get(sample)
        if held is None or held.ended is not None or not self._holds.has_ticket(held.request_id):
            return None
        is_fresh = self._clock() < held.made + self._facts.config.kv_lease_duration / 2
        return held.ticket if is_fresh else None

    def _digests(self, request: Request, tokens: int) -> tuple[bytes, BlockDigests | None]:
        """Return the digest of a ticket's tokens, and for an answer one for each block of them."""
        try:
            adapter = self._facts.adapter_content(request)
        except AdapterError as exc:
            raise NoTicketError(str(exc), NoTicket.ADAPTER) from exc
        blocks = None
        if self._eligibility.is_answer(request):
            every = digest_block(tokens, self._digest_unit)
            covered = 0 if self._facts.needs_exact_length else tokens
            salt = randomness.token_bytes(SALT_BYTES)
            blocks = block_digests(request, covered, every, salt, adapter)
        return prompt_digest(request, tokens, adapter), blocks

    def _hold(
        self,
        request: Request,
        tokens: int,
        block_ids: Sequence[Sequence[int]],
        lists: Sequence[Sequence[int]],
    ) -> tuple[Hold, Sequence[Sequence[int]]]:
        """Return hold and pages for a ticket of these blocks, or raise ``NoTicketError``."""
        request_id = RequestId(request.request_id)
        is_answer = self._eligibility.is_answer(request)
        try:
            pages, copy = self._pages.place(request_id, lists, request.num_prompt_tokens)
        except NoHostPagesError as exc:
            raise NoTicketError(str(exc), NoTicket.HOST_PAGES) from exc
        blocks = frozenset[int]().union(*block_ids) - {HOLE}
        held = blocks if copy is None else frozenset(copy.pages)
        if not self._holds.fits(len(held)):
            raise NoTicketError(
                f"it has {len(held)} blocks, and {self._max_held} may be held: set a larger "
                "max_held_fraction, or decode it here",
                NoTicket.TOO_LARGE,
            )
        if is_answer and not self._holds.has_room(held):
            raise NoTicketError(
                f"it has {len(held)} blocks, and with those held for prompts that would be more "
                f"than {self._max_held}, which may be held: set a larger max_held_fraction"
            )
        config = self._facts.config
        ttl = config.decoder_kv_blocks_ttl if is_answer else None
        hold = self._holds.ticket(request_id, config.kv_lease_duration, held, ttl=ttl, copy=copy)
        if hold is None:
            self._pages.give_back(request_id)
            raise NoTicketError(
                "its id is that of a request whose pages another engine may still read, or no slot "
                "was free: give requests ids of their own",
                NoTicket.NO_HOLD,
            )
        self._metrics.add(_holds_metric(is_answer), outcome=HOLD_MADE)
        self._held[request_id] = HeldRequest(
            request_id=request_id,
            tokens=tokens,
            blocks=len(held),
            made=self._clock(),
            is_conversation=is_answer,
            headers=request.trace_headers,
        )
        return hold, pages

    def holds(self, request_id: str) -> bool:
        """Return whether the blocks of a request that ended are kept for another engine."""
        return request_id in self._held

    def _params(self, **facts: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return a ticket, or a part of one, with these attributes of ``TicketParams``."""
        weights = self._facts.weights.version
        ticket = TicketParams(**asdict(self.serving), **self._facts.sizes, weights=weights, **facts)
        return ticket.params(self._facts.security.secrets, self._facts.ticket_key)

    def publish_parts(self, scheduler_output: SchedulerOutput) -> None:
        """Publish what the last step has computed; to be called once for each, before ``drain``."""
        self._parts.next_step(scheduler_output)

    def _no_ticket(self, request: Request, error: NoTicketError) -> None:
        """Count and log that a request gets no ticket, unless nobody wanted one."""
        if not error.why:
            return
        is_answer = self._eligibility.is_answer(request)
        self._metrics.add(_holds_metric(is_answer), outcome=HOLD_REFUSED)
        level = logging.WARNING
        if error.reason is None or is_answer:
            level = self._facts.reports.level
        else:
            self._metrics.add(NO_TICKETS, reason=error.reason.value)
            if error.reason in self._logged_reasons:
                level = logging.DEBUG
            self._logged_reasons |= {error.reason} & LOGGED_ONCE
        logger.log(
            level,
            "request %s: no ticket is made (stage prefill, cause %s): %s",
            on_one_line(request.request_id),
            error.reason or "answer",
            error.why,
        )

    def revoke(self, request_ids: Sequence[str]) -> None:
        """End the holds of requests whose tickets were just made and must not be used.

        The tickets do not say ``computed``, so nobody reads the pages before the workers get the
        orders of the next step, which end these holds.
        """
        for request_id in request_ids:
            held = self._held.get(request_id)
            is_answer = held is not None and held.is_conversation
            if self._holds.revoke(RequestId(request_id)) and not is_answer:
                self._metrics.add(NO_TICKETS, reason=NoTicket.ADAPTER.value)

    def holds_ended(self, ended: Mapping[str, EndedHold]) -> None:
        """Record how ranks have ended holds, by request, for ``sends_finished``."""
        for request_id, hold in ended.items():
            if (held := self._held.get(request_id)) is not None:
                held.ended = hold if held.ended is None else held.ended.combine(hold)

    def sends_finished(self, request_ids: Iterable[str]) -> None:
        """End holds of requests that all workers have sent; if staged, only free their blocks."""
        self._end(self._pages.sent(request_ids))

    def holds_over(self, over: Mapping[int, Sequence[str]]) -> None:
        """Take, by rank, the requests whose host pages it uses no longer; end those of all."""
        self._end(self._pages.over(over))

    def _end(self, request_ids: Iterable[str]) -> None:
        """Free the slots of requests' holds; unless another end was reported, they were read."""
        for request_id in request_ids:
            given_up = self._holds.sent(RequestId(request_id))
            held = self._held.pop(request_id, None)
            if held is None:
                continue
            found = held.ended.end if held.ended is not None else None
            end = given_up or found or HoldEnd.READ
            self._metrics.add(_holds_metric(held.is_conversation), outcome=end.value)
            self._facts.reports.hold_ended(held, end, self._clock() - held.made)
            self._samples.pop(held.sample, None)
            if end is HoldEnd.EVICTED and not held.is_conversation:
                logger.warning(
                    "request %s: its ticket was given up before it was used (stage held, cause "
                    "evicted): more than %s blocks were held for other engines; decode requests "
                    "sooner, or set a larger max_held_fraction",
                    on_one_line(request_id),
                    self._max_held,
                )

    def reset(self) -> bool:
        """End every hold that a ticket names; return whether the workers have yet to report any."""
        self._holds.reset()
        return self._holds.is_ending

    def ask_revocation(self, conversations: bool) -> int:
        """Have the next step end all holds, or conversations'; return how many. Thread-safe."""
        return self._holds.ask_revocation(conversations)

    def update_metrics(self) -> None:
        """Set the metrics of held blocks and host pages."""
        self._pages.update_metrics(self._metrics)
        self._metrics.set(HELD, self._holds.held_pages)
        reclaimable = self._holds.reclaimable_pages
        if self._eligibility.keeps_answers:
            self._metrics.set(CONVERSATION_PAGES, reclaimable)
        self._metrics.set(HELD_FRACTION, (self._holds.held_pages - reclaimable) / self._may_hold)

    def drain(self) -> HoldOrders:
        """Return the queued orders to workers: which holds to begin, make readable or end."""
        return self._holds.drain()

    @property
    def pending(self) -> bool:
        """Whether ranks have to report when host pages are over, or to end holds by request."""
        return self._pages.pending or self._holds.is_asked

    # The methods below free held blocks when requests of this engine wait for blocks.

    def allocation_attempted(self, request: Request, computed: int) -> None:
        """Record that vLLM tries to allocate blocks: if it can, ``take_on`` follows."""
        needed = num_blocks(self._facts.groups, request.num_tokens - computed)
        self._blocks_needed[request.request_id] = needed

    def has_pending_block_frees(self) -> bool:
        """End holds of conversations for a running request; return whether any are ending."""
        if self._facts.is_staged:
            return self._pages.frees_blocks_soon
        self._running_request_waits = True
        if not self._holds.is_ending:
            self._holds.reclaim(self._pressure.enough(0))
        return self._holds.is_ending

    def relieve_block_pressure(self, *, request_waits: bool = False) -> bool:
        """If requests wait for pages, end holds of conversations, and otherwise silent holds.

        Must be called once, at the end of each scheduling pass. ``request_waits``: whether a
        request waits for blocks of which no other method was told.

        Returns:
            Whether the ranks must be asked, in the coming step, which holds are silent now.
        """
        waits_again = not self._waited_before.isdisjoint(self._blocks_needed)
        needed, reclaims = self._pages.lacking(
            sum(self._blocks_needed.values()),
            reclaims=waits_again or request_waits or self._running_request_waits,
        )
        self._waited_before = set(self._blocks_needed)
        self._blocks_needed.clear()
        self._running_request_waits = False
        silent = self._pressure.take_silent()
        if not (needed or reclaims):
            return False
        if reclaims and not self._holds.is_reclaiming:
            self._holds.reclaim(self._pressure.enough(needed))
        if self._holds.conversations or self._holds.is_reclaiming:
            return False  # holds of prompts go only when none of conversations is left
        _log_orphaned(self._holds.give_up(silent, self._pressure.enough(needed)))
        return self._pressure.ask(self._clock(), held=self._holds.ticketed)

    def silence_reported(self, reports: Mapping[int, Sequence[Silence]]) -> None:
        """Store which holds the ranks report as silent, by rank; empty if they were not asked."""
        if reports:
            self._pressure.answered(reports)


def _log_orphaned(holds: Sequence[Silence]) -> None:
    """Log the silent holds that were given up because requests waited for blocks."""
    if holds:
        engines = sorted({engine for each in holds for engine in each.engines})
        logger.warning(
            "the pages of %d requests were given back before anybody read them, since other "
            "requests wait for blocks (stage held, cause orphaned): %s gave no sign of life for "
            "%.1f s; restart decode, or if it lives, look whether it reaches this engine, and hand "
            "it its tickets sooner",
            len(holds),
            on_one_line(f"engine {', '.join(engines)}", 256) if engines else "decode",
            min(each.age for each in holds),
        )


def _holds_metric(is_answer: bool) -> Metric:
    return CONVERSATION_HOLDS if is_answer else HOLDS
