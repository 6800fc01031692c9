"""vLLM's own NIXL worker, the peer that planning and requests are measured against.

It is driven as vLLM drives it, with NIXL's agent replaced by a stand-in whose calls cost nothing,
or with NIXL itself. Its caches are address space of the size that the model has; only a small one
is ever touched.

The worker is that of the installed vLLM or, after ``use_source``, that of another release's source:
a release of which there is no build for CPUs can be measured that way.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import engines

FAMILY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64 * engines.DIM,
    "intermediate_size": 1024,
    "num_attention_heads": 64,
    "num_key_value_heads": engines.HEADS,
    "head_dim": engines.DIM,
    "vocab_size": 1024,
    "max_position_embeddings": 1 << 17,
    "torch_dtype": "bfloat16",
}
NORESERVE = 0x4000  # Linux's ``MAP_NORESERVE``, which not every Python names
MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"


class NoNixl:
    """An agent that does nothing, at no cost."""

    def __init__(self, name: str, *rest: object) -> None:
        self._ids = itertools.count(1)

    def get_reg_descs(self, caches: Sequence[object], kind: str) -> list[object]:
        return []

    def get_xfer_descs(self, blocks: object, kind: str) -> list[object]:
        return []

    def prep_xfer_dlist(self, agent: str, descs: object, mem_type: str = "") -> int:
        return next(self._ids)

    def get_agent_metadata(self) -> bytes:
        return bytes(600)

    def add_remote_agent(self, metadata: bytes) -> str:
        return f"agent-{next(self._ids)}"

    def make_prepped_xfer(self, *rest: object, **named: object) -> int:
        return next(self._ids)

    def transfer(self, handle: int) -> str:
        return "PROC"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def _nothing(self, *rest: object, **named: object) -> None:
        return None

    register_memory = deregister_memory = release_xfer_handle = release_dlist_handle = _nothing
    remove_remote_agent = send_notif = _nothing


@dataclass(kw_only=True)
class Worker:
    """A worker of one rank, its caches registered, and the payload that it publishes."""

    worker: Any
    payload: Any
    caches: dict[str, Any]


def start(*, tp: int, layers: int, blocks: int, api: Any = None, dim: int = engines.DIM) -> Worker:
    """Rank 0 of an engine, with NIXL's module of agents as ``api``, or a stand-in for it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorWorker

    made = config(layers, dim)
    with (
        mock.patch(f"{MODULE}.NixlWrapper", api.nixl_agent if api else NoNixl),
        mock.patch(f"{MODULE}.nixl_agent_config", api.nixl_agent_config if api else None),
        mock.patch(f"{MODULE}.get_tensor_model_parallel_rank", return_value=0),
        mock.patch(f"{MODULE}.get_tensor_model_parallel_world_size", return_value=tp),
        mock.patch.object(os, "sched_setaffinity"),
        set_current_vllm_config(made),
    ):
        caches = _caches(layers, blocks, engines.HEADS // tp, dim)
        described = cache_config(layers, blocks, engines.HEADS // tp, dim)
        worker = NixlConnectorWorker(made, f"engine-{tp}", described)
        worker.register_kv_caches(caches)
    return Worker(worker=worker, payload=worker.xfer_handshake_metadata, caches=caches)


@functools.cache
def config(layers: int, dim: int = engines.DIM) -> Any:
    """One for all engines of a process: vLLM wants both sides to name the same model."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    with tempfile.TemporaryDirectory() as folder:
        family = FAMILY | {"num_hidden_layers": layers, "head_dim": dim, "hidden_size": 64 * dim}
        Path(folder, "config.json").write_text(json.dumps(family), encoding="utf-8")
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16")
    cache: Any = CacheConfig(block_size=engines.BLOCK)
    cache.kv_cache_layout = "LBHNC"
    transfer = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_consumer", kv_buffer_device="cpu"
    )
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_model_len=1 << 16, max_num_batched_tokens=1 << 16, is_encoder_decoder=False
        ),
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )


def cache_config(layers: int, blocks: int, heads: int, dim: int = engines.DIM) -> Any:
    """vLLM's ``KVCacheConfig`` of a rank."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=engines.BLOCK, num_kv_heads=heads, head_size=dim, dtype=torch.bfloat16
    )
    names = [engines.layer_name(layer) for layer in range(layers)]
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )


def _caches(layers: int, blocks: int, heads: int, dim: int) -> dict[str, Any]:
    """All layers in one buffer, one behind the other, as vLLM allocates them."""
    import torch

    shape = (layers, blocks, heads, engines.BLOCK, 2 * dim)
    reserved = room(math.prod(shape) * engines.ELEMENT)
    whole = torch.frombuffer(reserved, dtype=torch.bfloat16).view(shape)
    return {engines.layer_name(layer): each for layer, each in enumerate(whole)}


def room(nbytes: int) -> mmap.mmap:
    """Address space; memory only where it is touched."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)


def metadata(payload: Any, name: str) -> Any:
    """What a rank published, decoded, as that of an engine of this name."""
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

    found = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
    found.engine_id = name
    return found


def use_source(folder: Path) -> None:
    """Have this process import vLLM from the source of a release, which is not compiled.

    NIXL's worker is Python, and no kernel of vLLM's is called for it. vLLM finds its platform by
    how it was built, so the platform is set here.
    """
    if not (folder / "vllm" / "__init__.py").is_file():
        raise SystemExit(f"no package vllm in {folder}: name an unpacked source distribution")
    sys.path.insert(0, str(folder.resolve()))
    # vLLM looks at models in a process of its own, and keeps what it found.
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
    os.environ["VLLM_CACHE_ROOT"] = str(folder.resolve().parent / "cache")
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()


def name() -> str:
    """Return the worker's name with its version, as in ``vLLM 0.32's worker``."""
    import vllm

    return f"vLLM {'.'.join(vllm.__version__.split('.')[:2])}'s worker"


NEWER = (
    "--newer",
    {
        "type": Path,
        "metavar": "FOLDER",
        "help": "the unpacked source distribution of a newer vLLM, whose worker is measured, too",
    },
)
"""The option that names a newer vLLM, as ``harness.main`` takes it."""


def sources(newer: Path | None) -> list[Path | None]:
    """The vLLMs to measure beside: the installed one (``None``) first, if there is one."""
    installed: list[Path | None] = [None] if find_spec("vllm") else []
    return installed + ([newer] if newer else [])


def quiet() -> None:
    """Its log goes nowhere, and costs no more than a check of its level."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)
