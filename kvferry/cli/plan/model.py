"""Read the shape of a model's cache, KV and recurrent states, from its config file.

Keys that a file leaves out have the defaults of its ``model_type`` (``defaults``). A cache that the
file does not describe completely is refused, with the key that shows it. The sizes of states are
those that vLLM 0.32 computes (``MambaStateShapeCalculator`` in
``model_executor/layers/mamba/mamba_utils.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.cli.formatting import numbers
from kvferry.cli.plan.defaults import (
    ALIASES,
    DTYPES,
    EXCLUSIVE,
    INDEX_SCALED,
    INDEXED,
    LEFT_OUT,
    LOCAL,
    NESTED,
    STATES,
    UNLIKE,
    UNSUPPORTED,
)
from kvferry.core.errors import KVFerryError
from kvferry.core.layout import ELEMENT_BYTES

FILE_LIMIT = 1 << 24  # largest size of a config file, in bytes; real ones have some thousands
LARGEST = 1 << 24  # largest number in a file that counts
MOST_EXPANDED = 1 << 10

HYBRID = "hybrid"  # type of the layers that have both attention and a state
STATEFUL = frozenset({"linear_attention", "mamba", "conv", HYBRID})
"""Types of layers that have a state."""
WINDOWED, CHUNKED = "sliding_attention", "chunked_attention"
LENGTHS: Mapping[str, str] = {
    WINDOWED: "sliding_window",
    CHUNKED: "attention_chunk_size",
    "indexed_attention": "index_topk",
}
"""The key that says to how many tokens a token attends, by the type of the layer."""
ATTENDING = frozenset({"full_attention", "attention", HYBRID, *LENGTHS})
"""Types of layers with attention."""
KNOWN = ATTENDING | STATEFUL | {"mlp", "moe"}
"""All types of layers; the last two keep nothing of the tokens before."""
PATTERN: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The types of layers by their letters in ``hybrid_override_pattern``."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Some channels of a layer's convolution, by the name of the connector's field (``conv/NAME``).

    They can be split into so many equal ``units``; a single one is copied to every rank.
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
    """The recurrent state of one layer: the inputs of its convolution, then a matrix per head.

    Attributes:
        channels: The channels of the convolution, in their order in memory.
        columns: For how many tokens the convolution's inputs are kept.
        heads, elements: Heads of the matrix in the model (0: none), and its elements per head.
        input_dtype, dtype: Element types of the inputs and of the matrix.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The properties of a model that decide which rank reads what. Layers are named by index.

    Attributes:
        windows: Sliding window in tokens (0: none) of each layer with a cache of attention.
        chunks: Size in tokens of the chunks of each layer with chunked attention.
        kv_heads: Number of KV heads; 1 if an entry is a latent (MLA), which every rank stores.
        parts: Parts of an entry (one head of one token) in order: name to number of elements.
        indexed: The layers that have an index beside their latents.
        index_parts: Bytes per token of the index's parts.
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


class _Keys:
    """The keys of a config file that have a value, by usual names, checked when asked for."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        # A head_dim of 0 stands for a missing one, as in vLLM.
        self.all = {k: v for k, v in keys.items() if v is not None and (k, v) != ("head_dim", 0)}
        for key, others in ALIASES.items():
            if found := [name for name in (key, *others) if name in self.all]:
                self.all[key] = self.all[found[0]]

    def get(self, name: str, kind: Any, default: Any = None) -> Any:  # noqa: ANN401 - of that kind
        """Return a value, which must be of a kind; the default if the file does not have it."""
        try:
            return msgspec.convert(self.all[name], kind) if name in self.all else default
        except msgspec.ValidationError as exc:
            value = str(self.all[name])[:32]
            raise ModelError(f"is wrong: {name!r} is {value!r}: {exc}") from exc

    def optional(self, name: str, *, least: int = 1) -> int | None:
        """Return a number; ``None`` if the file does not have it."""
        value: int | None = self.get(name, Annotated[int, Meta(ge=least, le=LARGEST)])
        return value

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a number; without a default, the file must have it."""
        value = self.optional(name, least=least)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"has no {name!r}, which the size of a cache depends on. {DEFAULTS}")
        return value


