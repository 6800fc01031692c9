"""Compute where the entries of an axis lie, and walk a local and a remote axis together.

An axis (the tokens of a page, for example) says at which byte each of its entries lies. It is a
list of dims, coarse to fine, each with an extent and a stride in bytes, like the shape and strides
of a numpy array. Entry *i* of the axis is element *i* of that array, in row-major order.

A local and a remote axis with equally many entries are walked together: where the dims of one
subdivide the dims of the other, the walk is a list of dims that have a stride on each side. Where
they do not (extents 3, 4 on one side and 4, 3 on the other), every entry is enumerated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.core.layout import Axis
from kvferry.core.layout.fields import Dims
from kvferry.core.memory import I64Array

JointDims = tuple[tuple[int, int, int], ...]
"""Dims of a local and a remote axis: (extent, local stride, remote stride), strides in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrideWalk:
    """Where the same entries lie on a local and on a remote axis.

    There are n starts. From each start, entries lie at all sums of index times stride over the
    dims, one entry for every combination of indices.

    Attributes:
        local: (n,) int64, bytes from entry 0 of the local axis to each start.
        remote: (n,) int64, bytes from entry 0 of the remote axis to each start.
        dims: the (extent, local stride, remote stride) of each dim, in any order; the same for all
            starts.
    """

    local: I64Array
    remote: I64Array
    dims: JointDims


def axis_dims(axis: Axis) -> Dims:
    """Return the dims of a layout's axis, merged by ``merge_dims``."""
    return merge_dims(tuple((dim.extent, dim.stride) for dim in axis))


def merge_dims(dims: Dims) -> Dims:
    """Merge neighbouring dims wherever that leaves the offsets of all entries as they are.

    Args:
        dims: the dims of an axis, coarse to fine.

    Returns:
        The merged dims, coarse to fine. No extent is 1.
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
    """Return the offsets in bytes of some entries of an axis.

    Args:
        dims: the dims of the axis, as ``merge_dims`` returns them.
        index: (n,) int64, index of each entry.

    Returns:
        (n,) int64, bytes from entry 0 of the axis to each entry.
    """
    if len(dims) == 1:
        return index * dims[0][1]
    offsets = np.zeros(len(index), dtype=np.int64)
    for extent, stride in reversed(dims):
        offsets += index % extent * stride
        index = index // extent
    return offsets


def coarsen(dims: Dims, entries: int) -> Dims:
    """Cut an axis into runs of consecutive entries; return the dims along which the runs lie.

    Args:
        dims: the dims of the axis, as ``merge_dims`` returns them.
        entries: number of entries in a run, which ``uniform_run`` has returned for these dims.

    Returns:
        The dims of an axis whose entries are the first entries of the runs, coarse to fine.
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
    """Return the most entries per run with which an axis can be cut into runs that are alike.

    Runs are alike if the distance from the first entry of a run to its entry *k* is the same in all
    of them.

    Args:
        dims: the dims of the axis, as ``merge_dims`` returns them.
        entries: the longest run that is wanted, in entries.

    Returns:
        The number of entries in a run, a divisor of ``entries``.
    """
    product = 1
    for extent, _ in reversed(dims):
        product *= extent
        if entries % product and product % entries:
            return uniform_run(dims, int(np.gcd(entries, product)))
    return entries


def walk_together(
    local: Dims, remote: Dims, starts: tuple[int, int], entries: int, limit: int
) -> StrideWalk:
    """Return where the entries of a range lie on a local and on a remote axis.

    Args:
        local: dims of the local axis, as ``merge_dims`` returns them.
        remote: dims of the remote axis, as ``merge_dims`` returns them.
        starts: index of the range's first entry on the local axis, and its index on the remote
            axis.
        entries: number of entries in the range.
        limit: the most entries to enumerate if no dims describe the entries on both axes.

    Raises:
        OverflowError: no dims describe the entries on both axes, and ``entries`` is above
            ``limit``.
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
    """Return the offset of the first entry of a range, and the dims of the range.

    Args:
        dims: the dims of the axis, as ``merge_dims`` returns them.
        start: index of the range's first entry.
        entries: number of entries in the range.

    Returns:
        The bytes from entry 0 of the axis to the range's first entry, and the dims of the range,
        coarse to fine. ``None`` if no dims describe the range, for example if it begins in the
        middle of one row and ends in the next.
    """
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
    """Return dims that describe two axes at once, each dim with a local and a remote stride.

    Args:
        local: dims of the local axis, coarse to fine.
        remote: dims of the remote axis, coarse to fine, with equally many entries.

    Returns:
        The dims, fine to coarse; ``None`` if no dims fit both axes.
    """
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
