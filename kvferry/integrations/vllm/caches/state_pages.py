"""How recurrent layers, by the table ``STATE_PACKINGS``, and rings fill a page.

A page holds a layer's state tensors one after the other, without gaps: usually the last inputs of
the layer's convolution (a column for each token, with an element for each channel), then the
recurrent state. vLLM's specs give the shape of each tensor on this rank. If the numbers of
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
from typing import TYPE_CHECKING

from kvferry.core.errors import LayoutError
from kvferry.core.layout import Field
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.caches.pages import Page, ShardPosition, without_memory

if TYPE_CHECKING:
    import torch

Fields = tuple[Field, ...]

Part = tuple[str, tuple[int, int]]
"""A part of the convolution's channels, such as x, B or C, and the model's [first, last) here."""


def mamba1(page: Page) -> Fields:
    """Return the fields of a Mamba 1 state: the convolution's input, and a state per channel."""
    match page.spec.shapes:
        case ((_, _), (channels, _)):
            return _both(page, (("x", _even_range(page, channels)),))
    return ()


def mamba2(page: Page) -> Fields:
    """Return the fields of a Mamba 2 state: x by heads, B and C by groups, a matrix per head."""
    match page.spec.shapes:
        case ((_, _), (heads, head, size)):
            groups = _groups(page, _channels(page) - heads * head, size)
            if groups is not None:
                x = _even_range(page, heads * head)
                return _both(page, (("x", x), ("B", groups), ("C", groups)))
    return ()


def delta(page: Page, *, rows_first: bool = True) -> Fields:
    """Return the fields of a delta rule's state: the convolution's q, k and v, a matrix per head.

    Each matrix has the axes (v, k), or unless ``rows_first`` (k, v).
    """
    match page.spec.shapes:
        case ((_, _), (heads, head, _)):
            value = heads * head
            key, rest = divmod(_channels(page) - value, 2)
            if not rest and key > 0:
                widths = ("q", key), ("k", key), ("v", value)
                parts = [(name, _even_range(page, width)) for name, width in widths]
                return _both(page, parts, rows_first=rows_first)
    return ()


def delta_transposed(page: Page) -> Fields:
    """Return the fields of a state as in ``delta``, but with the matrices stored as (k, v).

    vLLM 0.33 computes float16 with the kernels for GPUs, which store (v, k), on CPUs too; vLLM 0.32
    refuses float16 there (``cpu_gdn_attention_core`` in ``ops/cpu/gdn_attention.py``).
    """
    return delta(page, rows_first=str(page.spec.dtypes[0]) == "torch.float16")


def short_conv(page: Page) -> Fields:
    """Return the fields of a state that is only a convolution's input."""
    is_expected = len(page.spec.shapes[0]) == 2
    return _convolution(page, (("x", _even_range(page, _channels(page))),)) if is_expected else ()


def linear(page: Page) -> Fields:
    """Return the fields of a linear attention's state, which is only a matrix per head."""
    return (_recurrence(page),) if len(page.spec.shapes[0]) == 3 else ()


STATE_PACKINGS: Mapping[str, Callable[[Page], Fields]] = {
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
"""By ``LayerFacts.backend``, what returns the fields of a page; none if the shapes of its tensors
are unexpected. The states of other backends are opaque.
"""


def state_fields(page: Page) -> Fields:
    """Return the fields of a recurrent layer's pages; one for a whole page if it is not known.

    Raises:
        LayoutError: A state has more tensors than ``STATE_PACKINGS`` describes for the backend. The
            further ones hold recent inputs from which vLLM has yet to compute the state (ReplaySSM,
            RecoverSSM); the page does not contain the current positions in them.
    """
    packing, tensors = STATE_PACKINGS.get(page.facts.backend), len(page.spec.shapes)
    if packing is None:
        return (_opaque(page),)
    known = 1 if packing in (short_conv, linear) else 2
    if tensors > known:
        raise LayoutError(
            f"layer {page.layer!r}: its state has {tensors} tensors, and {page.facts.backend} "
            f"knows {known}: what a state needs beside them cannot be handed over; run "
            "without --use-replayssm"
        )
    return packing(page) or (_opaque(page),)


def ring_fields(page: Page) -> Fields:
    """Return the single field of a layer's rings (``CircularBufferSpec``).

    The entry of token t is in slot ``t % capacity`` of the request's only page, the same on every
    tensor-parallel rank: ``_ring_slot_mapping_kernel`` in ``deepseek_v41/compressor.py``,
    ``circular_qsa_slot_mapping`` in ``qwen4_exp/common/qsa_cache.py`` and ``Glm5NextTailCache`` in
    ``glm5next/common/attention.py``. So after equally many tokens, the same token is in the same
    slot on every engine whose ring has the same capacity, and a page moves as a whole. Engines
    whose rings have another capacity have no field with the same key, so the handshake refuses the
    pair.
    """
    heads, entries, content = page.block.shape
    dtype = str(page.block.dtype).removeprefix("torch.")
    name = (
        f"ring[{page.facts.backend}: {page.kernels * entries} slots of {dtype} {heads}x{content}]"
        f"{versions.opaque_release()}"
    )
    return (page.field(name, page.whole.transpose(0, 1), "inner inner inner unit"),)


def _opaque(page: Page) -> Field:
    """Return a single field that covers a whole state; its key has all that engines must share."""
    import torch

    shapes = ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))}"
        for tensor, _ in _tensors(page)
    )
    position = _sharing(page)
    return page.field(
        f"state[{page.facts.backend}: {shapes}]{versions.opaque_release()}",
        without_memory([page.spec.state_content_size_bytes], torch.uint8),
        "unit",
        shard=(position.tp, position.tp + 1),
    )


