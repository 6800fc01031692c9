"""Refuse at start settings and caches that cannot work with the connector or were not tested."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.caches.cache_specs import refusals
from kvferry.integrations.vllm.config import Config, ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


logger = logging.getLogger(__name__)

TICKET_CONNECTORS = frozenset(
    {
        "KVFerryConnector",
        "MooncakeConnector",
        "MoRIIOConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
    }
)
"""The connectors whose tickets use NixlConnector's keys; only one of them may run at a time."""

STAGED_TURNS = (
    "bidirectional_kv_xfer with {}: host pages are reserved when a request begins, and the length "
    "of its answer is not known then; remove one of the two"
)
"""Why turns are refused where a cache is staged; names the other setting."""


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuse an engine whose settings cannot work with the connector, or were not tested with it.

    What vLLM itself refuses with any connector is not checked here (``use_replayssm``, allocators
    that move memory, ``prefix_match_unit`` with one group, ...).

    Args:
        vllm_config: The engine's configuration.

    Raises:
        ConfigError: There are such settings; the message names each, and the remedy.
    """
    _refuse("KVFerryConnector cannot work with", _unsupported(vllm_config))


def check_siblings(own: KVTransferConfig, engine: KVTransferConfig) -> None:
    """Refuse a role that this connector's settings exclude, and siblings that it cannot run with.

    Siblings are the other connectors under vLLM's MultiConnector.

    Args:
        own: The configuration of this connector.
        engine: The configuration with which the engine was started, such as MultiConnector's; the
            same as ``own`` if this connector runs alone.

    Raises:
        ConfigError: Names the setting and the remedy.
    """
    _refuse("KVFerryConnector cannot work with", _unsupported_siblings(own, engine))


def has_siblings(engine: KVTransferConfig) -> bool:
    """Return whether other connectors run beside this one, which may keep what it has loaded.

    Args:
        engine: The configuration with which the engine was started, such as MultiConnector's.
    """
    return len(engine.kv_connector_extra_config.get("connectors", [])) > 1


def late_turn_risk(config: Config, engine: KVTransferConfig) -> str | None:
    """Return a warning that the next turn of a conversation may fail; ``None`` if it cannot.

    Args:
        config: The connector's settings.
        engine: The configuration with which the engine was started, such as MultiConnector's.
    """
    if not config.bidirectional_kv_xfer or engine.kv_load_failure_policy == "recompute":
        return None
    return (
        f"kv_load_failure_policy is {engine.kv_load_failure_policy!r}, with bidirectional_kv_xfer: "
        "a turn ends with an error on prefill if it comes after decoder_kv_blocks_ttl, after a "
        'restart of decode, or when decode has given the pages back; set "recompute", which '
        "computes it"
    )


def warn_of_late_turns(config: Config, engine: KVTransferConfig) -> None:
    """Log ``late_turn_risk``, if there is one; the arguments are the same."""
    if risk := late_turn_risk(config, engine):
        logger.warning(risk)


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse an engine that has no cache to hand over, or a kind of cache that is not supported.

    Args:
        kv_cache_config: The engine's cache groups.

    Raises:
        ConfigError: Names the layers that are refused, and why.
    """
    _refuse("KVFerryConnector cannot work with", _unsupported_groups(kv_cache_config))


