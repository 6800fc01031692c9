"""How recurrent layers store their state in a page: the table ``STATE_PACKINGS``.

A page holds a layer's state tensors one after the other, without gaps: usually the last inputs of
the layer's convolution (a column for each token, with an element for each channel), then the
recurrent state. vLLM's specs give the shape of each tensor on this rank. Which part of the model's
state a tensor holds follows from the way in which vLLM splits states among ranks. If the numbers of
channels, heads or columns contradict each other, the state is opaque: one field covers the whole
page, and only engines that split the state in the same way can exchange it.

If the convolution's kernel has the width K (``LayerFacts.kernel``), only K - 1 columns are state:
the inputs that the next token needs. Speculative decoding widens the tensor, but prefill kernels
still write and read the first K - 1 columns. Kernels start at a later column only after a step that
verified drafts, and such a state is never handed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.core.errors import LayoutError
from kvferry.core.layout import Field
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.caches.pages import Page, Pairs, ShardPosition

Part = tuple[str, tuple[int, int]]
"""A part of the convolution's channels, such as x, B or C.

Its name, and the range [first, last) of the model's channels of this part that this rank stores.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """One of the tensors of a state, contiguous in the page.

    Attributes:
        shape: The tensor's shape on this rank.
        dtype: Element type, by torch's name.
        itemsize: Bytes of an element.
        offset: Bytes from the page's start.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    offset: int


def mamba1(page: Page) -> tuple[Field, ...]:
    """Return the fields of a Mamba 1 state: the convolution's input, and a state per channel."""
    tensors = _tensors(page, 2)
    match page.spec.shapes:
        case ((_, _), (channels, _)):
            convolution = _convolution(page, tensors[0], (("x", _even_range(page, channels)),))
            return (
                (*convolution, _recurrence(page, tensors[1])) if convolution else opaque_state(page)
            )
    return opaque_state(page)


def mamba2(page: Page) -> tuple[Field, ...]:
    """Return the fields of a Mamba 2 state: the convolution's input, and a matrix for each head.

    The input's channels have the parts x, B and C. x is split among ranks by heads, B and C by
    groups.
    """
    tensors = _tensors(page, 2)
    match page.spec.shapes:
        case ((_, _), (heads, head, size)):
            channels = _channels(page)
            groups = _groups(page, channels - heads * head, size)
            if groups is None:
                return opaque_state(page)
            parts = (("x", _even_range(page, heads * head)), ("B", groups), ("C", groups))
            convolution = _convolution(page, tensors[0], parts)
            return (
                (*convolution, _recurrence(page, tensors[1])) if convolution else opaque_state(page)
            )
    return opaque_state(page)


def delta(page: Page) -> tuple[Field, ...]:
    """Return the fields of a delta rule's state: the convolution's input, and a matrix per head.

    The input's channels have the parts q, k and v. Each matrix is stored with the axes (v, k).
    Delta rules are those of gated delta net and KDA.
    """
    return _delta(page, rows_first=True)


def delta_transposed(page: Page) -> tuple[Field, ...]:
    """Return the fields of a state as in ``delta``, but with the matrices stored as (k, v).

    vLLM 0.33 computes float16 with the kernels for GPUs, which store (v, k), on CPUs too; vLLM 0.32
    refuses float16 there (``cpu_gdn_attention_core`` in ``ops/cpu/gdn_attention.py``).
    """
    return _delta(page, rows_first=str(page.spec.dtypes[0]) == "torch.float16")


def short_conv(page: Page) -> tuple[Field, ...]:
    """Return the fields of a state that is only a convolution's input."""
    [tensor] = _tensors(page, 1)
    if len(tensor.shape) != 2:
        return opaque_state(page)
    parts = (("x", _even_range(page, _channels(page))),)
    return _convolution(page, tensor, parts) or opaque_state(page)


