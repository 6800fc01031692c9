"""The scheduler half of an engine that prefills for others (PS in docs/protocol.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.core.error_causes import on_one_line
from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.reclamation import BlockPressure, Silence
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.metrics import Metrics
from kvferry.core.security import TicketKey, TicketSecrets
from kvferry.integrations.vllm.groups import CacheGroup
from kvferry.integrations.vllm.prompts import digest_of, shorten
from kvferry.integrations.vllm.ticket_metrics import EVICTED, HELD, NO_TICKETS, ORPHANED, NoTicket
from kvferry.integrations.vllm.ticket_params import ParallelSizes, TicketParams

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvferry.integrations.vllm.side_channel import EngineSideChannel

logger = logging.getLogger(__name__)

COMPLETE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""How a request ends whose prompt was computed (names of vLLM's ``RequestStatus``)."""

MAX_NAMED = 4
"""So many engines are named in one line of the log."""

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
        hands_over: whether other engines load from this one (its role is a producer's).
        clock: seconds, monotonic.
        ticket_key: proves them; ``None`` leaves them without a proof.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        figures: Metrics,
        slots: int,
        lease: float,
        backoff: int,
        computed: bool,
        sizes: ParallelSizes,
        max_held: int | None = None,
        secrets: TicketSecrets | None = None,
        hands_over: bool = True,
        clock: Callable[[], float] = time.monotonic,
        ticket_key: TicketKey | None = None,
    ) -> None:
        self._groups = groups
        self._figures = figures
        self._bounded = any(group.bounded for group in groups)
        self._ledger = SchedulerHolds(slots, max_pages=max_held)
        self._max_held = max_held
        self._lease = lease
        self._backoff = backoff
        self._computed = computed
        self._sizes = sizes
        self._secrets = secrets
        self._hands_over = hands_over
        self._warned_of_role = False
        self._clock = clock
        self._pressure = BlockPressure(slots)
        self._wanted: dict[str, int] = {}
        """Requests that vLLM looked at in this scheduling pass and gave no blocks, and how many
        they need."""
        self._running_waits = False
        self._ticket_key = ticket_key

    def on_new_request(self, request: Request) -> None:
        """Shorten the prompt of a request that is prefilled for another engine, once."""
        params = request.kv_transfer_params or {}
        if _for_another(request) and not self._hands_over:
            self._refuse_role(request)
        if not self._is_handed_over(request) or not self._backoff or params.get(TRUNCATED):
            return
        if request.num_prompt_tokens <= self._backoff or request.skip_reading_prefix_cache:
            return
        shorten(request, self._backoff)
        # Of a copy: requests for several samples of one prompt may have one dictionary together.
        request.kv_transfer_params = {**params, TRUNCATED: True}

    def take_on(self, request: Request) -> None:
        """The request is first computed in the coming step, or again after a preemption."""
        if not self._is_handed_over(request):
            return
        if self._ledger.take_on(RequestId(request.request_id)) is None:
            self._no_ticket(
                request,
                NoTicket.NO_HOLD,
                "its id is that of a request whose pages another engine may still read, or no slot "
                "is free: give requests ids of their own",
            )

    def finished(
        self, request: Request, block_ids: Sequence[Sequence[int]], serving: EngineSideChannel
    ) -> dict[str, Any] | None:
        """The ticket of a request that ended; ``None`` if its blocks are vLLM's at once."""
        request_id = RequestId(request.request_id)
        tokens = self._handed_over(request)
        wanted = tokens and self._is_handed_over(request)
        hold = self._hold(request, block_ids) if wanted else None
        if hold is None:
            self._ledger.drop(request_id)
            return None
        lists = [group.offered(block_ids[group.index], tokens) for group in self._groups]
        logger.debug("request %s: %d tokens in %s are held", request_id, tokens, hold)
        return TicketParams(
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
        if reason is NoTicket.ROLE and self._warned_of_role:
            return  # a router's setting: every request says the same
        self._warned_of_role = self._warned_of_role or reason is NoTicket.ROLE
        logger.warning(
            "request %s: no ticket is made (stage prefill, cause %s): %s",
            on_one_line(request.request_id),
            reason,
            why,
        )

    def _refuse_role(self, request: Request) -> None:
        self._no_ticket(
            request,
            NoTicket.ROLE,
            'this engine\'s kv_role is "kv_consumer", so no other engine would come for its pages, '
            'and they are not held: set "kv_producer" or "kv_both", or let the router send '
            "do_remote_decode to prefill engines only; said once",
        )

    def _is_handed_over(self, request: Request) -> bool:
        return self._hands_over and _for_another(request)

    def _handed_over(self, request: Request) -> int:
        """How many tokens a ticket of this request covers; 0 if it gets none.

        A request that went on after its prompt has states, and windows, that are past it.
        """
        if request.status.name not in COMPLETE:
            return 0
        tokens: int = min(request.num_computed_tokens, request.num_prompt_tokens)
        if (
            self._bounded
            and request.num_computed_tokens != tokens
            and self._is_handed_over(request)
        ):
            self._no_ticket(
                request,
                NoTicket.WENT_ON,
                f"{request.num_computed_tokens} tokens were computed, and the states and windows "
                f"of its prompt of {request.num_prompt_tokens} are gone: prefill with max_tokens 1",
            )
            return 0
        if self._bounded and self._is_handed_over(request) and self._kept_whole(request):
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

    def drain(self) -> HoldOrders:
        """What the workers must hear in this step."""
        return self._ledger.drain()

    # Requests that wait for blocks.

    def published(self, ranks: int) -> None:
        """So many ranks hold pages for others."""
        self._pressure.ranks = ranks

    def looked_at(self, request: Request, computed: int) -> None:
        """vLLM looks whether it has blocks for a request of which ``computed`` tokens are here.

        Where ``given_blocks`` does not follow in the same pass, it has none.
        """
        tokens = request.num_tokens - computed
        self._wanted[request.request_id] = sum(
            1 if group.is_state else -(-tokens // group.tokens) for group in self._groups
        )

    def given_blocks(self, request: Request) -> None:
        """It had."""
        self._wanted.pop(request.request_id, None)

    def running_waits(self) -> bool:
        """vLLM lacks a block for a running request; whether some will come back soon."""
        self._running_waits = True
        return self._ledger.ending

    def relieve(self) -> bool:
        """At the end of a scheduling pass: give up holds whose consumer is gone, if that helps.

        Returns:
            Whether the ranks are to say, in the coming step, of which holds they hear nothing.
        """
        waits, wanted = bool(self._wanted) or self._running_waits, sum(self._wanted.values())
        self._wanted.clear()
        self._running_waits = False
        silent = self._pressure.take_silent()
        if not waits:
            return False
        self._give_up(self._ledger.give_up(silent, self._pressure.enough(wanted)))
        return self._pressure.ask(self._clock(), held=self._ledger.ticketed)

    def heard_silence(self, reports: Mapping[int, Sequence[Silence]]) -> None:
        """What the ranks say that were asked."""
        if reports:
            self._pressure.answered(reports)

    def _give_up(self, holds: Sequence[Silence]) -> None:
        if not holds:
            return
        self._figures.add(ORPHANED, len(holds))
        engines = sorted({engine for each in holds for engine in each.engines})
        logger.warning(
            "the pages of %d requests were given back before anybody read them, since other "
            "requests wait for blocks (stage held, cause orphaned): %s, and gave no sign of life "
            "for %.1f to %.1f s; restart decode, or if it lives, look whether it reaches this "
            "engine, and hand it its tickets sooner",
            len(holds),
            _claims(holds, engines),
            min(each.age for each in holds),
            max(each.age for each in holds),
        )


def _claims(holds: Sequence[Silence], engines: Sequence[str]) -> str:
    """Who wanted the pages, for the log."""
    unclaimed = sum(not each.engines for each in holds)
    named = ", ".join(on_one_line(engine, 64) for engine in engines[:MAX_NAMED])
    more = f" and {len(engines) - MAX_NAMED} more" if len(engines) > MAX_NAMED else ""
    claimed = f"{len(holds) - unclaimed} were claimed by engine {named}{more}"
    nobody = f"nobody had come for {unclaimed}"
    return ", ".join(([claimed] if engines else []) + ([nobody] if unclaimed else []))


def _for_another(request: Request) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))
