"""A prompt as two engines see it: which one it is, and how much of it is handed over."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.core.lifecycle.digest import DIGEST_BYTES, digest
from kvferry.integrations.vllm.groups import CacheGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
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
    ids = (request.prompt_token_ids or [])[:tokens]
    return digest(ids, lora, media, salt, _embeddings(request, tokens), *_mask(request, tokens))


def _mask(request: Request, tokens: int) -> tuple[bytes, ...]:
    """Return which of a prompt's first positions are token ids and which are embeddings.

    Empty where vLLM gives no such mask, so that every other prompt keeps its digest. A mask that is
    all true or all false is not left out: vLLM reads the same ids and embeddings in another way
    where there is none.
    """
    mask = request.prompt_is_token_ids
    return () if mask is None else (bytes(map(bool, mask[:tokens])),)


def _embeddings(request: Request, tokens: int) -> bytes | None:
    """What stands for a prompt's first embeddings; ``None`` if it is of token ids alone."""
    if request.prompt_embeds is None:
        return None
    import torch

    rows = request.prompt_embeds[:tokens].contiguous().cpu()
    state = hashlib.blake2b(f"{rows.dtype} {tuple(rows.shape)}".encode(), digest_size=DIGEST_BYTES)
    state.update(rows.flatten().view(dtype=torch.uint8).numpy())
    return state.digest()


def backoff(vllm_config: VllmConfig, groups: Sequence[CacheGroup]) -> int:
    """How many tokens at a prompt's end the producer leaves to the consumer.

    The consumer computes at least the last token. A state cannot go back, so it must be the one
    before that token; pages of a window that has moved past it are gone; and a multi-token
    predictor's whole lookahead must stay with whoever verifies what it drafted (as in vLLM's
    ``nixl/base_scheduler.py``, ``_prefill_backoff``).
    """
    lookahead: int = vllm_config.num_prefill_lookahead_tokens
    return max(int(any(group.bounded for group in groups)), lookahead - 1)


def shorten(request: Request, tail: int) -> None:
    """Take the last ``tail`` tokens off a prompt, and ask for one token after the rest."""
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        if (rows := getattr(request, name)) is not None:
            setattr(request, name, rows[:-tail])
    del request._all_token_ids[-tail:]
    request.num_prompt_tokens -= tail
    request.max_tokens = 1


def handed_over(request: Request, tail: int) -> int:
    """How many of a prompt's tokens a producer computes for another engine.

    Args:
        request: the request, its prompt not shortened.
        tail: the ``backoff``; a prompt that is not longer is handed over whole.
    """
    tokens: int = request.num_prompt_tokens
    return tokens - tail if tokens > tail else tokens
