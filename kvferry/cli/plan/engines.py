"""Engines as layouts: drawn from a model and settings, or read from JSON.

What is drawn follows how vLLM 0.32 lays memory out: one buffer per rank, which all groups start at
the front of; logically (layers, blocks, heads, tokens, content), nested as the layout's name says;
an entry's K before its V (``v1/kv_cache_layout.py`` and ``create_kv_cache_views`` there).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvferry.cli.plan.model import Model
from kvferry.cli.plan.settings import PlanSettings
from kvferry.core.errors import KVFerryError
from kvferry.core.layout import (
    ELEMENT_BYTES,
    ContextParallel,
    Field,
    Group,
    GroupKind,
    Layout,
    axis,
)
from kvferry.core.memory import Region
from kvferry.core.messages import DECODE_ERRORS, MAX_RANKS, Coordinates

MAX_FILE_BYTES = 1 << 26
ADDRESS = 1 << 40
"""Where a drawn buffer starts: anywhere, nothing is read."""

UNEVEN = 1.5
"""Where no kind of layer has this many times as many layers as another, vLLM pads the groups to
the larger number instead of splitting them (``_get_kv_cache_groups_uniform_page_size`` there)."""


class EngineError(KVFerryError):
    """A model cannot be spread like that, or a file does not describe an engine; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """All ranks of an engine; also the form of a JSON file.

    Attributes:
        ranks: the layout of each.
        coordinates: where each stands; none if nobody said.
        windows: per group, how many tokens back its layers look; 0, or nothing, if all the way.
    """

    ranks: Annotated[tuple[Layout, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    coordinates: tuple[Coordinates, ...] = ()
    windows: tuple[Annotated[int, Meta(ge=0, lt=1 << 40)], ...] = ()

    def __post_init__(self) -> None:
        if self.coordinates and len(self.coordinates) != len(self.ranks):
            raise EngineError(f"{len(self.coordinates)} coordinates for {len(self.ranks)} ranks")
        groups = len(self.ranks[0].groups)
        if any(len(layout.groups) != groups for layout in self.ranks):
            raise EngineError("the ranks of an engine have unlike numbers of groups")
        if self.windows and len(self.windows) != groups:
            raise EngineError(f"{len(self.windows)} windows for {groups} groups")

    def window(self, group: int) -> int:
        """How many tokens back the layers of a group look; 0: all the way."""
        return self.windows[group] if self.windows else 0

    def first_token(self, group: int, tokens: int) -> int:
        """The first token that decoding after ``tokens`` tokens looks back to."""
        window = self.window(group)
        return max(0, tokens - window + 1) if window else 0


def read_engine(path: Path) -> Engine:
    """The engine that a JSON file describes: ``{"ranks": [layout, ...]}``, or one layout alone.

    Raises:
        EngineError: the file cannot be read, or what it describes is no engine.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise EngineError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        found = msgspec.json.decode(data)
        if isinstance(found, dict) and "ranks" not in found and "fields" in found:
            found = {"ranks": [found]}
        return msgspec.convert(found, Engine)
    except OSError as exc:
        raise EngineError(f"{path} cannot be read: {exc.strerror}") from exc
    except EngineError as exc:
        raise EngineError(f"{path}: {exc}") from exc
    except DECODE_ERRORS as exc:
        raise EngineError(f"{path} does not describe an engine's layouts: {exc}") from exc


def write_engine(path: Path, engine: Engine) -> None:
    """What ``read_engine`` reads.

    Raises:
        EngineError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(engine) + b"\n")
    except OSError as exc:
        raise EngineError(f"{path} cannot be written: {exc.strerror}") from exc


def draw(model: Model, settings: PlanSettings, tokens: int) -> Engine:
    """The layouts of an engine that runs a model.

    Args:
        model: what it runs.
        settings: how it is set up.
        tokens: how long the requests are that must fit.

    Raises:
        EngineError: the model cannot be spread over these ranks.
        LayoutError: the cache would be beyond all bounds.
    """
    check_spread(model, settings)
    groups = _groups(model)
    pages = 1 + sum(-(-tokens // (settings.block_size * settings.dcp)) for _ in groups)
    places = list(itertools.product(range(settings.pp), range(settings.tp)))
    return Engine(
        ranks=tuple(_rank(model, settings, groups, pages, pp, tp) for pp, tp in places),
        coordinates=tuple(Coordinates(pp=pp, tp=tp, dcp=tp % settings.dcp) for pp, tp in places),
        windows=tuple(model.windows[layers[0]] for layers in groups),
    )


def check_spread(model: Model, settings: PlanSettings) -> None:
    """Raises ``EngineError`` where a model cannot be spread over that many ranks."""
    tp, heads = settings.tp, model.kv_heads
    if model.attention_heads % tp:
        raise EngineError(f"tp={tp} does not divide the {model.attention_heads} attention heads")
    if heads % tp and tp % heads:
        raise EngineError(f"tp={tp} and {heads} KV heads: one of the two must divide the other")
    if settings.pp > model.layers:
        raise EngineError(f"pp={settings.pp} is more than the {model.layers} layers")
    if settings.dcp > max(1, tp // heads):
        raise EngineError(
            f"dcp={settings.dcp} spreads tokens over ranks that hold the same heads, and with "
            f"tp={tp} and {heads} KV heads there are {max(1, tp // heads)}"
        )


def _groups(model: Model) -> list[list[int]]:
    """Layers that share block ids: as many layers in each, one window in each."""
    kinds: dict[int, list[int]] = {}
    for layer, window in model.windows.items():
        kinds.setdefault(window, []).append(layer)
    if not kinds:
        raise EngineError("no layer has a cache of its own")
    fewest, most = (pick(map(len, kinds.values())) for pick in (min, max))
    size = most if most < fewest * UNEVEN else fewest
    return [
        layers[turn::groups]
        for layers in kinds.values()
        for groups in [-(-len(layers) // size)]
        for turn in range(groups)
    ]


def _stage(layers: int, pp: int, rank: int) -> range:
    """The layers of a pipeline rank; what is left over goes to the last but one, and before it."""
    each, over = divmod(layers, pp)
    sizes = [each + (pp - 1 - over <= stage < pp - 1) for stage in range(pp)]
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


class _Strides(NamedTuple):
    """Bytes from one to the next along each logical axis."""

    layer: int
    block: int
    head: int
    token: int
    content: int


def _strides(settings: PlanSettings, shape: Sequence[int], block: int) -> _Strides:
    """Of a shape (layers, blocks, heads, tokens, bytes); ``block`` where blocks are outermost."""
    stride, found = 1, {}
    for name in reversed(settings.layout):
        found[name] = stride
        stride *= shape["LBHNC".index(name)]
    if settings.layout.startswith("B"):
        found["B"] = block
    return _Strides(*(found[name] for name in "LBHNC"))


def _rank(
    model: Model, settings: PlanSettings, groups: list[list[int]], pages: int, pp: int, tp: int
) -> Layout:
    stage = _stage(model.layers, settings.pp, pp)
    mine = [[layer for layer in layers if layer in stage] for layers in groups]
    heads = _heads(model.kv_heads, settings.tp, tp)
    page = (heads[1] - heads[0]) * settings.block_size * model.entry_bytes
    block = max(map(len, mine)) * page
    context = ContextParallel(
        size=settings.dcp, rank=tp % settings.dcp, interleave=settings.interleave
    )
    kind = Group(kind=GroupKind.PAGED, block_tokens=settings.block_size, context=context)
    return Layout(
        regions=(Region(address=ADDRESS, nbytes=max(1, block * pages), kind="cuda"),),
        groups=(kind,) * len(groups),
        fields=tuple(
            f
            for group, layers in enumerate(mine)
            for f in _fields(model, settings, group, layers, pages, heads, block)
        ),
    )


def _heads(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """The KV heads of a tensor-parallel rank; more ranks than heads hold replicas."""
    start = rank * total // ranks
    return start, max(start + 1, (rank + 1) * total // ranks)


def _fields(
    model: Model,
    settings: PlanSettings,
    group: int,
    layers: list[int],
    pages: int,
    heads: tuple[int, int],
    block: int,
) -> Iterator[Field]:
    kernels, held = settings.kernels, heads[1] - heads[0]
    tokens = settings.block_size // kernels
    shape = (len(layers), pages * kernels, held, tokens, model.entry_bytes)
    step = _strides(settings, shape, block)
    cut = ((kernels, step.block),) if kernels > 1 else ()
    item = ELEMENT_BYTES[model.dtype]
    for index, layer in enumerate(layers):
        offset = index * step.layer
        for name, elements in model.parts.items():
            yield Field(
                key=f"layers.{layer}.attn/{name}",
                group=group,
                region=0,
                offset=offset,
                page_stride=kernels * step.block,
                pages=pages,
                dtype=model.dtype,
                unit=elements * item,
                tokens=axis(*cut, (tokens, step.token)),
                shard=axis((held, step.head)),
                shard_range=heads,
            )
            offset += elements * item
