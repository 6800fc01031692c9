"""The scheduler half of an engine that prefills for others (PS in docs/protocol.md)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ledger import HoldLedger, Orders
from kvferry.integrations.vllm.prompts import digest_of
from kvferry.integrations.vllm.ticket import Offer

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
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
        kv_cache_config: the engine's groups.
        lease: seconds for which the pages of a ticket are kept.
        backoff: prompt tokens that are left to the consumer.
        computed: whether nothing writes pages after a request's last token was sampled.
        tp_size: of this engine.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        lease: float,
        backoff: int,
        computed: bool,
        tp_size: int,
    ) -> None:
        self._config = kv_cache_config
        self._ledger = HoldLedger(kv_cache_config.num_blocks)
        self._lease = lease
        self._backoff = backoff
        self._computed = computed
        self._tp_size = tp_size

    def on_new_request(self, request: Request) -> None:
        """Shorten the prompt of a request that is prefilled for another engine, once."""
        params = request.kv_transfer_params or {}
        if not _for_another(request) or not self._backoff or params.get(TRUNCATED):
            return
        if request.num_prompt_tokens <= self._backoff or request.skip_reading_prefix_cache:
            return
        if request.prompt_token_ids is None:
            return
        del request.prompt_token_ids[-self._backoff :]
        del request._all_token_ids[-self._backoff :]
        request.num_prompt_tokens -= self._backoff
        request.max_tokens = 1
        params[TRUNCATED] = True

    def take_on(self, request: Request) -> None:
        """The request is first computed in the coming step, or again after a preemption."""
        if not _for_another(request) or request.prompt_token_ids is None:
            return
        if self._ledger.take_on(RequestId(request.request_id)) is None:
            logger.warning(
                "request %s: no ticket will be made; its id is that of a request whose pages "
                "another engine may still read, or no slot is free",
                request.request_id,
            )

    def finished(
        self, request: Request, block_ids: Sequence[Sequence[int]], serving: Serving
    ) -> dict[str, Any] | None:
        """The ticket of a request that ended; ``None`` if its blocks are vLLM's at once."""
        request_id = RequestId(request.request_id)
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        complete = request.status.name in COMPLETE and tokens > 0
        hold = self._ledger.ticket(request_id, self._lease) if complete else None
        if hold is None:
            self._ledger.drop(request_id)
            return None
        pages = [
            _without_front(ids[: -(-tokens // group.kv_cache_spec.block_size)])
            for ids, group in zip(
                self._config.select_transfer_block_ids(block_ids),
                self._config.transfer_groups,
                strict=True,
            )
        ]
        logger.debug("request %s: %d tokens in %s are held", request_id, tokens, hold)
        return Offer(
            engine=serving.engine,
            incarnation=serving.incarnation,
            request=request_id,
            host=serving.host,
            port=serving.port,
            hold=hold,
            pages=[ids for _, ids in pages],
            first_index=[first for first, _ in pages],
            tokens=tokens,
            digest=digest_of(request, tokens),
            computed=self._computed,
            tp_size=self._tp_size,
        ).params()

    def sent(self, request_ids: Sequence[str]) -> None:
        """All workers have reported the requests sent."""
        for request_id in request_ids:
            self._ledger.sent(RequestId(request_id))

    def reset(self) -> None:
        """Give up what is held: tickets become stale, pages come back."""
        self._ledger.reset()

    def drain(self) -> Orders:
        """What the workers must hear in this step."""
        return self._ledger.drain()


def _for_another(request: Request) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def _without_front(ids: Sequence[int]) -> tuple[int, Sequence[int]]:
    """A list without the holes at its front, and the index of what is first then."""
    first = sum(1 for _ in takewhile(lambda page: page == HOLE, ids))
    return first, ids[first:]
