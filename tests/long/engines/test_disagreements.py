"""Real engines that must not exchange pages, and engines that only have other names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines.fixtures import StartEngine
from tests.engines.steps import check_hand_over, check_refused

pytestmark = pytest.mark.timeout(300)

LAYERS = 4
KEY = "field 'model.layers.0.self_attn.attn/k'"
STATIC_SCALES = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "ignore": [],
    "quantization_status": "frozen",
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    },
}
"""Only the cache is quantised, and by scales that the checkpoint has."""


def altered(
    checkpoint: Path, folder: Path, *, scale: float | None = None, **config: object
) -> Path:
    """A copy of a checkpoint, its configuration changed; with ``scale``, of an fp8 cache's K."""
    copy = shutil.copytree(checkpoint, folder)
    if scale is not None:
        import numpy as np
        from safetensors.numpy import save_file

        scales = {"k": scale, "v": 0.25}
        save_file(
            {
                f"model.layers.{layer}.self_attn.{name}_scale": np.array(value, dtype=np.float32)
                for layer in range(LAYERS)
                for name, value in scales.items()
            },
            copy / "scales.safetensors",
        )
        config["quantization_config"] = STATIC_SCALES
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return copy


def test_static_scales(start_engine: StartEngine, checkpoint: Path, tmp_path: Path) -> None:
    """A quantised cache is read by whoever has the same scales, whatever its ranks and blocks."""
    quantised = {"kv_cache_dtype": "fp8"}
    half, whole = (altered(checkpoint, tmp_path / str(scale), scale=scale) for scale in (0.5, 1.0))
    ordinary = start_engine("ordinary", model=half, **quantised)
    extra = {"enforce_handshake_compat": False}
    decode = start_engine(
        "decode", "kv_consumer", extra=extra, model=half, block_size=64, **quantised
    )
    same = start_engine("same", "kv_producer", model=half, tensor_parallel_size=2, **quantised)
    other = start_engine("other", "kv_producer", model=whole, **quantised)
    check_hand_over(ordinary, same, decode, *(prompt(each, seed=2) for each in (33, 70, 200)))
    [ticket] = other.prefill(prompt(33, seed=2))
    reason = (
        f"{KEY}: encoding is 'fp8_e4m3, scales k 0.5, v 0.25' on local rank 0 and "
        "'fp8_e4m3, scales k 1.0, v 0.25' on remote rank 0"
    )
    check_refused(decode, prompt(33, seed=2), ticket, reason)
