"""Which of vLLM's registered architectures are served, by the caches that their source makes.

Most architectures cannot be built without a GPU or a checkpoint, so that vLLM's source is read:
from an architecture's class on, through every class and function of vLLM's models and attention
layers that is named there, to the layers that have a cache. A layer's ``get_kv_cache_spec`` names
its kinds of cache, and ``SPECS``, ``PACKINGS`` and ``STATE_PACKINGS`` have the verdict on these. Of
code that is for one vendor's processors, only NVIDIA's is read.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvferry.integrations.vllm.caches.attention_pages import PACKINGS, RINGS, unknown
from kvferry.integrations.vllm.caches.cache_specs import SPECS, Handling
from kvferry.integrations.vllm.caches.state_pages import STATE_PACKINGS
from tests.vllm.caches import census

MODELS = "vllm.model_executor.models."
READ = (
    MODELS,
    "vllm.models.",
    "vllm.model_executor.layers.attention",
    "vllm.model_executor.layers.mamba.",
    "vllm.model_executor.layers.mla",
    "vllm.v1.attention.backends.mla.sparse_swa",
)
"""The modules whose classes and functions are followed, by the start of their names."""
NOT_READ = {f"{MODELS}{name}" for name in ("adapters", "config", "registry", "utils", "vision")}
"""Modules that name classes which an architecture does not have."""
OTHER_PROCESSORS = {"amd", "cpu", "xpu"}
"""Packages of code that does not run on NVIDIA's GPUs."""

OTHER_PROCESSORS_BACKENDS = {"CPU", "ROCM", "XPU"}
"""Words in the names of backends that do not run on them, either."""

LAYER = "AttentionLayerBase"
"""The base of every layer that may have a cache."""
LANGUAGE_MODEL = "init_vllm_registered_model"
"""A function that builds the language model that a checkpoint names."""
ENTRIES_PER_TOKEN, PREFIX_LM = "several entries per token", "a prefix LM"
"""Kinds of cache that are refused because of what a spec's fields say."""

POOLING = (
    "_EMBEDDING_MODELS",
    "_LATE_INTERACTION_MODELS",
    "_REWARD_MODELS",
    "_TOKEN_CLASSIFICATION_MODELS",
    "_SEQUENCE_CLASSIFICATION_MODELS",
)
"""The parts of vLLM's registry whose architectures pool, unless another part has them, too."""
POOLING_NAMES = ("EmbeddingModel", "ForSequenceClassification")
"""How the names of those end that pool in other parts."""
DRAFTS = "_SPECULATIVE_DECODING_MODELS"

BY_CHECKPOINT: Mapping[str, tuple[str, str]] = {
    "VoxtralForConditionalGeneration": (
        ENTRIES_PER_TOKEN,
        "as its language model is, but refused where the audio encoder is causal",
    ),
}
"""Kinds of cache that only some checkpoints of an architecture have, and what to say of these."""

ENGINES: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": "test_families.py",
    "EagleLlamaForCausalLM": "test_drafts_live.py",
    "Gemma3ForCausalLM": "test_families.py",
    "GptOssForCausalLM": "test_families.py",
    "GraniteMoeHybridForCausalLM": "test_families.py",
    "Idefics3ForConditionalGeneration": "test_media_live.py",
    "LlamaForCausalLM": "test_hand_over.py",
    "MiMoForCausalLM": "test_drafts_live.py",
    "MiMoMTPModel": "test_drafts_live.py",
    "MistralForCausalLM": "test_families.py",
    "NemotronHForCausalLM": "test_families.py",
    "Qwen2ForCausalLM": "test_drafts_live.py",
    "Qwen3ForCausalLM": "test_families.py",
    "Qwen3NextForCausalLM": "test_families.py",
    "Gemma3ForConditionalGeneration": "by hand",
    "LlavaForConditionalGeneration": "by hand",
    "Qwen2VLForConditionalGeneration": "by hand",
}
"""Architectures that whole engines hand over, and in which test of ``tests/engines``."""

