"""Read the shape of a model's KV cache from its config file.

Only keys of the file are used, never the name of a model. A cache that the file does not describe
completely is refused, with the key that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvferry.cli.formatting import numbers
from kvferry.cli.plan.states import (
    HYBRID,
    KINDS,
    NO_CACHE,
    STATEFUL,
    RecurrentState,
    Size,
    layer_types,
    read_state,
    with_aliases,
)
from kvferry.core.errors import KVFerryError
from kvferry.core.layout import ELEMENT_BYTES
from kvferry.core.side_channel_messages import DECODE_ERRORS

FILE_LIMIT = 1 << 24
"""Largest size of a config file, in bytes; real ones have some thousands."""

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a multimodal model keeps the configuration of its text model, as vLLM reads them
(``transformers_utils/config.py`` and ``transformers_utils/configs``)."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (
        "n_head_kv",
        "num_kv_heads",
        "multi_query_group_num",
        "num_attention_groups",
    ),
    "head_dim": ("attention_head_dim", "kv_channels", "hidden_size_per_head"),
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

EVERY_TOKEN = frozenset({"full_attention", "attention", "chunked_attention", HYBRID})
"""Types of layers that keep every token, as vLLM's chunked attention does by default."""
WINDOWED = frozenset({"sliding_attention"})

TYPE_KEYS = ("layer_types", *ALIASES["layer_types"], "hybrid_override_pattern")
"""Keys with the type of each layer; the first that is present counts."""

STATES = re.compile(
    r"mamba_|ssm_|ssm$|linear_(num|conv|key|value|attn)|rwkv|conv_kernel$|conv_L_cache$|state_size$"
    r"|hybrid_override_pattern$|full_attention_interval$|attn_layer_|attn_type_list$|lru_|block_types$|layer_group_size$"
)
"""Keys of models that have recurrent states beside attention or instead of it."""

UNSUPPORTED: Mapping[str, str] = {
    "index_topk": "a second cache in every layer, for finding tokens",
    "compress_ratios": "entries that stand for several tokens",
    "block_configs": "layers that are unlike each other",
    "global_head_dim": "heads of two sizes",
    "num_global_key_value_heads": "layers with unlike numbers of heads",
    "cross_attention_layers": "layers that keep entries of images instead of tokens",
}
"""Keys of models whose cache the file does not describe completely, with what each stands for."""

