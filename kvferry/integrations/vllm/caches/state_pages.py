"""How recurrent layers keep their state inside a page: one table, ``STATE_LAYOUTS``.

A page holds a layer's state tensors one after the other, without gaps: as a rule the convolution's
last inputs, channels by columns, and then the recurrence itself. vLLM's specs give each tensor's
shape on this rank; what each part of it is of the model's comes from the same arithmetic that vLLM
splits it with. Where that does not add up, a state moves as a whole.

Of a convolution with a kernel of K only K - 1 columns are the state: those with which the next
token is computed. Speculative decoding widens the tensor. Prefill kernels still write the first
K - 1 columns and read them from there; only after a step that verified drafts do they start
further on, and such a state is never handed over (``LayerFacts.kernel`` says how many they are).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.core.errors import LayoutError
from kvferry.core.layout import Field
from kvferry.integrations.vllm.caches.pages import Page, Pairs, ShardPosition

State = Callable[[Page], tuple[Field, ...]]

Part = tuple[str, tuple[int, int]]
"""A part of the convolution's channels: its name, and the range of the model's that is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """One of the tensors in a page: ``offset`` bytes from its start, dense."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    offset: int


def mamba1(page: Page) -> tuple[Field, ...]:
    """Mamba 1: channels of the convolution's input, and for each a row of state."""
    tensors = _tensors(page, 2)
    match page.spec.shapes:
        case ((_, _), (channels, _)):
            convolution = _convolution(page, tensors[0], (("x", _even(page, channels)),))
            return (*convolution, _recurrence(page, tensors[1])) if convolution else whole(page)
    return whole(page)


def mamba2(page: Page) -> tuple[Field, ...]:
    """Mamba 2: the convolution's x by heads, B and C by groups, and a state for each head."""
    tensors = _tensors(page, 2)
    match page.spec.shapes:
        case ((_, _), (heads, head, size)):
            channels = _channels(page)
            groups = _groups(page, channels - heads * head, size)
            if groups is None:
                return whole(page)
            parts = (("x", _even(page, heads * head)), ("B", groups), ("C", groups))
            convolution = _convolution(page, tensors[0], parts)
            return (*convolution, _recurrence(page, tensors[1])) if convolution else whole(page)
    return whole(page)


def delta(page: Page) -> tuple[Field, ...]:
    """Delta rules (gated delta net, KDA): q, k and v channels, and a (v, k) state for each head."""
    return _delta(page, rows_first=True)


def delta_transposed(page: Page) -> tuple[Field, ...]:
    """The same, each head's state stored as (k, v), whatever the spec's shape says."""
    return _delta(page, rows_first=False)


def short_conv(page: Page) -> tuple[Field, ...]:
    """Nothing but a convolution's input."""
    [tensor] = _tensors(page, 1)
    if len(tensor.shape) != 2:
        return whole(page)
    parts = (("x", _even(page, _channels(page))),)
    return _convolution(page, tensor, parts) or whole(page)


def linear(page: Page) -> tuple[Field, ...]:
    """Linear attention: nothing but a matrix for each head."""
    [tensor] = _tensors(page, 1)
    return (_recurrence(page, tensor),) if len(tensor.shape) == 3 else whole(page)


STATE_LAYOUTS: Mapping[str, State] = {
    "MAMBA1_ATTN": mamba1,
    "MAMBA1_ATTN/cpu": mamba1,
    "MAMBA2_ATTN": mamba2,
    "MAMBA2_ATTN/cpu": mamba2,
    "SHORT_CONV_ATTN": short_conv,
    "SHORT_CONV_ATTN/cpu": short_conv,
    "PLE_SHORT_CONV_ATTN": short_conv,
    "LINEAR_ATTN": linear,
    "BAILING_LINEAR_ATTN": linear,
    "GDN_ATTN": delta,
    # The CPU kernels take the tensor as (heads, k, v): ops/cpu/gdn_attention.py, `ssm_state.view`.
    "GDN_ATTN/cpu": delta_transposed,
    "KIMI_K3_KDA": delta,
    "KIMI_K3_KDA_ROCM": delta,
}
"""What is known about the inside of a state, by ``LayerFacts.backend``."""


def whole(page: Page) -> tuple[Field, ...]:
    """A state whose inside is unknown: it moves as a whole, between engines that split it alike.

    Its key says whose kernels it is for and which shapes it has, so that two engines that order it
    differently never meet.
    """
    shapes = ", ".join(
        f"{tensor.dtype} {'x'.join(map(str, tensor.shape))}" for tensor in _every_tensor(page)
    )
    position = _position(page)
    return (
        page.field(
            f"state[{page.facts.backend}: {shapes}]",
            unit=page.spec.state_content_size_bytes,
            shard=(position.tp, position.tp + 1),
            dtype="uint8",
        ),
    )


