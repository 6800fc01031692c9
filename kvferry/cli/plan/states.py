"""Read the recurrent states of hybrid models from their config files.

A hybrid model has layers with a recurrent state (Mamba, gated delta net, short convolutions) beside
its attention. The sizes are those that vLLM 0.32 computes (``MambaStateShapeCalculator`` in
``model_executor/layers/mamba/mamba_utils.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvferry.core.layout import ELEMENT_BYTES

Size = Annotated[int, Meta(ge=1, le=1 << 20)]
Width = Annotated[int, Meta(ge=2, le=1 << 10)]
Index = Annotated[int, Meta(ge=0, le=1 << 20)]
Factor = Annotated[float, Meta(gt=0, le=1 << 10)]

HYBRID = "hybrid"
"""Type of the layers that have both attention and a state."""
STATEFUL = frozenset({"linear_attention", "mamba", "conv", HYBRID})
"""Types of layers that have a state."""
NO_CACHE = frozenset({"mlp", "moe"})
"""Types of layers that keep nothing of the tokens before."""

PATTERN: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The types of layers by their letters in ``hybrid_override_pattern``."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Some of the channels of a layer's convolution, such as those of x, B or C.

    Attributes:
        name: The name that the connector gives to their field, without ``conv/``.
        units: Into how many equal parts they can be split, such as heads or groups. A single unit
            is copied to every rank.
    """

    name: str
    count: int
    units: int

    def share(self, ranks: int, rank: int) -> tuple[int, int]:
        """Return the range [first, last) of the channels that a tensor-parallel rank stores."""
        if self.units % ranks:
            return 0, self.count
        return rank * self.count // ranks, (rank + 1) * self.count // ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """The recurrent state of one layer: the convolution's last inputs, then a matrix per head.

    Attributes:
        channels: The channels of the convolution, in their order in memory.
        columns: For how many tokens the convolution's inputs are kept.
        heads: Heads of the recurrent state in the model; 0 if there is only a convolution.
        elements: Elements of the recurrent state of one head.
        input_dtype: Element type of the convolution's inputs.
        dtype: Element type of the recurrent state.
    """

    channels: tuple[Channels, ...]
    columns: int
    heads: int = 0
    elements: int = 0
    input_dtype: str = "auto"
    dtype: str = "auto"

    def nbytes(self, ranks: int) -> int:
        """Return the bytes of the state on one of ``ranks`` tensor-parallel ranks."""
        shares = [part.share(ranks, 0) for part in self.channels]
        inputs = sum(stop - start for start, stop in shares) * self.columns
        recurrent = self.heads // ranks * self.elements
        return inputs * ELEMENT_BYTES[self.input_dtype] + recurrent * ELEMENT_BYTES[self.dtype]


def _channels(each: int, **units: int) -> tuple[Channels, ...]:
    """Return channels by name: so many units, of ``each`` channels."""
    return tuple(Channels(name=name, count=n * each, units=n) for name, n in units.items())


class _DeltaAttention(Struct):
    """The keys under ``linear_attn_config``: a delta rule with a gate for each channel (KDA).

    Layers are counted from 1.
    """

    kda_layers: list[Size]
    full_attn_layers: list[Size]
    num_heads: Size
    head_dim: Size
    short_conv_kernel_size: Width


class _LayerKeys(Struct):
    """The keys that say the type of each layer, beside ``layer_types``."""

    hybrid_override_pattern: str | None = None
    full_attention_interval: Size | None = None
    attn_layer_period: Size | None = None
    attn_layer_offset: Index = 0
    attn_layer_indices: list[Index] | None = None
    full_attn_idxs: list[Index] | None = None
    hybrid_layer_ids: list[Index] | None = None
    mamba_d_ssm: Size | None = None
    attn_type_list: list[int] | None = None
    linear_attn_config: _DeltaAttention | None = None


def layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """Return the type of each layer, from keys other than ``layer_types``; ``None`` without any."""
    keys = msgspec.convert({k: v for k, v in config.items() if v is not None}, _LayerKeys)
    every = range(layers)
    if pattern := keys.hybrid_override_pattern:
        if unknown := [letter for letter in pattern if letter not in PATTERN]:
            raise msgspec.ValidationError(
                f"'hybrid_override_pattern' has the letter {unknown[0]!r}; known are "
                f"{', '.join(PATTERN)}"
            )
        return [PATTERN[letter] for letter in pattern]
    if keys.linear_attn_config:
        attending = {layer - 1 for layer in keys.linear_attn_config.full_attn_layers}
        return ["attention" if n in attending else "linear_attention" for n in every]
    if keys.attn_type_list:
        return ["attention" if kind == 1 else "linear_attention" for kind in keys.attn_type_list]
    if "mamba_d_ssm" in config:
        return [HYBRID] * layers
    if keys.hybrid_layer_ids is not None:
        return [HYBRID if n in keys.hybrid_layer_ids else "mamba" for n in every]
    if keys.attn_layer_period:
        period, offset = keys.attn_layer_period, keys.attn_layer_offset
        return ["attention" if n % period == offset else "mamba" for n in every]
    if interval := keys.full_attention_interval:
        return ["linear_attention" if (n + 1) % interval else "attention" for n in every]
    if indices := keys.attn_layer_indices or keys.full_attn_idxs:
        state = "conv" if keys.full_attn_idxs else "mamba"
        return ["attention" if n in indices else state for n in every]
    return None


class _DeltaNet(Struct):
    """The keys of a gated delta net."""

    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Width

    def state(self) -> RecurrentState:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        return RecurrentState(
            channels=_channels(self.linear_key_head_dim, q=keys, k=keys)
            + _channels(self.linear_value_head_dim, v=values),
            columns=self.linear_conv_kernel_dim - 1,
            heads=values,
            elements=self.linear_value_head_dim * self.linear_key_head_dim,
        )


class _GatedChannels(Struct):
    """The keys of KDA."""

    linear_attn_config: _DeltaAttention

    def state(self) -> RecurrentState:
        keys = self.linear_attn_config
        heads = keys.num_heads
        return RecurrentState(
            channels=_channels(keys.head_dim, q=heads, k=heads, v=heads),
            columns=keys.short_conv_kernel_size - 1,
            heads=heads,
            elements=keys.head_dim**2,
            dtype="float32",
        )


class _ShortConvolution(Struct):
    """The keys of layers whose only state is the input of a short convolution."""

    conv_L_cache: Width
    hidden_size: Size
    conv_dim: Size | None = None

    def state(self) -> RecurrentState:
        count = self.conv_dim or self.hidden_size
        return RecurrentState(channels=_channels(1, x=count), columns=self.conv_L_cache - 1)


class _Mamba1(Struct):
    """The keys of Mamba 1."""

    mamba_d_state: Size
    mamba_d_conv: Width
    hidden_size: Size
    mamba_expand: Factor = 2

    def state(self) -> RecurrentState:
        count = self.width()
        return RecurrentState(
            channels=_channels(1, x=count),
            columns=self.mamba_d_conv - 1,
            heads=count,
            elements=self.mamba_d_state,
        )

    def width(self) -> int:
        """Return the number of channels of a layer."""
        channels = int(self.mamba_expand * self.hidden_size)
        if not channels:
            raise msgspec.ValidationError(
                f"mamba_expand={self.mamba_expand} and hidden_size={self.hidden_size} give 0 "
                "channels"
            )
        return channels


class _Mamba2(_Mamba1, kw_only=True):
    """The keys of Mamba 2."""

    mamba_n_heads: Size
    mamba_n_groups: Size = 1
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_d_ssm: Size | None = None
    hybrid_override_pattern: str | None = None
    model_type: str = ""

    def state(self) -> RecurrentState:
        head = self._head_channels() if self.mamba_d_head == "auto" else self.mamba_d_head
        groups = self.mamba_n_groups
        # vLLM's default for Nemotron-H; not all of its files have both keys.
        is_nemotron = self.hybrid_override_pattern or self.model_type == "nemotron_h"
        return RecurrentState(
            channels=_channels(head, x=self.mamba_n_heads)
            + _channels(self.mamba_d_state, B=groups, C=groups),
            columns=self.mamba_d_conv - 1,
            heads=self.mamba_n_heads,
            elements=head * self.mamba_d_state,
            dtype="float32" if is_nemotron else "auto",
        )

    def _head_channels(self) -> int:
        """Return the number of channels of one head, for files that do not say it."""
        channels = self.mamba_d_ssm or self.width()
        if channels < self.mamba_n_heads:
            keys = (
                f"mamba_d_ssm={self.mamba_d_ssm}"
                if self.mamba_d_ssm
                else f"mamba_expand={self.mamba_expand} and hidden_size={self.hidden_size}"
            )
            raise msgspec.ValidationError(
                f"mamba_n_heads={self.mamba_n_heads} is more than the {channels} channels of {keys}"
            )
        return channels // self.mamba_n_heads


KINDS: Mapping[str, type[_DeltaNet | _GatedChannels | _ShortConvolution | _Mamba1]] = {
    "linear_num_value_heads": _DeltaNet,
    "linear_attn_config": _GatedChannels,
    "conv_L_cache": _ShortConvolution,
    "mamba_n_heads": _Mamba2,
    "mamba_d_state": _Mamba1,
}
"""The kinds of states, by the key that shows which kind a model has; the first counts."""


def read_state(
    config: Mapping[str, Any], dtype: Callable[[str | None], str]
) -> RecurrentState | None:
    """Return the state of a hybrid's layers; ``None`` without any of the keys in ``KINDS``.

    ``dtype`` returns the key of ``ELEMENT_BYTES`` for a name of an element type.
    """
    named = with_aliases(config)
    kind = next((kind for key, kind in KINDS.items() if key in named), None)
    if kind is None:
        return None
    state = msgspec.convert(named, kind).state()
    inputs = dtype(named.get("dtype"))
    own = str(named.get("mamba_ssm_dtype", state.dtype))
    return replace(state, input_dtype=inputs, dtype=inputs if own == "auto" else dtype(own))


def with_aliases(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config file that have a value, with their usual names added."""
    present = {key: value for key, value in config.items() if value is not None}
    for key, others in ALIASES.items():
        if found := [name for name in (key, *others) if name in present]:
            present[key] = present[found[0]]
    return present
