"""Read the shape of a model's KV cache from its config file.

Keys that a file leaves out have the defaults of its ``model_type`` (``defaults``). A cache that the
file does not describe completely is refused, with the key that shows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvferry.cli.formatting import numbers
from kvferry.cli.plan.defaults import LEFT_OUT, LOCAL
from kvferry.cli.plan.states import (
    ALIASES,
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

EVERY_TOKEN = frozenset({"full_attention", "attention", HYBRID})
"""Types of layers that keep every token."""
WINDOWED, CHUNKED = "sliding_attention", "chunked_attention"
LENGTHS: Mapping[str, str] = {
    WINDOWED: "sliding_window",
    CHUNKED: "attention_chunk_size",
    "indexed_attention": "index_topk",
}
"""The key that says to how many tokens a token attends, by the type of the layer."""

EXCLUSIVE = frozenset({"cohere2", "cohere2_moe"})
"""Model types whose windows do not count the token itself, so that vLLM adds it."""
INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Model types with latents and, beside them, an index by which a token finds the tokens that it
attends to."""
INDEX_SCALED = 128
"""How many values of an index have a scale together."""
WINDOWS_FROM_A_LAYER = frozenset(name for name in LEFT_OUT if "max_window_layers" in LEFT_OUT[name])
"""Model types in which layers before ``max_window_layers`` have no window."""

TYPE_KEYS = ("layer_types", *ALIASES["layer_types"], "hybrid_override_pattern", "attn_type_list")
"""Keys with the type of each layer; the first that is present counts."""

STATES = re.compile(
    r"mamba_|ssm_|ssm$|linear_(num|conv|key|value|attn)|rwkv|conv_kernel$|conv_L_cache$|state_size$"
    r"|hybrid_override_pattern$|full_attention_interval$|attn_layer_|lru_|block_types$|layer_group_size$"
)
"""Keys of models that have recurrent states beside attention or instead of it."""

UNSUPPORTED: Mapping[str, str] = {
    "compress_ratios": "entries that stand for several tokens",
    "block_configs": "layers that are unlike each other",
    "global_head_dim": "heads of two sizes",
    "num_global_key_value_heads": "layers with unlike numbers of heads",
    "cross_attention_layers": "layers that keep entries of images instead of tokens",
}
"""Keys of models whose cache the file does not describe completely, with what each stands for."""

_TWO_SIZES = "layers with heads of two sizes"
_BLOCK_INDEX = "layers with an index of blocks"
UNLIKE: Mapping[str, str] = {
    "deepseek_v4": "entries that stand for several tokens",
    "diffusion_gemma_text": _TWO_SIZES,
    "gemma4_text": _TWO_SIZES,
    "gemma4_unified_text": _TWO_SIZES,
    "glm5_next_text": _BLOCK_INDEX,
    "hrm_text": "layers that run several times",
    "inkling_text": "convolutions beside windows",
    "longcat_flash": "two caches in each layer",
    "longcat_flash_ngram": "two caches in each layer",
    "mimo_v2_flash": _TWO_SIZES,
    "minicpm3": "latents that vLLM stores as K and V",
    "minimax_m3_vl_text": _BLOCK_INDEX,
    "qwen4_exp_text": _BLOCK_INDEX,
    "step3p5": "layers with unlike numbers of heads",
    "zaya": "a state in each layer",
}
"""Model types whose cache is not what their keys say, with the reason; the file may leave out the
key that would show it."""

REMEDY = (
    "describe both engines as JSON layouts instead, or take the layouts of running engines with "
    "--from (kvferry plan --help)"
)
DEFAULTS = (
    "If the file leaves this key to the defaults of transformers, let it write every key: "
    "AutoConfig.from_pretrained(PATH).to_json_file(FILE, use_diff=False)"
)