REMEDY = (
    "describe both engines as JSON layouts instead, or take the layouts of running engines with "
    "--from (kvferry plan --help)"
)
DEFAULTS = (
    "If the file leaves this key to the defaults of transformers, let it write every key: "
    "AutoConfig.from_pretrained(PATH).to_json_file(FILE, use_diff=False)"
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The properties of a model that decide which rank reads what.

    Attributes:
        layers: Number of layers, which pipeline ranks share.
        windows: Sliding window in tokens by the index of each layer with attention, 0 for no
            window. It has no layer that uses the cache of another layer.
        attention_heads: Number of query heads.
        kv_heads: Number of KV heads; 1 if an entry is a latent (MLA), which every rank stores.
        parts: Parts of an entry (one head of one token) in order: name to number of elements.
        dtype: Element type, a key of ``ELEMENT_BYTES``.
        states: The indices of the layers that have a recurrent state.
        state: The state of each of these layers; ``None`` if there are none.
        notes: Assumptions about what the file does not say, a sentence each.
    """

    layers: int
    windows: Mapping[int, int]
    attention_heads: int
    kv_heads: int
    parts: Mapping[str, int]
    dtype: str
    states: tuple[int, ...] = ()
    state: RecurrentState | None = None
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
    types = _layer_types(file, flat, config)
    windows, notes = _windows(config, types)
    states = _state_layers(config, types)
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
        states=states,
        state=_state(file, flat, states, types[states[0]]) if types and states else None,
        notes=(*notes, *_assumed_heads(config)),
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

    A multimodal model has such a text model. Its value counts if both levels have a key, but for
    the element type, where vLLM takes the top level's.
    """
    inner = next((config[name] for name in NESTED if isinstance(config.get(name), dict)), None)
    if inner is None:
        return config
    dtype = config.get("dtype") or config.get("torch_dtype")
    outer = {"dtype": dtype} if dtype else {}
    return _flat({**config, **dict.fromkeys(NESTED), **inner, **outer})


def _refuse_unsupported(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse models whose cache the config file does not describe completely.

    Args:
        file: The config file, for errors.
        config: The file's keys, from ``_flat``.

    Raises:
        ModelError: The file is of such a model; the message says what shows it.
    """
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{file} is of an encoder and a decoder ('is_encoder_decoder'): only decoders are drawn"
        )
    for key, what in UNSUPPORTED.items():
        if config.get(key):
            raise ModelError(f"{file} has {key!r}, {what}: that is not drawn from a file; {REMEDY}")


def _converted(file: Path, config: Mapping[str, Any]) -> _Config:
    """Return the validated keys of a config file, under their usual names.

    Args:
        file: The config file, for errors.
        config: The file's keys, from ``_flat``.

    Raises:
        ModelError: A key is missing, or its value is not valid.
    """
    # A head_dim of 0 stands for a missing one, as in vLLM.
    kept = {k: v for k, v in config.items() if k != "head_dim" or v != 0}
    try:
        return msgspec.convert(with_aliases(kept, ALIASES), _Config)
    except msgspec.ValidationError as exc:
        remedy = f". {DEFAULTS}" if "missing required field" in str(exc) else ""
        raise ModelError(f"{file} does not say what a KV cache is made of: {exc}{remedy}") from exc


def _layer_types(file: Path, config: Mapping[str, Any], converted: _Config) -> Sequence[str] | None:
    """Return the type of each layer; ``None`` if all layers have attention.

    Args:
        file: The config file, for errors.
        config: The file's keys, from ``_flat``.
        converted: The validated keys.

    Raises:
        ModelError: A value is not valid, or the file does not say which layers have a state.
    """
    layers = converted.num_hidden_layers
    try:
        types = converted.layer_types or layer_types(config, layers)
    except msgspec.ValidationError as exc:
        raise ModelError(f"{file} does not say which layers have a state: {exc}") from exc
    if types is not None and len(types) < layers:
        key = next((key for key in TYPE_KEYS if config.get(key)), "layer_types")
        raise ModelError(f"{key!r} has {len(types)} entries for {layers} layers")
    state = next((key for key in config if STATES.match(key) and config[key]), None)
    if state and types is None:
        raise ModelError(
            f"{file} has {state!r}, so the model has states, and no 'layer_types' that says which "
            f"layers have them: such states are not drawn from a file; {REMEDY}"
        )
    return types


def _state_layers(config: _Config, types: Sequence[str] | None) -> tuple[int, ...]:
    """Return the indices of the layers that have a recurrent state.

    Args:
        config: The keys of the file.
        types: The type of each layer; ``None`` if all layers have attention.
    """
    return tuple(n for n in range(config.num_hidden_layers) if types and types[n] in STATEFUL)


def _state(
    file: Path, config: Mapping[str, Any], layers: Sequence[int], name: str
) -> RecurrentState:
    """Return the state of the layers that have one.

    Args:
        file: The config file, for errors.
        config: The file's keys, from ``_flat``.
        layers: The indices of these layers, for errors.
        name: The type of the first of these layers, for errors.

    Raises:
        ModelError: The file does not say how large the state is.
    """
    try:
        state = read_state(config, element_type)
    except msgspec.ValidationError as exc:
        raise ModelError(f"{file} does not say what its states are made of: {exc}") from exc
    if state is None:
        raise ModelError(
            f"layers {numbers(layers)} are {name!r}, which have states, and the file has none of "
            f"the keys that give a state's size ({', '.join(KINDS)}); {REMEDY}"
        )
    return state


def _assumed_heads(config: _Config) -> tuple[str, ...]:
    """Return a sentence if the file does not say the number of KV heads; else nothing."""
    if config.num_key_value_heads or config.kv_lora_rank or config.multi_query:
        return ()
    return (
        "As many KV heads as attention heads are assumed: the file has no 'num_key_value_heads'.",
    )


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
        ModelError: The file does not say the number, or there are more heads than elements.
    """
    if config.head_dim is not None:
        return config.head_dim
    if config.hidden_size is None:
        raise ModelError(f"{file} says neither 'head_dim' nor 'hidden_size'")
    if config.hidden_size < config.num_attention_heads:
        raise ModelError(
            f"{file} has no 'head_dim', and hidden_size={config.hidden_size} is less than "
            f"num_attention_heads={config.num_attention_heads}: a head would have no elements"
        )
    return config.hidden_size // config.num_attention_heads


def _windows(
    config: _Config, types: Sequence[str] | None
) -> tuple[dict[int, int], tuple[str, ...]]:
    """Return the sliding window of each layer with attention, and what was assumed.

    Args:
        config: The keys of the file.
        types: The type of each layer; ``None`` if the file does not say.

    Returns:
        The window in tokens by layer index, 0 for no window, without the layers that use the cache
        of another layer; and a sentence for each assumption.

    Raises:
        ModelError: The file does not describe the layers completely.
    """
    layers = config.num_hidden_layers - (config.num_kv_shared_layers or 0)
    window = config.sliding_window or 0
    if types is not None:
        return _windows_by_type(types[:layers], window), ()
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


def _windows_by_type(types: Sequence[str], window: int) -> dict[int, int]:
    """Return the sliding window in tokens of each layer with attention, from the layers' types.

    Args:
        types: The type of each layer that has a cache of its own.
        window: Window in tokens of each sliding layer; 0 if the file does not say it.

    Returns:
        The window by layer index; 0 for a layer that keeps every token.

    Raises:
        ModelError: A type is unknown, or the length of the window is missing.
    """
    known = EVERY_TOKEN | WINDOWED | STATEFUL | NO_CACHE
    unknown = {n: t for n, t in enumerate(types) if t not in known}
    if unknown:
        name = next(iter(unknown.values()))
        of = numbers([n for n, kind in unknown.items() if kind == name])
        raise ModelError(
            f"layers {of} are {name[:64]!r}, and known are {', '.join(sorted(known))}: other "
            f"layers are not drawn from a file; {REMEDY}"
        )
    if not window and WINDOWED & set(types):
        raise ModelError("'layer_types' names windows, and 'sliding_window' does not say how long")
    attending = {n: kind for n, kind in enumerate(types) if kind in EVERY_TOKEN | WINDOWED}
    return {n: window if kind in WINDOWED else 0 for n, kind in attending.items()}