def _delta(page: Page, *, rows_first: bool) -> tuple[Field, ...]:
    tensors = _tensors(page, 2)
    match page.spec.shapes:
        case ((_, _), (heads, head, _)):
            value = heads * head
            key, rest = divmod(_channels(page) - value, 2)
            if rest or key <= 0:
                return whole(page)
            widths = ("q", key), ("k", key), ("v", value)
            parts = [(name, _even(page, width)) for name, width in widths]
            convolution = _convolution(page, tensors[0], parts)
            recurrence = _recurrence(page, tensors[1], rows_first=rows_first)
            return (*convolution, recurrence) if convolution else whole(page)
    return whole(page)


def _tensors(page: Page, count: int) -> list[_Tensor]:
    """The tensors of a state that has so many.

    Raises:
        LayoutError: there are more. As far as vLLM knows them, they keep recent inputs from which
            the state has yet to be made (ReplaySSM, RecoverSSM), and their cursors are in no page.
    """
    tensors = _every_tensor(page)
    if len(tensors) > count:
        raise LayoutError(
            f"layer {page.layer!r}: its state has {len(tensors)} tensors, and {page.facts.backend} "
            f"knows {count}: what a state needs beside them cannot be handed over; run without "
            "--use-replayssm"
        )
    return tensors


def _every_tensor(page: Page) -> list[_Tensor]:
    tensors: list[_Tensor] = []
    offset = 0
    for shape, dtype in zip(page.spec.shapes, page.spec.dtypes, strict=True):
        name = str(dtype).removeprefix("torch.")
        tensors.append(_Tensor(shape=shape, dtype=name, itemsize=dtype.itemsize, offset=offset))
        offset += math.prod(shape) * dtype.itemsize
    return tensors


def _position(page: Page) -> ShardPosition:
    """Among whom a state is shared out: among nobody where every rank holds all of it."""
    return ShardPosition() if page.spec.tp_replicated else page.position


def _even(page: Page, here: int) -> tuple[int, int]:
    """The range of what is dealt out evenly, so many to each rank."""
    rank = _position(page).tp
    return rank * here, (rank + 1) * here


def _channels(page: Page) -> int:
    """How many channels the convolution has on this rank."""
    channels: int = page.spec.shapes[0][0 if page.facts.channels_first else 1]
    return channels


def _groups(page: Page, channels: int, size: int) -> tuple[int, int] | None:
    """The range of the channels of B, and of C, that are here; ``None`` if it cannot be told.

    vLLM deals groups out evenly, or, if there is but one, copies it to every rank; it refuses all
    else. The specs cannot tell one copied from one of several.
    """
    here, rest = divmod(channels, 2 * size)
    if rest or here < 1:
        return None
    ranks = _position(page).tp_size
    total = page.facts.groups or (here if ranks == 1 else 0)
    if total == here * ranks:
        return _even(page, here * size)
    return (0, size) if total == here == 1 else None


def _columns(page: Page, width: int) -> int | None:
    """How many columns of the convolution's tensor are its state; ``None`` if it cannot be told."""
    scratch = page.spec.num_speculative_blocks
    if not page.facts.kernel:
        return None if scratch or width < 1 else width
    columns = page.facts.kernel - 1
    return columns if columns >= 1 and width - columns in (0, scratch) else None


def _convolution(page: Page, tensor: _Tensor, parts: Sequence[Part]) -> tuple[Field, ...]:
    """The fields of a convolution's parts, one after the other; none if they do not add up."""
    channels = _channels(page)
    item, width = tensor.itemsize, math.prod(tensor.shape) // channels
    columns = _columns(page, width)
    if columns is None or channels != sum(stop - start for _, (start, stop) in parts):
        return ()
    step, column = (width * item, item) if page.facts.channels_first else (item, channels * item)
    fields: list[Field] = []
    offset = tensor.offset
    for name, (start, stop) in parts:
        fields.append(
            page.field(
                f"conv/{name}",
                offset=offset,
                unit=item,
                heads=((stop - start, step),),
                inner=((columns, column),),
                shard=(start, stop),
                dtype=tensor.dtype,
            )
        )
        offset += (stop - start) * step
    return tuple(fields)


def _recurrence(page: Page, tensor: _Tensor, *, rows_first: bool = True) -> Field:
    """The recurrent state of every head: dense, in the order of its shape or column by column."""
    heads, *inside = tensor.shape
    item = tensor.itemsize
    unit = math.prod(inside) * item
    inner: Pairs = ()
    if not rows_first:
        rows, columns = inside
        inner = ((rows, item), (columns, rows * item))
    return page.field(
        "ssm",
        offset=tensor.offset,
        unit=unit if rows_first else item,
        heads=((heads, unit),),
        inner=inner,
        shard=_even(page, heads),
        dtype=tensor.dtype,
    )
