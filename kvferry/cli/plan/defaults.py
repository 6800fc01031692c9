"""What is known of models beyond their config files: defaults, other names of keys, exceptions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Keys = dict[str, Any]

LOCAL = "L"
"""The letter in ``sliding_window_pattern`` of a layer with a window; other layers have none."""


def _heads(count: int, head_dim: int | None = None) -> Keys:
    """Return the defaults of a model that has a number of KV heads, and perhaps a size of heads."""
    return {"num_key_value_heads": count} | ({"head_dim": head_dim} if head_dim else {})


_MISTRAL: Keys = {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN3_MOE: Keys = _heads(4) | {"use_sliding_window": False, "sliding_window": 4096}
_QWEN2: Keys = _QWEN3_MOE | {"num_key_value_heads": 32, "max_window_layers": 28}
_COHERE2: Keys = {"sliding_window": 4096, "sliding_window_pattern": "LLLG"}
_EXAONE: Keys = {"num_key_value_heads": 32} | _COHERE2
_GEMMA2: Keys = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "sliding_window_pattern": "LG",
}
_QWEN2_VL: Keys = _QWEN2 | {"num_key_value_heads": 8, "max_window_layers": 80}
_GRANITE_SWA: Keys = {"sliding_window": 128, "sliding_window_pattern": "GLLL"}
_LATENT: Keys = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_INDEXED: Keys = _LATENT | {"index_topk": 2048, "index_head_dim": 128}
_DELTA_NET: Keys = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
_MAMBA2: Keys = {
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
}


LEFT_OUT: Mapping[str, Keys] = {
    "afmoe": {"head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": "LLLG"},
    "apertus": {},
    "axk1": _LATENT,
    "bamba": _heads(8) | _MAMBA2,
    "bitnet": _heads(5),
    "cohere2": _COHERE2,
    "cohere2_moe": _COHERE2 | {"head_dim": 128},
    "cosmos3_edge_text": _heads(8, 128),
    "cwm": _heads(8, 128) | {"sliding_window": 8192, "sliding_window_pattern": "GLLL"},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED,
    "ernie4_5": _heads(2, 128),
    "ernie4_5_moe": _heads(4),
    "ernie4_5_vl_moe_text": _heads(4),
    "exaone4": _EXAONE,
    "exaone_moe": _EXAONE,
    "falcon": {"multi_query": True, "sliding_window_pattern": "G"},
    "falcon_h1": _heads(8) | _MAMBA2 | {"mamba_d_ssm": 1024},
    "gemma": _heads(16, 256),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2 | {"sliding_window_pattern": "LLLLLG"},
    "gemma3n_text": _heads(2, 256)
    | {"num_kv_shared_layers": 15, "sliding_window": 512, "sliding_window_pattern": "LLLLG"},
    "glm": _heads(2, 128),
    "glm4": _heads(2, 128),
    "glm4_moe": _heads(8),
    "glm4_moe_lite": _LATENT,
    "glm4v_moe_text": _heads(8),
    "glm4v_text": _heads(2),
    "glm_moe_dsa": _INDEXED,
    "glm_ocr_text": _heads(8),
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": _heads(8, 64) | {"sliding_window": 128, "sliding_window_pattern": "LG"},
    "granite": {},
    "granite_swa": _heads(4) | _GRANITE_SWA,
    "granitemoe": {},
    "granitemoe_swa": _GRANITE_SWA,
    "granitemoehybrid": _MAMBA2,
    "helium": _heads(20, 128),
    "hy_v3": _heads(8, 128),
    "jamba": _heads(8)
    | {
        "attn_layer_offset": 4,
        "attn_layer_period": 8,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "jetmoe": _heads(16, 128),
    "lfm2": _heads(8) | {"conv_L_cache": 3},
    "lfm2_moe": _heads(8) | {"conv_L_cache": 3},
    "llama": {},
    "llama4_text": _heads(8, 128) | {"attention_chunk_size": 8192},
    "minimax_m2": _heads(8, 128),
    "ministral": _MISTRAL,
    "ministral3": _heads(8, 128),
    "mistral": _MISTRAL,
    "mixtral": _heads(8),
    "muse_glimmer_text": _heads(2, 128)
    | {"sliding_window": 2048, "sliding_window_pattern": "LLLG"},
    "nemotron_h": _heads(8, 128)
    | {
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 8,
        "mamba_n_heads": 128,
        "mamba_ssm_dtype": "float32",
    },
    "olmo3": _COHERE2,
    "paddleocr_vl_text": _heads(2, 128),
    "phi3": {},
    "phi4_multimodal": _heads(8),
    "phimoe": _heads(8),
    "qwen2": _QWEN2,
    "qwen2_5_omni_text": _QWEN2 | {"num_key_value_heads": 4, "sliding_window": 32768},
    "qwen2_5_vl_text": _QWEN2_VL,
    # In vLLM, none of its layers has a window, since never all of them have one.
    "qwen2_moe": _QWEN3_MOE | {"num_key_value_heads": 16, "sliding_window_pattern": "G"},
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "qwen3_5_moe_text": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET | {"num_key_value_heads": 4},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": _DELTA_NET,
    "qwen3_omni_moe_text": _heads(4),
    "qwen3_vl_moe_text": _heads(16),
    "qwen3_vl_text": _heads(32, 128),
    "seed_oss": _heads(8, 128),
    "smollm3": _heads(4) | {"use_sliding_window": False, "sliding_window_pattern": "GGGL"},
    "solar_open": _heads(8, 128),
    "stablelm": _heads(32),
    "starcoder2": _heads(2),
    "vaultgemma": _GEMMA2,
    "youtu": _LATENT,
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
INDEX_SCALED = 128
"""How many values of an index have a scale together."""
STATES = re.compile(
    r"mamba_|ssm_|ssm$|linear_(num|conv|key|value|attn)|rwkv|conv_kernel$|conv_L_cache$|state_size$"
    r"|hybrid_override_pattern$|full_attention_interval$|attn_layer_|lru_|block_types$|layer_group_size$"
)
"""Keys of models that have recurrent states beside attention or instead of it."""

UNSUPPORTED = (
    *("compress_ratios", "block_configs", "global_head_dim", "num_global_key_value_heads"),
    "cross_attention_layers",
)
"""Keys of models whose cache the file does not describe completely: entries that stand for several
tokens or for images, and layers or heads that are unlike each other."""

UNLIKE = frozenset(
    {
        *("deepseek_v4", "diffusion_gemma_text", "gemma4_text", "gemma4_unified_text"),
        *("glm5_next_text", "hrm_text", "inkling_text", "longcat_flash", "longcat_flash_ngram"),
        *("mimo_v2_flash", "minicpm3", "minimax_m3_vl_text", "qwen4_exp_text", "step3p5", "zaya"),
    }
)
"""Model types whose cache is not what their keys say; the file may leave out the key that would
show it."""
