"""A prompt as two engines see it: which one it is, and how much of it is handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.core.lifecycle.digest import digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


def digest_of(request: Request, tokens: int) -> bytes:
    """What the pages of a request's first ``tokens`` prompt tokens depend on.

    Not vLLM's block hashes: they depend on settings of the process.
    """
    lora = request.lora_request.lora_name if request.lora_request else None
    media = [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
        if feature.mm_position.offset < tokens
    ]
    # A client's salt may be text that is not encodable.
    salt = request.cache_salt and request.cache_salt.encode("utf-8", "surrogatepass")
    return digest((request.prompt_token_ids or [])[:tokens], lora, media, salt)


def backoff(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many tokens at a prompt's end the producer leaves to the consumer.

    The consumer computes at least the last token. A state cannot go back, so it must be the one
    before that token; and a multi-token predictor's whole lookahead window must stay with whoever
    verifies what it drafted (as in vLLM's ``nixl/base_scheduler.py``, ``_prefill_backoff``).
    """
    state = kv_cache_config.has_mamba_layers or any(
        group.kv_cache_spec.prefix_replay_tokens for group in kv_cache_config.kv_cache_groups
    )
    lookahead: int = vllm_config.num_prefill_lookahead_tokens
    return max(int(state), lookahead - 1)


def handed_over(request: Request, tail: int) -> int:
    """How many of a prompt's tokens a producer computes for another engine.

    Args:
        request: the request, its prompt not shortened.
        tail: the ``backoff``; a prompt that is not longer is handed over whole.
    """
    tokens: int = request.num_prompt_tokens
    return tokens - tail if tokens > tail else tokens