GEOMETRY = {
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "RSWASpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
}
"""The kinds of cache that ``tests/vllm/geometry`` hands over."""
GEOMETRY_STATES = {"MAMBA2_ATTN", "GDN_ATTN"}
"""The backends of the states that it hands over."""

KINDS: Mapping[str, str] = {
    "FullAttentionSpec": "keys and values",
    "SlidingWindowSpec": "keys and values",
    "ChunkedLocalAttentionSpec": "chunks",
    "RSWASpec": "keys and values",
    "MLAAttentionSpec": "latents",
    "SlidingWindowMLASpec": "latents",
    "CircularBufferSpec": "rings",
    "MambaSpec": "states",
    "CrossAttentionSpec": "cross attention",
    "EncoderOnlyAttentionSpec": "none",
    "HiddenStateCacheSpec": "hidden states",
    "SinkFullAttentionSpec": "sinks",
    ENTRIES_PER_TOKEN: ENTRIES_PER_TOKEN,
    PREFIX_LM: PREFIX_LM,
}
"""What docs/coverage.md calls the kinds of cache."""

Place = tuple[str, str]
"""A module's name, and that of a class or function in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One of the architectures that vLLM registers."""

    name: str  # in a checkpoint's configuration
    part: str  # of vLLM's registry
    kinds: frozenset[str]  # the kinds of cache that its layers may have, by the spec's class
    states: frozenset[str]  # the backends of its states
    backends: frozenset[str]  # of its own, that do not depend on settings
    composed: bool  # it has a language model that a checkpoint names

    @property
    def opaque(self) -> list[str]:
        """The backends whose pages move whole."""
        pages = {
            name
            for name in self.backends
            if name in PACKINGS
            and not OTHER_PROCESSORS_BACKENDS & set(name.split("_"))
            and PACKINGS[name].fields is unknown
            and PACKINGS[name].inside != RINGS
        }
        return sorted(pages | (self.states - set(STATE_PACKINGS)))

    @property
    def caches(self) -> str:
        """What its caches hold, as text for docs/coverage.md."""
        found = sorted({KINDS[kind] for kind in self.kinds} - {"states"})
        if self.composed:
            found.append("those of its language model")
        states = ", ".join(sorted(self.states))
        return ", ".join([*found, *([f"states ({states})"] if states else [])]) or "none"

    @property
    def verdict(self) -> tuple[str, str]:
        """Whether it is served, and how that is known or why it is not."""
        if self.part in POOLING or self.name.endswith(POOLING_NAMES):
            return "refused", "a pooling model has nothing to decode"
        if reasons := self._refusals():
            return "refused", "; ".join(reasons)
        if self.part == DRAFTS and self.name not in ENGINES:
            return "draft", ", ".join(f"`{name}`" for name in self.opaque)
        if not self.kinds and not self.composed:
            return "refused", "it has no cache"
        where = ENGINES.get(self.name)
        if where:
            return "served, on engines", where if where == "by hand" else f"`{where}`"
        if self.opaque:
            return "moved whole", ", ".join(f"`{name}`" for name in self.opaque)
        if self.composed:
            _, why = BY_CHECKPOINT.get(self.name, ("", "as its language model is"))
            return "served, by kind", why
        if self.kinds - {"MambaSpec"} <= GEOMETRY and self.states <= GEOMETRY_STATES:
            return "served, by geometry", ""
        rest = sorted((self.kinds - {"MambaSpec"} - GEOMETRY) | (self.states - GEOMETRY_STATES))
        return "served, by kind", ", ".join(f"`{name}`" for name in rest)

    def _refusals(self) -> list[str]:
        if ENTRIES_PER_TOKEN in self.kinds:
            return ["an entry of a page must be of whole tokens"]
        if PREFIX_LM in self.kinds:
            return ["its prompt's tokens attend to each other in both directions"]
        return sorted(
            SPECS[kind].why.partition(";")[0]
            for kind in self.kinds - {"EncoderOnlyAttentionSpec"}
            if SPECS[kind].handling is Handling.REFUSED
        )


def architectures() -> tuple[Architecture, ...]:
    """Return all that vLLM registers, by name."""
    return tuple(_architecture(name) for name in sorted(_registered(), key=str.casefold))


