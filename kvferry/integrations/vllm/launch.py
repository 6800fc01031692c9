"""Refuse a wrong configuration when an engine is launched, before vLLM loads the model.

Everything is checked again where it is used, since the launch cannot see all: the plugin may be
switched off (``VLLM_PLUGINS``), and ranks may run on other hosts.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvferry.core.errors import DriverError, HandshakeError
from kvferry.core.handshake import check_address
from kvferry.core.transport import registry
from kvferry.integrations.vllm import config as configuration
from kvferry.integrations.vllm import support
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.security import examine_security_settings
from kvferry.integrations.vllm.transfer_config import as_mapping, extra_of, own_transfers

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


def check_transfer(transfer: object) -> None:
    """Refuse wrong settings, an unknown driver, and keys and secrets that cannot be read.

    Args:
        transfer: vLLM's ``KVTransferConfig``, or its keys and values. Only the parts are checked
            that select ``KVFerryConnector``.

    Raises:
        ConfigError: Names everything that is wrong, and the remedies.
    """
    own = map(extra_of, own_transfers(transfer))
    _refuse(problem for extra in own for problem in setting_problems(extra))


def check_launch(vllm_config: VllmConfig) -> None:
    """Refuse an engine that cannot work with the connector, as far as its configuration shows.

    Args:
        vllm_config: The configuration of the engine that is launched.

    Raises:
        ConfigError: Names everything that is wrong, and the remedies.
    """
    transfer = vllm_config.kv_transfer_config
    check_transfer(transfer)
    for own in own_transfers(transfer):
        engine = copy.copy(vllm_config)  # as MultiConnector makes its children's configurations
        if own != as_mapping(transfer):
            engine.kv_transfer_config = type(transfer)(**own)
        support.check_engine(engine)
        support.check_siblings(engine.kv_transfer_config, transfer)
        indices = engines_here(vllm_config.parallel_config)
        _refuse(address_problems(configuration.parse(extra_of(own)), indices))


def setting_problems(extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the settings, their driver, and the keys and secrets they name.

    The driver is looked up, but neither imported nor started. Settings that are accepted are
    checked even if others are refused.

    Args:
        extra: ``kv_connector_extra_config``.
    """
    yield from configuration.problems(extra)
    config = configuration.acceptable(extra)
    try:
        registry.find(config.driver)
    except DriverError as exc:
        yield str(exc)
    yield from examine_security_settings(config)[1]


def address_problems(config: Config, indices: Iterable[int]) -> Iterator[str]:
    """Yield why side channels could not listen on this host now.

    Args:
        config: The settings, with the port as configured.
        indices: The data-parallel indices of the engines on this host. Each is added to the port,
            unless that is 0.
    """
    for index in indices:
        try:
            port = configuration.with_index(config, index).side_channel_port
            check_address(config.side_channel_host, port)
        except (ConfigError, HandshakeError) as exc:
            yield str(exc)


def engines_here(parallel: ParallelConfig) -> range:
    """Return the data-parallel indices of the engines that this process launches on this host.

    Empty in processes that another process of vLLM has started: the engine may listen already. Also
    empty with Ray, which may place engines on other hosts, and on a host that has only workers.

    Args:
        parallel: The configuration of the launch.
    """
    rays = "ray" in (parallel.data_parallel_backend, parallel.distributed_executor_backend)
    if multiprocessing.parent_process() is not None or rays or parallel.node_rank_within_dp > 0:
        return range(0)
    first = parallel.data_parallel_index
    return range(first, first + parallel.data_parallel_size_local)


def _refuse(problems: Iterable[str]) -> None:
    text = "; ".join(problems)
    if text:
        raise ConfigError(text)
