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
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvferry.cli.formatting import numbers
from kvferry.cli.plan import defaults
from kvferry.core.errors import KVFerryError
from kvferry.core.layout import ELEMENT_BYTES

LARGEST = 1 << 24  # largest number in a file that counts
MOST_EXPANDED = 1 << 10
SHARED = "num_kv_shared_layers"  # so many last layers use the cache of others

FULL, HYBRID = "full_attention", "hybrid"  # the latter has both attention and a state
STATEFUL = frozenset({"linear_attention", "mamba", "conv", HYBRID})
"""Types of layers that have a state."""
WINDOWED, CHUNKED = "sliding_attention", "chunked_attention"
LENGTHS: Mapping[str, str] = {
    WINDOWED: "sliding_window",
    CHUNKED: "attention_chunk_size",
    "indexed_attention": "index_topk",
}
"""The key that says to how many tokens a token attends, by the type of the layer."""
ATTENDING = frozenset({FULL, "attention", HYBRID, *LENGTHS})
"""Types of layers with attention."""
KNOWN = ATTENDING | STATEFUL | {"mlp", "moe"}
"""All types of layers; the last two keep nothing of the tokens before."""
PATTERN: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The types of layers by their letters in ``hybrid_override_pattern``."""


class ModelError(KVFerryError):
    """A config file cannot be read, or does not describe the cache; the message names the key."""


def _unknown(what: str) -> ModelError:
    """Return an error about a cache whose bytes do not follow from a file."""
    return ModelError(
        f"{what}: such a cache is not drawn from a file; describe both engines as JSON layouts "
        "instead, or take the layouts of running engines with --from (kvferry plan --help)"
    )


class Channels(NamedTuple):
    """Some channels of a layer's convolution, by the name of the connector's field (``conv/NAME``).

    They can be split into so many equal ``units``; a single one is copied to every rank.
    """

    name: str
    units: int
    each: int = 1

    def share(self, ranks: int, rank: int) -> tuple[int, int]:
        """Return the range [first, last) of the channels that a tensor-parallel rank stores."""
        count = self.units * self.each
        if self.units % ranks:
            return 0, count
        return rank * count // ranks, (rank + 1) * count // ranks


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
        in_chunks: Whether these are the sizes of chunks, as of Llama 4, instead.
        attention_heads: Number of query heads.
        kv_heads: Number of KV heads; 1 if an entry is a latent (MLA), which every rank stores.
        parts: Parts of an entry (one head of one token) in order: name to number of elements.
        indexed: The layers that have an index beside their latents.
        index_parts: Bytes per token of the index's parts.
        states: The layers that have a state.
        notes: Assumptions about what the file does not say, a sentence each.
    """

    layers: int
    windows: Mapping[int, int]
    in_chunks: bool = False
    attention_heads: int
    kv_heads: int
    parts: Mapping[str, int]
    dtype: str
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
        for key, others in defaults.ALIASES.items():
            if found := [name for name in (key, *others) if name in self.all]:
                self.all[key] = self.all[found[0]]

    def get(self, name: str, kind: Any, default: Any = None) -> Any:  # noqa: ANN401 - of that kind
        """Return a value, which must be of a kind; the default if the file does not have it."""
        try:
            return msgspec.convert(self.all[name], kind) if name in self.all else default
        except msgspec.ValidationError as exc:
            value = str(self.all[name])[:32]
            raise ModelError(f"is wrong: {name!r} is {value!r}: {exc}") from exc

    def optional(self, name: str, default: int = 0, *, least: int = 1) -> int:
        """Return a number; the default if the file does not have it."""
        return int(self.get(name, Annotated[int, Meta(ge=least, le=LARGEST)], default))

    def number(self, name: str, *, least: int = 1) -> int:
        """Return a number that the file must have."""
        if name not in self.all:
            raise ModelError(
                f"has no {name!r}, which the size of a cache depends on. If that is the default of "
                "transformers, let it write every key: "
                "AutoConfig.from_pretrained(PATH).to_json_file(FILE, use_diff=False)"
            )
        return self.optional(name, least=least)

    def columns(self, name: str) -> int:
        """Return for how many tokens before its own a convolution keeps inputs."""
        return self.number(name, least=2) - 1

    def layers(self, name: str) -> list[int]:
        """Return a list of numbers; an empty one if the file does not have it."""
        return list(self.get(name, list[int], []))


