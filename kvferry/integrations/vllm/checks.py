"""Checks of a configuration: settings and caches that cannot work, were not tested, or are risky.

They run when an engine is launched, before vLLM loads the model (`plugin`), and again in the
workers, since the launch cannot see all: the plugin may be switched off (``VLLM_PLUGINS``), and
ranks may run on other hosts. ``kvferry check-config`` runs those that need no model.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvferry.core.errors import DriverError, HandshakeError
from kvferry.core.side_channel.server import check_address
from kvferry.core.transport import registry
from kvferry.integrations.vllm import compat_029, versions
from kvferry.integrations.vllm import config as configuration
from kvferry.integrations.vllm.caches.cache_kinds import refusals
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.security import examine_security_settings
from kvferry.integrations.vllm.transfer_config import as_mapping, extra_of, own_transfers

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
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

CANNOT = "KVFerryConnector cannot work with "

STAGED_TURNS = (
    "bidirectional_kv_xfer with {}: host pages are reserved when a request begins, and the length "
    "of its answer is not known then; remove one of the two"
)
"""Why turns are refused where a cache is staged; names the other setting."""


def _refuse(problems: Iterable[str], beginning: str = "") -> None:
    """Raise one ``ConfigError`` for all problems, if there are any."""
    if text := "; ".join(problems):
        raise ConfigError(beginning + text)


# At launch.


def launches_here(parallel: ParallelConfig) -> bool:
    """Return whether a launch starts engines or workers on this host, as far as is known before.

    ``False`` for a front end whose engines are all elsewhere, and with Ray, which places them.
    """
    placed_by = parallel.data_parallel_backend, parallel.distributed_executor_backend
    return "ray" not in placed_by and parallel.data_parallel_size_local != 0


def check_launch(vllm_config: VllmConfig) -> None:
    """Refuse an engine that cannot work with the connector, as far as its configuration shows."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    of_settings = setting_problems if launches_here(parallel) else configuration.problems
    own_parts = own_transfers(transfer)
    _refuse(problem for own in own_parts for problem in of_settings(extra_of(own)))
    for own in own_parts:
        engine = copy.copy(vllm_config)  # as MultiConnector makes its children's configurations
        if own != as_mapping(transfer):
            engine.kv_transfer_config = type(transfer)(**own)
        check_engine(engine, transfer)
        _refuse(address_problems(configuration.parse(extra_of(own)), engines_here(parallel)))


