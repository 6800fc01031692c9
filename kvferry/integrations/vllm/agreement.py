"""The values that two engines must agree on before they exchange pages.

A fact decides what the bytes of a page mean: engines that differ in a fact never exchange pages. A
judgement is a name, such as the model's: two names may mean the same model, so an operator can
allow the difference (``enforce_handshake_compat``). What is only told may differ: engines of
several versions of vLLM exchange pages. Element type, encoding and shape of each field are compared
with the layouts, not here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvferry.core.endpoint import EndpointOptions, Identity
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.security import Access
from kvferry.core.side_channel.compatibility import Judgements
from kvferry.integrations.vllm import compat_029, versions
from kvferry.integrations.vllm.caches.layer_facts import cache_format
from kvferry.integrations.vllm.config import Config
from kvferry.integrations.vllm.rank_position import RankPosition

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_CHARACTERS = 1000
"""How many characters of a value are published at most; longer ones end with a digest of all."""


def rank_identity(
    vllm_config: VllmConfig, incarnation: Incarnation, position: RankPosition
) -> Identity:
    """Return what a rank publishes of itself in the handshake."""
    return Identity(
        engine=vllm_config.kv_transfer_config.engine_id,
        incarnation=incarnation,
        rank=position.rank,
        coordinates=position.coordinates,
        agreement=compatibility_facts(vllm_config),
    )


def compatibility_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the values of ``FACTS``, ``JUDGEMENTS`` and ``TOLD`` by name."""
    tables = {**FACTS, **JUDGEMENTS, **TOLD}
    values = {name: value_of(vllm_config) for name, value_of in tables.items()}
    return {name: truncated(value) for name, value in values.items() if value is not None}


def endpoint_options(config: Config, access: Access) -> EndpointOptions:
    """Return the options of a rank's endpoint, and of the ``Directory``."""
    return EndpointOptions(
        handshake_timeout=config.handshake_timeout,
        lease=config.kv_lease_duration,
        load_timeout=config.load_timeout,
        liveness_interval=config.liveness_interval,
        liveness_misses=config.liveness_misses,
        engine_ttl=config.engine_ttl,
        judgements=Judgements(
            keys=frozenset(JUDGEMENTS),
            overridden=not config.enforce_handshake_compat,
            told=frozenset(TOLD),
        ),
        access=access,
    )


def _cache_dtype(config: VllmConfig) -> str:
    """Return the configured type or quantised format of the cache; layers may have others."""
    cache_dtype = config.cache_config.cache_dtype
    if cache_dtype == "auto":
        return _dtype_name(config.model_config.dtype)
    return cache_format(cache_dtype) or _dtype_name(cache_dtype)


def _quantization(config: VllmConfig) -> str:
    """Return the quantization as the checkpoint names it; vLLM's name depends on kernels."""
    model = config.model_config
    declared = getattr(model.hf_config, "quantization_config", None)
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    return str(method or model.quantization)


def _rotary(config: VllmConfig) -> str:
    """Return the parameters of the rotary embedding.

    LongRoPE has two sets of factors. The kernels use one of them for all prompts, depending on the
    longest prompt that the engine accepts (``phi3_long_rope_scaled_rope.py``).
    """
    model = config.model_config
    parameters = getattr(model.hf_text_config, "rope_parameters", None) or {}
    text = json.dumps(parameters, sort_keys=True, default=str)
    name = "original_max_position_embeddings"
    original: int | None = parameters.get(name) or getattr(model.hf_text_config, name, None)
    if "longrope" in text and original is not None:
        return f"{'long' if model.max_model_len > original else 'short'} factors of {text}"
    return text


def _overrides(config: VllmConfig) -> str | None:
    """Return the user's ``hf_overrides`` as JSON; ``None`` for functions, which have no text."""
    overrides = config.model_config.hf_overrides
    return None if callable(overrides) else json.dumps(overrides, sort_keys=True, default=str)


def _media_settings(config: VllmConfig) -> str | None:
    """Return the settings that decide what an image, or another medium, becomes, as JSON.

    vLLM's identifier of an image contains settings that a request brings, but not these.
    """
    media = config.model_config.multimodal_config
    if media is None:
        return None
    settings = {
        "hash": media.mm_hasher_algorithm,
        "media_io_kwargs": media.media_io_kwargs or {},
        "mm_processor_kwargs": media.mm_processor_kwargs or {},
    }
    return json.dumps(settings, sort_keys=True, default=str)


def _draft_method(config: VllmConfig) -> str | None:
    """Return the method of speculative decoding; ``None`` if there is none with a KV cache."""
    speculative = config.speculative_config
    if speculative is None or not compat_029.drafts_with_cache(speculative):
        return None
    return str(speculative.method)


def _draft(name: str) -> Callable[[VllmConfig], str | None]:
    """Return a function that returns what a draft model with a cache is configured with."""

    def value_of(config: VllmConfig) -> str | None:
        if _draft_method(config) is None:
            return None
        return str(getattr(config.speculative_config.draft_model_config, name))

    return value_of


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def truncated(value: str, characters: int = MAX_CHARACTERS) -> str:
    """Return a value to be compared, of which no more than some ``characters`` are shown."""
    if len(value) <= characters:
        return value
    digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{value[:characters]}... (digest {digest})"


FACTS: Mapping[str, Callable[[VllmConfig], str | None]] = {
    "dtype": lambda config: _dtype_name(config.model_config.dtype),
    "quantization": _quantization,
    "cache dtype": _cache_dtype,
    "rotary embedding": _rotary,
    "draft method": _draft_method,
}
"""What returns the value of each fact, ``None`` if it does not apply; likewise below."""

JUDGEMENTS: Mapping[str, Callable[[VllmConfig], str | None]] = {
    "model": lambda config: str(config.model_config.model),
    "revision": lambda config: str(config.model_config.revision),
    "model overrides": _overrides,
    "media": _media_settings,
    "draft model": _draft("model"),
    "draft revision": _draft("revision"),
}

TOLD: Mapping[str, Callable[[VllmConfig], str | None]] = {
    "vLLM": lambda config: versions.vllm_version(),
}
