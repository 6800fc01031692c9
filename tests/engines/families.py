"""Tiny checkpoints of model families, made on the spot like `examples.tiny_llama`.

Each keeps another kind of cache, or mixes kinds in another way. Fixed seed, and weights spread so
that greedy texts differ from prompt to prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.tiny_llama import SEED, WORDS, tokenizer

MAX_TOKENS = 1024
WINDOW = 80
"""Tokens of a sliding window: no multiple of any block size here."""

IMAGE, IMAGE_TOKENS = len(WORDS), 67
"""Idefics3's token for an image, and how many tokens an image has: 64, and 3 around them."""

COMMON: Mapping[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_TOKENS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def build(folder: Path, family: str) -> Path:
    """Write the checkpoint of a family, a key of `FAMILIES`, and a tokenizer of 512 words."""
    import torch

    torch.manual_seed(SEED)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "post_attention_layernorm" in name and model.config.tie_word_embeddings:
                weight.fill_(4.0)
            elif weight.dim() >= 2 and "conv1d" not in name:
                weight.normal_(std=_spread(name) * (0.1 if _tied(model, name) else 1.0))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def build_all(folder: Path, llama: Path) -> None:
    """Every family, each in a folder of its name, and those that draft."""
    for family in FAMILIES:
        build(folder / family, family)
    build_drafter(folder / "drafter", llama)
    build_predictor(folder / "predictor")
    build_idefics3(folder / "idefics3")


def build_idefics3(folder: Path) -> Path:
    """Write a Llama with a vision tower, which needs no torchvision, and an image processor.

    The token ``IMAGE`` stands for an image, and becomes ``IMAGE_TOKENS`` tokens.
    """
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    words, size, sequence = tokenizer(), 128, IMAGE_TOKENS - 3
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    words.add_special_tokens({"additional_special_tokens": special})
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": size}, max_image_size={"longest_edge": size}
    )
    Idefics3Processor(images, words, image_seq_len=sequence).save_pretrained(folder)
    torch.manual_seed(SEED)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config={**COMMON, "vocab_size": len(words), "model_type": "llama"},
            vision_config={
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": size,
                "patch_size": 8,
            },
            scale_factor=2,
            image_token_id=IMAGE,
            pad_token_id=None,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(std=_spread(name))
    model.save_pretrained(folder)
    return folder


def build_drafter(folder: Path, llama: Path) -> Path:
    """Write an EAGLE head: a layer of its own, and the embeddings of the model that it drafts for.

    Its layer is the model's last one, so that its cache depends on the prompt as much as theirs.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((llama / "config.json").read_text())
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    weights = {
        f"layers.0.{name.removeprefix(last)}": weight
        for name, weight in load_file(llama / "model.safetensors").items()
        if name.startswith(last) and "input_layernorm" not in name
    }
    torch.manual_seed(SEED)
    weights["fc.weight"] = torch.randn(config["hidden_size"], 2 * config["hidden_size"]) * 0.2
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


def build_predictor(folder: Path) -> Path:
    """Write a model of four layers that predicts the token after next with one more (MTP)."""
    import torch
    from safetensors.torch import load_file, save_file

    build(folder, "qwen2")
    module, hidden = "model.mtp_layers.0.", int(COMMON["hidden_size"])
    weights = {
        name.replace("model.layers.4.", module): weight
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{module}{norm}.weight"] = torch.ones(hidden)
    weights[f"{module}input_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config |= {"num_hidden_layers": 4, "layer_types": config["layer_types"][:4]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drafting(
    checkpoints: Mapping[str, Path], method: str, tokens: int = 1
) -> tuple[Path, dict[str, Any]]:
    """A model, and the options of an engine that drafts for it with layers that have a cache."""
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens}
    if method == "mtp":
        return checkpoints["predictor"], {"speculative_config": speculation}
    speculation |= {"model": str(checkpoints["drafter"]), "max_model_len": MAX_TOKENS}
    return checkpoints["llama"], {"speculative_config": speculation}


def _spread(name: str) -> float:
    """See `examples.tiny_llama`; experts and latents have other names for the same."""
    if any(part in name for part in ("o_proj", "out_proj")):
        return 1.0
    return 0.2 if any(part in name for part in ("proj", "expert", "linear")) else 1.0


def _tied(model: Any, name: str) -> bool:
    """Whether a weight is that of embeddings which are scaled up and are the output's weights, too.

    Beside them nothing else would be heard, so they are made small, and attention loud.
    """
    return "embed" in name and bool(model.config.tie_word_embeddings)


@dataclass(frozen=True, slots=True)
class _Family:
    """A class of transformers, what its configuration has beside `COMMON`, and what it has not."""

    model: str
    more: Mapping[str, Any] = field(default_factory=dict)
    without: str = ""
    config: str = ""

    def __call__(self) -> Any:
        import transformers

        kept = {key: value for key, value in COMMON.items() if key != self.without}
        config = self.config or self.model.replace("ForCausalLM", "Config")
        made = getattr(transformers, config)(**{**kept, **self.more})
        return getattr(transformers, self.model)(made)


# Latents instead of keys and values (MLA).
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 4,
    "q_lora_rank": None,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "topk_group": 1,
    "n_group": 1,
}
# Four sliding layers and two full ones, which vLLM deals into three groups.
_GEMMA3 = {
    "num_hidden_layers": 6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 1,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
}
# Sliding and full layers by turns, with attention sinks and experts.
_GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL] * 2,
}
# Mamba 2 with one group, and attention.
_GRANITE4 = {
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 256,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_expand": 2,
}
# Mamba 2 with two groups, attention, and layers that are one thing each.
_NEMOTRON_H = {
    "layers_block_type": [LINEAR, "mlp", LINEAR, FULL, "mlp", LINEAR],
    "ssm_state_size": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
}
# A gated delta net, attention, and experts.
_QWEN3_NEXT = {
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}

FAMILIES: Mapping[str, Callable[[], Any]] = {
    "qwen2": _Family("Qwen2ForCausalLM", {"num_hidden_layers": 5}, without="head_dim"),
    "qwen3": _Family("Qwen3ForCausalLM"),
    "gemma3": _Family("Gemma3ForCausalLM", _GEMMA3, config="Gemma3TextConfig"),
    "mistral": _Family("MistralForCausalLM", {"sliding_window": WINDOW}),
    "gpt_oss": _Family("GptOssForCausalLM", _GPT_OSS),
    "granite4": _Family("GraniteMoeHybridForCausalLM", _GRANITE4, without="head_dim"),
    "nemotron_h": _Family("NemotronHForCausalLM", _NEMOTRON_H, without="num_hidden_layers"),
    "qwen3_next": _Family("Qwen3NextForCausalLM", _QWEN3_NEXT),
    "deepseek": _Family("DeepseekV2ForCausalLM", _DEEPSEEK, without="head_dim"),
}
"""Qwen 2 is what `build_predictor` starts from; Qwen 3 normalises queries and keys."""
