"""Arithmetic of axes: windows into an axis, and the dims that two axes have in common.

An axis is a mixed-radix number whose digits are dims of (extent, stride), coarse to fine. Two axes
that hold the same entries can be walked together where the dims of one refine those of the other;
where they do not (3 x 4 against 4 x 3), the entries are enumerated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.core.layout import Axis
from kvferry.core.layout.fields import Dims
from kvferry.core.memory import I64Array

JointDims = tuple[tuple[int, int, int], ...]
"""(extent, local stride, remote stride) of dims that both sides have, in any order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrideWalk:
    """Entries of two axes side by side: every start, repeated along the dims.

    Attributes:
        local: (n,) int64, bytes from the first local entry of the axis to each start.
        remote: (n,) int64, bytes from the first remote entry of the axis to each start.
        dims: the dims that every start is repeated along.
    """

    local: I64Array
    remote: I64Array
    dims: JointDims


def axis_dims(axis: Axis) -> Dims:
    """Return the dims of a layout's axis, merged."""
    return merge_dims(tuple((dim.extent, dim.stride) for dim in axis))


def merge_dims(dims: Dims) -> Dims:
    """Return the same entries with as few dims as possible.

    Args:
        dims: coarse to fine.

    Returns:
        Coarse to fine; none has the extent 1, and no two neighbours could be one.
    """
    merged: list[tuple[int, int]] = []
    for extent, stride in dims:
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * stride:
            extent *= merged.pop()[0]
        merged.append((extent, stride))
    return tuple(merged)


def entry_offsets(dims: Dims, index: I64Array) -> I64Array:
    """Return where entries of an axis lie.

    Args:
        dims: the dims of the axis, merged.
        index: (n,) int64, index of each entry.

    Returns:
        (n,) int64, bytes from entry 0.
    """
    if len(dims) == 1:
        return index * dims[0][1]
    offsets = np.zeros(len(index), dtype=np.int64)
    for extent, stride in reversed(dims):
        offsets += index % extent * stride
        index = index // extent
    return offsets


def coarsen(dims: Dims, entries: int) -> Dims:
    """Return the dims of the axis whose entries are runs of ``entries`` entries.

    Args:
        dims: the dims of the axis, merged.
        entries: a number that ``uniform_run`` returned for the axis.
    """
    kept: list[tuple[int, int]] = []
    for extent, stride in reversed(dims):
        if entries >= extent:
            entries //= extent
        else:
            kept.append((extent // entries, stride * entries))
            entries = 1
    return merge_dims(tuple(reversed(kept)))


def uniform_run(dims: Dims, entries: int) -> int:
    """Return the largest divisor of ``entries`` whose runs look alike all along the axis."""
    product = 1
    for extent, _ in reversed(dims):
        product *= extent
        if entries % product and product % entries:
            return uniform_run(dims, int(np.gcd(entries, product)))
    return entries


def walk_together(
    local: Dims, remote: Dims, starts: tuple[int, int], entries: int, limit: int
) -> StrideWalk:
    """Walk the same entries of two axes.

    Args:
        local: dims of the local axis, merged.
        remote: dims of the remote axis, merged.
        starts: index of the first entry on the local and on the remote axis.
        entries: how many to walk.
        limit: how many may be enumerated where the axes have no dims in common.

    Raises:
        OverflowError: the axes have no dims in common and ``entries`` is above ``limit``.
    """
    near = _window(local, starts[0], entries)
    far = _window(remote, starts[1], entries)
    joint = _common_dims(near[1], far[1]) if near and far else None
    if near and far and joint is not None:
        return StrideWalk(local=_single(near[0]), remote=_single(far[0]), dims=joint)
    if entries > limit:
        raise OverflowError
    index = np.arange(entries, dtype=np.int64)
    return StrideWalk(
        local=entry_offsets(local, index + starts[0]),
        remote=entry_offsets(remote, index + starts[1]),
        dims=(),
    )


def _single(offset: int) -> I64Array:
    return np.array([offset], dtype=np.int64)


def _window(dims: Dims, start: int, entries: int) -> tuple[int, Dims] | None:
    """Return offset and dims of the entries from ``start`` on; ``None`` if they are no box."""
    offset = 0
    kept: list[tuple[int, int]] = []
    for extent, stride in reversed(dims):
        start, within = divmod(start, extent)
        if within + entries <= extent:
            kept.append((entries, stride))
            offset += within * stride
            entries = 1
        elif within or entries % extent:
            return None
        else:
            kept.append((extent, stride))
            entries //= extent
    return offset, tuple(dim for dim in reversed(kept) if dim[0] > 1)


def _common_dims(local: Dims, remote: Dims) -> JointDims | None:
    """Return the coarsest dims that both axes can be walked with, or ``None``."""
    near, far = list(local), list(remote)
    joint: list[tuple[int, int, int]] = []
    while near and far:
        (near_extent, near_stride), (far_extent, far_stride) = near.pop(), far.pop()
        extent = min(near_extent, far_extent)
        if near_extent % extent or far_extent % extent:
            return None
        joint.append((extent, near_stride, far_stride))
        if near_extent > extent:
            near.append((near_extent // extent, near_stride * extent))
        if far_extent > extent:
            far.append((far_extent // extent, far_stride * extent))
    return tuple(joint)