def read_model(path: Path, dtype: str | None = None) -> Model:
    """Return the model of a config file, or of its folder, by default with its element type."""
    try:
        own = None if dtype in (None, "auto") else element_type(dtype)
    except ModelError as exc:
        raise ModelError(f"--dtype {exc}") from None
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_LIMIT + 1)
        if len(data) > FILE_LIMIT:
            raise ModelError(f"has more than {FILE_LIMIT} bytes: that is no model's config")
        config = json.loads(data)
        if not isinstance(config, dict):
            raise ModelError("is not the config of a model: it holds no JSON object")
        return _model(_flat(config), own)
    except OSError as exc:
        raise ModelError(f"{file} cannot be read: {exc.strerror}") from exc
    except ModelError as exc:
        raise ModelError(f"{file} {exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{file} is not the config of a model: {exc}") from exc


def element_type(name: str | None) -> str:
    """Return the key of ``ELEMENT_BYTES`` for a name in files and options; none is bfloat16."""
    plain = (name or "bfloat16").removeprefix("torch.")
    plain = DTYPES.get(plain, plain)
    if plain not in ELEMENT_BYTES:
        raise ModelError(
            f"names the unknown element type {name!r}; known are "
            f"{', '.join((*ELEMENT_BYTES, *DTYPES))}"
        )
    return plain


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a file's keys, with the nested keys of a text model at the top level."""
    inner = next((config[name] for name in NESTED if isinstance(config.get(name), dict)), None)
    if inner is None:
        name = str(config.get("model_type") or "")
        if f"{name}_text" in LEFT_OUT.keys() | UNLIKE:
            name = f"{name}_text"  # a multimodal model's file does not name its text model's type
        return config | {"model_type": name}
    # The inner value counts if both levels have a key, but for the element type: as in vLLM.
    dtype = config.get("dtype") or config.get("torch_dtype")
    outer = {"dtype": dtype} if dtype else {}
    return _flat({**config, **dict.fromkeys(NESTED), **inner, **outer})


def _model(given: dict[str, Any], dtype: str | None) -> Model:
    name, notes = given["model_type"], []
    left_out = {  # a key that is null is not left out
        key: value
        for key, value in LEFT_OUT.get(name, {}).items()
        if given.keys().isdisjoint((key, *ALIASES.get(key, ())))
    }
    keys = _Keys(left_out | given)
    _refuse_unsupported(keys, name)
    layers, heads = keys.number("num_hidden_layers"), keys.number("num_attention_heads")
    kinds = _layer_types(keys, layers)
    if not kinds:
        kinds, taken = _attention_types(keys, layers, name)
        if found := " and ".join(repr(key) for key in taken if key in left_out):
            notes.append(f"The file leaves out {found}: the default of model_type {name!r} counts.")
    shared = keys.number("num_kv_shared_layers", 0, least=0)
    windows, chunks = _windows(keys, name, kinds[: layers - shared])
    states = tuple(n for n, kind in enumerate(kinds[:layers]) if kind in STATEFUL)
    element = dtype or element_type(keys.get("dtype", str, ""))
    latent, kv_heads = keys.optional("kv_lora_rank"), keys.optional("num_key_value_heads")
    if latent or (keys.all.get("multi_query") and not keys.all.get("new_decoder_architecture")):
        kv_heads = 1
    elif not kv_heads:
        kv_heads = heads
        notes.append(
            "As many KV heads as attention heads are assumed: the file has no "
            "'num_key_value_heads'."
        )
    if latent:
        parts = {"latent": latent + keys.number("qk_rope_head_dim", 0, least=0)}
    else:
        parts = dict.fromkeys(("k", "v"), keys.optional("head_dim") or _head_dim(keys, heads))
    indexed, index_parts = _index(keys, layers, element)
    return Model(
        layers=layers,
        windows=windows,
        chunks=chunks,
        attention_heads=heads,
        kv_heads=kv_heads,
        parts=parts,
        dtype=element,
        indexed=indexed,
        index_parts=index_parts,
        states=states,
        state=_state(keys, f"layers {numbers(states)} are {kinds[states[0]]!r}")
        if states
        else None,
        notes=tuple(notes),
    )


