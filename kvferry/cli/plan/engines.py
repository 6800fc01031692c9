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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct, structs

from kvferry.cli.formatting import grouped
from kvferry.cli.plan.model import Model
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
WHOLE = "LB"  # prefix of the orders in which a layer's pages are contiguous and follow each other
SCATTERED = "LHBNC"
"""The order in which a block is not in one piece even within a layer, so it has no room for a
state."""
ALIASES: Mapping[str, str] = {"HND": "LBHNC", "NHD": "LBNHC"}
"""Other names of two orders, which say only whether heads or tokens are outermost in a page."""

Ranks = Annotated[int, Meta(ge=1, le=1 << 10)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 16)]
Reach = Annotated[int, Meta(ge=0, lt=1 << 40)]
SHOWN = ("tp", "pp", "block_size", "layout")  # the settings that are always printed

ADDRESS = 1 << 40
"""The address of every computed buffer. Any address will do, since no memory is read."""
UNEVEN = 1.5
"""If the largest kind of layers is less than this many times as large as the smallest, vLLM pads
the smaller groups instead of splitting the larger ones
(``_get_kv_cache_groups_uniform_page_size``)."""
ALIGNMENT = 16
"""If pages are enlarged for states, they hold a multiple of this many tokens: the smallest block of
the kernels of FLASH_ATTN, FLASHINFER and TRITON_ATTN."""
LATENT_ALIGNMENT = 128  # the same for latents (MLA)


class SettingsError(KVFerryError):
    """A setting or an option is refused; the message has the allowed values."""


class EngineError(KVFerryError):
    """A model does not fit the ranks that were set, or a file does not describe an engine."""


class PlanSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one engine; pipeline index p and tensor index t are rank ``p * tp + t``.

    Raises:
        SettingsError: No engine can have these settings, whatever the model.
    """

    tp: Ranks = 1
    pp: Ranks = 1
    dcp: Ranks = 1
    interleave: Tokens = 1
    block_size: Tokens = 16
    layout: Annotated[str, Meta(pattern=f"^({'|'.join(ORDERS)})$")] = "LBNHC"
    kernel_block: Tokens = 0

    def __post_init__(self) -> None:
        if self.tp * self.pp > MAX_RANKS:
            raise SettingsError(f"tp={self.tp},pp={self.pp} are more than {MAX_RANKS} ranks")
        for name, part, whole in (
            ("dcp", self.dcp, "tp"),  # tokens are spread over ranks that share the heads
            ("interleave", self.interleave, "block_size"),
            ("kernel_block", self.kernel_block, "block_size"),
        ):
            if part and getattr(self, whole) % part:
                raise SettingsError(f"{name}={part} does not divide {whole}={getattr(self, whole)}")
        if self.kernels > 1 and not self.layout.startswith(WHOLE):
            raise SettingsError(
                f"layout={self.layout} scatters the pages of a layer, so kernels cannot cut them: "
                f"use block_size={self.kernel_block} or a layout that starts with {WHOLE}"
            )

    @property
    def kernels(self) -> int:
        """Number of blocks into which kernels split a page."""
        return self.block_size // self.kernel_block if self.kernel_block else 1

    def __str__(self) -> str:
        """Return the text that ``parse`` reads; defaults are left out except those in ``SHOWN``."""
        own = {f.name: (getattr(self, f.name), f.default) for f in structs.fields(self)}
        return ",".join(f"{k}={v}" for k, (v, usual) in own.items() if k in SHOWN or v != usual)


def parse(text: str) -> PlanSettings:
    """Return the settings of one engine: ``key=value`` pairs, separated by commas."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    values = {key.strip().replace("-", "_"): value.strip() for key, _, value in pairs}
    if order := values.get("layout", "").upper():
        values["layout"] = ALIASES.get(order, order)
    try:
        if len(values) < len(pairs):
            raise msgspec.ValidationError("a setting stands twice")
        return msgspec.convert(values, PlanSettings, strict=False)
    except msgspec.ValidationError as exc:
        known = ", ".join(f.name for f in structs.fields(PlanSettings))
        raise SettingsError(
            f"{text[:64]!r}: {exc}. Write key=value pairs with commas between; the keys are {known}"
        ) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The layouts of all ranks of an engine; also the schema of the JSON files.

    ``coordinates`` are empty if unknown. ``windows`` and ``chunks`` have the tokens of each cache
    group's sliding window and of its chunks; 0, or empty, for none.
    """

    ranks: Annotated[tuple[Layout, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    coordinates: tuple[Coordinates, ...] = ()
    windows: tuple[Reach, ...] = ()
    chunks: tuple[Reach, ...] = ()

    def __post_init__(self) -> None:
        groups = {len(layout.groups) for layout in self.ranks}
        if len(groups) > 1:
            raise EngineError("the ranks of an engine have unlike numbers of groups")
        for what, wanted in (
            ("coordinates", {len(self.ranks)}),
            ("windows", groups),
            ("chunks", groups),
        ):
            if (given := len(getattr(self, what))) not in wanted | {0}:
                raise EngineError(f"there are {given} {what}, where {max(wanted)} are needed")

    def with_reach(self, model: Model, lengths: Sequence[int]) -> Engine:
        """Return an engine whose cache groups have windows, or chunks, of these lengths."""
        if model.in_chunks:
            return replace(self, chunks=tuple(lengths))
        return replace(self, windows=tuple(lengths))

    def reach(self, group: int) -> tuple[int, int]:
        """Return the tokens of a cache group's sliding window, and of its chunks; 0 for none."""
        windows, chunks = (given or {group: 0} for given in (self.windows, self.chunks))
        return windows[group], chunks[group]

    def first_token(self, group: int, tokens: int) -> int:
        """Return the first token of a request to which the token after its last attends."""
        window, chunk = self.reach(group)
        if chunk:
            return tokens // chunk * chunk
        return max(0, tokens - window + 1) if window else 0