def registered() -> frozenset[str]:
    """Return the names of all architectures in the parts of vLLM's registry."""
    return frozenset(_registered())


@functools.cache
def _registered() -> Mapping[str, tuple[str, Place]]:
    """By name, the part of the registry, and where the class is."""
    from vllm.model_executor.models import registry

    parts = [name for name in vars(registry) if name.endswith("_MODELS") and name != "_VLLM_MODELS"]
    parts = [name for name in parts if isinstance(getattr(registry, name), dict)]
    found: dict[str, tuple[str, Place]] = {}
    for part in sorted(parts, key=lambda part: part not in POOLING):  # later ones take precedence
        for name, target in getattr(registry, part).items():
            if name in registry._VLLM_MODELS and isinstance(target, tuple):
                module, cls = registry._VLLM_MODELS[name]
                full = module if module.startswith("vllm.") else MODELS + module
                found[name] = part, (full, cls)
    return found


def _architecture(name: str) -> Architecture:
    part, place = _registered()[name]
    reached = _reached(place)
    layers = [found for found in reached.made if _is_layer(found)]
    composed = LANGUAGE_MODEL in reached.names
    # Whisper's attention layer may be of an encoder or across. Models with a language model of
    # their checkpoint take only Whisper's encoder.
    absent = {"CrossAttentionSpec"} if composed else set()
    absent |= set(BY_CHECKPOINT.get(name, ())[:1])
    return Architecture(
        name=name,
        part=part,
        kinds=frozenset(kind for layer in layers for kind in _kinds(layer)) - absent,
        states=frozenset(state for layer in layers for state in _states(layer)),
        backends=frozenset(reached.backends),
        composed=composed,
    )


@functools.cache
def _backends() -> Mapping[str, tuple[str, ...]]:
    """By the path of a backend's class, the names that vLLM gives the backend."""
    found: dict[str, tuple[str, ...]] = {}
    for backend in census.backends():
        for path in backend.classes:
            found[path] = (*found.get(path, ()), backend.name)
    return found


def _backends_named(module: str, name: str) -> tuple[str, ...]:
    sources = [(module, name), *_module(module).imported.get(name, ())]
    return tuple(backend for source in sources for backend in _backends().get(".".join(source), ()))


@dataclass(slots=True)
class _Reached:
    """What is named from a class on."""

    places: set[Place] = field(default_factory=set)  # all definitions
    # the definitions without the classes that are only there as a layer's base
    made: set[Place] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # all names in the definitions of models
    backends: set[str] = field(default_factory=set)  # those that the definitions of models name


@functools.cache
def _reached(start: Place) -> _Reached:
    reached = _Reached()
    waiting = list(_definitions(*start))
    reached.made.update(waiting)
    while waiting:
        place = waiting.pop()
        if place in reached.places:
            continue
        reached.places.add(place)
        names = _names(place)
        if place[0].startswith((MODELS, "vllm.models.")):
            reached.names |= names
            for name in names:
                reached.backends.update(_backends_named(place[0], name))
        above = _bases(place) if _is_layer(place) else set()
        for name in names:
            found = _definitions(place[0], name)
            waiting += found
            if name not in above:
                reached.made.update(found)
    return reached


def _bases(place: Place) -> set[str]:
    node = _module(place[0]).defined[place[1]]
    return {census._simple(base) for base in getattr(node, "bases", ())}


@functools.cache
def _names(place: Place) -> frozenset[str]:
    """The names in a definition that are not types of arguments or variables."""
    node = _module(place[0]).defined[place[1]]
    ignored = {
        id(inner)
        for each in ast.walk(node)
        for annotation in _annotations(each)
        for inner in ast.walk(annotation)
    } | {id(inner) for each in ast.walk(node) if _is_check(each) for inner in ast.walk(each)}
    return frozenset(
        each.id if isinstance(each, ast.Name) else each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute) and id(each) not in ignored
    )


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("annotation", "returns"):
        if isinstance(found := getattr(node, name, None), ast.AST):
            yield found