def read_model(path: Path, dtype: str | None = None) -> Model:
    """Return the model of a config file, or of its folder, by default with its element type."""
    try:
        own = None if dtype in (None, "auto") else element_type(dtype)
    except ModelError as exc:
        raise ModelError(f"--dtype {exc}") from None
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
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
    plain = defaults.DTYPES.get(plain, plain)
    if plain not in ELEMENT_BYTES:
        raise ModelError(
            f"names the unknown element type {name!r}; known are "
            f"{', '.join((*ELEMENT_BYTES, *defaults.DTYPES))}"
        )
    return plain


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a file's keys, with the nested keys of a text model at the top level."""
    inner = next(
        (config[name] for name in defaults.NESTED if isinstance(config.get(name), dict)), None
    )
    if inner is None:
        name = str(config.get("model_type") or "")
        if f"{name}_text" in defaults.LEFT_OUT.keys() | defaults.UNLIKE:
            name = f"{name}_text"  # a multimodal model's file does not name its text model's type
        return config | {"model_type": name}
    # The inner value counts if both levels have a key, but for the element type: as in vLLM.
    dtype = config.get("dtype") or config.get("torch_dtype")
    outer = {"dtype": dtype} if dtype else {}
    return _flat({**config, **dict.fromkeys(defaults.NESTED), **inner, **outer})


def _model(given: dict[str, Any], dtype: str | None) -> Model:
    name = given["model_type"]
    left_out = {  # a key that is null is not left out
        key: value
        for key, value in defaults.LEFT_OUT.get(name, {}).items()
        if given.keys().isdisjoint((key, *defaults.ALIASES.get(key, ())))
    }
    keys = _Keys(left_out | given)
    unlike = [repr(key) for key in defaults.UNSUPPORTED if keys.all.get(key)]
    unlike += ["'index_topk'"] * bool(keys.all.get("index_topk") and name not in defaults.INDEXED)
    unlike += [f"model_type {name!r}"] * (name in defaults.UNLIKE)
    if unlike:
        raise _unknown(f"has {' and '.join(unlike)}, so that its keys do not describe all of it")
    layers, heads = keys.number("num_hidden_layers"), keys.number("num_attention_heads")
    types = _types(keys, layers, name)
    windows, in_chunks = _windows(keys, name, types[: layers - keys.optional(SHARED, least=0)])
    taken = left_out.keys() & {*LENGTHS.values(), "sliding_window_pattern"}
    notes = []
    if any(windows.values()) and taken and "layer_types" not in keys.all:
        what = " and ".join(map(repr, sorted(taken)))
        notes.append(f"The file leaves out {what}: the default of model_type {name!r} counts.")
    element = dtype or element_type(keys.get("dtype", str, ""))
    if latent := keys.optional("kv_lora_rank"):
        parts = {"latent": latent + keys.optional("qk_rope_head_dim", least=0)}
    else:
        size = keys.optional("head_dim") or keys.number("hidden_size", least=heads) // heads
        parts = {"k": size, "v": size}
    multi_query = keys.all.get("multi_query") and not keys.all.get("new_decoder_architecture")
    indexed, index_parts = _index(keys, layers, element)
    states = tuple(n for n, kind in enumerate(types) if kind in STATEFUL)
    return Model(
        layers=layers,
        windows=windows,
        in_chunks=in_chunks,
        attention_heads=heads,
        kv_heads=1 if latent or multi_query else keys.optional("num_key_value_heads", heads),
        parts=parts,
        dtype=element,
        indexed=indexed,
        index_parts=index_parts,
        states=states,
        state=_state(keys, f"layers {numbers(states)} are {types[states[0]]!r}")
        if states
        else None,
        notes=tuple(notes),
    )


# Attention, by layer.


def _types(keys: _Keys, layers: int, name: str) -> Sequence[str]:
    """Return the type of each layer."""
    types = keys.get("layer_types", list[str], []) or _types_of_hybrid(keys, range(layers))
    state = next((key for key in keys.all if defaults.STATES.match(key) and keys.all[key]), None)
    if state and types is None:
        raise _unknown(f"has {state!r}, so states, and no 'layer_types' that says in which layers")
    types = types or _types_of_attention(keys, layers, name)
    if len(types) < layers:
        raise ModelError(f"is wrong: it says what {len(types)} of its {layers} layers are")
    return types[:layers]


