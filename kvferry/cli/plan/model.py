"""Read the shape of a model's KV cache from its config file.

Only keys of the file are used, never the name of a model. A cache that the file does not describe
completely is refused, with the key that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvferry.cli.formatting import numbers
from kvferry.core.errors import KVFerryError
from kvferry.core.layout import ELEMENT_BYTES
from kvferry.core.messages import DECODE_ERRORS

FILE_LIMIT = 1 << 24
"""Largest size of a config file, in bytes; real ones have some thousands."""

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a multimodal model keeps the configuration of its text model."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("kv_channels",),
    "hidden_size": ("n_embd", "d_model"),
    "dtype": ("torch_dtype",),
    "layer_types": ("layers_block_type",),
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

EVERY_TOKEN = frozenset({"full_attention", "attention", "chunked_attention"})
"""Types of layers that keep every token, as vLLM's chunked attention does by default."""
WINDOWED = frozenset({"sliding_attention"})

STATES = re.compile(
    r"mamba_|ssm_|ssm$|linear_(num|conv|key|value|attn)|rwkv|conv_kernel$|conv_L_cache$|state_size$"
    r"|hybrid_override_pattern$|full_attention_interval$|attn_layer_|attn_type_list$|lru_|block_types$"
)
"""Keys of models that have recurrent states beside attention or instead of it."""

UNSUPPORTED: Mapping[str, str] = {
    "index_topk": "a second cache in every layer, for finding tokens",
    "compress_ratios": "entries that stand for several tokens",
    "block_configs": "layers that are unlike each other",
    "global_head_dim": "heads of two sizes",
    "num_global_key_value_heads": "layers with unlike numbers of heads",
}
"""Keys of models whose cache the file does not describe completely, with what each stands for."""

REMEDY = "describe both engines as JSON layouts instead (kvferry plan --help)"

Size = Annotated[int, Meta(ge=1, le=1 << 20)]


class ModelError(KVFerryError):
    """A config file cannot be read, or does not describe the cache; the message names the key."""


class _Config(Struct):
    """The keys of a config file that describe the cache."""

    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_size: Size | None = None
    dtype: str | None = None
    kv_lora_rank: Size | None = None
    qk_rope_head_dim: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    layer_types: list[str] | None = None
    sliding_window: Annotated[int, Meta(ge=0)] | None = None
    sliding_window_pattern: Annotated[int, Meta(ge=1)] | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Meta(ge=0)] = 0
    num_kv_shared_layers: Annotated[int, Meta(ge=0)] | None = None
    multi_query: bool | None = None
    new_decoder_architecture: bool | None = None
    is_encoder_decoder: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The properties of a model that decide which rank reads what.

    Attributes:
        layers: Number of layers, which pipeline ranks share.
        windows: Sliding window in tokens by layer index, 0 for no window. It has no layer that
            uses the cache of another layer.
        attention_heads: Number of query heads.
        kv_heads: Number of KV heads; 1 if an entry is a latent (MLA), which every rank stores.
        parts: Parts of an entry (one head of one token) in order: name to number of elements.
        dtype: Element type, a key of ``ELEMENT_BYTES``.
        notes: Assumptions about what the file does not say, a sentence each.
    """

    layers: int
    windows: Mapping[int, int]
    attention_heads: int
    kv_heads: int
    parts: Mapping[str, int]
    dtype: str
    notes: tuple[str, ...] = ()

    @property
    def latent(self) -> bool:
        """Whether an entry is a latent instead of K and V."""
        return "latent" in self.parts

    @property
    def entry_bytes(self) -> int:
        """Bytes of one head of one token in one layer."""
        return sum(self.parts.values()) * ELEMENT_BYTES[self.dtype]


def read_model(path: Path, dtype: str | None = None) -> Model:
    """Return the model of a config file.

    Args:
        path: A ``config.json``, or the folder that contains one.
        dtype: Element type of the cache; ``None`` or ``auto`` for the file's.

    Raises:
        ModelError: The file cannot be read, or does not describe the cache completely.
    """
    file = path / "config.json" if path.is_dir() else path
    flat = _flat(_parsed(file))
    _refuse_unsupported(file, flat)
    config = _converted(file, flat)
    windows, notes = _windows(config)
    latent = config.kv_lora_rank is not None
    return Model(
        layers=config.num_hidden_layers,
        windows=windows,
        attention_heads=config.num_attention_heads,
        kv_heads=1 if latent else _kv_heads(config),
        parts={"latent": (config.kv_lora_rank or 0) + config.qk_rope_head_dim}
        if latent
        else dict.fromkeys(("k", "v"), _head_dim(file, config)),
        dtype=element_type(dtype if dtype not in (None, "auto") else config.dtype),
        notes=notes,
    )


def element_type(name: str | None) -> str:
    """Return the key of ``ELEMENT_BYTES`` for an element type.

    Args:
        name: A name of the type, as in files and options; ``None`` for bfloat16.

    Raises:
        ModelError: The type is unknown.
    """
    plain = (name or "bfloat16").removeprefix("torch.")
    plain = DTYPES.get(plain, plain)
    if plain not in ELEMENT_BYTES:
        raise ModelError(
            f"unknown element type {name!r}; known are {', '.join((*ELEMENT_BYTES, *DTYPES))}"
        )
    return plain


def _parsed(file: Path) -> dict[str, Any]:
    """Return the keys of a config file."""
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_LIMIT + 1)
        if len(data) > FILE_LIMIT:
            raise ModelError(f"{file} has more than {FILE_LIMIT} bytes: that is no model's config")
        return msgspec.json.decode(data, type=dict[str, Any])
    except OSError as exc:
        raise ModelError(f"{file} cannot be read: {exc.strerror}") from exc
    except DECODE_ERRORS as exc:
        raise ModelError(f"{file} is not the config of a model: {exc}") from exc


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config file's keys, with the nested keys of a text model moved to the top level.

    A multimodal model has such a text model. Its value counts if both levels have a key.
    """
    inner = next((config[name] for name in NESTED if isinstance(config.get(name), dict)), None)
    return config if inner is None else _flat({**config, **dict.fromkeys(NESTED), **inner})