ASSUMED_HEADS = (
    "As many KV heads as attention heads are assumed: the file has no 'num_key_value_heads'."
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
    sliding_window_pattern: Annotated[int, Meta(ge=1)] | Annotated[str, Meta(min_length=1)] = LOCAL
    attention_chunk_size: Annotated[int, Meta(ge=0)] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Annotated[int, Meta(ge=1)] = 4
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Meta(ge=0)] = 0
    num_kv_shared_layers: Annotated[int, Meta(ge=0)] | None = None
    multi_query: bool | None = None
    new_decoder_architecture: bool | None = None
    model_type: str = ""
    index_topk: Size | None = None
    index_head_dim: Size = 128
    index_topk_freq: Annotated[int, Meta(ge=1)] = 1
    index_topk_pattern: str | None = None
    index_skip_topk_offset: Annotated[int, Meta(ge=0)] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The properties of a model that decide which rank reads what. Layers are named by index.

    Attributes:
        windows: Sliding window in tokens of each layer with attention, 0 for no window. It has no
            layer that uses the cache of another layer.
        chunks: Size in tokens of the chunks of each layer with chunked attention.
        kv_heads: Number of KV heads; 1 if an entry is a latent (MLA), which every rank stores.
        parts: Parts of an entry (one head of one token) in order: name to number of elements.
        indexed: The layers that have an index beside their latents.
        index_parts: Bytes per token of the index's parts: a value for each of its elements, and a
            float32 for each 128 of them.
        states: The layers that have a recurrent state.
        notes: Assumptions about what the file does not say, a sentence each.
    """

    layers: int
    windows: Mapping[int, int]
    attention_heads: int
    kv_heads: int
    parts: Mapping[str, int]
    dtype: str
    chunks: Mapping[int, int] = field(default_factory=dict)
    indexed: tuple[int, ...] = ()
    index_parts: Mapping[str, int] = field(default_factory=dict)
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

    @property
    def index_bytes(self) -> int:
        """Bytes of one token in a layer's index."""
        return sum(self.index_parts.values())

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, without states."""
        entries = len(self.windows) * self.kv_heads * self.entry_bytes
        return entries + len(self.indexed) * self.index_bytes


def read_model(path: Path, dtype: str | None = None) -> Model:
    """Return the model of a config file, or of the folder that has one.

    ``dtype`` is the element type of the cache; ``None`` or ``auto`` is the file's.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        own = None if dtype in (None, "auto") else element_type(dtype)
    except ModelError as exc:
        raise ModelError(f"--dtype {exc}") from None
    try:
        return _model(*_with_defaults(_flat(_parsed(file))), own)
    except OSError as exc:
        raise ModelError(f"{file} cannot be read: {exc.strerror}") from exc
    except ModelError as exc:
        raise ModelError(f"{file} {exc}") from exc
    except DECODE_ERRORS as exc:
        raise ModelError(f"{file} is not the config of a model: {exc}") from exc


def _model(keys: dict[str, Any], left_out: frozenset[str], dtype: str | None) -> Model:
    """Return the model of a config file's keys; errors go on after the file's name."""
    _refuse_unsupported(keys)
    config = _converted(keys)
    types = _layer_types(keys, config)
    kinds, notes = (types, []) if types else _attention_types(config, left_out)
    windows, chunks = _windows(
        config, kinds[: config.num_hidden_layers - (config.num_kv_shared_layers or 0)]
    )
    states = tuple(n for n in range(config.num_hidden_layers) if types and types[n] in STATEFUL)
    latent = config.kv_lora_rank is not None
    indexed = _indexed_layers(config)
    element = dtype or element_type(config.dtype)
    if indexed and ELEMENT_BYTES[element] == 1:
        raise ModelError(
            f"has {element} latents beside an index: vLLM packs them with their scales "
            f"(fp8_ds_mla), which is not drawn from a file; {REMEDY}"
        )
    if not (config.num_key_value_heads or latent or config.multi_query):
        notes = [*notes, ASSUMED_HEADS]
    scales = config.index_head_dim // INDEX_SCALED * 4
    index_parts = {"latent": config.index_head_dim} | ({"scale": scales} if scales else {})
    return Model(
        layers=config.num_hidden_layers,
        windows=windows,
        chunks=chunks,
        attention_heads=config.num_attention_heads,
        kv_heads=1 if latent else _kv_heads(config),
        parts={"latent": (config.kv_lora_rank or 0) + config.qk_rope_head_dim}
        if latent
        else dict.fromkeys(("k", "v"), _head_dim(config)),
        dtype=element,
        indexed=indexed,
        index_parts=index_parts if indexed else {},
        states=states,
        state=_state(keys, states, types[states[0]]) if types and states else None,
        notes=tuple(notes),
    )


def element_type(name: str | None) -> str:
    """Return the key of ``ELEMENT_BYTES`` for a name in files and options; ``None`` is bfloat16."""
    plain = (name or "bfloat16").removeprefix("torch.")
    plain = DTYPES.get(plain, plain)
    if plain not in ELEMENT_BYTES:
        raise ModelError(
            f"names the unknown element type {name!r}; known are "
            f"{', '.join((*ELEMENT_BYTES, *DTYPES))}"
        )
    return plain


