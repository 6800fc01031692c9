"""Which of vLLM's ``KVCacheSpec`` classes are supported: the tables ``HANDLED`` and ``REFUSED``."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvferry.integrations.vllm import versions

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class Handling(enum.StrEnum):
    """How caches of one class of ``KVCacheSpec`` are handled."""

    PAGED = "paged"  # a page holds consecutive tokens
    STATE = "state"  # a page holds the recurrent state after some tokens
    RING = "ring"  # a request's only page holds its last tokens, which later ones overwrite
    MEMBERS = "members"  # a container, in which each layer of the group has a spec of its own


HANDLED: Mapping[str, Handling] = {
    "FullAttentionSpec": Handling.PAGED,
    "MLAAttentionSpec": Handling.PAGED,
    "RSWASpec": Handling.PAGED,
    "SlidingWindowSpec": Handling.PAGED,
    "SlidingWindowMLASpec": Handling.PAGED,
    "ChunkedLocalAttentionSpec": Handling.PAGED,
    "MambaSpec": Handling.STATE,
    "CircularBufferSpec": Handling.RING,
    "UniformTypeKVCacheSpecs": Handling.MEMBERS,
}
"""By the spec's class name. A class that is not listed is refused, whatever its base."""

HISPARSE = (
    "a HiSparse replica on the device, which vLLM fills on demand from host memory; the pages in "
    "host memory would have to be registered and handed over instead"
)

REFUSED: Mapping[str, str] = {
    "AttentionSpec": "no layer has it: others are derived from it",
    "CrossAttentionSpec": "cross attention caches an encoder's tokens; a ticket would have to name "
    "the encoder's input and its pages beside the prompt's",
    "EncoderOnlyAttentionSpec": "an encoder keeps no keys and values; there is nothing to hand "
    "over",
    "HiddenStateCacheSpec": "hidden states are an output, not a cache to decode from; use vLLM's "
    "ExampleHiddenStatesConnector for these",
    "HiSparseHotSpec": HISPARSE,
    "HiSparseResidentSpec": HISPARSE,
    "SinkFullAttentionSpec": "the kernels read the sink's keys from the engine's first blocks, in "
    "front of every request's; that no load fills these blocks would have to be proven",
}
"""Why an engine with such a cache does not start."""


def handling(spec: KVCacheSpec) -> Handling | None:
    """Return how the caches of a group's layers are handled, which are of one kind."""
    return HANDLED.get(type(versions.first_layer(spec)).__name__)


def refusals(config: KVCacheConfig) -> Iterator[str]:
    """Yield why cache groups, of those that vLLM offers for transfer, cannot be handed over."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    for group in config.transfer_groups:
        reasons = {_spec_refusal(spec) for spec in iter_layer_specs(group.kv_cache_spec)} - {""}
        if reasons:
            first, more = group.layer_names[:2], len(group.layer_names) - 2
            rest = f" and {more} more layers" if more > 0 else ""
            yield f"the caches of {', '.join(first)}{rest} ({'; '.join(sorted(reasons))})"


def _spec_refusal(spec: KVCacheSpec) -> str:
    """Return why caches with this spec cannot be handed over; an empty text if they can."""
    name = type(spec).__name__
    if name not in HANDLED:
        return f"{name}: {REFUSED.get(name, 'not known here')}"
    states = getattr(spec, "tokens_per_state", 1)
    if HANDLED[name] is Handling.PAGED and (states < 1 or states != int(states)):
        return f"{name} of {1 / states} entries per token: an entry must be of whole tokens"
    if getattr(spec, "non_causal", False):
        return (
            f"{name} of a prefix LM: the prompt's tokens attend to each other in both directions, "
            "so its pages fit no longer prompt, which a ticket would have to say"
        )
    return ""
