"""A request's prompt: its digest, and how many of its tokens one engine computes for another."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvferry.core.lifecycle.prompt_digest import DIGEST_BYTES, BlockDigests, chain, digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvferry.core.lifecycle.ticket import Ticket


def prompt_digest(request: Request, tokens: int, adapter: bytes | None = None) -> bytes:
    """Return a digest of everything that the pages of a request's first tokens depend on.

    ``DIGEST_BYTES`` bytes, equal on two engines where token ids, LoRA adapter, media, cache salt
    and embeddings are equal. (vLLM's block hashes depend on settings of the process.) If there are
    more tokens than the prompt has, the generated tokens follow. ``adapter`` is the content of the
    request's LoRA adapter (``Adapters.content``).
    """
    ids = request.prompt_token_ids or []  # none if the prompt has embeddings only
    if ids and tokens > len(ids) and has_chain(request):
        ids = request.all_token_ids
    return digest(
        ids[:tokens],
        _adapter_facts(request, adapter),
        [facts for offset, facts in _media_facts(request) if offset < tokens],
        _cache_salt(request),
        _embeddings(request, tokens),
        *_token_id_mask(request, tokens),
    )


def whole_prompt_digest(request: Request) -> bytes:
    """Return a digest of a whole prompt, without the content of a LoRA adapter."""
    return prompt_digest(request, request.num_prompt_tokens)


def has_chain(request: Request) -> bool:
    """Return whether ``block_digests`` can be made of a request: not of embeddings."""
    return request.prompt_embeds is None


def block_digests(
    request: Request, tokens: int, every: int, salt: bytes, adapter: bytes | None = None
) -> BlockDigests:
    """Return a digest for each whole block of ``every`` of a request's first ``tokens``."""
    media: dict[int, list[object]] = {}
    for offset, facts in _media_facts(request):
        media.setdefault(offset // every, []).append(facts)
    root = _adapter_facts(request, adapter), _cache_salt(request)
    digests = chain(request.all_token_ids[:tokens], every, salt, root, media)
    return BlockDigests(tokens=every, salt=salt, digests=digests)


def common_tokens(request: Request, ticket: Ticket, adapter: bytes | None = None) -> int:
    """Return how many of a prompt's first tokens a conversation's ticket covers.

    That is all tokens of the ticket, if the prompt begins with them. Otherwise the tokens up to the
    last block whose digest is the prompt's, but to the last block before an image (or another
    medium) that would be cut: its tokens may attend to each other in both directions.
    """
    blocks = ticket.blocks
    if blocks is None or not has_chain(request):
        return 0
    if (
        ticket.tokens <= request.num_prompt_tokens
        and prompt_digest(request, ticket.tokens, adapter) == ticket.digest
    ):
        return ticket.tokens
    covered = min(len(blocks) * blocks.tokens, request.num_prompt_tokens)
    prompt = block_digests(request, covered, blocks.tokens, blocks.salt, adapter)
    common = blocks.common(prompt.digests)
    for feature in reversed(request.mm_features):  # in the order of their positions
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if offset < common < offset + length:
            common = offset // blocks.tokens * blocks.tokens
    return common


def _adapter_facts(request: Request, adapter: bytes | None) -> object:
    """Return what identifies a request's LoRA adapter, for a digest; ``None`` without one."""
    name = _packable(request.lora_request.lora_name) if request.lora_request else None
    return name if adapter is None else (name, adapter)


def _media_facts(request: Request) -> list[tuple[int, tuple[object, ...]]]:
    """Return each medium of a prompt: its first position, and what identifies it, for a digest."""
    return [
        (
            feature.mm_position.offset,
            (
                _packable(feature.identifier),
                feature.mm_position.offset,
                feature.mm_position.length,
            ),
        )
        for feature in request.mm_features
    ]


def _cache_salt(request: Request) -> object:
    """Return a request's cache salt for a digest: a client's text may hold lone surrogates."""
    return request.cache_salt and request.cache_salt.encode("utf-8", "surrogatepass")


def _packable(text: str) -> str | bytes:
    """Return a client's text, or its bytes if it holds lone surrogates, which msgpack refuses."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def _token_id_mask(request: Request, tokens: int) -> tuple[bytes, ...]:
    """Return a byte per position: 1 for a token id, 0 for an embedding; () without a mask."""
    mask = request.prompt_is_token_ids
    return () if mask is None else (bytes(map(bool, mask[:tokens])),)


def _embeddings(request: Request, tokens: int) -> bytes | None:
    """Return a digest of the first positions' embeddings, ``None`` if there are only token ids."""
    if request.prompt_embeds is None:
        return None
    import torch

    rows = request.prompt_embeds[:tokens].contiguous().cpu()
    state = hashlib.blake2b(f"{rows.dtype} {tuple(rows.shape)}".encode(), digest_size=DIGEST_BYTES)
    state.update(rows.flatten().view(dtype=torch.uint8).numpy())
    return state.digest()


def truncate_prompt(request: Request, tail: int) -> None:
    """Remove a prompt's last tokens, and limit the request to one generated token, in place."""
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        if (rows := getattr(request, name)) is not None:
            setattr(request, name, rows[:-tail])
    del request._all_token_ids[-tail:]
    request.num_prompt_tokens -= tail
    request.max_tokens = 1


def cuts_media(request: Request, tail: int) -> bool:
    """Return whether an image, or another medium, has tokens among a prompt's last ones.

    The rest of such an image cannot be computed without these tokens: in some models the tokens of
    an image attend to each other in both directions (``is_mm_prefix_lm`` in vLLM), and vLLM expects
    every position of an image within the prompt.
    """
    kept = request.num_prompt_tokens - tail
    positions = [feature.mm_position for feature in request.mm_features]
    return any(position.offset + position.length > kept for position in positions)


def handed_over_tokens(request: Request, tail: int) -> int:
    """Return how many tokens of a prompt, not truncated, a producer computes for another engine."""
    tokens: int = request.num_prompt_tokens
    return tokens - tail if tokens > tail else tokens
