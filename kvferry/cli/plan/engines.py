"""Engines for ``kvferry plan``: their settings as text, and their layouts, computed or from JSON.

Layouts are computed as vLLM 0.32 lays out memory (``v1/kv_cache_layout.py``,
``create_kv_cache_views``). Each rank has one buffer, which all cache groups share from its start.
The axes are (layers, blocks, heads, tokens, content), nested as the layout's name says. An entry,
which is one head of one token, has its K before its V. A layer's state is at the start of a page,
and pages of attention are enlarged until a state fits into one. Where layers have an index, too,
its pages are behind those of all layers' latents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvferry.cli.plan.model import Model
from kvferry.cli.plan.states import RecurrentState
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
from kvferry.core.memory import CUDA, Region
from kvferry.core.messages import Coordinates
from kvferry.core.side_channel_messages import DECODE_ERRORS, MAX_RANKS

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders of memory, outermost first: Layers, Blocks, Heads, tokeNs, Content (K, then V)."""

WHOLE = "LB"
"""Prefix of the orders in which a layer's pages are contiguous and follow each other."""

ALIASES: Mapping[str, str] = {"HND": "LBHNC", "NHD": "LBNHC"}
"""Other names of two orders, which say only whether heads or tokens are outermost in a page."""

LIMITS: Mapping[str, int] = {
    "tp": 1 << 10,
    "pp": 1 << 10,
    "dcp": 1 << 10,
    "interleave": 1 << 16,
    "block_size": 1 << 16,
    "kernel_block": 1 << 16,
}
"""The largest value of each setting that is a number."""


class SettingsError(KVFerryError):
    """A setting is refused; the message has its name, the allowed values, and the nearest name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The settings of one engine, written as ``tp=2,pp=1,block_size=16,layout=LBHNC``.

    Attributes:
        tp: Number of tensor-parallel ranks, which share the heads.
        pp: Number of pipeline-parallel ranks, which share the layers.
        dcp: Number of decode context-parallel ranks: tensor-parallel ranks that store the same
            heads, and over which a request's tokens are distributed.
        interleave: How many consecutive tokens one of the ``dcp`` ranks stores before the next.
        block_size: Number of tokens in a page of one rank.
        layout: Order of memory, one of ``ORDERS``.
        kernel_block: Number of tokens in the blocks into which kernels split a page; 0 if kernels
            do not split pages.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    interleave: int = 1
    block_size: int = 16
    layout: str = "LBNHC"
    kernel_block: int = 0

    def __post_init__(self) -> None:
        if self.tp * self.pp > MAX_RANKS:
            raise SettingsError(f"tp={self.tp},pp={self.pp} are more than {MAX_RANKS} ranks")
        if self.tp % self.dcp:
            raise SettingsError(
                f"dcp={self.dcp} does not divide tp={self.tp}: tokens are spread over ranks that "
                "share the heads"
            )
        if self.block_size % self.interleave:
            raise SettingsError(
                f"interleave={self.interleave} does not divide block_size={self.block_size}"
            )
        self._check_kernel_block()

    def _check_kernel_block(self) -> None:
        """Refuse a ``kernel_block`` that does not fit the block size or the order of memory."""
        if self.kernel_block and self.block_size % self.kernel_block:
            raise SettingsError(
                f"kernel_block={self.kernel_block} does not divide block_size={self.block_size}"
            )
        if self.kernels > 1 and not self.layout.startswith(WHOLE):
            raise SettingsError(
                f"layout={self.layout} scatters the pages of a layer, so kernels cannot cut them: "
                f"use block_size={self.kernel_block} or a layout that starts with {WHOLE}"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks.

        The rank with pipeline index p and tensor index t has index ``p * tp + t``.
        """
        return self.tp * self.pp

    @property
    def kernels(self) -> int:
        """Number of blocks into which kernels split a page."""
        return self.block_size // self.kernel_block if self.kernel_block else 1

    def __str__(self) -> str:
        """Return the text that ``parse`` reads; defaults are left out except those in ``SHOWN``."""
        optional = asdict(PlanSettings())
        shown = {k: v for k, v in asdict(self).items() if k in SHOWN or v != optional[k]}
        return ",".join(f"{key}={value}" for key, value in shown.items())