def linear(page: Page) -> tuple[Field, ...]:
    """Return the fields of a linear attention's state, which is only a matrix per head."""
    [tensor] = _tensors(page, 1)
    return (_recurrence(page, tensor),) if len(tensor.shape) == 3 else opaque_state(page)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePacking:
    """How one backend stores its states in a page.

    Attributes:
        inside: What a page holds, as text for docs/coverage.md.
        fields: Returns the fields of a page; one field for the whole page (opaque) if the shapes of
            the tensors are not as expected.
    """

    inside: str
    fields: Callable[[Page], tuple[Field, ...]]


MAMBA1 = StatePacking(
    inside="Mamba 1: channels of the convolution's input, and for each a row of state.",
    fields=mamba1,
)
MAMBA2 = StatePacking(
    inside="Mamba 2: the convolution's x by heads, B and C by groups, and a state for each head.",
    fields=mamba2,
)
SHORT_CONV = StatePacking(inside="Nothing but a convolution's input.", fields=short_conv)
LINEAR = StatePacking(inside="Linear attention: nothing but a matrix for each head.", fields=linear)
DELTA = StatePacking(
    inside="Delta rules (gated delta net, KDA): q, k and v channels, and a (v, k) state for each "
    "head.",
    fields=delta,
)

STATE_PACKINGS: Mapping[str, StatePacking] = {
    "MAMBA1_ATTN": MAMBA1,
    "MAMBA1_ATTN/cpu": MAMBA1,
    "MAMBA2_ATTN": MAMBA2,
    "MAMBA2_ATTN/cpu": MAMBA2,
    "SHORT_CONV_ATTN": SHORT_CONV,
    "SHORT_CONV_ATTN/cpu": SHORT_CONV,
    "PLE_SHORT_CONV_ATTN": SHORT_CONV,
    "LINEAR_ATTN": LINEAR,
    "BAILING_LINEAR_ATTN": LINEAR,
    "GDN_ATTN": DELTA,
    # The CPU kernels take the tensor as (heads, k, v): ops/cpu/gdn_attention.py, `ssm_state.view`.
    "GDN_ATTN/cpu": StatePacking(
        inside="The same, each head's state stored as (k, v), whatever the spec's shape says.",
        fields=delta_transposed,
    ),
    "KIMI_K3_KDA": DELTA,
    "KIMI_K3_KDA_ROCM": DELTA,
}
"""State packings by ``LayerFacts.backend``. The states of other backends are opaque."""


def state_fields(page: Page) -> tuple[Field, ...]:
    """Return the fields of a recurrent layer's pages.

    If the content of the pages is not known, a single field covers a whole page (opaque).

    Args:
        page: The layer's pages.

    Raises:
        LayoutError: A page has more tensors than ``STATE_PACKINGS`` describes for the backend.
    """
    packing = STATE_PACKINGS.get(page.facts.backend)
    return packing.fields(page) if packing else opaque_state(page)


def opaque_state(page: Page) -> tuple[Field, ...]:
    """Return a single field that covers a whole state, whose content is not known.

    Only engines that split the state among ranks in the same way can exchange the field. Its key
    contains the backend, the tensors' types and shapes, and vLLM's release. So engines that may
    store the state in other ways have no field with this key.

    Args:
        page: The layer's pages.
    """
    shapes = ", ".join(
        f"{tensor.dtype} {'x'.join(map(str, tensor.shape))}" for tensor in _every_tensor(page)
    )
    position = _sharing(page)
    return (
        page.field(
            f"state[{page.facts.backend}: {shapes}]{versions.opaque_release()}",
            unit=page.spec.state_content_size_bytes,
            shard=(position.tp, position.tp + 1),
            dtype="uint8",
        ),
    )


def _delta(page: Page, *, rows_first: bool) -> tuple[Field, ...]:
    """Return the fields of a delta rule's state.

    Args:
        page: The layer's pages.
        rows_first: Whether the heads' matrices are stored as (v, k); otherwise as (k, v).
    """
    tensors = _tensors(page, 2)
    match page.spec.shapes:
        case ((_, _), (heads, head, _)):
            value = heads * head
            key, rest = divmod(_channels(page) - value, 2)
            if rest or key <= 0:
                return opaque_state(page)
            widths = ("q", key), ("k", key), ("v", value)
            parts = [(name, _even_range(page, width)) for name, width in widths]
            convolution = _convolution(page, tensors[0], parts)
            recurrence = _recurrence(page, tensors[1], rows_first=rows_first)
            return (*convolution, recurrence) if convolution else opaque_state(page)
    return opaque_state(page)