def _tensors(page: Page) -> list[tuple[torch.Tensor, int]]:
    """Return all tensors of a state, and the offset of each in the page, in bytes."""
    tensors, offset = [], 0
    for shape, dtype in zip(page.spec.shapes, page.spec.dtypes, strict=True):
        tensors.append((without_memory(shape, dtype), offset))
        offset += math.prod(shape) * dtype.itemsize
    return tensors


def _sharing(page: Page) -> ShardPosition:
    """Return this rank's position, or ``ShardPosition()`` if every rank stores the whole state."""
    return ShardPosition() if page.spec.tp_replicated else page.position


def _even_range(page: Page, here: int) -> tuple[int, int]:
    """Return this rank's range [first, last) where each rank stores ``here`` heads or channels."""
    rank = _sharing(page).tp
    return rank * here, (rank + 1) * here


def _channels(page: Page) -> int:
    """Return how many channels the convolution has on this rank."""
    channels: int = page.spec.shapes[0][0 if page.facts.channels_first else 1]
    return channels


def _groups(page: Page, channels: int, size: int) -> tuple[int, int] | None:
    """Return the range of the model's B channels here; C's is the same. ``None`` if unknown.

    ``channels`` is how many B and C have together on this rank, ``size`` how many a group has. vLLM
    distributes groups evenly or, if there is only one, copies it to every rank.
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
    """Return how many columns, without scratch of drafts, are handed over; ``None`` if unknown."""
    scratch = page.spec.num_speculative_blocks
    if not page.facts.kernel:
        return None if scratch or width < 1 else width
    columns = page.facts.kernel - 1
    return columns if columns >= 1 and width - columns in (0, scratch) else None


def _both(page: Page, parts: Sequence[Part], *, rows_first: bool = True) -> Fields:
    """Return the fields of a convolution's input and of the recurrent state behind it."""
    convolution = _convolution(page, parts)
    return (*convolution, _recurrence(page, rows_first=rows_first)) if convolution else ()


def _convolution(page: Page, parts: Sequence[Part]) -> Fields:
    """Return the fields of a convolution's input, by part; empty if their channels do not fit."""
    tensor, offset = _tensors(page)[0]
    if not page.facts.channels_first:
        tensor = tensor.T
    columns = _columns(page, tensor.shape[1])
    sizes = [stop - start for _, (start, stop) in parts]
    if columns is None or len(tensor) != sum(sizes):
        return ()
    return tuple(
        page.field(f"conv/{name}", part[:, :columns], "head inner", offset=offset, shard=shard)
        for (name, shard), part in zip(parts, tensor.split(sizes), strict=True)
    )


def _recurrence(page: Page, *, rows_first: bool = True) -> Field:
    """Return the field of the recurrent state, its matrices stored by rows or by columns."""
    tensor, offset = _tensors(page)[-1]
    shard = _even_range(page, len(tensor))
    if rows_first:
        return page.field("ssm", tensor.flatten(1), "head unit", offset=offset, shard=shard)
    heads, rows, columns = tensor.shape
    stored = tensor.view(heads, columns, rows).transpose(1, 2)
    return page.field("ssm", stored, "head inner inner", offset=offset, shard=shard)