SHOWN = ("tp", "pp", "block_size", "layout")


def parse(text: str, option: str) -> PlanSettings:
    """Return the settings of one engine."""
    values: dict[str, int | str] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        name = _check_name(
            option, "setting", key.replace("-", "_"), [f.name for f in fields(PlanSettings)]
        )
        if not equals or not value:
            raise SettingsError(f"{option}: {key!r} has no value: write {key}=...")
        if name in values:
            raise SettingsError(f"{option}: {name!r} stands twice")
        values[name] = _order(option, value) if name == "layout" else _count(option, name, value)
    try:
        return PlanSettings(**values)  # type: ignore[arg-type]  # each value is of its field's type
    except SettingsError as exc:
        raise SettingsError(f"{option}: {exc}") from None


def _order(option: str, value: str) -> str:
    """Return an order of memory by its name or alias."""
    name = value.upper()
    return ALIASES.get(name) or _check_name(option, "layout", name, [*ORDERS, *ALIASES])


def _count(option: str, name: str, value: str) -> int:
    """Return the number in a setting's value."""
    limit = LIMITS[name]
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and 1 <= int(value) <= limit):
        raise SettingsError(f"{option}: {name}={value[:32]} must be a number in 1 to {limit}")
    return int(value)


def _check_name(option: str, what: str, name: str, allowed: list[str]) -> str:
    """Return a name if it is allowed, and refuse it otherwise."""
    if name in allowed:
        return name
    near = get_close_matches(name, allowed, 1, 0.5)
    meant = f": did you mean {near[0]!r}?" if near else ""
    raise SettingsError(
        f"{option}: unknown {what} {name[:32]!r}{meant} Allowed are {', '.join(allowed)}"
        if meant
        else f"{option}: unknown {what} {name[:32]!r}; allowed are {', '.join(allowed)}"
    )


MAX_FILE_BYTES = 1 << 26
"""Largest size of a JSON file with layouts."""
ADDRESS = 1 << 40
"""The address of every computed buffer. Any address will do, since no memory is read."""

UNEVEN = 1.5
"""If the largest kind of layers is less than this many times as large as the smallest, vLLM pads
the smaller groups instead of splitting the larger ones
(``_get_kv_cache_groups_uniform_page_size``)."""

ALIGNMENT = 16
"""If pages are enlarged for states, they hold a multiple of this many tokens: the smallest block of
the kernels of FLASH_ATTN, FLASHINFER and TRITON_ATTN."""
LATENT_ALIGNMENT = 128
"""The same for latents (MLA)."""
SCATTERED = "LHBNC"
"""The order in which a block is not contiguous even within one layer, so it has no room for a
state."""


