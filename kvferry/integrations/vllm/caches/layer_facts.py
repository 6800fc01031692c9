"""What is known of an engine's layers beside their caches, gathered from vLLM's configuration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvferry.core.errors import LayoutError
from kvferry.integrations.vllm.caches.pages import LayerFacts, ShardPosition, share, spec_of
from kvferry.integrations.vllm.caches.quantization import encoded

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def layer_facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, position: ShardPosition
) -> dict[str, LayerFacts]:
    """The facts of every layer that has a cache which is transferred.

    Raises:
        LayoutError: how many KV heads a layer has on all ranks cannot be told.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import MambaSpec

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    facts = {}
    for group in kv_cache_config.transfer_groups:
        for name in group.layer_names:
            spec = spec_of(name, group)
            draft = is_draft(name, vllm_config)
            if isinstance(spec, MambaSpec):
                facts[name] = _state_facts(layers[name], draft, position)
                continue
            facts[name] = LayerFacts(
                backend=_backend_name(layers[name]),
                draft=draft,
                heads=_heads(name, spec, _model_of(vllm_config, draft), position),
            )
    return encoded(facts, layers, position)


def is_draft(layer: str, vllm_config: VllmConfig) -> bool:
    """Whether a layer belongs to the speculative model: vLLM numbers those after the model's."""
    if vllm_config.speculative_config is None:
        return False
    if layer.startswith("draft_model."):
        return True
    number = re.search(r"\.(\d+)\.", layer)
    layers: int = vllm_config.model_config.get_total_num_hidden_layers()
    return number is not None and int(number.group(1)) >= layers


def _model_of(vllm_config: VllmConfig, draft: bool) -> ModelConfig:
    if draft:
        return vllm_config.speculative_config.draft_model_config
    return vllm_config.model_config


def _heads(layer: str, spec: KVCacheSpec, model: ModelConfig, position: ShardPosition) -> int:
    """How many KV heads there are on all ranks; the specs know only how many are here."""
    here = getattr(spec, "num_kv_heads", 1)
    if getattr(spec, "max_tp_shards", None) == 1 or not hasattr(spec, "num_kv_heads"):
        return 1
    for total in (model.get_total_num_kv_heads(), here * position.tp_size):
        first, last = share(total, position)
        if last - first == here and (here > 1 or total == model.get_total_num_kv_heads()):
            return int(total)
    raise LayoutError(
        f"layer {layer!r} has {here} KV head(s) on each of {position.tp_size} ranks, and the model "
        f"{model.get_total_num_kv_heads()}: it cannot be told which of the layer's heads are here"
    )


def _backend_name(layer: object) -> str:
    name: str = layer.get_attn_backend().get_name()  # type: ignore[attr-defined]
    kernel = getattr(layer, "isa", None)
    return f"{name}/{kernel}" if kernel else name


def _state_facts(layer: object, draft: bool, position: ShardPosition) -> LayerFacts:
    """What is known of a recurrent layer; the modules say what their specs do not."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.platforms import current_platform

    name = _backend_name(layer)
    gpu = current_platform.is_cuda_alike()
    return LayerFacts(
        backend=name if gpu else f"{name}/{current_platform.device_type}",
        draft=draft,
        groups=_groups(layer, position),
        kernel=_kernel(layer),
        channels_first=is_conv_state_dim_first(),
    )


def _groups(layer: object, position: ShardPosition) -> int:
    """How many groups B and C have in the model, 0 if unknown.

    The mixer's own number includes copies, as many as there are ranks; its norm has the model's.
    """
    groups = getattr(getattr(layer, "norm", None), "n_groups", None)
    if groups is None:
        padded = getattr(layer, "n_groups", 0)
        groups = 0 if position.tp_size == padded > 1 else padded
    return int(groups)


def _kernel(layer: object) -> int:
    """How many inputs a convolution looks at, this one included; 0 if unknown."""
    history = getattr(layer, "conv_state_len", None)  # a dilated one looks further than its kernel
    if history is not None:
        return int(history) + 1
    widths = (getattr(layer, name, None) for name in ("conv_kernel_size", "conv_size", "L_cache"))
    return int(next((width for width in widths if width is not None), 0))
