"""Engines whose scheduler is vLLM's, and whose workers are simulated.

A scheduler is told which tokens were sampled and which loads are over, so nothing is computed and a
conversation takes milliseconds. All else in the scheduler's process is real: requests, block pool,
prefix cache, tickets, and the side channels whose addresses tickets name. Blocks have 16 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.core.messages import encoded, payload
from tests.engines.engines import PREFILL
from tests.vllm.geometry.scheduled import vllm_config

BLOCK_TOKENS = 16
BLOCKS = 1000
MAX_STEPS = 200

_numbers = itertools.count(1)


def configuration(*, engine: str | None = None, **extra: Any) -> Any:
    """Return the ``VllmConfig`` of an engine with prefix caching that computes 64 tokens a step."""
    engine_id = engine or f"engine-{next(_numbers)}"
    return vllm_config(
        engine_id, block=BLOCK_TOKENS, batch=64, length=1000, policy="recompute", extra=extra
    )


def scheduler_of(config: Any) -> Any:
    """Return a scheduler of one rank with full attention; its side channel is open."""
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvferry.integrations.vllm.metadata import RankHandshake

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=SimpleNamespace(accept_tokens=lambda *_: True),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )
    [published] = encoded(
        payload(engine=config.kv_transfer_config.engine_id, incarnation=next(_numbers))
    )
    scheduler.connector.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): RankHandshake(payload=published)}
    )
    return scheduler


def request(
    name: str, prompt: Sequence[int], params: dict[str, Any] | None, *, max_tokens: int = 1
) -> Any:
    """Return a request as it reaches a scheduler."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": dict(params)},
        ),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )


class SimulatedEngine:
    """An engine with vLLM's scheduler and without workers."""

    def __init__(self, engine: str, **extra: Any) -> None:
        self.scheduler = scheduler_of(configuration(engine=engine, **extra))
        self._answers: dict[str, list[int]] = {}

    def close(self) -> None:
        self.scheduler.shutdown()

    def add(self, each: Any, *, answer: Sequence[int] = ()) -> None:
        """Add a request, for which the tokens of the answer and then 0 will be sampled."""
        self._answers[each.request_id] = list(answer)
        self.scheduler.add_request(each)

    def finish(self, each: Any) -> dict[str, Any]:
        """Step until a request ends; loads that begin meanwhile succeed at once."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        received: set[str] = set()
        for _ in range(MAX_STEPS):
            scheduled = self.scheduler.schedule()
            ids = list(scheduled.num_scheduled_tokens)
            outputs = self.scheduler.update_from_output(
                scheduled,
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={name: index for index, name in enumerate(ids)},
                    sampled_token_ids=[self._sampled(name) for name in ids],
                    kv_connector_output=KVConnectorOutput(finished_recving=received),
                ),
            )
            for client in outputs.values():
                for one in client.outputs:
                    if one.request_id == each.request_id and one.finish_reason is not None:
                        return one.kv_transfer_params or {}
            loads = scheduled.kv_connector_metadata.loads
            received = {load.request for load in loads if load.report}
        raise AssertionError(f"{each.request_id} is {each.status} after {MAX_STEPS} steps")

    def _sampled(self, name: str) -> list[int]:
        """Return the token that a step samples for a request; none before the prompt's end."""
        each = self.scheduler.requests[name]
        if each.num_computed_tokens < each.num_tokens:
            return []
        answer = self._answers.get(name)
        return [answer.pop(0) if answer else 0]


def first_ticket(prefill: SimulatedEngine, name: str, prompt: Sequence[int]) -> dict[str, Any]:
    each = request(name, prompt, PREFILL)
    prefill.add(each)
    return prefill.finish(each)


def conversation_ticket(
    prefill: SimulatedEngine, decode: SimulatedEngine, name: str, tokens: Sequence[int]
) -> dict[str, Any]:
    """Prefill and decode a conversation's first turn; return the ticket in decode's answer.

    The first half of the tokens is the prompt, and decode samples the rest. Decode samples one
    further token, whose KV is not computed.
    """
    prompt, answer = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
    params = first_ticket(prefill, name, prompt)
    each = request(name, prompt, params, max_tokens=len(answer) + 1)
    decode.add(each, answer=answer)
    return decode.finish(each)
