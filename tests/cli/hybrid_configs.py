"""Config files of hybrid and multimodal models, with the keys and sizes of published ones."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

QWEN3_NEXT: Config = {
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "torch_dtype": "bfloat16",
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
"""Every fourth layer has attention, the others a gated delta net."""

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
"""A multimodal model whose text model is a hybrid, with states in float32."""

NEMOTRON_H: Config = {
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "torch_dtype": "bfloat16",
}
"""Mamba 2 with eight groups, four layers with attention, and layers without any cache."""

NEMOTRON_H_BY_TYPES: Config = NEMOTRON_H | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": None,
    "layers_block_type": [
        {"M": "mamba", "*": "attention", "-": "mlp"}[letter]
        for letter in NEMOTRON_H["hybrid_override_pattern"]
    ],
}
"""The same model with the type of each layer instead of the pattern."""

GRANITE: Config = {
    "num_hidden_layers": 40,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2048,
    "mamba_n_heads": 64,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}
"""Mamba 2 with a single group, which every rank has a copy of."""

FALCON_H1: Config = {
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 1024,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}
"""Every layer has both attention and Mamba 2."""

ZAMBA2: Config = {
    "num_hidden_layers": 38,
    "hybrid_layer_ids": [5, 11, 17, 23, 29, 35],
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "attention_head_dim": 128,
    "kv_channels": 64,
    "hidden_size": 2048,
    "n_mamba_heads": 64,
    "mamba_headdim": 64,
    "mamba_ngroups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}
"""Every layer has Mamba 2, and some have attention, too."""

JAMBA: Config = {
    "num_hidden_layers": 32,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}
"""Mamba 1 beside attention."""

LFM2: Config = {
    "num_hidden_layers": 16,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2048,
    "conv_L_cache": 3,
    "conv_dim": 2048,
    "torch_dtype": "bfloat16",
}
"""Short convolutions beside attention."""

KIMI_LINEAR: Config = {
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "hidden_size": 2304,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "dtype": "bfloat16",
}
"""KDA beside latents (MLA)."""

TEXT: Config = {
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2560,
}
"""The text model of a multimodal model."""

VISION: Config = {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 1152}