def _types_of_hybrid(keys: _Keys, every: range) -> list[str] | None:
    """Return the type of each layer, from keys other than ``layer_types``; ``None`` without any."""
    stateful, attends = "mamba", "attention"
    if pattern := keys.get("hybrid_override_pattern", str, ""):
        return [PATTERN.get(letter, letter) for letter in pattern]
    if kinds := keys.layers("attn_type_list"):
        return ["attention" if kind == 1 else "linear_attention" for kind in kinds]
    if (gated := _Keys(keys.get("linear_attn_config", dict, {}))).all:
        # Its layers count from 1.
        attending = [layer - 1 for layer in gated.layers("full_attn_layers")]
        stateful = "linear_attention"
    elif "mamba_d_ssm" in keys.all:
        attending, attends = list(every), HYBRID
    elif period := keys.optional("attn_layer_period"):
        offset = keys.optional("attn_layer_offset", least=0)
        attending = [n for n in every if n % period == offset]
    elif interval := keys.optional("full_attention_interval"):
        attending, stateful = [n for n in every if not (n + 1) % interval], "linear_attention"
    elif indices := keys.layers("attn_layer_indices"):
        attending = indices
    elif indices := keys.layers("full_attn_idxs"):
        attending, stateful = indices, "conv"
    else:
        return None
    return [attends if n in attending else stateful for n in every]


def _types_of_attention(keys: _Keys, layers: int, name: str) -> Sequence[str]:
    """Return the types of the layers of a file that does not say them, and has no states."""
    if name.startswith("llama4") and keys.optional("attention_chunk_size", least=0):
        every = keys.optional("no_rope_layer_interval", 4)
        with_rope = keys.layers("no_rope_layers") or [(n + 1) % every for n in range(layers)]
        return [CHUNKED if rope else FULL for rope in with_rope]
    window = keys.optional("sliding_window", least=0)
    # vLLM keeps every latent.
    if not window or keys.all.get("use_sliding_window") is False or "kv_lora_rank" in keys.all:
        return [FULL] * layers
    pattern = keys.all.get("sliding_window_pattern", defaults.LOCAL)
    if not isinstance(pattern, str) or not pattern:
        pattern = defaults.LOCAL * (keys.number("sliding_window_pattern") - 1) + "G"
    if pattern == defaults.LOCAL and name not in defaults.LEFT_OUT:
        raise ModelError(
            f"has sliding_window={window}, and which layers have that window is not known "
            f"for model_type {name!r}: add 'layer_types', a list with 'sliding_attention' or "
            f"'full_attention' for each of the {layers} layers, or 'sliding_window': null if "
            "none has it"
        )
    from_a_layer = "max_window_layers" in defaults.LEFT_OUT.get(name, {})
    first = keys.optional("max_window_layers", least=0) if from_a_layer else 0
    windowed = [n >= first and pattern[n % len(pattern)] == defaults.LOCAL for n in range(layers)]
    return [WINDOWED if local else FULL for local in windowed]


def _windows(keys: _Keys, name: str, types: Sequence[str]) -> tuple[dict[int, int], bool]:
    """Return ``Model.windows`` and ``in_chunks`` for the layers that have a cache of their own."""
    if unknown := [kind for kind in types if kind not in KNOWN]:
        of = numbers(n for n, kind in enumerate(types) if kind == unknown[0])
        known = ", ".join(sorted(KNOWN))
        raise _unknown(f"says that layers {of} are {unknown[0][:64]!r}, and known are {known}")
    lengths = {kind: keys.optional(key, least=0) for kind, key in LENGTHS.items() if kind in types}
    for kind in (kind for kind, length in lengths.items() if not length):
        raise ModelError(f"is wrong: it has layers with {kind!r}, and no {LENGTHS[kind]!r}")
    if {WINDOWED, CHUNKED} <= lengths.keys():
        raise _unknown("has layers with windows and layers with chunks")
    lengths.pop("indexed_attention", None)
    if WINDOWED in lengths and name in defaults.EXCLUSIVE:
        lengths[WINDOWED] += 1
    windows = {n: lengths.get(kind, 0) for n, kind in enumerate(types) if kind in ATTENDING}
    return windows, CHUNKED in lengths


