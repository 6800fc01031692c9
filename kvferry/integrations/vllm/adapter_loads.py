"""Which files a worker of vLLM loaded LoRA adapters from.

vLLM has no hook for this: it loads an adapter when an operator asks for it
(``/v1/load_lora_adapter``), or in the step that first runs a request with the adapter, and again
after it has dropped the adapter to make room. So ``observe_loads`` wraps the method of vLLM that
reads the files. ADR 17 says why files alone do not tell what the engine computes with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.lru_cache import LRUCache
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.adapter_files import AdapterError, AdapterVersion, settled_version
from kvferry.integrations.vllm.config import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

    LoadAdapter = Callable[[WorkerLoRAManager, LoRARequest], LoRAModel]

METHOD = "_load_adapter"
"""The method of vLLM's ``WorkerLoRAManager`` that reads an adapter's files, each time it does."""

MAX_ADAPTERS = 1024
"""For how many adapters a worker remembers the last load.

Fewer than the scheduler half remembers, so that a load that the scheduler half has forgotten is
reported again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """A load of an adapter from files, on one rank.

    Attributes:
        rank: The rank.
        adapter: The number under which vLLM keeps the adapter (``lora_int_id``).
        name: The adapter's name.
        path: The adapter's folder.
        version: The version of the files that were read; ``None`` if it is not known, because the
            files changed meanwhile.
    """

    rank: int
    adapter: int
    name: str
    path: str
    version: AdapterVersion | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """What ranks report about their adapters in a step.

    Attributes:
        loads: The loads since the ranks' last reports, in order for each rank. A load that repeats
            the last one of its adapter is left out, if the rank remembers that one.
        step: The number of the step if the scheduler half asked for a report, otherwise 0.
    """

    loads: tuple[AdapterLoad, ...] = ()
    step: int = 0

    def __bool__(self) -> bool:
        return bool(self.loads or self.step)

    def aggregate(self, other: AdapterReport) -> AdapterReport:
        """Return the reports of these and of other ranks on the same step, merged."""
        return AdapterReport(loads=self.loads + other.loads, step=min(self.step, other.step))


class LoadLog:
    """Collect the loads of adapters on this rank, for the report of the next step.

    Args:
        rank: The rank of this worker.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._loads: list[AdapterLoad] = []
        self._last = LRUCache[AdapterLoad](MAX_ADAPTERS)
        self._asked = 0

    def loaded(self, lora: LoRARequest, version: AdapterVersion | None) -> None:
        """Record that vLLM loaded an adapter.

        Args:
            lora: vLLM's ``LoRARequest``.
            version: The version of the files that were read; ``None`` if it is not known.
        """
        load = AdapterLoad(
            rank=self._rank,
            adapter=lora.lora_int_id,
            name=lora.lora_name,
            path=lora.lora_path,
            version=version,
        )
        if self._last.get(load.adapter) != load:
            self._last.put(load.adapter, load)
            self._loads.append(load)

    def ask(self, step: int) -> None:
        """Let the next report be an answer to the scheduler half, even if there is no load.

        Args:
            step: The number of the step; 0 if no answer is asked for.
        """
        self._asked = step

    def take(self) -> AdapterReport:
        """Return the report of this step; it is false if there is nothing to report."""
        report = AdapterReport(loads=tuple(self._loads), step=self._asked)
        self._loads.clear()
        self._asked = 0
        return report


def observe_loads(vllm_config: VllmConfig) -> LoadLog:
    """Return a log to which every later load of an adapter by this worker is added.

    Args:
        vllm_config: The worker's configuration, with LoRA.

    Raises:
        ConfigError: This vLLM loads adapters in another way.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager

    log = LoadLog(vllm_config.parallel_config.rank)
    original = getattr(WorkerLoRAManager, METHOD, None)
    if original is None:
        raise ConfigError(
            f"this vLLM's WorkerLoRAManager has no {METHOD}, so the connector cannot see which "
            "files adapters were loaded from: start without enable_lora, or with vLLM "
            f"{versions.window()}"
        )
    # Several engines may live in one process; each has a lora_config of its own.
    setattr(WorkerLoRAManager, METHOD, _observed(original, vllm_config.lora_config, log))
    return log


def _observed(original: LoadAdapter, config: object, log: LoadLog) -> LoadAdapter:
    """Return a method that does what vLLM's does, and adds each load to a log.

    Args:
        original: vLLM's method.
        config: The ``lora_config`` of the engine whose loads are recorded.
        log: The log.
    """

    @functools.wraps(original)
    def load_adapter(manager: WorkerLoRAManager, lora: LoRARequest) -> LoRAModel:
        if manager.lora_config is not config:
            return original(manager, lora)
        before = _version(lora.lora_path)
        loaded = original(manager, lora)
        log.loaded(lora, before if before == _version(lora.lora_path) else None)
        return loaded

    return load_adapter


def _version(path: str) -> AdapterVersion | None:
    """Return the settled version of an adapter's files, or ``None`` if there is none."""
    try:
        return settled_version(path)
    except AdapterError:
        return None
