"""The scheduler half of an engine that decodes what others prefilled (DS in docs/protocol.md).

A ticket that is refused never raises here, where an exception would end the engine: its request
takes the way of any other, and the worker reports it as failed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.endpoint import Load
from kvferry.core.error_causes import on_one_line, with_remedy
from kvferry.core.errors import HandshakeError, TicketError, TicketReason
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.metrics import REFUSED, Metrics
from kvferry.integrations.vllm import ticket_params as tickets
from kvferry.integrations.vllm.groups import NOTHING, CacheGroup
from kvferry.integrations.vllm.prompts import digest_of, handed_over
from kvferry.integrations.vllm.security import SecuritySettings
from kvferry.integrations.vllm.ticket_metrics import FAILED, LOADS, TOKENS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

SAMPLE = re.compile(r"[0-9]+_")
"""How vLLM begins the id of each of several samples of one prompt (``n`` of a request), which come
to the scheduler one by one, and are told by nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What the workers must hear in this step; see ``metadata.Step``."""

    prepare: tuple[Ticket, ...] = ()
    loads: tuple[Load, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    aborted: tuple[str, ...] = ()


class Consumer:
    """Follows requests with a ticket from their arrival to the end of their load.

    Args:
        groups: the engine's, those that are transferred.
        figures: told of what becomes of tickets.
        engine: the engine's id.
        may_load: whether vLLM orders this engine's frees for a loader (its role is a consumer's).
        verify_prompt: refuse tickets that were made for another prompt.
        backoff: prompt tokens that a producer leaves to this engine.
        admission: whose tickets are accepted.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        figures: Metrics,
        engine: str,
        may_load: bool,
        verify_prompt: bool,
        backoff: int,
        admission: SecuritySettings = SecuritySettings(),  # noqa: B008 - frozen
    ) -> None:
        self._groups = groups
        self._bounded = any(group.bounded for group in groups)
        self._figures = figures
        self._engine = engine
        self._may_load = may_load
        self._verify_prompt = verify_prompt
        self._backoff = backoff
        self._admission = admission
        self._waiting: dict[str, Ticket | TicketError] = {}
        self._loading: dict[str, int | None] = {}
        self._users = HoldUsers()
        self._prepare: list[Ticket] = []
        self._loads: list[Load] = []
        self._refused: list[tuple[str, str]] = []
        self._aborted: list[str] = []

    def on_new_request(self, request: Request) -> None:
        """Check the ticket of a request that was prefilled elsewhere."""
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return
        if request.abort_immediately:
            # vLLM refused the request before it came here, and its prompt is not here to check the
            # ticket against: whose hold it is stays open, so the lease ends it (ADR 5).
            return
        try:
            ticket = self._admit(request)
        except TicketError as error:
            _log_refusal(request, error)
            self._waiting[request.request_id] = error
            self._figures.add(REFUSED, reason=error.reason.value)
        else:
            self._waiting[request.request_id] = ticket
            self._users.add(RequestId(request.request_id), ticket)
            self._prepare.append(ticket)

    def matched(self, request: Request, computed: int) -> int:
        """How many tokens beyond the ``computed`` ones are to be loaded. Changes nothing."""
        entry = self._waiting.get(request.request_id)
        return max(0, self._total(request, entry) - computed) if entry is not None else 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has given blocks to a request, ``external`` tokens of which are to be loaded."""
        entry = self._waiting.pop(request.request_id, None)
        if entry is None:
            return
        if external:
            refused = isinstance(entry, TicketError)
            self._loading[request.request_id] = None if refused else external
        if isinstance(entry, Ticket):
            if external:
                self._loads.append(self._load(request, entry, blocks))
            else:
                self._needs_nothing(request.request_id, entry)
        elif external:
            self._refused.append((request.request_id, str(entry)))

    def finished(self, request: Request) -> None:
        """A request ended, maybe before its load did, or before it had one."""
        entry = self._waiting.pop(request.request_id, None)
        if isinstance(entry, Ticket):
            self._needs_nothing(request.request_id, entry)
        elif request.request_id in self._loading:
            self._aborted.append(request.request_id)

    def received(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> None:
        """All workers have reported the loads of these requests, some of them ``failed``."""
        for request_id in request_ids:
            tokens = self._loading.pop(request_id, None)
            if tokens is None:
                continue
            # vLLM passes a report on when every rank has made it. Ranks end loads in different
            # orders, some of them before they hear of the next one, so only what all have reported
            # counts: no rank reads for this request any more when "done" is said after it.
            self._users.over(RequestId(request_id), loaded=request_id not in failed)
            if request_id in failed:
                self._figures.add(FAILED)
            else:
                self._figures.add(LOADS)
                self._figures.add(TOKENS, tokens)

    def drain(self) -> Arrivals:
        """What the workers must hear in this step."""
        for ticket in self._users.take_unused():
            self._loads.append(self._nothing_to_load(ticket.request, ticket, shared=False))
        arrivals = Arrivals(
            prepare=tuple(self._prepare),
            loads=tuple(self._loads),
            refused=tuple(self._refused),
            aborted=tuple(self._aborted),
        )
        for pending in (self._prepare, self._loads, self._refused, self._aborted):
            pending.clear()
        return arrivals

    @property
    def pending(self) -> bool:
        """Whether the workers have yet to hear something."""
        messages = self._prepare or self._loads or self._refused or self._aborted
        return bool(messages) or self._users.pending

    def _admit(self, request: Request) -> Ticket:
        """Raises ``TicketError``."""
        if not self._may_load:
            raise TicketError(
                'this engine\'s kv_role is "kv_producer", so it may not load: set "kv_consumer" or '
                '"kv_both"',
                reason=TicketReason.ROLE,
            )
        ticket = tickets.read(
            request.kv_transfer_params, self._admission.secrets, prompt=request.num_prompt_tokens
        )
        self._check_server(ticket)
        if ticket.engine == self._engine:
            raise TicketError(
                f"it was made by this very engine, {self._engine!r}", reason=TicketReason.OWN
            )
        if self._verify_prompt and digest_of(request, ticket.tokens) != ticket.digest:
            raise TicketError(
                f"it was made for another prompt than this one of {request.num_prompt_tokens} "
                f"tokens (producer's request {ticket.request!r}, {ticket.tokens} tokens)",
                reason=TicketReason.PROMPT,
            )
        self._check_tokens(request, ticket.tokens)
        return ticket

    def _check_server(self, ticket: Ticket) -> None:
        """Raises ``TicketError`` if this engine would not ask its side channel in any case."""
        try:
            self._admission.access.check_server(ticket.key)
        except HandshakeError as exc:
            raise TicketError(
                f"engine {ticket.engine!r}: {exc}", reason=TicketReason.ADMISSION
            ) from exc

    def _check_tokens(self, request: Request, tokens: int) -> None:
        """A state, or the pages of a window, are those after exactly so many tokens.

        Raises:
            TicketError: this engine goes on from another token.
        """
        expected = handed_over(request, self._backoff)
        if self._bounded and tokens != expected and not request.skip_reading_prefix_cache:
            raise TicketError(
                f"its states and windows are those after {tokens} tokens, and this engine needs "
                f"those after {expected} of the prompt's {request.num_prompt_tokens}",
                reason=TicketReason.TOKENS,
            )

    def _total(self, request: Request, entry: Ticket | TicketError) -> int:
        """How many of a prompt's tokens are not computed here."""
        total = handed_over(request, self._backoff)
        if isinstance(entry, Ticket):
            total = min(total, entry.tokens)
        # The last token is computed here, from what is before it; of a prompt too short to leave
        # that out, the states are past it.
        return 0 if self._bounded and total >= request.num_prompt_tokens else total

    def _load(self, request: Request, ticket: Ticket, blocks: KVCacheBlocks) -> Load:
        last = self._total(request, ticket)
        wanted = [group.wanted(blocks.blocks[group.index], last) for group in self._groups]
        return Load(
            request=RequestId(request.request_id),
            ticket=ticket,
            ranges=tuple(tokens for tokens, _ in wanted),
            local=tuple(pages for _, pages in wanted),
            shared=self._shares(request.request_id),
        )

    def _shares(self, request_id: str) -> bool:
        """Whether a load that is ordered now leaves it to a later one to say "done"."""
        siblings = SAMPLE.match(request_id) is not None
        return self._users.order(RequestId(request_id), siblings=siblings)

    def _needs_nothing(self, request_id: str, ticket: Ticket) -> None:
        """A request with a ticket loads nothing; the producer is told, unless others load."""
        shared = self._shares(request_id)
        self._loads.append(self._nothing_to_load(request_id, ticket, shared=shared))
        self._users.over(RequestId(request_id), loaded=False)

    def _nothing_to_load(self, request_id: str, ticket: Ticket, *, shared: bool) -> Load:
        """Return a load that tells the producer that its pages are not needed (any more)."""
        groups = len(self._groups)
        return Load(
            request=RequestId(request_id),
            ticket=ticket,
            ranges=(None,) * groups,
            local=(NOTHING,) * groups,
            report=False,
            shared=shared,
        )


def _log_refusal(request: Request, error: TicketError) -> None:
    peer = (request.kv_transfer_params or {}).get("remote_engine_id")
    logger.warning(
        "request %s: ticket refused: %s (stage ticket, cause %s, of engine %s)",
        on_one_line(request.request_id),
        with_remedy(error),
        error.reason,
        on_one_line(str(peer), 64),
    )
