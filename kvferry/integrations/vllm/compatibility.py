"""What this engine and its peers must agree on: one table of facts, one of judgements.

A fact decides what the bytes of a page mean; engines that differ in one must not exchange pages. A
judgement is a name: two names may stand for one model, and an operator may know that they do. What
a single field can say of itself (element type, encoding, shape) is in the layout, not here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvferry.core.endpoint import Identity
from kvferry.core.handshake import Judgements
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.integrations.vllm.caches.quantization import cache_format
from kvferry.integrations.vllm.config import Config
from kvferry.integrations.vllm.rank_position import RankPosition

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

MAX_WORDS = 1000
"""Longer values are cut, and end with a digest of the whole."""


def rank_identity(
    vllm_config: VllmConfig, incarnation: Incarnation, position: RankPosition
) -> Identity:
    """Who a rank is."""
    return Identity(
        engine=vllm_config.kv_transfer_config.engine_id,
        incarnation=incarnation,
        rank=position.rank,
        coordinates=position.coordinates,
        agreement=compatibility_facts(vllm_config),
    )


def compatibility_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """What this engine says about itself, name to value; what it has nothing to say of is left
    out."""
    said = {name: says(vllm_config) for name, says in {**FACTS, **JUDGEMENTS}.items()}
    return {name: _bounded(value) for name, value in said.items() if value is not None}


def judgements(config: Config) -> Judgements:
    """Which differences an operator may override, and whether he has."""
    return Judgements(keys=frozenset(JUDGEMENTS), overridden=not config.enforce_handshake_compat)


def _cache_dtype(config: VllmConfig) -> str:
    """The default of all layers; a layer that differs says so in its fields."""
    cache_dtype = config.cache_config.cache_dtype
    if cache_dtype == "auto":
        return _plain(config.model_config.dtype)
    return cache_format(cache_dtype) or _plain(cache_dtype)


def _quantization(config: VllmConfig) -> str:
    """What the checkpoint declares: vLLM's own name for it depends on the kernels of a machine."""
    model = config.model_config
    declared = getattr(model.hf_config, "quantization_config", None)
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    return str(method or model.quantization)


def _rotary(config: VllmConfig) -> str:
    """How positions are turned into keys.

    Of two sets of factors the kernels use one for all prompts, by the longest prompt that the
    engine takes (``phi3_long_rope_scaled_rope.py``).
    """
    model = config.model_config
    parameters = getattr(model.hf_text_config, "rope_parameters", None) or {}
    text = json.dumps(parameters, sort_keys=True, default=str)
    original = _original_length(model, parameters)
    if "longrope" in text and original is not None:
        return f"{'long' if model.max_model_len > original else 'short'} factors of {text}"
    return text


def _original_length(model: ModelConfig, parameters: Mapping[str, Any]) -> int | None:
    name = "original_max_position_embeddings"
    length: int | None = parameters.get(name) or getattr(model.hf_text_config, name, None)
    return length


def _overrides(config: VllmConfig) -> str | None:
    """What the user changed in the model's configuration; a function has no words."""
    overrides = config.model_config.hf_overrides
    return None if callable(overrides) else json.dumps(overrides, sort_keys=True, default=str)


def _draft_method(config: VllmConfig) -> str | None:
    """Only of a draft model with caches: whatever else guesses tokens leaves no bytes."""
    speculative = config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    return str(speculative.method)


def _draft(name: str) -> Callable[[VllmConfig], str | None]:
    def says(config: VllmConfig) -> str | None:
        if _draft_method(config) is None:
            return None
        return str(getattr(config.speculative_config.draft_model_config, name))

    return says


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _bounded(value: str) -> str:
    if len(value) <= MAX_WORDS:
        return value
    digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{value[:MAX_WORDS]}... (digest {digest})"


FACTS: Mapping[str, Callable[[VllmConfig], str | None]] = {
    "dtype": lambda config: _plain(config.model_config.dtype),
    "quantization": _quantization,
    "cache dtype": _cache_dtype,
    "rotary embedding": _rotary,
    "draft method": _draft_method,
}
"""Differences that would corrupt: refused, whatever an operator says."""

JUDGEMENTS: Mapping[str, Callable[[VllmConfig], str | None]] = {
    "model": lambda config: str(config.model_config.model),
    "revision": lambda config: str(config.model_config.revision),
    "model overrides": _overrides,
    "draft model": _draft("model"),
    "draft revision": _draft("revision"),
}
"""Differences that may mean nothing: refused, unless ``enforce_handshake_compat`` is false."""
