"""Import modules of the integration where vLLM need not be: its base classes are stand-ins."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

OURS = "kvferry.integrations.vllm."
PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1"


@dataclass(frozen=True, kw_only=True)
class Results:
    """vLLM's ``KVConnectorTransferResults``."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class Stats:
    """vLLM's ``KVConnectorStats``."""

    data: dict[str, Any] = field(default_factory=dict)


class Role(Enum):
    """vLLM's ``KVConnectorRole``."""

    SCHEDULER = 0
    WORKER = 1


class Base:
    """vLLM's ``KVConnectorBase_V1``."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self.bound: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.bound = metadata

    def clear_connector_metadata(self) -> None:
        self.bound = None


@contextmanager
def modules(*names: str) -> Iterator[list[Any]]:
    """Import modules of ours anew, and have them forgotten again: they know the stand-ins."""
    before = {name: module for name, module in sys.modules.items() if name.startswith(OURS)}
    theirs = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    for name in (*before, *theirs):
        del sys.modules[name]
    parts = PACKAGE.split(".")
    base, metrics = ModuleType(f"{PACKAGE}.base"), ModuleType(f"{PACKAGE}.metrics")
    packages = [ModuleType(".".join(parts[:length])) for length in range(1, len(parts) + 1)]
    for name in ("HandshakeMetadata", "Metadata", "WorkerMetadata"):
        setattr(base, f"KVConnector{name}", type(f"KVConnector{name}", (), {"__slots__": ()}))
    vars(base).update(
        KVConnectorBase_V1=Base,
        KVConnectorRole=Role,
        KVConnectorTransferResults=Results,
        SupportsHMA=type("SupportsHMA", (), {}),
    )
    config, hits = ModuleType("vllm.config"), ModuleType("vllm.v1.metrics.cache_hit_source")
    vars(config)["get_current_vllm_config_or_none"] = lambda: None
    vars(hits)["CacheHitSource"] = SimpleNamespace(P2P="p2p")
    packages += [config, hits, ModuleType("vllm.v1"), ModuleType("vllm.v1.metrics")]
    vars(metrics).update(
        KVConnectorPromMetrics=type("KVConnectorPromMetrics", (), {}), KVConnectorStats=Stats
    )
    sys.modules.update({module.__name__: module for module in (*packages, base, metrics)})
    try:
        yield [importlib.import_module(OURS + name) for name in names]
    finally:
        for name in list(sys.modules):
            if name.startswith(OURS) or name.split(".")[0] == "vllm":
                del sys.modules[name]
        sys.modules.update(before | theirs)
        for name, module in before.items():  # packages have their modules as attributes, too
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