def _refuse_unsupported(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse models whose cache the config file does not describe completely.

    Args:
        file: The config file, for errors.
        config: The file's keys, from ``_flat``.

    Raises:
        ModelError: The file has a key of such a model; the message names the key.
    """
    for key, what in UNSUPPORTED.items():
        if config.get(key):
            raise ModelError(f"{file} has {key!r}, {what}: that is not drawn from a file; {REMEDY}")
    typed = any(config.get(key) for key in ("layer_types", *ALIASES["layer_types"]))
    state = next((key for key in config if STATES.match(key) and config[key]), None)
    if state and not typed:
        raise ModelError(
            f"{file} has {state!r}, so the model has states, and no 'layer_types' that says which "
            f"layers have them: states are not drawn from a file; {REMEDY}"
        )


def _converted(file: Path, config: Mapping[str, Any]) -> _Config:
    """Return the validated keys of a config file, under their usual names.

    Args:
        file: The config file, for errors.
        config: The file's keys, from ``_flat``.

    Raises:
        ModelError: A key is missing, or its value is not valid.
    """
    present = {key: value for key, value in config.items() if value is not None}
    named = {
        key: present[name]
        for key, others in ALIASES.items()
        if (name := next((n for n in (key, *others) if n in present), None))
    }
    try:
        return msgspec.convert({**present, **named}, _Config)
    except msgspec.ValidationError as exc:
        raise ModelError(f"{file} does not say what a KV cache is made of: {exc}") from exc


def _kv_heads(config: _Config) -> int:
    """Return the number of KV heads."""
    if config.multi_query and not config.new_decoder_architecture:
        return 1
    return config.num_key_value_heads or config.num_attention_heads


def _head_dim(file: Path, config: _Config) -> int:
    """Return the number of elements of one head.

    Args:
        file: The config file, for errors.
        config: The file's keys.

    Raises:
        ModelError: The file does not say the number, or the model has an encoder.
    """
    if config.is_encoder_decoder:
        raise ModelError(f"{file} is of an encoder and a decoder: only decoders are drawn")
    if config.head_dim is not None:
        return config.head_dim
    if config.hidden_size is None:
        raise ModelError(f"{file} says neither 'head_dim' nor 'hidden_size'")
    return config.hidden_size // config.num_attention_heads


def _windows(config: _Config) -> tuple[dict[int, int], tuple[str, ...]]:
    """Return the sliding windows of a model's layers, and what was assumed about them.

    Returns:
        The window in tokens by layer index, 0 for no window, without layers that share the cache of
        another layer; and a sentence for each assumption.

    Raises:
        ModelError: The file does not describe the layers completely.
    """
    layers = config.num_hidden_layers - (config.num_kv_shared_layers or 0)
    window = config.sliding_window or 0
    if config.layer_types is not None:
        return _windows_by_type(config.layer_types, config.num_hidden_layers, layers, window), ()
    if not window or config.use_sliding_window is False:
        return dict.fromkeys(range(layers), 0), ()
    if config.sliding_window_pattern:
        pattern = config.sliding_window_pattern
        return {n: window if (n + 1) % pattern else 0 for n in range(layers)}, ()
    first = config.max_window_layers if config.use_sliding_window else 0
    note = (
        f"Layers from {first} on keep a window of {window:,} tokens: the file says "
        "'sliding_window' and has no 'layer_types' that would say otherwise."
    )
    return {n: window if n >= first else 0 for n in range(layers)}, (note,)


def _windows_by_type(types: list[str], declared: int, layers: int, window: int) -> dict[int, int]:
    """Return the sliding window in tokens of each layer with a cache, from the layers' types.

    Args:
        types: The type of each layer, ``layer_types`` of the config file.
        declared: Number of layers that the config file declares.
        layers: Number of layers, from the first on, that have a cache of their own.
        window: Window in tokens of each sliding layer; 0 if the file does not say it.

    Returns:
        The window by layer index; 0 for a layer that keeps every token.

    Raises:
        ModelError: Types are missing or unknown, or the length of the window is missing.
    """
    if len(types) < declared:
        raise ModelError(f"'layer_types' has {len(types)} entries for {declared} layers")
    unknown = {n: t for n, t in enumerate(types[:layers]) if t not in EVERY_TOKEN | WINDOWED}
    if unknown:
        name = next(iter(unknown.values()))
        of = numbers([n for n, kind in unknown.items() if kind == name])
        raise ModelError(
            f"layers {of} are {name[:64]!r}: states, and whatever is not attention, are not drawn "
            f"from a file; {REMEDY}"
        )
    if not window and WINDOWED & set(types[:layers]):
        raise ModelError("'layer_types' names windows, and 'sliding_window' does not say how long")
    return {n: window if kind in WINDOWED else 0 for n, kind in enumerate(types[:layers])}