def check_failure_reports(transfer: KVTransferConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse an engine that loads if its vLLM cannot be told that a load failed.

    Args:
        transfer: The engine's configuration of the connector.
        kv_cache_config: The engine's cache groups.

    Raises:
        ConfigError: Names vLLM's version and the remedy.
    """
    problem = versions.unreportable_failures(kv_cache_config) if transfer.is_kv_consumer else None
    if problem:
        raise ConfigError(
            f'KVFerryConnector cannot load with {problem}; set kv_role "kv_producer", or install '
            "a later vLLM"
        )


def _refuse(reason: str, problems: Iterable[str]) -> None:
    """Raise one ``ConfigError`` for all problems, if there are any.

    Args:
        reason: The beginning of the message.
        problems: A text for each problem, with its remedy.
    """
    text = "; ".join(problems)
    if text:
        raise ConfigError(f"{reason} {text}")


def _unsupported(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield each setting with which the connector cannot work, and the remedy."""
    model = vllm_config.model_config
    if model.enable_sleep_mode:
        yield (
            "enable_sleep_mode: it gives the cache's memory away while peers may read it; start "
            "without it"
        )
    if model.is_encoder_decoder:
        yield (
            f"the encoder-decoder model {model.model!r}: its cross attention caches an encoder's "
            "tokens, vLLM has no connectors for these, and a ticket would have to name the "
            "encoder's input; start without kv_transfer_config"
        )
    if model.runner_type == "pooling":
        yield (
            f"the pooling model {model.model!r}: its requests end with their prompt, so there is "
            "nothing to decode; start without kv_transfer_config"
        )
    if versions.uses_hisparse(vllm_config):
        yield (
            "attention_config.hisparse_config (HiSparse): its caches lie in host memory and are "
            "copied on demand, so that memory would have to be registered; start without it"
        )
    if versions.returns_routed_experts(vllm_config):
        yield (
            "enable_return_routed_experts: decode has none for the tokens that another engine "
            "computed; start without it"
        )
    if versions.stores_every_state(vllm_config):
        yield (
            'mamba_cache_mode "all": that its states can be handed over was not proven; set "align"'
        )
    yield from _unsupported_media(vllm_config)
    yield from _unsupported_transfer(vllm_config)


def _unsupported_media(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield each setting with which prompts with images or other media cannot be handed over."""
    media = vllm_config.model_config.multimodal_config
    if media is None:
        return
    if media.mm_processor_cache_gb == 0 and not vllm_config.cache_config.enable_prefix_caching:
        yield (
            "mm_processor_cache_gb 0 without prefix caching: vLLM then numbers images instead of "
            "hashing their content, so no engine can tell for which image a ticket was made; "
            "remove mm_processor_cache_gb, or set enable_prefix_caching"
        )
    if media.video_pruning_rate:
        yield (
            f"video_pruning_rate {media.video_pruning_rate}: the positions of the tokens after a "
            "video then depend on the video's content, and decode does not encode a video whose "
            "pages it loads; start without it"
        )


def _unsupported_transfer(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield each transfer or parallelism setting with which the connector cannot work."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    prefill_ranks = parallel.prefill_context_parallel_size
    if prefill_ranks > 1 and parallel.decode_context_parallel_size == 1 and transfer.is_kv_consumer:
        yield (
            f"prefill_context_parallel_size {prefill_ranks} with kv_role {transfer.kv_role!r}: its "
            "ranks all keep the whole cache, and only the first can load it; set kv_role "
            '"kv_producer"'
        )
    holds_answers = transfer.kv_connector_extra_config.get("bidirectional_kv_xfer")
    if (
        holds_answers
        and transfer.kv_buffer_device == "cpu" != vllm_config.device_config.device_type
    ):
        yield STAGED_TURNS.format(f"kv_buffer_device {transfer.kv_buffer_device!r}")
    if transfer.enable_permute_local_kv:
        yield (
            "enable_permute_local_kv: nothing is permuted here, any layout is read into any other; "
            "remove it"
        )


def _unsupported_siblings(own: KVTransferConfig, engine: KVTransferConfig) -> Iterator[str]:
    """Yield each reason why this connector cannot run in its role, or under a MultiConnector.

    Args:
        own: The configuration of this connector.
        engine: The configuration with which the engine was started.
    """
    wrong_roles = sorted({own.kv_role, engine.kv_role} - {"kv_both"}, key=str)
    if own.kv_connector_extra_config.get("bidirectional_kv_xfer") and wrong_roles:
        yield (
            f"bidirectional_kv_xfer with kv_role {wrong_roles[0]!r}: each engine both loads and "
            "hands over, and vLLM frees blocks in a safe order for that only where the role says "
            'so; set kv_role "kv_both" on both engines, or remove bidirectional_kv_xfer'
        )
    extra = own.kv_connector_extra_config
    if extra.get("bidirectional_kv_xfer") and extra.get("staging"):
        yield STAGED_TURNS.format("staging")
    children = engine.kv_connector_extra_config.get("connectors", [])
    names = [child.get("kv_connector") for child in children if isinstance(child, Mapping)]
    ticket_connectors = [name for name in names if name in TICKET_CONNECTORS]
    if len(ticket_connectors) > 1:
        yield (
            f"{' and '.join(ticket_connectors)} under one MultiConnector: their tickets have the "
            "same keys; leave one"
        )
    if own.is_kv_consumer and not engine.is_kv_consumer:
        yield (
            f"kv_role {own.kv_role!r} under a MultiConnector with kv_role {engine.kv_role!r}: vLLM "
            "gives blocks back to a loader in order only where the outer role loads; set the outer "
            'to "kv_both"'
        )


def _unsupported_groups(kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Yield a text for each cache group that cannot be handed over; one if there is no group."""
    if not kv_cache_config.transfer_groups:
        yield (
            "a model without a cache to hand over: every request would be computed twice; start "
            "without kv_transfer_config"
        )
    yield from refusals(kv_cache_config)
