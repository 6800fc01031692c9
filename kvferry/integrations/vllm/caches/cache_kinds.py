"""Which of vLLM's ``KVCacheSpec`` classes are supported: the tables ``HANDLED`` and ``REFUSED``."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvferry.integrations.vllm import compat_029, versions

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


class Handling(enum.StrEnum):
    """How caches of one class of ``KVCacheSpec`` are handled."""

    PAGED = "paged"
    """A page holds consecutive tokens."""
    STATE = "state"
    """A page holds the recurrent state after some tokens."""
    RING = "ring"
    """A request's only page holds its last tokens, which later tokens overwrite in place."""
    MEMBERS = "members"
    """The spec is a container, in which each layer of the group has a spec of its own."""


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
    for group in config.transfer_groups:
        reason = _refusal(group)
        if reason:
            yield f"the caches of {_names_of(group.layer_names)} ({reason})"


def _refusal(group: KVCacheGroupSpec) -> str:
    """Return why a cache group cannot be handed over; an empty text if it can."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    if compat_029.is_host_resident(group):
        return (
            "they lie in the host's memory, where vLLM numbers blocks on its own; this memory "
            "would have to be registered, and tickets would have to have its block numbers; start "
            "without attention_config.hisparse_config"
        )
    reasons = {_spec_refusal(spec) for spec in iter_layer_specs(group.kv_cache_spec)}
    return "; ".join(sorted(reasons - {""}))


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


def _names_of(names: list[str]) -> str:
    """Return the first two layer names, and how many more there are."""
    rest = f" and {len(names) - 2} more layers" if len(names) > 2 else ""
    return ", ".join(names[:2]) + rest
