"""What a worker of vLLM loaded LoRA adapters from, as hashes of the files.

vLLM has no hook for this: it loads an adapter when an operator asks for it
(``/v1/load_lora_adapter``), or in the step that first runs a request with the adapter, and again
after it has dropped the adapter to make room. So ``observe_loads`` wraps the method of vLLM that
reads the files. ADR 17 says why files alone do not tell what the engine computes with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.adapter_files import (
    AdapterContents,
    AdapterError,
    AdapterVersion,
)
from kvferry.integrations.vllm.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

METHOD = "_load_adapter"
"""The method of vLLM's ``WorkerLoRAManager`` that reads an adapter's files, each time it does."""

UNKNOWN = b""
"""The content of files that could not be hashed, or changed while vLLM read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """A load of an adapter from files, on one rank."""

    rank: int
    adapter: int  # the number under which vLLM keeps it (``lora_int_id``)
    name: str
    path: str  # the folder
    version: AdapterVersion = ()  # of the files that were read; empty if the content is unknown
    content: bytes = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """What ranks report about their adapters in a step."""

    loads: tuple[AdapterLoad, ...] = ()  # since the last reports, in order for each rank
    step: int = 0  # the step's number, if the scheduler half asked for a report

    def __bool__(self) -> bool:
        return bool(self.loads or self.step)

    def aggregate(self, other: AdapterReport) -> AdapterReport:
        """Return the reports of these and of other ranks on the same step, merged."""
        return AdapterReport(loads=self.loads + other.loads, step=min(self.step, other.step))


class LoadLog:
    """Collect the loads of adapters on this rank, for the report of the next step."""

    def __init__(self) -> None:
        self._loads: list[AdapterLoad] = []
        self._asked = 0

    def add(self, load: AdapterLoad) -> None:
        """Record that vLLM loaded an adapter."""
        self._loads.append(load)

    def ask(self, step: int) -> None:
        """Let the next report be the answer of a step, even without a load, unless that is 0."""
        self._asked = step

    def take(self) -> AdapterReport:
        """Return the report of this step; it is false if there is nothing to report."""
        report = AdapterReport(loads=tuple(self._loads), step=self._asked)
        self._loads.clear()
        self._asked = 0
        return report


def observe_loads(vllm_config: VllmConfig) -> LoadLog:
    """Return a log to which every later load of an adapter by this worker is added.

    Raises:
        ConfigError: This vLLM loads adapters in another way.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager

    log, contents, rank = LoadLog(), AdapterContents(), vllm_config.parallel_config.rank
    original: Callable[[WorkerLoRAManager, LoRARequest], LoRAModel] | None
    original = getattr(WorkerLoRAManager, METHOD, None)
    if original is None:
        raise ConfigError(
            f"this vLLM's WorkerLoRAManager has no {METHOD}, so the connector cannot see which "
            "files adapters were loaded from: start without enable_lora, or with vLLM "
            f"{versions.window()}"
        )

    @functools.wraps(original)
    def load_adapter(manager: WorkerLoRAManager, lora: LoRARequest) -> LoRAModel:
        # Several engines may live in one process; each has a lora_config of its own.
        if manager.lora_config is not vllm_config.lora_config:
            return original(manager, lora)
        load = AdapterLoad(
            rank=rank, adapter=lora.lora_int_id, name=lora.lora_name, path=lora.lora_path
        )
        before = _read(contents, lora.lora_path)
        loaded = original(manager, lora)
        # vLLM reads the files after they were hashed. If they are of the same version before and
        # after it, it has read what was hashed.
        if before is not None and before == _read(contents, lora.lora_path):
            load = replace(load, version=before[0], content=before[1])
        log.add(load)
        return loaded

    setattr(WorkerLoRAManager, METHOD, load_adapter)
    return log


def _read(contents: AdapterContents, path: str) -> tuple[AdapterVersion, bytes] | None:
    """Return the version and content of an adapter's files; ``None`` if they are not known."""
    try:
        return contents.read(path)
    except AdapterError:
        return None
