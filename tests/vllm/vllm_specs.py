"""Print, as JSON, the caches that the installed vLLM gives to the layers of models.

It reads a JSON list of config files' contents. Every model is built by vLLM without weights, on
torch's ``meta`` device where possible. It runs in a process of its own, because importing vLLM
changes the process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.workspace import init_workspace_manager

DEVICES = {"apertus": "cpu", "gemma3n_text": "cpu"}
"""Where models are built that compute something while they are built."""

CPU_BACKEND = CpuPlatform.get_attn_backend_cls.__func__
CPU_CHECK = CpuPlatform.check_and_update_config.__func__


def backend(cls: Any, /, selected_backend: Any, attn_selector_config: Any, **more: Any) -> str:
    """Return the backend of a GPU for sparse attention, which CPUs do not have."""
    if attn_selector_config.use_sparse:
        return str(AttentionBackendEnum.FLASHMLA_SPARSE.get_path())
    return str(CPU_BACKEND(cls, selected_backend, attn_selector_config, **more))


def keep_state_dtype(cls: Any, /, vllm_config: VllmConfig) -> None:
    """Leave the element type of states as on GPUs; on CPUs they are float32."""
    dtype = vllm_config.cache_config.mamba_ssm_cache_dtype
    CPU_CHECK(cls, vllm_config)
    vllm_config.cache_config.mamba_ssm_cache_dtype = dtype


def start() -> None:
    """Let vLLM build models in this process, with the caches that they have on GPUs."""
    CpuPlatform.check_and_update_config = classmethod(keep_state_dtype)
    CpuPlatform.get_attn_backend_cls = classmethod(backend)
    registry._run_in_subprocess = lambda function: function()  # a process for each takes 7 s
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        initialize_model_parallel(1, 1)
    init_workspace_manager(torch.device("cpu"))
    torch.accelerator.empty_cache = lambda: None  # it is called for that backend's workspace


def engine_config(content: dict[str, Any], folder: Path) -> VllmConfig:
    """Return vLLM's configuration of an engine that runs the model of a config file."""
    (folder / "config.json").write_text(json.dumps(content))
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=1024,
        enforce_eager=True,
    ).create_engine_config()


def caches(content: dict[str, Any]) -> dict[int, list[list[Any]]]:
    """Return the caches of each layer: kind, tokens that it looks back, and bytes of a token.

    Instead of the bytes of a token, a state has all its bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(content, Path(folder))
        device = torch.device(DEVICES.get(content["model_type"], "meta"))
        with set_current_vllm_config(config), device:
            initialize_model(config)
    found: dict[int, list[list[Any]]] = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        if not isinstance(layer, AttentionLayerBase):
            continue
        shares = getattr(layer, "kv_sharing_target_layer_name", None)  # another layer's cache
        if not shares and (spec := layer.get_kv_cache_spec(config)):
            # Falcon-H1 counts its states on from its attention.
            index = extract_layer_index(name) % content["num_hidden_layers"]
            found.setdefault(index, []).append(cache(spec))
    return {index: sorted(found[index]) for index in sorted(found)}


def cache(spec: Any) -> list[Any]:
    """Return the kind of a cache, the tokens that it looks back, and its bytes."""
    name = type(spec).__name__
    if name == "MambaSpec":
        sizes = zip(spec.shapes, spec.dtypes, strict=True)
        return ["state", 0, sum(torch.Size(shape).numel() * kind.itemsize for shape, kind in sizes)]
    entry = (spec.head_size + spec.head_size_v) * spec.num_kv_heads * spec.dtype.itemsize
    if name == "MLAAttentionSpec":
        return ["index" if spec.cache_role.name == "INDEXER" else "latent", 0, entry]
    if name == "ChunkedLocalAttentionSpec":
        return ["chunks", spec.attention_chunk_size, entry]
    if name == "SlidingWindowSpec":
        return ["window", spec.sliding_window, entry]
    return [{"FullAttentionSpec": "full"}.get(name, name), 0, entry]


def main() -> None:
    start()
    found: list[Any] = []
    for content in json.load(sys.stdin):
        try:
            found.append(caches(content))
        except Exception as exc:  # noqa: BLE001  # reported by the test that asked
            found.append(repr(exc))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