def _refuse_unsupported(keys: _Keys, name: str) -> None:
    if keys.all.get("is_encoder_decoder"):
        raise ModelError(
            "is of an encoder and a decoder ('is_encoder_decoder'): only decoders are drawn"
        )
    unlike = [key for key in UNSUPPORTED if keys.all.get(key)]
    if keys.all.get("index_topk") and name not in INDEXED:
        unlike.append("index_topk")
    shown = [f"{key!r}" for key in unlike] + [f"model_type {name!r}"] * (name in UNLIKE)
    if shown:
        raise ModelError(
            f"has {' and '.join(shown)}: a cache that its keys do not describe completely is not "
            f"drawn from a file; {REMEDY}"
        )


def _head_dim(keys: _Keys, heads: int) -> int:
    size = keys.number("hidden_size", 0)
    if size < heads:
        raise ModelError(
            f"has neither 'head_dim' nor a 'hidden_size' of at least num_attention_heads={heads}"
        )
    return size // heads


# Attention, by layer.


def _layer_types(keys: _Keys, layers: int) -> Sequence[str] | None:
    """Return the type of each layer; ``None`` if the file does not say it."""
    types = keys.get("layer_types", list[str], []) or _types_of_hybrid(keys, range(layers))
    if types is not None and len(types) < layers:
        lists = ("layer_types", "hybrid_override_pattern", "attn_type_list")
        key = next(key for key in lists if keys.all.get(key))
        raise ModelError(f"is wrong: {key!r} has {len(types)} entries for {layers} layers")
    state = next((key for key in keys.all if STATES.match(key) and keys.all[key]), None)
    if state and types is None:
        raise ModelError(
            f"has {state!r}, so the model has states, and no 'layer_types' that says which layers "
            f"have them: such states are not drawn from a file; {REMEDY}"
        )
    return types


def _types_of_hybrid(keys: _Keys, every: range) -> list[str] | None:
    """Return the type of each layer, from keys other than ``layer_types``; ``None`` without any."""
    stateful, attends = "mamba", "attention"
    if pattern := keys.get("hybrid_override_pattern", str, ""):
        if unknown := [letter for letter in pattern if letter not in PATTERN]:
            raise ModelError(
                f"is wrong: 'hybrid_override_pattern' has the letter {unknown[0]!r}; known are "
                f"{', '.join(PATTERN)}"
            )
        return [PATTERN[letter] for letter in pattern]
    if (gated := _Keys(keys.get("linear_attn_config", dict, {}))).all:
        # Its layers count from 1.
        attending = [layer - 1 for layer in gated.get("full_attn_layers", list[int], [])]
        stateful = "linear_attention"
    elif kinds := keys.get("attn_type_list", list[int], []):
        return ["attention" if kind == 1 else "linear_attention" for kind in kinds]
    elif "mamba_d_ssm" in keys.all:
        attending, attends = list(every), HYBRID
    elif "hybrid_layer_ids" in keys.all:
        attending, attends = keys.get("hybrid_layer_ids", list[int], []), HYBRID
    elif period := keys.optional("attn_layer_period"):
        offset = keys.number("attn_layer_offset", 0, least=0)
        attending = [n for n in every if n % period == offset]
    elif interval := keys.optional("full_attention_interval"):
        attending, stateful = [n for n in every if not (n + 1) % interval], "linear_attention"
    elif indices := keys.get("attn_layer_indices", list[int], []):
        attending = indices
    elif indices := keys.get("full_attn_idxs", list[int], []):
        attending, stateful = indices, "conv"
    else:
        return None
    return [attends if n in attending else stateful for n in every]