def setting_problems(extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the settings, their driver, and the keys and secrets they name.

    The driver is looked up, but neither imported nor started.
    """
    yield from configuration.problems(extra)
    config = configuration.acceptable(extra)
    try:
        registry.find(config.driver)
    except DriverError as exc:
        yield str(exc)
    yield from examine_security_settings(config)[1]


def address_problems(config: Config, indices: Iterable[int]) -> Iterator[str]:
    """Yield why side channels of engines with these data-parallel indices could not listen here."""
    for index in indices:
        try:
            port = configuration.with_index(config, index).side_channel_port
            check_address(config.side_channel_host, port)
        except (ConfigError, HandshakeError) as exc:
            yield str(exc)


def engines_here(parallel: ParallelConfig) -> range:
    """Return the data-parallel indices of the engines that this process launches on this host.

    Empty in processes that another process of vLLM has started: the engine may listen already. Also
    empty with Ray, which places engines, and on a host that has only workers.
    """
    is_child = multiprocessing.parent_process() is not None
    if is_child or not launches_here(parallel) or parallel.node_rank_within_dp > 0:
        return range(0)
    first = parallel.data_parallel_index
    return range(first, first + parallel.data_parallel_size_local)


# Of an engine's whole configuration.


def check_engine(vllm_config: VllmConfig, outer: KVTransferConfig) -> None:
    """Refuse an engine whose settings cannot work with the connector, or were not tested with it.

    What vLLM itself refuses with any connector is not checked here, such as encoder-decoder models.
    ``outer`` is the configuration of connectors with which the engine was started, such as
    MultiConnector's.
    """
    siblings = sibling_problems(vllm_config.kv_transfer_config, outer)
    _refuse((*_unsupported_settings(vllm_config), *siblings), CANNOT)


def _unsupported_settings(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield each setting of the engine with which the connector cannot work."""
    model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    if model.enable_sleep_mode:
        yield (
            "enable_sleep_mode: it gives the cache's memory away while peers may read it; start "
            "without it"
        )
    if model.runner_type == "pooling":
        yield (
            f"the pooling model {model.model!r}: its requests end with their prompt, so there is "
            "nothing to decode; start without kv_transfer_config"
        )
    if compat_029.uses_hisparse(vllm_config):
        yield "attention_config.hisparse_config: its caches lie in host memory; start without it"
    if versions.returns_routed_experts(vllm_config):
        yield (
            "enable_return_routed_experts: decode has none for the tokens that another engine "
            "computed; start without it"
        )
    if versions.stores_every_state(vllm_config):
        yield (
            'mamba_cache_mode "all": that its states can be handed over was not proven; set "align"'
        )
    prefill_ranks = parallel.prefill_context_parallel_size
    if prefill_ranks > 1 and parallel.decode_context_parallel_size == 1 and transfer.is_kv_consumer:
        yield (
            f"prefill_context_parallel_size {prefill_ranks} with kv_role {transfer.kv_role!r}: its "
            "ranks all keep the whole cache, and only the first can load it; set kv_role "
            '"kv_producer"'
        )
    is_staged = transfer.kv_buffer_device == "cpu" != vllm_config.device_config.device_type
    if is_staged and transfer.kv_connector_extra_config.get("bidirectional_kv_xfer"):
        yield STAGED_TURNS.format(f"kv_buffer_device {transfer.kv_buffer_device!r}")
    if (media := model.multimodal_config) is None:
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


def sibling_problems(own: KVTransferConfig, engine: KVTransferConfig) -> Iterator[str]:
    """Yield roles that this connector's settings exclude, and siblings that it cannot run with.

    Siblings are the other connectors under vLLM's MultiConnector, whose configuration is
    ``engine``.
    """
    extra = own.kv_connector_extra_config
    holds_answers = extra.get("bidirectional_kv_xfer")
    wrong_roles = sorted({own.kv_role, engine.kv_role} - {"kv_both"}, key=str)
    if holds_answers and wrong_roles:
        yield (
            f"bidirectional_kv_xfer with kv_role {wrong_roles[0]!r}: each engine both loads and "
            "hands over, and vLLM frees blocks in a safe order for that only where the role says "
            'so; set kv_role "kv_both" on both engines, or remove bidirectional_kv_xfer'
        )
    if holds_answers and extra.get("staging"):
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


def check_caches(transfer: KVTransferConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse an engine that has no cache to hand over, or a cache that is not supported."""
    _refuse(cache_problems(transfer, kv_cache_config), CANNOT)


def cache_problems(transfer: KVTransferConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Yield why an engine's caches cannot be handed over, or not be loaded."""
    if not kv_cache_config.transfer_groups:
        yield (
            "a model without a cache to hand over: every request would be computed twice; start "
            "without kv_transfer_config"
        )
    yield from refusals(kv_cache_config)
    problem = compat_029.unreportable_failures(kv_cache_config) if transfer.is_kv_consumer else None
    if problem:
        yield (f'loads into {problem}; set kv_role "kv_producer", or install a later vLLM')


# Risks.


def has_siblings(engine: KVTransferConfig) -> bool:
    """Return whether other connectors run beside this one, which may keep what it has loaded."""
    return len(engine.kv_connector_extra_config.get("connectors", [])) > 1


def late_turn_risk(config: Config, engine: KVTransferConfig) -> str | None:
    """Return a warning that the next turn of a conversation may fail; ``None`` if it cannot."""
    if not config.bidirectional_kv_xfer or engine.kv_load_failure_policy == "recompute":
        return None
    return (
        f"kv_load_failure_policy is {engine.kv_load_failure_policy!r}, with bidirectional_kv_xfer: "
        "a turn ends with an error on prefill if it comes after decoder_kv_blocks_ttl, after a "
        'restart of decode, or when decode has given the pages back; set "recompute", which '
        "computes it"
    )


def warn_of_risks(config: Config, engine: KVTransferConfig) -> None:
    """Log what is unsafe or ignored (``config.risks``), and ``late_turn_risk``."""
    late = late_turn_risk(config, engine)
    for risk in (*configuration.risks(config), *filter(None, [late])):
        logger.warning("%s", risk)