def _tensors(page: Page, count: int) -> list[_Tensor]:
    """Return the tensors of a state, and refuse a state of more than ``count`` tensors.

    Raises:
        LayoutError: There are more tensors. The further ones hold recent inputs from which vLLM has
            yet to compute the state (ReplaySSM, RecoverSSM). Such a state cannot be handed over,
            because the page does not contain the current positions in these tensors.
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
    """Return all tensors of a state, in their order in the page."""
    tensors: list[_Tensor] = []
    offset = 0
    for shape, dtype in zip(page.spec.shapes, page.spec.dtypes, strict=True):
        name = str(dtype).removeprefix("torch.")
        tensors.append(_Tensor(shape=shape, dtype=name, itemsize=dtype.itemsize, offset=offset))
        offset += math.prod(shape) * dtype.itemsize
    return tensors


def _sharing(page: Page) -> ShardPosition:
    """Return this rank's position, or ``ShardPosition()`` if every rank stores the whole state."""
    return ShardPosition() if page.spec.tp_replicated else page.position


def _even_range(page: Page, here: int) -> tuple[int, int]:
    """Return this rank's range [first, last) of heads or channels that ranks split evenly.

    Args:
        page: The layer's pages.
        here: How many of these heads or channels each rank stores.
    """
    rank = _sharing(page).tp
    return rank * here, (rank + 1) * here


def _channels(page: Page) -> int:
    """Return how many channels the convolution has on this rank."""
    channels: int = page.spec.shapes[0][0 if page.facts.channels_first else 1]
    return channels


def _groups(page: Page, channels: int, size: int) -> tuple[int, int] | None:
    """Return the range of the model's B channels that this rank stores; C's range is the same.

    vLLM distributes groups evenly or, if there is only one, copies it to every rank. The specs do
    not show whether a rank's group is such a copy.

    Args:
        page: The layer's pages.
        channels: How many channels B and C have together on this rank.
        size: Channels per group.

    Returns:
        The first channel and the one after the last; ``None`` if the range cannot be determined.
    """
    here, rest = divmod(channels, 2 * size)
    if rest or here < 1:
        return None
    ranks = _sharing(page).tp_size
    total = page.facts.groups or (here if ranks == 1 else 0)
    if total == here * ranks:
        return _even_range(page, here * size)
    return (0, size) if total == here == 1 else None


def _columns(page: Page, width: int) -> int | None:
    """Return how many columns of the convolution's input must be handed over; ``None`` if unknown.

    The tensor's further columns are scratch memory of speculative decoding.

    Args:
        page: The layer's pages.
        width: How many columns the tensor has.
    """
    scratch = page.spec.num_speculative_blocks
    if not page.facts.kernel:
        return None if scratch or width < 1 else width
    columns = page.facts.kernel - 1
    return columns if columns >= 1 and width - columns in (0, scratch) else None


def _convolution(page: Page, tensor: _Tensor, parts: Sequence[Part]) -> tuple[Field, ...]:
    """Return the fields of a convolution's input, one for each part of its channels.

    Args:
        page: The layer's pages.
        tensor: The tensor of the convolution's input.
        parts: The parts of the channels, in their order in memory.

    Returns:
        The fields; empty if the parts have more or fewer channels than the tensor, or if it is not
        known which columns are state.
    """
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
    """Return the field of the recurrent state: a matrix for each head, or a row for each channel.

    Args:
        page: The layer's pages.
        tensor: The tensor of the recurrent state, heads or channels first.
        rows_first: Whether each matrix is stored row by row; otherwise column by column.
    """
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
        shard=_even_range(page, heads),
        dtype=tensor.dtype,
    )