def _is_check(node: ast.AST) -> bool:
    """``isinstance`` and the like name classes that need not be there."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
        "isinstance",
        "issubclass",
        "cast",
    )


@functools.cache
def _definitions(module: str, name: str) -> tuple[Place, ...]:
    """Where a name that a module uses is defined, as far as that is read."""
    if not module.startswith(READ) or module in NOT_READ:
        return ()
    if OTHER_PROCESSORS & set(module.split(".")):
        return ()
    parsed = _module(module)
    # A class may have the name of its base, which the module imports.
    own = [(module, name)] if name in parsed.defined else []
    imported = [
        place
        for source, original in parsed.imported.get(name, ())
        if (source, original) != (module, name)
        for place in _definitions(source, original)
    ]
    return tuple(dict.fromkeys([*own, *imported]))


@functools.cache
def _module(name: str) -> SimpleNamespace:
    """A module's classes and functions, and where its other names are from."""
    defined: dict[str, ast.AST] = {}
    imported: dict[str, list[Place]] = {}
    path = _path(name)
    tree = ast.parse(path.read_text(encoding="utf-8")) if path else ast.Module([], [])
    package = name if path and path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                imported.setdefault(alias.asname or alias.name, []).append((source, alias.name))
    for node in _top(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    defined.setdefault(target.id, node)
    return SimpleNamespace(defined=defined, imported=imported)


def _top(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module, also those under a condition, but not those for checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and census._simple(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield from _top(ast.Module([other], []))
        elif isinstance(node, ast.If | ast.Try):
            yield from _top(node)
        else:
            yield node


def _path(name: str) -> Path | None:
    import vllm

    base = Path(vllm.__file__).parent.joinpath(*name.split(".")[1:])
    for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
        if path.exists():
            return path
    return None


@functools.cache
def _ancestry(place: Place) -> tuple[Place, ...]:
    """A class, and all classes that it is derived from as far as these are read."""
    found: dict[Place, None] = {}
    waiting = [place]
    while waiting:
        current = waiting.pop(0)
        if current not in found:
            found[current] = None
            for base in sorted(_bases(current)):
                waiting += _definitions(current[0], base)
    return tuple(found)


def _is_layer(place: Place) -> bool:
    return isinstance(_module(place[0]).defined[place[1]], ast.ClassDef) and any(
        base == LAYER for above in _ancestry(place) for base in _bases(above)
    )


def _method(place: Place, name: str) -> Iterator[ast.FunctionDef]:
    """A class's method, and, where it calls it, that of the class above."""
    for module, cls in _ancestry(place):
        for node in getattr(_module(module).defined[cls], "body", ()):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield node
                if not any(
                    isinstance(each, ast.Name) and each.id == "super" for each in ast.walk(node)
                ):
                    return


def _kinds(layer: Place) -> Iterable[str]:
    """The specs that a layer's ``get_kv_cache_spec`` makes."""
    found: set[str] = set()
    for method in _method(layer, "get_kv_cache_spec"):
        for node in ast.walk(method):
            if isinstance(node, ast.Call):
                found |= {census._simple(node.func)} & set(SPECS)
                found |= {ENTRIES_PER_TOKEN} if census._simple(node.func) == "Fraction" else set()
                found |= {PREFIX_LM} if any(k.arg == "non_causal" for k in node.keywords) else set()
    return found


def _states(layer: Place) -> Iterable[str]:
    """The backends of a layer's states."""
    if "MambaSpec" not in _kinds(layer):
        return ()
    for method in _method(layer, "get_attn_backend"):
        for node in ast.walk(method):
            value = node.value if isinstance(node, ast.Return) else None
            if value and (names := _backends_named(layer[0], census._simple(value))):
                return names
    for method in _method(layer, "mamba_type"):
        for node in ast.walk(method):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Attribute):
                return _backends()[_state_class(node.value.attr)]
    return ()


def _state_class(member: str) -> str:
    """The path of the class of a member of vLLM's enumeration of states' backends."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    kinds: Any = MambaAttentionBackendEnum
    value: str = kinds[member].value
    return value
