"""``kvferry plan`` reads from a config file the caches that vLLM gives to the model's layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.plan.model import Model, read_model
from tests.cli.plan_command import write_config

Config = dict[str, Any]

LAYERS = 12
SMALL: Config = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "hidden_size": 2048,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
"""What every file has; what decides about caches is left out as far as possible."""

WINDOW: Config = {"sliding_window": 20}
EVERY_LAYER: Config = WINDOW | {"use_sliding_window": True, "max_window_layers": 0}
LATENT: Config = {"first_k_dense_replace": 1, "n_routed_experts": 8}
INDEXED: Config = LATENT | {"mlp_layer_types": ["dense"] * LAYERS}
V32: Config = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 128}
LFM2: Config = {"full_attn_idxs": [2, 5], "block_dim": 2048, "conv_dim": 2048}
GEMMA3N: Config = {"num_kv_shared_layers": 3, "vocab_size_per_layer_input": 512}
LAYER_TYPES = (["sliding_attention"] * 2 + ["full_attention"]) * 4
STATES = (["mamba"] * 2 + ["attention"]) * 4
HYBRID: Config = {"layer_types": STATES, "mamba_n_heads": 64}

ARCHITECTURES: list[tuple[str, str, Config]] = [
    ("apertus", "ApertusForCausalLM", WINDOW),
    ("arcee", "ArceeForCausalLM", {}),
    ("axk1", "AXK1ForCausalLM", LATENT),
    ("bitnet", "BitNetForCausalLM", {"num_attention_heads": 20, "hidden_size": 2560}),
    ("cohere", "CohereForCausalLM", {}),
    ("cohere2", "Cohere2ForCausalLM", {}),
    ("cohere2", "Cohere2ForCausalLM", WINDOW | {"sliding_window_pattern": 3}),
    ("cohere2_moe", "Cohere2MoeForCausalLM", {}),
    ("cwm", "CwmForCausalLM", {}),
    ("deepseek_v2", "DeepseekV2ForCausalLM", LATENT | {"topk_method": "greedy"}),
    ("deepseek_v3", "DeepseekV3ForCausalLM", LATENT | WINDOW),
    ("deepseek_v32", "DeepseekV32ForCausalLM", INDEXED | V32),
    ("ernie4_5", "Ernie4_5ForCausalLM", {}),
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {}),
    ("exaone4", "Exaone4ForCausalLM", {}),
    ("exaone4", "Exaone4ForCausalLM", WINDOW | {"layer_types": LAYER_TYPES}),
    ("exaone_moe", "ExaoneMoEForCausalLM", {}),
    ("falcon", "FalconForCausalLM", WINDOW),
    ("falcon_h1", "FalconH1ForCausalLM", {}),
    ("gemma", "GemmaForCausalLM", {}),
    ("gemma2", "Gemma2ForCausalLM", {}),
    ("gemma3_text", "Gemma3ForCausalLM", {}),
    ("gemma3_text", "Gemma3ForCausalLM", WINDOW | {"sliding_window_pattern": 3}),
    ("gemma3_text", "Gemma3ForCausalLM", WINDOW | {"layer_types": LAYER_TYPES}),
    ("gemma3n_text", "Gemma3nForCausalLM", GEMMA3N),
    ("glm", "GlmForCausalLM", {"pad_token_id": 0}),
    ("glm4", "Glm4ForCausalLM", {}),
    ("glm4_moe", "Glm4MoeForCausalLM", {"head_dim": 64}),
    ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", LATENT),
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM", INDEXED | {"index_topk_freq": 4}),
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM", INDEXED | {"index_topk_pattern": "FSSF" * 3}),
    ("gpt2", "GPT2LMHeadModel", {}),
    ("gpt_bigcode", "GPTBigCodeForCausalLM", {}),
    ("gpt_oss", "GptOssForCausalLM", {}),
    ("granite", "GraniteForCausalLM", {}),
    ("granite_swa", "GraniteSWAForCausalLM", {}),
    ("granitemoe", "GraniteMoeForCausalLM", {}),
    ("granitemoe_swa", "GraniteMoeSWAForCausalLM", {}),
    ("granitemoehybrid", "GraniteMoeHybridForCausalLM", HYBRID),
    ("helium", "HeliumForCausalLM", {"num_attention_heads": 20}),
    ("jamba", "JambaForCausalLM", {}),
    ("lfm2", "Lfm2ForCausalLM", LFM2),
    ("llama", "LlamaForCausalLM", WINDOW),
    ("llama4_text", "Llama4ForCausalLM", {}),
    ("llama4_text", "Llama4ForCausalLM", {"no_rope_layers": [1, 0] * 6}),
    ("llama4_text", "Llama4ForCausalLM", {"attention_chunk_size": None}),
    (
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        {"rotary_dim": 64, "scoring_func": "sigmoid", "attn_type_list": [1] * LAYERS},
    ),
    ("ministral3", "Ministral3ForCausalLM", WINDOW),
    ("mistral", "MistralForCausalLM", {}),
    ("mistral", "MistralForCausalLM", {"sliding_window": None}),
    ("mixtral", "MixtralForCausalLM", WINDOW),
    ("olmo3", "Olmo3ForCausalLM", {}),
    ("olmoe", "OlmoeForCausalLM", {}),
    ("phi", "PhiForCausalLM", {}),
    ("phi3", "Phi3ForCausalLM", WINDOW | {"pad_token_id": 0}),
    ("qwen2", "Qwen2ForCausalLM", {}),
    ("qwen2", "Qwen2ForCausalLM", EVERY_LAYER),
    ("qwen2_moe", "Qwen2MoeForCausalLM", EVERY_LAYER),
    ("qwen3", "Qwen3ForCausalLM", EVERY_LAYER),
    ("qwen3_moe", "Qwen3MoeForCausalLM", EVERY_LAYER),
    ("qwen3_next", "Qwen3NextForCausalLM", {}),
    ("seed_oss", "SeedOssForCausalLM", {}),
    ("smollm3", "SmolLM3ForCausalLM", EVERY_LAYER | {"pad_token_id": 0}),
    ("stablelm", "StableLmForCausalLM", {}),
    ("starcoder2", "Starcoder2ForCausalLM", WINDOW),
    ("vaultgemma", "VaultGemmaForCausalLM", {}),
    ("youtu", "YoutuForCausalLM", {}),
]
"""``model_type``, architecture, and what the file has beside ``SMALL``."""

CONFIGS = [
    SMALL | {"model_type": name, "architectures": [architecture]} | more
    for name, architecture, more in ARCHITECTURES
]


def specs() -> list[Any]:
    """Return what vLLM gives to the layers of all models: it builds them in one process."""
    script = Path(__file__).with_name("vllm_specs.py")
    run = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(CONFIGS),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    found: list[Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def caches(model: Model) -> dict[str, list[list[Any]]]:
    """Return what ``vllm_specs.py`` prints of a model."""
    found: dict[int, list[list[Any]]] = {}
    for n, window in model.windows.items():
        plain = "latent" if model.latent else "full"
        reach = "chunks" if model.in_chunks else "window"
        kind = reach if window else plain
        found.setdefault(n, []).append([kind, window, model.kv_heads * model.entry_bytes])
    for n in model.indexed:
        found[n].append(["index", 0, model.index_bytes])
    for n in model.states:
        assert model.state is not None
        found.setdefault(n, []).append(["state", 0, model.state.nbytes(1)])
    return {str(n): sorted(found[n]) for n in sorted(found)}


@pytest.mark.timeout(600)
def test_caches_of_layers_match_vllm(tmp_path: Path) -> None:
    read = [caches(read_model(Path(write_config(tmp_path, config)))) for config in CONFIGS]
    wrong = [
        (config["model_type"], ours, theirs)
        for config, ours, theirs in zip(CONFIGS, read, specs(), strict=True)
        if ours != theirs
    ]
    assert wrong == []
