"""The scheduler half of an engine that prefills for others (PS in docs/protocol.md)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvferry.core.failures import on_one_line
from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.ledger import HoldLedger, Orders
from kvferry.core.security import TicketKey, TicketSecrets
from kvferry.core.stats import Figures
from kvferry.integrations.vllm.figures import EVICTED, HELD, NO_TICKETS, NoTicket
from kvferry.integrations.vllm.groups import CacheGroup
from kvferry.integrations.vllm.prompts import digest_of, shorten
from kvferry.integrations.vllm.ticket import Offer, Sizes

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvferry.integrations.vllm.serving import Serving

logger = logging.getLogger(__name__)

COMPLETE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""How a request ends whose prompt was computed (names of vLLM's ``RequestStatus``)."""

TRUNCATED = "_p_side_truncated"
"""Marks, in a request's params, a prompt that was shortened: a preempted request comes back."""


class Producer:
    """Takes requests on for other engines, and makes their tickets.

    Args:
        groups: the engine's, those that are transferred.
        figures: told of tickets that were not made, and of what is held.
        slots: how many requests can be held at once: as many as the engine has blocks.
        max_held: how many blocks may be held for others; ``None`` for any number.
        lease: seconds for which the pages of a ticket are kept.
        backoff: prompt tokens that are left to the consumer.
        computed: whether nothing writes pages after a request's last token was sampled.
        sizes: the engine's parallelism.
        secrets: sign the tickets; ``None`` leaves them unsigned.
        ticket_key: proves them; ``None`` leaves them without a proof.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        figures: Figures,
        slots: int,
        lease: float,
        backoff: int,
        computed: bool,
        sizes: Sizes,
        max_held: int | None = None,
        secrets: TicketSecrets | None = None,
        ticket_key: TicketKey | None = None,
    ) -> None:
        self._groups = groups
        self._figures = figures
        self._bounded = any(group.bounded for group in groups)
        self._ledger = HoldLedger(slots, max_pages=max_held)
        self._max_held = max_held
        self._lease = lease
        self._backoff = backoff
        self._computed = computed
        self._sizes = sizes
        self._secrets = secrets
        self._ticket_key = ticket_key

    def on_new_request(self, request: Request) -> None:
        """Shorten the prompt of a request that is prefilled for another engine, once."""
        params = request.kv_transfer_params or {}
        if not _for_another(request) or not self._backoff or params.get(TRUNCATED):
            return
        if request.num_prompt_tokens <= self._backoff or request.skip_reading_prefix_cache:
            return
        shorten(request, self._backoff)
        # Of a copy: requests for several samples of one prompt may have one dictionary together.
        request.kv_transfer_params = {**params, TRUNCATED: True}

    def take_on(self, request: Request) -> None:
        """The request is first computed in the coming step, or again after a preemption."""
        if not _for_another(request):
            return
        if self._ledger.take_on(RequestId(request.request_id)) is None:
            self._no_ticket(
                request,
                NoTicket.NO_HOLD,
                "its id is that of a request whose pages another engine may still read, or no slot "
                "is free: give requests ids of their own",
            )

    def finished(
        self, request: Request, block_ids: Sequence[Sequence[int]], serving: Serving
    ) -> dict[str, Any] | None:
        """The ticket of a request that ended; ``None`` if its blocks are vLLM's at once."""
        request_id = RequestId(request.request_id)
        tokens = self._handed_over(request)
        hold = self._hold(request, block_ids) if tokens and _for_another(request) else None
        if hold is None:
            self._ledger.drop(request_id)
            return None
        lists = [group.offered(block_ids[group.index], tokens) for group in self._groups]
        logger.debug("request %s: %d tokens in %s are held", request_id, tokens, hold)
        return Offer(
            engine=serving.engine,
            incarnation=serving.incarnation,
            request=request_id,
            host=serving.host,
            port=serving.port,
            hold=hold,
            pages=[ids for _, ids in lists],
            first_index=[first for first, _ in lists],
            tokens=tokens,
            digest=digest_of(request, tokens),
            computed=self._computed,
            sizes=self._sizes,
            key=serving.key,
        ).params(self._secrets, self._ticket_key)

    def _hold(self, request: Request, block_ids: Sequence[Sequence[int]]) -> Hold | None:
        blocks = frozenset().union(*block_ids) - {HOLE}
        if not self._ledger.fits(len(blocks)):
            self._no_ticket(
                request,
                NoTicket.TOO_LARGE,
                f"it has {len(blocks)} blocks, and {self._max_held} may be held: set a larger "
                "max_held_fraction, or decode it here",
            )
        return self._ledger.ticket(RequestId(request.request_id), self._lease, blocks)

    def _no_ticket(self, request: Request, reason: NoTicket, why: str) -> None:
        self._figures.add(NO_TICKETS, reason=reason.value)
        logger.warning(
            "request %s: no ticket is made (stage prefill, cause %s): %s",
            on_one_line(request.request_id),
            reason,
            why,
        )

    def _handed_over(self, request: Request) -> int:
        """How many tokens a ticket of this request covers; 0 if it gets none.

        A request that went on after its prompt has states, and windows, that are past it.
        """
        if request.status.name not in COMPLETE:
            return 0
        tokens: int = min(request.num_computed_tokens, request.num_prompt_tokens)
        if self._bounded and request.num_computed_tokens != tokens and _for_another(request):
            self._no_ticket(
                request,
                NoTicket.WENT_ON,
                f"{request.num_computed_tokens} tokens were computed, and the states and windows "
                f"of its prompt of {request.num_prompt_tokens} are gone: prefill with max_tokens 1",
            )
            return 0
        if self._bounded and _for_another(request) and self._kept_whole(request):
            self._no_ticket(
                request,
                NoTicket.SCORED,
                f"it asked for prompt_logprobs, so all {tokens} tokens were computed, and the "
                "states and windows that decode starts from are gone: ask for them on decode, "
                "which then computes the prompt itself",
            )
            return 0
        return tokens

    def _kept_whole(self, request: Request) -> bool:
        """Return whether a prompt was left whole that is otherwise shortened."""
        scored: bool = request.skip_reading_prefix_cache
        return scored and request.num_prompt_tokens > self._backoff

    def sent(self, request_ids: Sequence[str]) -> None:
        """All workers have reported the requests sent."""
        for request_id in request_ids:
            self._ledger.sent(RequestId(request_id))

    def reset(self) -> None:
        """Give up what is held: tickets become stale, pages come back."""
        self._ledger.reset()

    def count(self) -> None:
        """Tell the figures what is held now, and what was given up since the last call."""
        self._figures.set(HELD, self._ledger.held_pages)
        for request_id in self._ledger.take_evicted():
            self._figures.add(EVICTED)
            logger.warning(
                "request %s: its ticket was given up before it was used (stage held, cause "
                "evicted): more than %s blocks were held for other engines; decode requests "
                "sooner, or set a larger max_held_fraction",
                on_one_line(request_id),
                self._max_held,
            )

    def drain(self) -> Orders:
        """What the workers must hear in this step."""
        return self._ledger.drain()


def _for_another(request: Request) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))
