"""What a request's pages hold, found the way vLLM's own CPU kernels find it: no layout of ours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.vllm.caches import views

if TYPE_CHECKING:
    from tests.engines.engines import Engine

Contents = dict[str, npt.NDArray[np.uint8]]
"""By layer and part, the bytes of each token (or channel, or head) of a rank."""

LOADED_SECONDS = 60.0
STEP_SECONDS = 0.001
"""Pause after a step, for the connector's thread."""


def of_both(
    prefill: Engine, decode: Engine, tokens: list[int], ticket: dict[str, Any]
) -> tuple[list[Contents], list[Contents]]:
    """By rank, what both engines have of a prompt when the ticket's tokens have been loaded, and
    before the next one is computed. Nothing else may be loading meanwhile."""
    covered = ticket["kvferry"]["tokens"]
    there = prefill.run(of_request, ticket["remote_request_id"], covered)
    with decode.paused():
        requests = decode.submit(tokens, params=ticket, max_tokens=1)
        loaded = decode.run(step_until_loaded)
        here = decode.run(of_request, loaded, covered)
    [completion] = decode.results(requests)
    assert completion.finish_reason == "length"
    return there, here


def check_crossing(prefill: Engine, decode: Engine, *prompts: list[int]) -> None:
    """See that decode gets what prefill has computed of prompts, byte for byte."""
    for tokens in prompts:
        [ticket] = prefill.prefill(tokens)
        there, here = of_both(prefill, decode, tokens, ticket)
        assert unequal(there, here) == [], f"{len(tokens)} tokens"


def unequal(some: Sequence[Contents], others: Sequence[Contents]) -> list[str]:
    """Which parts differ. Of a convolution that one engine keeps wider only the common columns
    count: the others are scratch of speculative decoding."""
    assert [list(rank) for rank in some] == [list(rank) for rank in others]
    return [
        key
        for rank, other in zip(some, others, strict=True)
        for key in rank
        if not _equal(key, rank[key], other[key])
    ]


def _equal(key: str, one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> bool:
    width = min(one.shape[-1], other.shape[-1]) if key.endswith("conv") else None
    return np.array_equal(one[..., :width], other[..., :width])


def of_request(engine: Any, request: str, tokens: int) -> list[Contents]:
    """By rank, what the pages of a request hold after ``tokens``.

    For a layer with a window, what the next token attends to; for a state, all of it.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    blocks = scheduler.kv_cache_manager.get_block_ids(request)
    ranks: list[Contents] = engine.collective_rpc(_of_rank, args=(blocks, tokens))
    return ranks


def step_until_loaded(engine: Any) -> str:
    """Step a paused engine until a load has been reported and nothing has been computed since.

    Returns whose load that was.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    until = time.monotonic() + LOADED_SECONDS
    while time.monotonic() < until:
        if scheduler.finished_recving_kv_req_ids:
            [request] = scheduler.finished_recving_kv_req_ids
            return str(request)
        engine.step()
        time.sleep(STEP_SECONDS)
    raise RuntimeError("nothing was loaded")


def _of_rank(worker: Any, blocks: Sequence[Sequence[int]], tokens: int) -> Contents:
    runner = worker.model_runner
    layers = runner.compilation_config.static_forward_context
    found: Contents = {}
    for ids, group in zip(blocks, runner.kv_cache_config.kv_cache_groups, strict=True):
        for name in group.layer_names:
            parts = _parts(layers[name].kv_cache, group.kv_cache_spec, ids, tokens)
            found |= {f"{name}/{part}": _bytes(tensor) for part, tensor in parts.items()}
    return found


def _parts(cache: Any, spec: Any, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    kind = type(spec).__name__
    if kind == "MambaSpec":
        conv, ssm = (part[ids[(tokens - 1) // spec.block_size]] for part in cache)
        return {"conv": conv, "ssm": ssm}
    if kind == "MLAAttentionSpec":
        return {"latent": _of_tokens(cache.unsqueeze(2), spec, ids, tokens)}
    read = _reading(cache, spec)(cache, spec)
    return {part: _of_tokens(read[part], spec, ids, tokens) for part in ("k", "v")}


def _reading(cache: Any, spec: Any) -> views.Reading:
    """How the kernels of this machine read a page of attention: with AMX, in tiles."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    kernels = _get_attn_isa(cache.dtype, cache.shape[2], spec.head_size)
    return views.amx if kernels == "amx" else views.columns


def _of_tokens(cache: Any, spec: Any, ids: Sequence[int], tokens: int) -> Any:
    """The tokens to which the next one attends."""
    import torch

    window = getattr(spec, "sliding_window", None)
    wanted = torch.arange(max(0, tokens - window + 1) if window else 0, tokens)
    pages = torch.tensor(ids)[wanted // spec.block_size]
    assert (pages > 0).all(), "a token of the window is in no page"
    return cache[pages, wanted % spec.block_size]


def _bytes(tensor: Any) -> npt.NDArray[np.uint8]:
    import torch

    array: npt.NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).numpy().copy()
    return array


def fill(engine: Any, value: float) -> None:
    """Overwrite every page of every layer."""
    engine.collective_rpc(_fill, args=(value,))


def _fill(worker: Any, value: float) -> None:
    layers = worker.model_runner.compilation_config.static_forward_context
    for layer in layers.values():
        cache = getattr(layer, "kv_cache", ())
        for part in cache if isinstance(cache, tuple) else (cache,):
            part.fill_(value)