def _attention_types(keys: _Keys, layers: int, name: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the types of the layers of a file that does not say them, and the keys that do."""
    window = keys.optional("sliding_window", least=0)
    if name.startswith("llama4") and keys.optional("attention_chunk_size", least=0):
        every = keys.number("no_rope_layer_interval", 4)
        with_rope = keys.get("no_rope_layers", list[int], [])
        with_rope = with_rope or [int((n + 1) % every > 0) for n in range(layers)]
        if len(with_rope) < layers:
            raise ModelError(
                f"is wrong: 'no_rope_layers' has {len(with_rope)} entries for {layers} layers"
            )
        types = [CHUNKED if rope else "full_attention" for rope in with_rope]
        return types, ["attention_chunk_size"]
    # vLLM keeps every latent.
    if not window or keys.all.get("use_sliding_window") is False or "kv_lora_rank" in keys.all:
        return ["full_attention"] * layers, []
    pattern = keys.all.get("sliding_window_pattern", LOCAL)
    if not isinstance(pattern, str) or not pattern:
        pattern = LOCAL * (keys.number("sliding_window_pattern") - 1) + "G"
    if pattern == LOCAL and name not in LEFT_OUT:
        raise ModelError(
            f"has sliding_window={window}, and which layers have that window is not known "
            f"for model_type {name!r}: add 'layer_types', a list with 'sliding_attention' or "
            f"'full_attention' for each of the {layers} layers, or 'sliding_window': null if "
            "none has it"
        )
    from_a_layer = "max_window_layers" in LEFT_OUT.get(name, {})
    first = keys.number("max_window_layers", 0, least=0) if from_a_layer else 0
    windowed = [n >= first and pattern[n % len(pattern)] == LOCAL for n in range(layers)]
    types = [WINDOWED if local else "full_attention" for local in windowed]
    return types, ["sliding_window", "sliding_window_pattern"]


def _windows(keys: _Keys, name: str, types: Sequence[str]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the windows and the chunks of the layers that have a cache; see ``Model``."""
    if unknown := [kind for kind in types if kind not in KNOWN]:
        of = numbers(n for n, kind in enumerate(types) if kind == unknown[0])
        raise ModelError(
            f"says that layers {of} are {unknown[0][:64]!r}, and known are "
            f"{', '.join(sorted(KNOWN))}: other layers are not drawn from a file; {REMEDY}"
        )
    lengths = {kind: keys.optional(key, least=0) for kind, key in LENGTHS.items() if kind in types}
    for kind, length in lengths.items():
        if not length:
            raise ModelError(
                f"is wrong: 'layer_types' has {kind!r}, and the file has no {LENGTHS[kind]!r}"
            )
    window = (lengths.get(WINDOWED) or 0) + (name in EXCLUSIVE)
    chunk = lengths.get(CHUNKED) or 0
    return (
        {n: window * (kind == WINDOWED) for n, kind in enumerate(types) if kind in ATTENDING},
        {n: chunk for n, kind in enumerate(types) if kind == CHUNKED},
    )


def _index(keys: _Keys, layers: int, element: str) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return the layers that have an index, and its parts; others use that of a layer before.

    See ``DeepseekV2MLAAttention`` in vLLM's ``model_executor/models/deepseek_v2.py``.
    """
    if not keys.optional("index_topk"):
        return (), {}
    if ELEMENT_BYTES[element] == 1:
        raise ModelError(
            f"has {element} latents beside an index: vLLM packs them with their scales "
            f"(fp8_ds_mla), which is not drawn from a file; {REMEDY}"
        )
    values = keys.number("index_head_dim", 128)
    scales = values // INDEX_SCALED * 4
    parts = {"latent": values} | ({"scale": scales} if scales else {})
    if "index_topk_pattern" in keys.all:
        shared = {
            n for n, letter in enumerate(keys.get("index_topk_pattern", str, "")) if letter == "S"
        }
        return tuple(n for n in range(layers) if n not in shared), parts
    offset = keys.number("index_skip_topk_offset", 2, least=0) - 1
    every = keys.number("index_topk_freq", 1)
    return tuple(n for n in range(layers) if not max(n - offset, 0) % every), parts


# Recurrent states.


def _state(keys: _Keys, said: str) -> RecurrentState:
    """Return the state of the layers that have one; ``said`` is what the file says of them."""
    make = next((make for key, make in STATE_KINDS.items() if key in keys.all), None)
    if make is None:
        raise ModelError(
            f"says that {said}, which have states, and the file has "
            f"none of the keys that give a state's size ({', '.join(STATE_KINDS)}); {REMEDY}"
        )
    state, inputs = make(keys), element_type(keys.get("dtype", str, ""))
    own = keys.get("mamba_ssm_dtype", str, "") or state.dtype
    return replace(state, input_dtype=inputs, dtype=inputs if own == "auto" else element_type(own))


def _channels(each: int, **units: int) -> tuple[Channels, ...]:
    """Return channels by name: so many units, of ``each`` channels."""
    return tuple(Channels(name=name, count=n * each, units=n) for name, n in units.items())


def _delta_net(keys: _Keys) -> RecurrentState:
    heads, values = keys.number("linear_num_key_heads"), keys.number("linear_num_value_heads")
    head, value = keys.number("linear_key_head_dim"), keys.number("linear_value_head_dim")
    return RecurrentState(
        channels=_channels(head, q=heads, k=heads) + _channels(value, v=values),
        columns=keys.number("linear_conv_kernel_dim", least=2) - 1,
        heads=values,
        elements=value * head,
    )


def _gated_channels(keys: _Keys) -> RecurrentState:
    own = _Keys(keys.get("linear_attn_config", dict, {}))
    heads, head = own.number("num_heads"), own.number("head_dim")
    return RecurrentState(
        channels=_channels(head, q=heads, k=heads, v=heads),
        columns=own.number("short_conv_kernel_size", least=2) - 1,
        heads=heads,
        elements=head**2,
        dtype="float32",
    )


def _short_convolution(keys: _Keys) -> RecurrentState:
    count = keys.optional("conv_dim") or keys.number("hidden_size")
    columns = keys.number("conv_L_cache", least=2) - 1
    return RecurrentState(channels=_channels(1, x=count), columns=columns)


def _mamba1(keys: _Keys) -> RecurrentState:
    count = _mamba_channels(keys, 1)
    return RecurrentState(
        channels=_channels(1, x=count),
        columns=keys.number("mamba_d_conv", least=2) - 1,
        heads=count,
        elements=keys.number("mamba_d_state"),
    )


def _mamba2(keys: _Keys) -> RecurrentState:
    heads, state = keys.number("mamba_n_heads"), keys.number("mamba_d_state")
    groups = keys.number("mamba_n_groups", 1)
    if keys.all.get("mamba_d_head", "auto") == "auto":
        head = _mamba_channels(keys, heads) // heads
    else:
        head = keys.number("mamba_d_head")
    # vLLM's default for Nemotron-H; not all of its files have both keys.
    is_nemotron = "hybrid_override_pattern" in keys.all or keys.all["model_type"] == "nemotron_h"
    return RecurrentState(
        channels=_channels(head, x=heads) + _channels(state, B=groups, C=groups),
        columns=keys.number("mamba_d_conv", least=2) - 1,
        heads=heads,
        elements=head * state,
        dtype="float32" if is_nemotron else "auto",
    )


def _mamba_channels(keys: _Keys, heads: int) -> int:
    if (channels := keys.optional("mamba_d_ssm")) is None:
        size = keys.number("hidden_size")
        expand = keys.get("mamba_expand", Annotated[float, Meta(gt=0, le=MOST_EXPANDED)], 2)
        channels = int(expand * size)
    if channels < heads:
        raise ModelError(
            f"is wrong: mamba_d_ssm, or mamba_expand times hidden_size, is {channels} channels, "
            f"and a state has {heads} heads"
        )
    return channels


STATE_KINDS: Mapping[str, Callable[[_Keys], RecurrentState]] = {
    "linear_num_value_heads": _delta_net,
    "linear_attn_config": _gated_channels,
    "conv_L_cache": _short_convolution,
    "mamba_n_heads": _mamba2,
    "mamba_d_state": _mamba1,
}
"""The kinds of states, by the key that shows which kind a model has; the first counts."""
