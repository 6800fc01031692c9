"""Config files of models with states, with the keys and sizes of published ones."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def attention(layers: int, heads: int, kv_heads: int, hidden_size: int) -> Config:
    """The keys of attention."""
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden_size,
        "torch_dtype": "bfloat16",
    }


MAMBA: Config = {"mamba_d_conv": 4, "mamba_expand": 2}
MAMBA_2: Config = MAMBA | {"mamba_d_state": 128, "mamba_n_groups": 1}

QWEN3_NEXT = attention(48, 16, 2, 2048) | {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}

QWEN3_5: Config = {
    "dtype": "bfloat16",
    "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
    "text_config": QWEN3_NEXT
    | {
        "torch_dtype": None,
        "num_hidden_layers": 32,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "num_key_value_heads": 4,
        "mamba_ssm_dtype": "float32",
    },
}

NEMOTRON_H = attention(52, 32, 8, 4096) | {
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "attention_head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
}

GRANITE = (
    attention(40, 32, 8, 2048)
    | MAMBA_2
    | {"mamba_n_heads": 64, "mamba_d_head": "auto"}
    | {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4}
)

FALCON_H1 = (
    attention(36, 8, 2, 1024)
    | MAMBA_2
    | {"head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64}
)

ZAMBA2 = attention(38, 32, 32, 2048) | {
    "layers_block_type": (["mamba"] * 5 + ["hybrid"]) * 6 + ["mamba"] * 2,
    "attention_head_dim": 128,
    "kv_channels": 64,
    "n_mamba_heads": 64,
    "mamba_headdim": 64,
    "mamba_ngroups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

JAMBA = (
    attention(32, 32, 8, 4096)
    | MAMBA
    | {"mamba_d_state": 16, "attn_layer_period": 8, "attn_layer_offset": 4}
)

LFM2 = attention(16, 32, 8, 2048) | {
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_L_cache": 3,
    "conv_dim": 2048,
}

KIMI_LINEAR = attention(27, 32, 32, 2304) | {
    "head_dim": 72,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
