"""What is known of models beyond their config files: defaults, other names of keys, exceptions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Keys = dict[str, Any]

LOCAL = "L"
"""The letter in ``sliding_window_pattern`` of a layer with a window; other layers have none."""


def _heads(count: int, head_dim: int | None = None) -> Keys:
    return {"num_key_value_heads": count} | ({"head_dim": head_dim} if head_dim else {})


def _window(tokens: int, pattern: str = "") -> Keys:
    return {"sliding_window": tokens} | ({"sliding_window_pattern": pattern} if pattern else {})


def _mamba(**sizes: int | str) -> Keys:
    return {f"mamba_{name}": value for name, value in sizes.items()}


_MISTRAL = _heads(8) | _window(4096)
_QWEN3_MOE = _heads(4) | _window(4096) | {"use_sliding_window": False}
_QWEN2 = _QWEN3_MOE | _heads(32) | {"max_window_layers": 28}
_COHERE2 = _window(4096, "LLLG")
_GEMMA2 = _heads(4, 256) | _window(4096, "LG")
_GRANITE_SWA = _window(128, "GLLL")
_LATENT: Keys = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_DELTA_NET = _heads(2, 256) | {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
_MAMBA2 = _mamba(d_conv=4, d_head="auto", d_state=256, expand=2, n_groups=1, n_heads=128)
_NEMOTRON = _mamba(d_conv=4, d_head=64, d_state=128, n_groups=8, n_heads=128, ssm_dtype="float32")


_BY_NAMES: dict[str, Keys] = {
    "afmoe": {"head_dim": 128} | _window(1024, "LLLG"),
    "apertus granite granitemoe llama phi3": {},
    "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite youtu": _LATENT,
    "bamba": _heads(8) | _MAMBA2,
    "bitnet": _heads(5),
    "cohere2 olmo3": _COHERE2,
    "cohere2_moe": _COHERE2 | {"head_dim": 128},
    "cosmos3_edge_text hy_v3 minimax_m2 ministral3 seed_oss solar_open": _heads(8, 128),
    "cwm": _heads(8, 128) | _window(8192, "GLLL"),
    "deepseek_v32 glm_moe_dsa": _LATENT | {"index_topk": 2048, "index_head_dim": 128},
    "ernie4_5 glm glm4 paddleocr_vl_text": _heads(2, 128),
    "ernie4_5_moe ernie4_5_vl_moe_text qwen3_omni_moe_text": _heads(4),
    "exaone4 exaone_moe": _heads(32) | _COHERE2,
    "falcon": {"multi_query": True, "sliding_window_pattern": "G"},
    "falcon_h1": _heads(8) | _MAMBA2 | {"mamba_d_ssm": 1024},
    "gemma": _heads(16, 256),
    "gemma2 vaultgemma": _GEMMA2,
    "gemma3_text": _GEMMA2 | {"sliding_window_pattern": "LLLLLG"},
    "gemma3n_text": _heads(2, 256) | _window(512, "LLLLG") | {"num_kv_shared_layers": 15},
    "glm4_moe glm4v_moe_text glm_ocr_text mixtral phi4_multimodal phimoe": _heads(8),
    "glm4v_text starcoder2": _heads(2),
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": _heads(8, 64) | _window(128, "LG"),
    "granite_swa": _heads(4) | _GRANITE_SWA,
    "granitemoe_swa": _GRANITE_SWA,
    "granitemoehybrid": _MAMBA2,
    "helium": _heads(20, 128),
    "jamba": _heads(8)
    | {"attn_layer_offset": 4, "attn_layer_period": 8}
    | _mamba(d_conv=4, d_state=16, expand=2),
    "jetmoe": _heads(16, 128),
    "lfm2 lfm2_moe": _heads(8) | {"conv_L_cache": 3},
    "llama4_text": _heads(8, 128) | {"attention_chunk_size": 8192},
    "ministral mistral": _MISTRAL,
    "muse_glimmer_text": _heads(2, 128) | _window(2048, "LLLG"),
    "nemotron_h": _heads(8, 128) | _NEMOTRON,
    "qwen2": _QWEN2,
    "qwen2_5_omni_text": _QWEN2 | _heads(4) | _window(32768),
    "qwen2_5_vl_text qwen2_vl_text": _QWEN2 | _heads(8) | {"max_window_layers": 80},
    # In vLLM, none of its layers has a window, since never all of them have one.
    "qwen2_moe": _QWEN3_MOE | {"num_key_value_heads": 16, "sliding_window_pattern": "G"},
    "qwen3": _QWEN2 | {"head_dim": 128},
    "qwen3_5_moe_text qwen3_next": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET | {"num_key_value_heads": 4},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _heads(16),
    "qwen3_vl_text": _heads(32, 128),
    "smollm3": _heads(4) | {"use_sliding_window": False, "sliding_window_pattern": "GGGL"},
    "stablelm": _heads(32),
}
LEFT_OUT: Mapping[str, Keys] = {
    name: keys for names, keys in _BY_NAMES.items() for name in names.split()
}
"""The keys that ``kvferry plan`` would otherwise take for absent, by the model's ``model_type``:
transformers 5 leaves out of a file what equals its class's default, and vLLM reads the file with
that class."""

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a multimodal model keeps the configuration of its text model, as vLLM reads them
(``transformers_utils/config.py`` and ``transformers_utils/configs``)."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (
        *("n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups"),
    ),
    "head_dim": ("attention_head_dim", "kv_channels", "hidden_size_per_head"),
    "hidden_size": ("n_embd", "d_model"),
    "dtype": ("torch_dtype",),
    "layer_types": ("layers_block_type",),
    "mamba_n_heads": ("n_mamba_heads", "mamba_num_heads"),
    "mamba_d_head": ("mamba_headdim", "mamba_head_dim"),
    "mamba_n_groups": ("mamba_ngroups", "n_groups"),
    "mamba_d_state": ("ssm_state_size",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_expand": ("expand",),
    "mamba_ssm_dtype": ("mamba_ssm_cache_dtype",),
}
"""Other names of a key, which older files or some models use."""

DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

EXCLUSIVE = frozenset({"cohere2", "cohere2_moe"})
"""Model types whose windows do not count the token itself, so that vLLM adds it."""
INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Model types with latents and, beside them, an index by which a token finds the tokens that it
attends to."""
INDEX_SCALED = 128  # how many values of an index have a scale together
STATES = re.compile(
    r"mamba_|ssm_|ssm$|linear_(num|conv|key|value|attn)|rwkv|conv_kernel$|conv_L_cache$|state_size$"
    r"|hybrid_override_pattern$|full_attention_interval$|attn_layer_|lru_|block_types$|layer_group_size$"
)
"""Keys of models that have recurrent states beside attention or instead of it."""

UNSUPPORTED = (
    *("compress_ratios", "block_configs", "global_head_dim", "num_global_key_value_heads"),
    *("cross_attention_layers", "is_encoder_decoder"),
)
"""Keys of models whose cache the file does not describe completely: entries that stand for several
tokens, for images or for an encoder's, and layers or heads that are unlike each other."""

UNLIKE = frozenset(
    {
        *("deepseek_v4", "diffusion_gemma_text", "gemma4_text", "gemma4_unified_text"),
        *("glm5_next_text", "hrm_text", "inkling_text", "longcat_flash", "longcat_flash_ngram"),
        *("mimo_v2_flash", "minicpm3", "minimax_m3_vl_text", "qwen4_exp_text", "step3p5", "zaya"),
    }
)
"""Model types whose cache is not what their keys say; the file may leave out the key that would
show it."""