class EngineError(KVFerryError):
    """A model does not fit the ranks that were set, or a file does not describe an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The layouts of all ranks of an engine; also the schema of the JSON files.

    Attributes:
        ranks: The layout of each rank.
        coordinates: The parallel indices (``pp``, ``tp``, ...) of each rank; empty if unknown.
        windows: The sliding window in tokens of each cache group, 0 for no window; may be empty if
            no group has a window.
        chunks: The size in tokens of the chunks of each cache group with chunked attention, 0 for
            other groups; may be empty if there is no such group.
    """

    ranks: Annotated[tuple[Layout, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    coordinates: tuple[Coordinates, ...] = ()
    windows: tuple[Annotated[int, Meta(ge=0, lt=1 << 40)], ...] = ()
    chunks: tuple[Annotated[int, Meta(ge=0, lt=1 << 40)], ...] = ()

    def __post_init__(self) -> None:
        if self.coordinates and len(self.coordinates) != len(self.ranks):
            raise EngineError(f"{len(self.coordinates)} coordinates for {len(self.ranks)} ranks")
        groups = len(self.ranks[0].groups)
        if any(len(layout.groups) != groups for layout in self.ranks):
            raise EngineError("the ranks of an engine have unlike numbers of groups")
        for what in ("windows", "chunks"):
            given = getattr(self, what)
            if given and len(given) != groups:
                raise EngineError(f"{len(given)} {what} for {groups} groups")

    def drops_tokens(self, group: int) -> bool:
        """Return whether a cache group has a sliding window or chunks."""
        return any(given[group] for given in (self.windows, self.chunks) if given)

    def first_token(self, group: int, tokens: int) -> int:
        """Return the index of the first token to read for a request.

        With a sliding window or chunks, that is the first token to which the request's next token
        attends.
        """
        if self.chunks and self.chunks[group]:
            return tokens // self.chunks[group] * self.chunks[group]
        window = self.windows[group] if self.windows else 0
        return max(0, tokens - window + 1) if window else 0


def read_engine(path: Path) -> Engine:
    """Return the engine that a JSON file describes."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise EngineError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        content = msgspec.json.decode(data)
        if isinstance(content, dict) and "ranks" not in content and "fields" in content:
            content = {"ranks": [content]}
        return msgspec.convert(content, Engine)
    except OSError as exc:
        raise EngineError(f"{path} cannot be read: {exc.strerror}") from exc
    except EngineError as exc:
        raise EngineError(f"{path}: {exc}") from exc
    except DECODE_ERRORS as exc:
        raise EngineError(f"{path} does not describe an engine's layouts: {exc}") from exc


def write_engine(path: Path, engine: Engine) -> None:
    """Write an engine's layouts to a JSON file that ``read_engine`` reads."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(engine) + b"\n")
    except OSError as exc:
        raise EngineError(f"{path} cannot be written: {exc.strerror}") from exc


def make_engine(model: Model, settings: PlanSettings, tokens: int) -> Engine:
    """Return the layouts of an engine that runs a model."""
    settings = fit_states(model, settings)
    check_spread(model, settings)
    groups = _groups(model)
    pages = 1 + sum(
        1 if group.holds_states else -(-tokens // (settings.block_size * settings.dcp))
        for group in groups
    )
    ranks = list(itertools.product(range(settings.pp), range(settings.tp)))
    return Engine(
        ranks=tuple(_rank(model, settings, groups, pages, pp, tp) for pp, tp in ranks),
        coordinates=tuple(Coordinates(pp=pp, tp=tp, dcp=tp % settings.dcp) for pp, tp in ranks),
        windows=tuple(group.window for group in groups),
        chunks=tuple(group.chunk for group in groups) if model.chunks else (),
    )


def fit_states(model: Model, settings: PlanSettings) -> PlanSettings:
    """Return settings whose pages of attention have room for a state, as vLLM enlarges them.

    See ``Platform._align_hybrid_block_size`` in vLLM's ``platforms/interface.py``.
    """
    if model.state is None:
        return settings
    token = max(1, model.kv_heads // settings.tp) * model.entry_bytes
    step = max(settings.block_size, LATENT_ALIGNMENT if model.latent else ALIGNMENT)
    size = step * -(-model.state.nbytes(settings.tp) // (step * token))
    size = ALIGNMENT * -(-size // ALIGNMENT)
    enlarged = max(settings.block_size, size)
    try:
        return replace(settings, block_size=enlarged)
    except SettingsError as exc:
        raise SettingsError(
            f"{exc} (vLLM enlarges block_size={settings.block_size} to {enlarged} for the "
            "states of this model)"
        ) from None


def check_spread(model: Model, settings: PlanSettings) -> None:
    """Refuse settings with more ranks than a model can be distributed over."""
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
    if model.state is not None:
        _check_states(model.state, settings)


def _check_states(state: RecurrentState, settings: PlanSettings) -> None:
    """Refuse settings with which no engine can store a model's states."""
    tp = settings.tp
    parts = [(f"the {state.heads} heads of a state", state.heads)]
    parts += [
        (f"the {part.units} units of a state's {part.name} channels", part.units)
        for part in state.channels
        if part.units > 1
    ]
    for what, count in parts:
        if count % tp:
            raise EngineError(f"tp={tp} does not divide {what}")
    if settings.layout == SCATTERED:
        others = ", ".join(order for order in ORDERS if order != SCATTERED)
        raise EngineError(
            f"layout={SCATTERED} scatters a block over the heads, and a state needs a block in one "
            f"piece: use one of {others}"
        )


class _CacheGroup(NamedTuple):
    """Layers that share block ids.

    Attributes:
        layers: The layers' indices.
        window: Their sliding window in tokens, 0 for no window.
        chunk: The size in tokens of their chunks, 0 for no chunks.
        holds_states: Whether the group has the layers' states instead of their attention.
    """

    layers: list[int]
    window: int = 0
    chunk: int = 0
    holds_states: bool = False


def _groups(model: Model) -> list[_CacheGroup]:
    """Return the cache groups of a model."""
    by_reach: dict[tuple[int, int], list[int]] = {}
    for layer, window in model.windows.items():
        by_reach.setdefault((window, model.chunks.get(layer, 0)), []).append(layer)
    kinds = [_CacheGroup(layers, *reach) for reach, layers in by_reach.items()]
    if model.states:
        kinds.append(_CacheGroup(list(model.states), holds_states=True))
    if not kinds:
        raise EngineError("no layer has a cache of its own")
    kinds.sort(key=lambda kind: kind.layers[0])
    fewest, most = (pick(len(kind.layers) for kind in kinds) for pick in (min, max))
    size = most if most < fewest * UNEVEN else fewest
    return [
        kind._replace(layers=kind.layers[turn::groups])
        for kind in kinds
        for groups in [-(-len(kind.layers) // size)]
        for turn in range(groups)
    ]


def _stage(layers: int, pp: int, rank: int) -> range:
    """Return the layer indices of a pipeline rank."""
    each, over = divmod(layers, pp)
    sizes = [each + (pp - 1 - over <= stage < pp - 1) for stage in range(pp)]
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


class _Strides(NamedTuple):
    """For each axis of a cache group's memory, the bytes from one index to the next."""

    layer: int
    block: int
    head: int
    token: int
    content: int


def _strides(settings: PlanSettings, shape: Sequence[int], block: int) -> _Strides:
    """Return the strides in bytes of a cache group's memory."""
    stride, strides = 1, {}
    for name in reversed(settings.layout):
        strides[name] = stride
        stride *= shape["LBHNC".index(name)]
    if settings.layout.startswith("B"):
        strides["B"] = block
    return _Strides(*(strides[name] for name in "LBHNC"))


def _rank(
    model: Model, settings: PlanSettings, groups: list[_CacheGroup], pages: int, pp: int, tp: int
) -> Layout:
    """Return the layout of one rank."""
    stage = _stage(model.layers, settings.pp, pp)
    here = [
        group._replace(layers=[layer for layer in group.layers if layer in stage])
        for group in groups
    ]
    heads = _heads(model.kv_heads, settings.tp, tp)
    page = (heads[1] - heads[0]) * settings.block_size * model.entry_bytes
    indexed = [layer for layer in model.indexed if layer in stage]
    index_page = settings.block_size * model.index_bytes
    block = max(len(group.layers) for group in here) * page + len(indexed) * index_page
    context = ContextParallel(
        size=settings.dcp, rank=tp % settings.dcp, interleave=settings.interleave
    )
    paged = Group(kind=GroupKind.PAGED, block_tokens=settings.block_size, context=context)
    state = Group(kind=GroupKind.STATE, block_tokens=0)
    memory = _Memory(settings, pages, block)
    return Layout(
        regions=(Region(address=ADDRESS, nbytes=max(1, block * pages), kind=CUDA),),
        groups=tuple(state if group.holds_states else paged for group in here),
        fields=tuple(
            f
            for index, group in enumerate(here)
            for f in (
                _state_fields(model.state, memory, index, group.layers, page, tp)
                if group.holds_states and model.state is not None
                else _fields(model, memory, index, group.layers, heads)
            )
        )
        + tuple(_index_fields(model, memory, indexed, len(here[0].layers) * page)),
    )


class _Memory(NamedTuple):
    """What all groups of a rank have in common.

    Attributes:
        settings: The engine's settings.
        pages: Number of pages.
        block: Bytes from one page to the next; used only if blocks are the outermost axis.
    """

    settings: PlanSettings
    pages: int
    block: int


def _heads(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the range of KV heads that a tensor-parallel rank stores."""
    start = rank * total // ranks
    return start, max(start + 1, (rank + 1) * total // ranks)


def _fields(
    model: Model, memory: _Memory, group: int, layers: list[int], heads: tuple[int, int]
) -> Iterator[Field]:
    """Yield the fields of one cache group with attention on one rank."""
    settings, pages, block = memory
    kernels, held = settings.kernels, heads[1] - heads[0]
    tokens = settings.block_size // kernels
    shape = (len(layers), pages * kernels, held, tokens, model.entry_bytes)
    step = _strides(settings, shape, block)
    split = ((kernels, step.block),) if kernels > 1 else ()
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
                tokens=axis(*split, (tokens, step.token)),
                shard=axis((held, step.head)),
                shard_range=heads,
            )
            offset += elements * item


def _index_fields(
    model: Model, memory: _Memory, layers: list[int], latents: int
) -> Iterator[Field]:
    """Yield the fields of the layers' indexes on one rank, which are in the first cache group."""
    settings, pages, block = memory
    kernels = settings.kernels
    tokens = settings.block_size // kernels
    shape = (len(layers), pages * kernels, 1, tokens, model.index_bytes)
    step = _strides(settings, shape, block)
    split = ((kernels, step.block),) if kernels > 1 else ()
    start = latents if settings.layout.startswith("B") else latents * pages
    for index, layer in enumerate(layers):
        offset = start + index * step.layer
        for name, unit in model.index_parts.items():
            yield Field(
                key=f"layers.{layer}.indexer/{name}",
                group=0,
                region=0,
                offset=offset,
                page_stride=kernels * step.block,
                pages=pages,
                dtype="uint8",
                unit=unit,
                tokens=axis(*split, (tokens, unit)),
                shard=axis((1, unit)),
                shard_range=(0, 1),
            )
            offset += tokens * unit


def _state_fields(
    state: RecurrentState, memory: _Memory, group: int, layers: list[int], page: int, tp: int
) -> Iterator[Field]:
    """Yield the fields of one cache group with states on one rank."""
    settings, pages, block = memory
    step = _strides(settings, (len(layers), pages, 1, 1, page), block)
    item, element = ELEMENT_BYTES[state.input_dtype], ELEMENT_BYTES[state.dtype]
    shares = [part.share(settings.tp, tp) for part in state.channels]
    row = sum(stop - start for start, stop in shares) * item
    heads = state.heads // settings.tp
    field = partial(Field, group=group, region=0, page_stride=step.block, pages=pages)
    for index, layer in enumerate(layers):
        key, offset = f"layers.{layer}.mixer", index * step.layer
        for part, (start, stop) in zip(state.channels, shares, strict=True):
            yield field(
                key=f"{key}/conv/{part.name}",
                offset=offset,
                dtype=state.input_dtype,
                unit=item,
                shard=axis((stop - start, item)),
                shard_range=(start, stop),
                inner=(axis((state.columns, row)),),
            )
            offset += (stop - start) * item
        if heads:
            unit = state.elements * element
            yield field(
                key=f"{key}/ssm",
                offset=index * step.layer + state.columns * row,
                dtype=state.dtype,
                unit=unit,
                shard=axis((heads, unit)),
                shard_range=(tp * heads, (tp + 1) * heads),
            )