def _parsed(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        data = stream.read(FILE_LIMIT + 1)
    if len(data) > FILE_LIMIT:
        raise ModelError(f"has more than {FILE_LIMIT} bytes: that is no model's config")
    # Not msgspec's decoder: files of hybrids have Infinity, which Python writes and reads.
    return msgspec.convert(json.loads(data), dict[str, Any])


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config file's keys, with the nested keys of a text model at the top level."""
    inner = next((config[name] for name in NESTED if isinstance(config.get(name), dict)), None)
    if inner is None:
        return config
    # The inner value counts if both levels have a key, but for the element type: as in vLLM.
    dtype = config.get("dtype") or config.get("torch_dtype")
    outer = {"dtype": dtype} if dtype else {}
    return _flat({**config, **dict.fromkeys(NESTED), **inner, **outer})


def _with_defaults(config: dict[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return a config file's keys with those that it leaves out, and the names of the latter."""
    name = str(config.get("model_type") or "")
    if f"{name}_text" in LEFT_OUT.keys() | UNLIKE.keys():
        name = f"{name}_text"  # the file of a multimodal model does not name its text model's type
    # A key that is null is not left out.
    left_out = {
        key: value
        for key, value in LEFT_OUT.get(name, {}).items()
        if config.keys().isdisjoint((key, *ALIASES.get(key, ())))
    }
    return left_out | config | {"model_type": name}, frozenset(left_out)


def _refuse_unsupported(keys: Mapping[str, Any]) -> None:
    name = keys.get("model_type", "")
    if keys.get("is_encoder_decoder"):
        raise ModelError(
            "is of an encoder and a decoder ('is_encoder_decoder'): only decoders are drawn"
        )
    reasons = [f"has {key!r}, {what}" for key, what in UNSUPPORTED.items() if keys.get(key)]
    if name in UNLIKE:
        reasons.append(f"has model_type {name!r}, {UNLIKE[name]}")
    if reasons:
        raise ModelError(f"{reasons[0]}: that is not drawn from a file; {REMEDY}")
    if keys.get("index_topk") and name not in INDEXED:
        raise ModelError(
            "has 'index_topk', an index in every layer, which is drawn for the model types "
            f"{', '.join(sorted(INDEXED))} only; {REMEDY}"
        )


def _converted(keys: Mapping[str, Any]) -> _Config:
    """Return the validated keys of a config file, under their usual names."""
    # A head_dim of 0 stands for a missing one, as in vLLM.
    kept = {k: v for k, v in keys.items() if k != "head_dim" or v != 0}
    try:
        return msgspec.convert(with_aliases(kept), _Config)
    except msgspec.ValidationError as exc:
        remedy = f". {DEFAULTS}" if "missing required field" in str(exc) else ""
        raise ModelError(f"does not say what a KV cache is made of: {exc}{remedy}") from exc


def _layer_types(keys: Mapping[str, Any], config: _Config) -> Sequence[str] | None:
    """Return the type of each layer; ``None`` if all layers have attention."""
    layers = config.num_hidden_layers
    try:
        types = config.layer_types or layer_types(keys, layers)
    except msgspec.ValidationError as exc:
        raise ModelError(f"does not say which layers have a state: {exc}") from exc
    if types is not None and len(types) < layers:
        key = next((key for key in TYPE_KEYS if keys.get(key)), "layer_types")
        raise ModelError(f"is wrong: {key!r} has {len(types)} entries for {layers} layers")
    state = next((key for key in keys if STATES.match(key) and keys[key]), None)
    if state and types is None:
        raise ModelError(
            f"has {state!r}, so the model has states, and no 'layer_types' that says which layers "
            f"have them: such states are not drawn from a file; {REMEDY}"
        )
    return types


def _state(keys: Mapping[str, Any], layers: Sequence[int], name: str) -> RecurrentState:
    """Return the state of the layers that have one; ``name`` is the type of the first of them."""
    try:
        state = read_state(keys, element_type)
    except msgspec.ValidationError as exc:
        raise ModelError(f"does not say what its states are made of: {exc}") from exc
    if state is None:
        raise ModelError(
            f"says that layers {numbers(layers)} are {name!r}, which have states, and the file has "
            f"none of the keys that give a state's size ({', '.join(KINDS)}); {REMEDY}"
        )
    return state


def _kv_heads(config: _Config) -> int:
    if config.multi_query and not config.new_decoder_architecture:
        return 1
    return config.num_key_value_heads or config.num_attention_heads


def _head_dim(config: _Config) -> int:
    if config.head_dim is not None:
        return config.head_dim
    if config.hidden_size is None:
        raise ModelError("says neither 'head_dim' nor 'hidden_size'")
    if config.hidden_size < config.num_attention_heads:
        raise ModelError(
            f"has no 'head_dim', and hidden_size={config.hidden_size} is less than "
            f"num_attention_heads={config.num_attention_heads}: a head would have no elements"
        )
    return config.hidden_size // config.num_attention_heads


def _attention_types(
    config: _Config, left_out: frozenset[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the types of the layers of a file that does not say them, and what was assumed."""
    layers = range(config.num_hidden_layers)
    name, window = config.model_type, config.sliding_window
    if config.attention_chunk_size and name.startswith("llama4"):
        every = config.no_rope_layer_interval
        with_rope = config.no_rope_layers or [int((n + 1) % every > 0) for n in layers]
        if len(with_rope) < len(layers):
            raise ModelError(
                f"is wrong: 'no_rope_layers' has {len(with_rope)} entries for {len(layers)} layers"
            )
        types = [CHUNKED if rope else "full_attention" for rope in with_rope]
        return types, _taken(name, left_out, "attention_chunk_size")
    # vLLM keeps every latent.
    if not window or config.use_sliding_window is False or config.kv_lora_rank:
        return ["full_attention"] * len(layers), []
    pattern = config.sliding_window_pattern
    if isinstance(pattern, int):
        pattern = LOCAL * (pattern - 1) + "G"
    if pattern == LOCAL and name not in LEFT_OUT:
        raise ModelError(
            f"has sliding_window={window}, and which layers have that window is not known "
            f"for model_type {name!r}: add 'layer_types', a list with 'sliding_attention' or "
            f"'full_attention' for each of the {len(layers)} layers, or 'sliding_window': null if "
            "none has it"
        )
    first = config.max_window_layers if name in WINDOWS_FROM_A_LAYER else 0
    windowed = [n >= first and pattern[n % len(pattern)] == LOCAL for n in layers]
    types = [WINDOWED if local else "full_attention" for local in windowed]
    return types, _taken(name, left_out, "sliding_window", "sliding_window_pattern")


def _taken(name: str, left_out: frozenset[str], *keys: str) -> list[str]:
    """Return a sentence about the keys that have the default of a model type; else nothing."""
    said = " and ".join(repr(key) for key in keys if key in left_out)
    return [f"The file leaves out {said}: the default of model_type {name!r} counts."] * bool(said)


def _windows(config: _Config, types: Sequence[str]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the windows and the chunks of the layers that have a cache; see ``Model``."""
    attending = EVERY_TOKEN | set(LENGTHS)
    known = attending | STATEFUL | NO_CACHE
    unknown = {n: t for n, t in enumerate(types) if t not in known}
    if unknown:
        name = next(iter(unknown.values()))
        of = numbers([n for n, kind in unknown.items() if kind == name])
        raise ModelError(
            f"says that layers {of} are {name[:64]!r}, and known are {', '.join(sorted(known))}: "
            f"other layers are not drawn from a file; {REMEDY}"
        )
    for kind, key in LENGTHS.items():
        if kind in types and not getattr(config, key):
            raise ModelError(f"is wrong: 'layer_types' has {kind!r}, and the file has no {key!r}")
    window = (config.sliding_window or 0) + (config.model_type in EXCLUSIVE)
    attended = {n: kind for n, kind in enumerate(types) if kind in attending}
    return {n: window if kind == WINDOWED else 0 for n, kind in attended.items()}, {
        n: config.attention_chunk_size or 0 for n, kind in attended.items() if kind == CHUNKED
    }


def _indexed_layers(config: _Config) -> tuple[int, ...]:
    """Return the layers that have an index; the others use that of a layer before them.

    See ``DeepseekV2MLAAttention`` in vLLM's ``model_executor/models/deepseek_v2.py``.
    """
    if not config.index_topk:
        return ()
    layers = range(config.num_hidden_layers)
    if config.index_topk_pattern is not None:
        shared = {n for n, letter in enumerate(config.index_topk_pattern) if letter == "S"}
        return tuple(n for n in layers if n not in shared)
    offset = config.index_skip_topk_offset - 1
    return tuple(n for n in layers if not max(n - offset, 0) % config.index_topk_freq)
