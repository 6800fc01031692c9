"""vLLM's own recurrent layers, one for each rank, with their states in memory: an oracle.

The layers are made by vLLM as on the rank of an engine, so that its code says how a state is split,
which channels are whose (its weight loaders), what shape a state has and where it lies in a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvferry.core.layout import Layout
from kvferry.integrations.vllm.caches.cache_layout import describe
from kvferry.integrations.vllm.caches.layer_facts import layer_facts
from kvferry.integrations.vllm.caches.pages import LayerFacts, ShardPosition

if TYPE_CHECKING:
    import torch

LAYER = "model.layers.0.mixer"
PAGES = 5
KERNEL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A recurrent layer: its kind, a key of ``KINDS``, and its sizes on all ranks together."""

    kind: str
    heads: int = 12
    head: int = 4
    size: int = 3
    groups: int = 1

    @property
    def parts(self) -> tuple[int, ...]:
        """The widths of the parts of the convolution's channels."""
        inner, group = self.heads * self.head, self.groups * self.size
        return {
            "mamba1": (inner,),
            "mamba2": (inner, group, group),
            "delta": (group, group, inner),
            "kda": (inner, inner, inner),
            "short": (inner,),
            "linear": (),
        }[self.kind]

    @property
    def inside(self) -> tuple[int, ...]:
        """The shape of the whole recurrence; empty if there is none."""
        return {
            "mamba1": (self.heads * self.head, self.size),
            "mamba2": (self.heads, self.head, self.size),
            "delta": (self.heads, self.head, self.size),
            "kda": (self.heads, self.head, self.head),
            "short": (),
            "linear": (self.heads, self.head, self.head),
        }[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How an engine runs a model."""

    ranks: int = 1  # tensor parallelism
    channels_first: bool = False  # the convolution's layout is DS
    drafts: int = 0  # tokens of speculative decoding
    padding: int = 0  # bytes after each state
    device: str = "cpu"  # whose kernels; cpu or cuda


def _mamba(model: Model, config: Any) -> Any:
    from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    common: dict[str, Any] = {
        "hidden_size": 8,
        "ssm_state_size": model.size,
        "conv_kernel_size": KERNEL,
        "intermediate_size": model.heads * model.head,
        "use_bias": False,
        "model_config": config.model_config,
        "cache_config": config.cache_config,
        "prefix": LAYER,
    }
    if model.kind == "mamba1":
        return MambaMixer(**common, time_step_rank=1, use_conv_bias=False, use_rms_norm=False)
    sizes = {"n_groups": model.groups, "num_heads": model.heads, "head_dim": model.head}
    return MambaMixer2(**common, **sizes, use_conv_bias=True)


def _of_config(path: str, name: str) -> Callable[[Model, Any], Any]:
    def make(model: Model, config: Any) -> Any:
        described = SimpleNamespace(
            hidden_size=8,
            hidden_act="silu",
            rms_norm_eps=1e-6,
            linear_num_key_heads=model.groups,
            linear_key_head_dim=model.size,
            linear_num_value_heads=model.heads,
            linear_value_head_dim=model.head,
            linear_conv_kernel_dim=KERNEL,
            linear_attn_config={
                "head_dim": model.head,
                "num_heads": model.heads,
                "short_conv_kernel_size": KERNEL,
            },
            num_attention_heads=model.heads,
            num_hidden_layers=2,
            head_dim=model.head,
        )
        return getattr(import_module(path), name)(described, config, prefix=LAYER)

    return make


def _short(model: Model, config: Any) -> Any:
    from vllm.model_executor.layers.mamba.short_conv import ShortConv

    described = SimpleNamespace(conv_L_cache=KERNEL, conv_bias=False)
    return ShortConv(
        described,
        model.heads * model.head,
        0,
        model_config=config.model_config,
        cache_config=config.cache_config,
        prefix=LAYER,
    )


_LAYERS = "vllm.model_executor.layers.mamba"
KINDS: dict[str, Callable[[Model, Any], Any]] = {
    "mamba1": _mamba,
    "mamba2": _mamba,
    "delta": _of_config(f"{_LAYERS}.gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention"),
    "kda": _of_config(f"{_LAYERS}.gdn.kimi_gdn_linear_attn", "KimiGatedDeltaNetAttention"),
    "short": _short,
    "linear": _of_config(f"{_LAYERS}.linear.minimax_linear_attn", "MiniMaxText01LinearAttention"),
}
"""How vLLM makes the layers."""


class Rank:
    """One rank's layer, with its pages."""

    def __init__(self, model: Model, setup: Setup, rank: int, fill: int) -> None:
        """A layer whose pages are full of a byte."""
        import torch

        self.model, self.setup = model, setup
        self.position = ShardPosition(tp=rank, tp_size=setup.ranks)
        with _vllm(setup, rank) as config:
            self.layer = KINDS[model.kind](model, config)
            if hasattr(self.layer, "num_spec"):
                self.layer.num_spec = setup.drafts
            self.channels = _channels(self.layer, model)
            self.spec = self.layer.get_kv_cache_spec(config)
            self.facts = self._facts(config)
            content = self.spec.state_content_size_bytes
            stride = content + setup.padding
            self.pages = torch.full((PAGES, stride), fill, dtype=torch.int8)
            self.cache = self.pages[:, :content].unsqueeze(1).unsqueeze(1)
            self.layer.bind_kv_cache(self.cache)

    def _facts(self, config: Any) -> LayerFacts:
        groups: Any = SimpleNamespace(transfer_groups=[self.group])
        facts = layer_facts(config, groups, self.position)[LAYER]
        if self.setup.device == "cpu":
            return facts
        return replace(facts, backend=facts.backend.removesuffix("/cpu"))

    @property
    def group(self) -> Any:
        """As in vLLM's configuration of caches."""
        return SimpleNamespace(kv_cache_spec=self.spec, layer_names=[LAYER])

    def layout(self, **changed: Any) -> Layout:
        """What is published, if these facts were others."""
        config: Any = SimpleNamespace(num_blocks=PAGES, transfer_groups=[self.group])
        facts = {LAYER: replace(self.facts, **changed)}
        return describe({LAYER: self.cache}, config, facts=facts, position=self.position)

    def write(self, page: int, truth: Truth) -> None:
        """The state after some tokens, where this rank's kernels keep it."""
        for tensor, values in zip(self._tensors(), self._shares(truth), strict=True):
            tensor[page] = values

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Views of what the kernels use of each tensor, in the order of ``Truth``."""
        tensors = [_bits(tensor) for tensor in self.layer.kv_cache]
        if self.model.parts:
            conv = tensors.pop(0)
            conv = conv if self.setup.channels_first else conv.transpose(1, 2)
            yield conv[:, :, : KERNEL - 1]
        for tensor in tensors:
            if self.setup.device == "cpu" and self.model.kind in ("delta", "kda"):
                pages, heads, rows, columns = tensor.shape
                yield tensor.view(pages, heads, columns, rows).transpose(2, 3)
            else:
                yield tensor

    def _shares(self, truth: Truth) -> Iterator[torch.Tensor]:
        if truth.conv is not None:
            yield truth.conv[self.channels]
        if truth.ssm is not None:
            yield truth.ssm.chunk(self.position.tp_size)[self.position.tp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A state, undivided, as raw bits."""

    conv: torch.Tensor | None  # (channels, columns), or None
    ssm: torch.Tensor | None  # (heads, ...), or None

    @classmethod
    def of(cls, model: Model, rank: Rank, seed: int) -> Truth:
        """Random bits, of the types that this engine's states have."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        types = [_bits(tensor).dtype for tensor in rank.layer.kv_cache]

        def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            return torch.randint(least, most, shape, dtype=dtype, generator=generator)

        channels = sum(model.parts)
        return cls(
            conv=bits(types[0], channels, KERNEL - 1) if channels else None,
            ssm=bits(types[-1], *model.inside) if model.inside else None,
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _channels(layer: Any, model: Model) -> torch.Tensor:
    """Ask the loader of the convolution's weights: a weight is the number of its channel."""
    import torch

    if not model.parts:
        return torch.empty(0, dtype=torch.int64)
    weight = (layer.conv if model.kind == "short" else layer.conv1d).weight
    weight.data = weight.data.to(torch.float64)
    numbers = torch.arange(sum(model.parts), dtype=torch.float64)
    full = numbers[:, None, None].expand(-1, 1, KERNEL).contiguous()
    if model.kind == "kda":
        for shard, part in enumerate(full.split(model.parts)):
            weight.weight_loader(weight, part, shard)
    else:
        weight.weight_loader(weight, full)
    loaded: torch.Tensor = weight.data.reshape(weight.shape[0], KERNEL)[:, 0].to(torch.int64)
    return loaded


@contextmanager
def _vllm(setup: Setup, rank: int) -> Iterator[Any]:
    """The surroundings that vLLM's layers are made in."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.mamba import mamba_utils

    config = VllmConfig()
    config.cache_config.mamba_block_size = 1024
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16, hf_text_config=SimpleNamespace(), is_quantized=False
    )
    group = SimpleNamespace(world_size=setup.ranks, rank_in_group=rank)
    drafts = mock.PropertyMock(return_value=setup.drafts)
    first = mock.Mock(return_value=setup.channels_first)
    with (
        set_current_vllm_config(config),
        mock.patch.object(parallel_state, "_TP", group),
        mock.patch.object(VllmConfig, "num_speculative_tokens", drafts),
        mock.patch.object(mamba_utils, "is_conv_state_dim_first", first),
    ):
        yield config
