"""Compute where the entries of an axis lie, and walk a local and a remote axis together.

An axis is a list of dims, coarse to fine, each with an extent and a stride in bytes. Entry *i* is
element *i* of a numpy array with that shape and these strides, in row-major order. Two axes are
walked together by dims with a stride on each side, where the dims of one subdivide those of the
other; otherwise (extents 3, 4 on one side and 4, 3 on the other) every entry is enumerated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.core.layout import Axis
from kvferry.core.layout.fields import Dims
from kvferry.core.memory import I64Array
from kvferry.core.work_budget import MAX_STEPS, STRIP_STEPS

MAX_STRIPS = MAX_STEPS // STRIP_STEPS
"""The most strips in one sub-block: no request could read pages of layouts with more."""

JointDims = tuple[tuple[int, int, int], ...]
"""Dims of a local and a remote axis: (extent, local stride, remote stride), in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrideWalk:
    """Where the same entries lie on two axes: from each of n starts, at all sums along the dims."""

    local: I64Array  # (n,): bytes from entry 0 of the local axis to each start
    remote: I64Array  # (n,): bytes from entry 0 of the remote axis to each start
    dims: JointDims  # in any order, the same for all starts


def axis_dims(axis: Axis) -> Dims:
    """Return the dims of a layout's axis, merged by ``merge_dims``."""
    return merge_dims(tuple((dim.extent, dim.stride) for dim in axis))


def merge_dims(dims: Dims) -> Dims:
    """Merge neighbouring dims, coarse to fine, where no entry's offset changes; no extent is 1."""
    merged: list[tuple[int, int]] = []
    for extent, stride in dims:
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * stride:
            extent *= merged.pop()[0]
        merged.append((extent, stride))
    return tuple(merged)


def entry_offsets(dims: Dims, index: I64Array) -> I64Array:
    """Return the bytes from entry 0 of an axis with merged dims to entries ``index``."""
    if len(dims) == 1:
        return index * dims[0][1]
    offsets = np.zeros(len(index), dtype=np.int64)
    for extent, stride in reversed(dims):
        offsets += index % extent * stride
        index = index // extent
    return offsets


def coarsen(dims: Dims, entries: int) -> Dims:
    """Return the dims along which runs of ``entries`` entries, from ``uniform_run``, lie."""
    kept: list[tuple[int, int]] = []
    for extent, stride in reversed(dims):
        if entries >= extent:
            entries //= extent
        else:
            kept.append((extent // entries, stride * entries))
            entries = 1
    return merge_dims(tuple(reversed(kept)))


def uniform_run(dims: Dims, entries: int) -> int:
    """Return the longest run, a divisor of ``entries``, that cuts an axis into equal runs."""
    # Equal: the distance from a run's first entry to its entry *k* is the same in all runs.
    product = 1
    for extent, _ in reversed(dims):
        product *= extent
        if entries % product and product % entries:
            return uniform_run(dims, int(np.gcd(entries, product)))
    return entries


def walk_together(local: Dims, remote: Dims, starts: tuple[int, int], entries: int) -> StrideWalk:
    """Return where ``entries`` entries lie on two axes, from ``starts``, one index on each axis.

    Raises ``OverflowError`` if no dims describe them on both axes, and each would be a strip.
    """
    near = _window(local, starts[0], entries)
    far = _window(remote, starts[1], entries)
    joint = _common_dims(near[1], far[1]) if near and far else None
    if near and far and joint is not None:
        return StrideWalk(local=np.array([near[0]]), remote=np.array([far[0]]), dims=joint)
    if entries > MAX_STRIPS:
        raise OverflowError
    index = np.arange(entries, dtype=np.int64)
    return StrideWalk(
        local=entry_offsets(local, index + starts[0]),
        remote=entry_offsets(remote, index + starts[1]),
        dims=(),
    )


def _window(dims: Dims, start: int, entries: int) -> tuple[int, Dims] | None:
    """Return a range's first offset and its dims; ``None`` if no dims describe the range."""
    offset = 0
    kept: list[tuple[int, int]] = []
    for extent, stride in reversed(dims):
        start, within = divmod(start, extent)
        if within + entries <= extent:
            kept.append((entries, stride))
            offset += within * stride
            entries = 1
        # The range begins in the middle of one row and ends in another, for example.
        elif within or entries % extent:
            return None
        else:
            kept.append((extent, stride))
            entries //= extent
    return offset, tuple(dim for dim in reversed(kept) if dim[0] > 1)


def _common_dims(local: Dims, remote: Dims) -> JointDims | None:
    """Return dims, fine to coarse, that fit two axes of equal length; ``None`` if none do."""
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