def _index(keys: _Keys, layers: int, element: str) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return the layers that have an index, and its parts; others use that of a layer before.

    See ``DeepseekV2MLAAttention`` in vLLM's ``model_executor/models/deepseek_v2.py``.
    """
    if not keys.optional("index_topk"):
        return (), {}
    if ELEMENT_BYTES[element] == 1:
        raise _unknown(f"has {element} latents beside an index, packed with scales (fp8_ds_mla)")
    values = keys.optional("index_head_dim", 128)
    scales = values // defaults.INDEX_SCALED * 4
    parts = {"latent": values} | ({"scale": scales} if scales else {})
    if pattern := keys.get("index_topk_pattern", str, ""):
        return tuple(n for n in range(layers) if pattern[n : n + 1] != "S"), parts
    offset = keys.optional("index_skip_topk_offset", 2, least=0) - 1
    every = keys.optional("index_topk_freq", 1)
    return tuple(n for n in range(layers) if not max(n - offset, 0) % every), parts


# Recurrent states.


def _state(keys: _Keys, said: str) -> RecurrentState:
    """Return the state of the layers that have one; ``said`` is what the file says of them."""
    make = next((make for key, make in STATE_KINDS.items() if key in keys.all), None)
    if make is None:
        raise _unknown(f"says that {said}, and gives no size of states ({', '.join(STATE_KINDS)})")
    state, inputs = make(keys), element_type(keys.get("dtype", str, ""))
    own = keys.get("mamba_ssm_dtype", str, "") or state.dtype
    return replace(state, input_dtype=inputs, dtype=inputs if own == "auto" else element_type(own))


def _delta_net(keys: _Keys) -> RecurrentState:
    heads, values = keys.number("linear_num_key_heads"), keys.number("linear_num_value_heads")
    head, value = keys.number("linear_key_head_dim"), keys.number("linear_value_head_dim")
    return RecurrentState(
        channels=(*(Channels(name, heads, head) for name in "qk"), Channels("v", values, value)),
        columns=keys.columns("linear_conv_kernel_dim"),
        heads=values,
        elements=value * head,
    )


def _gated_channels(keys: _Keys) -> RecurrentState:
    own = _Keys(keys.get("linear_attn_config", dict, {}))
    heads, head = own.number("num_heads"), own.number("head_dim")
    return RecurrentState(
        channels=tuple(Channels(name, heads, head) for name in "qkv"),
        columns=own.columns("short_conv_kernel_size"),
        heads=heads,
        elements=head**2,
        dtype="float32",
    )


def _short_convolution(keys: _Keys) -> RecurrentState:
    count = keys.optional("conv_dim") or keys.number("hidden_size")
    return RecurrentState(channels=(Channels("x", count),), columns=keys.columns("conv_L_cache"))


def _mamba1(keys: _Keys) -> RecurrentState:
    count = _mamba_channels(keys, 1)
    return RecurrentState(
        channels=(Channels("x", count),),
        columns=keys.columns("mamba_d_conv"),
        heads=count,
        elements=keys.number("mamba_d_state"),
    )


def _mamba2(keys: _Keys) -> RecurrentState:
    heads, state = keys.number("mamba_n_heads"), keys.number("mamba_d_state")
    groups = keys.optional("mamba_n_groups", 1)
    if keys.all.get("mamba_d_head", "auto") == "auto":
        head = _mamba_channels(keys, heads) // heads
    else:
        head = keys.number("mamba_d_head")
    # vLLM's default for Nemotron-H; not all of its files have both keys.
    is_nemotron = "hybrid_override_pattern" in keys.all or keys.all["model_type"] == "nemotron_h"
    return RecurrentState(
        channels=(Channels("x", heads, head), *(Channels(name, groups, state) for name in "BC")),
        columns=keys.columns("mamba_d_conv"),
        heads=heads,
        elements=head * state,
        dtype="float32" if is_nemotron else "auto",
    )


def _mamba_channels(keys: _Keys, heads: int) -> int:
    channels = keys.optional("mamba_d_ssm")
    if not channels:
        expand = keys.get("mamba_expand", Annotated[float, Meta(gt=0, le=MOST_EXPANDED)], 2)
        channels = int(expand * keys.number("hidden_size"))
    if channels < heads:
        raise ModelError(f"is wrong: a state has {channels} channels, and {heads} heads")
    return channels


STATE_KINDS: Mapping[str, Callable[[_Keys], RecurrentState]] = {
    "linear_num_value_heads": _delta_net,
    "linear_attn_config": _gated_channels,
    "conv_L_cache": _short_convolution,
    "mamba_n_heads": _mamba2,
    "mamba_d_state": _mamba1,
}
"""The kinds of states, by the key that shows which kind a model has; the first counts."""
