"""Whether an engine accepts the ticket with which a request comes, and for how many of its tokens.

What is refused raises ``TicketError``. Nothing is asked of the engine that made the ticket: the
ranks check the ticket's proof and slot word when they read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvferry.core.errors import HandshakeError, TicketError, TicketReason
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.side_channel_messages import RoomNews
from kvferry.integrations.vllm.adapter_hashes import AdapterError
from kvferry.integrations.vllm.engine_facts import EngineFacts
from kvferry.integrations.vllm.prompts import common_tokens, handed_over_tokens, prompt_digest
from kvferry.integrations.vllm.request_ids import prompt_index
from kvferry.integrations.vllm.ticket_format import KEY, Part, read_part, read_room, read_ticket

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class TicketAdmission:
    """Check the tickets of requests, and parts of them, for an engine."""

    facts: EngineFacts

    def is_turn(self, request: Request) -> bool:
        """Return whether a request that is prefilled here comes with the last answer's ticket."""
        params = request.kv_transfer_params or {}
        is_prefill = params.get("do_remote_decode") and not params.get("do_remote_prefill")
        has_ticket = KEY in params or params.get("remote_block_ids")
        return self.facts.config.bidirectional_kv_xfer and bool(is_prefill and has_ticket)

    def admit(self, request: Request) -> Ticket:
        """Return the ticket in a request's params, or refuse it.

        It is refused if this engine may not load; or if it is malformed, is not signed as required,
        is of this engine itself or of one to which this engine may not connect, or was made with
        other weights, or for another prompt or number of tokens.
        """
        ticket = self._admit_maker(request)
        if self.facts.config.verify_prompt:
            self._check_prompt(request, ticket)
        self._check_tokens(request, ticket.tokens)
        return ticket

    def admit_turn(self, request: Request) -> tuple[Ticket, int]:
        """Return the ticket of a conversation, and how many tokens the next turn has of it.

        They are compared with ``verify_prompt`` false, too. There are none if the prompt has
        another beginning, or not all of the ticket's tokens where these are needed exactly.
        """
        ticket = self._admit_maker(request)
        common = common_tokens(request, ticket, self._adapter(request))
        is_useless = self.facts.needs_exact_length and common != ticket.tokens
        return ticket, 0 if is_useless else common

    def admit_room(self, request: Request) -> tuple[str, PeerKey]:
        """Return the name of the room in a request's params, and the engine that prefills."""
        self._check_may_load()
        name, producer = read_room(request.kv_transfer_params)
        self._check_maker(producer.engine, producer.key)
        return name, producer

    def admit_part(
        self, request: Request, news: RoomNews, producer: PeerKey, total: int | None
    ) -> Part:
        """Return the part of a ticket that ``producer`` has published for a request, or refuse it.

        The part before was for ``total`` tokens. The prompt is compared with ``verify_prompt``
        false, too: it is not the router that hands over a part, and an older build has one ticket
        for all requests with one ``transfer_id``.
        """
        secrets, prompt = self.facts.security.secrets, request.num_prompt_tokens
        part = read_part(news.part, secrets, is_last=news.is_last, prompt=prompt)
        ticket = part.ticket
        if (ticket.engine, part.total) != (producer.engine, total or part.total):
            raise TicketError(
                f"the side channel of engine {producer.engine!r} has a part for {part.total} "
                f"tokens, of engine {ticket.engine!r}; the one before was for {total}",
                reason=TicketReason.MISMATCH,
            )
        self._check_maker(ticket.engine, ticket.key)
        self.facts.weights.check(ticket.weights)
        self._check_prompt(request, ticket)
        self._check_tokens(request, part.total)
        # It can also be asked for where the router says, unless it is signed.
        routed = producer.host, producer.port
        is_known = secrets is not None or routed == (ticket.host, ticket.port)
        return replace(part, ticket=replace(ticket, routed=None if is_known else routed))

    def tokens_to_have(self, request: Request, covered: int | None) -> int:
        """Return how many of a prompt's first tokens are cached or loaded, not computed, here."""
        if self.is_turn(request):  # prefilled here, so its prompt is truncated already
            total: int = request.num_prompt_tokens
        else:
            total = handed_over_tokens(request, self.facts.backoff)
        if covered is not None:
            total = min(total, covered)
        # The last token is computed here, from the states before it. A prompt too short to be
        # truncated was computed whole, so its states are past that token and cannot be used.
        is_past = self.facts.needs_exact_length and total >= request.num_prompt_tokens
        return 0 if is_past else total

    def _admit_maker(self, request: Request) -> Ticket:
        """Return the ticket in a request's params if the engine that made it is admitted."""
        self._check_may_load()
        params, secrets = request.kv_transfer_params, self.facts.security.secrets
        ticket = read_ticket(params, secrets, prompt=request.num_prompt_tokens)
        self._check_maker(ticket.engine, ticket.key)
        self.facts.weights.check(ticket.weights)
        return ticket

    def _check_may_load(self) -> None:
        if not self.facts.may_load:
            raise TicketError(
                'this engine\'s kv_role is "kv_producer", so it may not load: set "kv_consumer" or '
                '"kv_both"',
                reason=TicketReason.ROLE,
            )

    def _check_maker(self, engine: str, key: bytes) -> None:
        """Refuse a ticket of this very engine, or of one to which it may not connect."""
        try:
            self.facts.security.access.check_server(key)
        except HandshakeError as exc:
            raise TicketError(f"engine {engine!r}: {exc}", reason=TicketReason.ADMISSION) from exc
        if engine == self.facts.engine:
            raise TicketError(
                f"it was made by this very engine, {engine!r}", reason=TicketReason.OWN
            )

    def _check_prompt(self, request: Request, ticket: Ticket) -> None:
        """Refuse a ticket that was made for another prompt, or with another LoRA adapter."""
        if prompt_digest(request, ticket.tokens, self._adapter(request)) == ticket.digest:
            return
        if index := prompt_index(request.request_id):
            raise TicketError(
                f"it is that of the first prompt of a list, and this is prompt {index + 1} of "
                "it: vLLM answers a completion request with the first prompt's ticket only, so "
                "send each prompt in a request of its own, or set kv_load_failure_policy to "
                "'recompute'",
                reason=TicketReason.LIST,
            )
        raise TicketError(
            f"it was made for another prompt than this one of {request.num_prompt_tokens} tokens, "
            "or with other media or another LoRA adapter (producer's request "
            f"{ticket.request!r}, {ticket.tokens} tokens)",
            reason=TicketReason.PROMPT,
        )

    def _check_tokens(self, request: Request, tokens: int) -> None:
        """Refuse a ticket for another number of tokens than the engine needs, if that matters."""
        expected = handed_over_tokens(request, self.facts.backoff)
        matters = self.facts.needs_exact_length and not request.skip_reading_prefix_cache
        if matters and tokens != expected:
            raise TicketError(
                f"its states and windows are those after {tokens} tokens, and this engine needs "
                f"those after {expected} of the prompt's {request.num_prompt_tokens}",
                reason=TicketReason.TOKENS,
            )

    def _adapter(self, request: Request) -> bytes | None:
        """Return the content of a request's LoRA adapter."""
        try:
            return self.facts.adapter_content(request)
        except AdapterError as exc:
            raise TicketError(str(exc), reason=TicketReason.ADAPTER) from exc