def read_engine(path: Path) -> Engine:
    """Return the engine that a JSON file describes."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Engine)
    except OSError as exc:
        raise EngineError(f"{path} cannot be read: {exc.strerror}") from exc
    except (EngineError, *DECODE_ERRORS) as exc:
        raise EngineError(f"{path} does not describe an engine's layouts: {exc}") from exc


def write_engine(path: Path, engine: Engine) -> None:
    """Write an engine's layouts to a JSON file that ``read_engine`` reads."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(engine) + b"\n")
    except OSError as exc:
        raise EngineError(f"{path} cannot be written: {exc.strerror}") from exc


def fit_states(model: Model, settings: PlanSettings) -> PlanSettings:
    """Return settings whose pages of attention have room for a state, as vLLM enlarges them.

    See ``Platform._align_hybrid_block_size`` in vLLM's ``platforms/interface.py``.
    """
    if model.state is None:
        return settings
    token = max(1, model.kv_heads // settings.tp) * model.entry_bytes
    step = max(settings.block_size, LATENT_ALIGNMENT if model.latent else ALIGNMENT)
    size = step * -(-model.state.nbytes(settings.tp) // (step * token))
    enlarged = max(settings.block_size, ALIGNMENT * -(-size // ALIGNMENT))
    return structs.replace(settings, block_size=enlarged)


def check_spread(model: Model, settings: PlanSettings) -> None:
    """Refuse settings with more ranks than a model can be distributed over."""
    tp, heads, state = settings.tp, model.kv_heads, model.state
    if model.attention_heads % tp:
        raise EngineError(f"tp={tp} does not divide the {model.attention_heads} attention heads")
    if state is not None:
        parts = [("heads", state.heads)]
        parts += [(f"units of {it.name}", it.units) for it in state.channels if it.units > 1]
        for what, count in parts:
            if count % tp:
                raise EngineError(f"tp={tp} does not divide a state's {count} {what}")
        if settings.layout == SCATTERED:
            raise EngineError(
                f"layout={SCATTERED} leaves no block in one piece, as a state needs: use another"
            )
    if heads % tp and tp % heads:
        raise EngineError(f"tp={tp} and {heads} KV heads: one of the two must divide the other")
    if settings.pp > model.layers:
        raise EngineError(f"pp={settings.pp} is more than the {model.layers} layers")
    if settings.dcp > max(1, tp // heads):
        raise EngineError(
            f"dcp={settings.dcp} spreads tokens over ranks that hold the same heads, and with "
            f"tp={tp} and {heads} KV heads there are {max(1, tp // heads)}"
        )


class _CacheGroup(NamedTuple):
    """Layers that share block ids, with the length of their window or chunks; 0 is none."""

    layers: list[int]
    length: int = 0
    holds_states: bool = False


def _groups(model: Model) -> list[_CacheGroup]:
    """Return the layers of one reach, or with states; vLLM splits frequent kinds (``UNEVEN``)."""
    by_length = grouped(model.windows, lambda layer: model.windows[layer])
    kinds = [_CacheGroup(layers, length) for length, layers in by_length.items()]
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
    """Return the layers of a pipeline rank; of n that remain, each rank before the last has one."""
    each, over = divmod(layers, pp)
    sizes = [each + (pp - 1 - over <= stage < pp - 1) for stage in range(pp)]
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


def make_engine(model: Model, settings: PlanSettings, tokens: int) -> Engine:
    """Return the layouts of an engine that runs a model, with room for a request of ``tokens``."""
    settings = fit_states(model, settings)
    check_spread(model, settings)
    groups = _groups(model)
    pages = 1 + sum(
        1 if group.holds_states else -(-tokens // (settings.block_size * settings.dcp))
        for group in groups
    )
    coordinates = tuple(
        Coordinates(pp=pp, tp=tp, dcp=tp % settings.dcp)
        for pp, tp in itertools.product(range(settings.pp), range(settings.tp))
    )
    ranks = tuple(_Rank(model, settings, pages, at).layout(groups) for at in coordinates)
    engine = Engine(ranks=ranks, coordinates=coordinates)
    return engine.with_reach(model, [group.length for group in groups])


class _Rank:
    def __init__(
        self, model: Model, settings: PlanSettings, pages: int, coordinates: Coordinates
    ) -> None:
        self._model, self._settings, self._pages, self._at = model, settings, pages, coordinates
        # If there are more ranks than heads, several ranks store the same head.
        start = coordinates.tp * model.kv_heads // settings.tp
        stop = max(start + 1, (coordinates.tp + 1) * model.kv_heads // settings.tp)
        self._heads = start, stop
        self._page = (stop - start) * settings.block_size * model.entry_bytes
        self._block = 0

    def layout(self, groups: Sequence[_CacheGroup]) -> Layout:
        model, settings = self._model, self._settings
        stage = _stage(model.layers, settings.pp, self._at.pp)
        here = [[layer for layer in group.layers if layer in stage] for group in groups]
        indexed = [layer for layer in model.indexed if layer in stage]
        latents = len(here[0]) * self._page
        index_page = settings.block_size * model.index_bytes
        self._block = max(map(len, here)) * self._page + len(indexed) * index_page
        context = ContextParallel(
            size=settings.dcp, rank=self._at.dcp, interleave=settings.interleave
        )
        paged = Group(kind=GroupKind.PAGED, block_tokens=settings.block_size, context=context)
        state = Group(kind=GroupKind.STATE, block_tokens=0)
        found = [
            self._states(n, layers) if group.holds_states else self._paged(n, layers)
            for n, (group, layers) in enumerate(zip(groups, here, strict=True))
        ]
        behind = latents if settings.layout.startswith("B") else latents * self._pages
        found.append(self._paged(0, indexed, index_start=behind))
        nbytes = max(1, self._block * self._pages)
        return Layout(
            regions=(Region(address=ADDRESS, nbytes=nbytes, kind=CUDA),),
            groups=tuple(state if group.holds_states else paged for group in groups),
            fields=tuple(itertools.chain(*found)),
        )

    def _strides(self, *extents: int) -> list[int]:
        """Return the bytes from one layer, block, head and token to the next, by their numbers.

        The last extent is the bytes of an entry.
        """
        stride, strides = 1, {}
        for name in reversed(self._settings.layout):
            strides[name] = stride
            stride *= extents["LBHNC".index(name)]
        if self._settings.layout.startswith("B"):
            strides["B"] = self._block  # the same for all groups
        return [strides[name] for name in "LBHN"]

    def _paged(
        self, group: int, layers: Sequence[int], index_start: int | None = None
    ) -> Iterator[Field]:
        """Yield the fields of K and V, or of latents; or the layers' indexes, from an offset.

        An index is as the connector's (``indexer`` in
        ``integrations/vllm/caches/attention_pages.py``): a block has all its tokens' values, then
        all their scales.
        """
        model, kernels, is_index = self._model, self._settings.kernels, index_start is not None
        item, tokens = ELEMENT_BYTES[model.dtype], self._settings.block_size // kernels
        parts = {name: elements * item for name, elements in model.parts.items()}
        if is_index:
            parts = dict(model.index_parts)
        heads = (0, 1) if is_index else self._heads
        held = heads[1] - heads[0]
        step, block, head, token = self._strides(
            len(layers), self._pages * kernels, held, tokens, sum(parts.values())
        )
        split = [(kernels, block)] * (kernels > 1)
        for n, layer in enumerate(layers):
            offset = (index_start or 0) + n * step
            for part, unit in parts.items():
                yield Field(
                    key=f"layers.{layer}.{'indexer' if is_index else 'attn'}/{part}",
                    group=group,
                    region=0,
                    offset=offset,
                    page_stride=kernels * block,
                    pages=self._pages,
                    dtype="uint8" if is_index else model.dtype,
                    unit=unit,
                    tokens=axis(*split, (tokens, unit if is_index else token)),
                    shard=axis((held, unit if is_index else head)),
                    shard_range=heads,
                )
                offset += unit * tokens if is_index else unit

    def _states(self, group: int, layers: Sequence[int]) -> Iterator[Field]:
        """Yield the fields of a cache group with states.

        Keys and axes are the connector's (``integrations/vllm/caches/state_pages.py``). The
        convolution's inputs have their channels innermost, as vLLM stores them by default.
        """
        state, tp, rank = self._model.state, self._settings.tp, self._at.tp
        if state is None:
            return
        step, block, *_ = self._strides(len(layers), self._pages, 1, 1, self._page)
        item, element = ELEMENT_BYTES[state.input_dtype], ELEMENT_BYTES[state.dtype]
        shares = [part.share(tp, rank) for part in state.channels]
        row = sum(stop - start for start, stop in shares) * item
        heads, matrix = state.heads // tp, state.elements * element
        field = partial(Field, group=group, region=0, page_stride=block, pages=self._pages)
        for n, layer in enumerate(layers):
            key, offset = f"layers.{layer}.mixer", n * step
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
                yield field(
                    key=f"{key}/ssm",
                    offset=n * step + state.columns * row,
                    dtype=state.dtype,
                    unit=matrix,
                    shard=axis((heads, matrix)),
                    shard_range=(rank * heads, (rank + 1) * heads),
                )
