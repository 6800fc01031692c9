"""Refuse a wrong configuration when an engine is launched, before vLLM loads the model.

Everything is checked again where it is used, since the launch cannot see all: the plugin may be
switched off (``VLLM_PLUGINS``), and ranks may run on other hosts.
"""

from __future__ import annotations

import copy
import errno
import logging
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvferry.core.errors import DriverError, HandshakeError
from kvferry.core.side_channel import check_address
from kvferry.core.transport import registry
from kvferry.integrations.vllm import config as configuration
from kvferry.integrations.vllm import support
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.security import examine_security_settings
from kvferry.integrations.vllm.transfer_config import as_mapping, extra_of, own_transfers

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = logging.getLogger(__name__)

ENDING_SECONDS = 3.0
"""How long an engine that was stopped may take to end, beyond its ``drain_timeout``. Its successor
waits so long for the port of the side channel."""


def check_transfer(transfer: object, here: bool = True) -> None:
    """Refuse wrong settings, an unknown driver, and keys and secrets that cannot be read.

    Args:
        transfer: vLLM's ``KVTransferConfig``, or its keys and values. Only the parts are checked
            that select ``KVFerryConnector``.
        here: Whether the engine runs on this host, which needs its driver, keys and secrets then.

    Raises:
        ConfigError: Names everything that is wrong, and the remedies.
    """
    own = map(extra_of, own_transfers(transfer))
    problems = setting_problems if here else configuration.problems
    _refuse(problem for extra in own for problem in problems(extra))


def launches_here(settings: object) -> bool:
    """Return whether a launch starts engines or workers on this host, as far as is known before.

    ``False`` for a front end whose engines are all elsewhere, and with Ray, which places them.

    Args:
        settings: vLLM's ``EngineArgs`` or ``ParallelConfig``.
    """
    placed_by = (
        getattr(settings, "data_parallel_backend", None),
        getattr(settings, "distributed_executor_backend", None),
    )
    return "ray" not in placed_by and getattr(settings, "data_parallel_size_local", None) != 0


def check_launch(vllm_config: VllmConfig) -> None:
    """Refuse an engine that cannot work with the connector, as far as its configuration shows.

    Args:
        vllm_config: The configuration of the engine that is launched.

    Raises:
        ConfigError: Names everything that is wrong, and the remedies.
    """
    transfer = vllm_config.kv_transfer_config
    check_transfer(transfer, launches_here(vllm_config.parallel_config))
    for own in own_transfers(transfer):
        engine = copy.copy(vllm_config)  # as MultiConnector makes its children's configurations
        if own != as_mapping(transfer):
            engine.kv_transfer_config = type(transfer)(**own)
        support.check_engine(engine)
        support.check_siblings(engine.kv_transfer_config, transfer)
        indices = engines_here(vllm_config.parallel_config)
        config = configuration.parse(extra_of(own))
        _refuse(address_problems(config, indices, wait=config.drain_timeout + ENDING_SECONDS))


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


def address_problems(config: Config, indices: Iterable[int], *, wait: float = 0.0) -> Iterator[str]:
    """Yield why side channels could not listen on this host.

    Args:
        config: The settings, with the port as configured.
        indices: The data-parallel indices of the engines on this host. Each is added to the port,
            unless that is 0.
        wait: For how many seconds to wait, in total, for ports that are in use.
    """
    deadline = time.monotonic() + wait
    for index in indices:
        try:
            port = configuration.with_index(config, index).side_channel_port
            _wait_for_address(config.side_channel_host, port, deadline)
        except (ConfigError, HandshakeError) as exc:
            yield str(exc)


def _wait_for_address(host: str, port: int, deadline: float) -> None:
    """Return when an address can be bound.

    Args:
        host: Address to bind.
        port: Port to bind.
        deadline: Until when to wait for a port that is in use, by ``time.monotonic``.

    Raises:
        HandshakeError: The address cannot be bound, or the port is still in use.
    """
    told = False
    while True:
        try:
            return check_address(host, port)
        except HandshakeError as exc:
            in_use = isinstance(exc.__cause__, OSError) and exc.__cause__.errno == errno.EADDRINUSE
            if not in_use or time.monotonic() >= deadline:
                raise
        if not told:
            told = True
            logger.warning("%s port %d is in use: waiting for an engine that ends", host, port)
        time.sleep(0.1)


def engines_here(parallel: ParallelConfig) -> range:
    """Return the data-parallel indices of the engines that this process launches on this host.

    Empty in processes that another process of vLLM has started: the engine may listen already. Also
    empty with Ray, which may place engines on other hosts, and on a host that has only workers.

    Args:
        parallel: The configuration of the launch.
    """
    if (
        multiprocessing.parent_process() is not None
        or not launches_here(parallel)
        or parallel.node_rank_within_dp > 0
    ):
        return range(0)
    first = parallel.data_parallel_index
    return range(first, first + parallel.data_parallel_size_local)


def _refuse(problems: Iterable[str]) -> None:
    text = "; ".join(problems)
    if text:
        raise ConfigError(text)
