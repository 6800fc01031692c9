"""Tiny LoRA adapters with random weights for the tiny Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 8
LAYERS = 4
HIDDEN = 128
OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "enable_prefix_caching": True,
    "max_cpu_loras": 4,
    "max_lora_rank": RANK,
    "max_loras": 2,
}
"""Of engines with adapters."""
OUTPUTS = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 128}


def write_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter's two files; equal seeds give equal files."""
    random = np.random.default_rng(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, outputs in OUTPUTS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            first, second = (RANK, HIDDEN), (outputs, RANK)
            weights[f"{name}.lora_A.weight"] = random.normal(size=first).astype(np.float32) / 4
            weights[f"{name}.lora_B.weight"] = random.normal(size=second).astype(np.float32) / 4
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*OUTPUTS]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    # A file of its own: the engine may have mapped the one that it loaded.
    save_file(weights, folder / "new")
    (folder / "new").replace(folder / "adapter_model.safetensors")
    return folder


def lora(path: Path, name: str = "adapter", number: int = 1, **more: Any) -> dict[str, Any]:
    """The arguments of vLLM's ``LoRARequest``."""
    return {"lora_name": name, "lora_int_id": number, "lora_path": str(path), **more}
