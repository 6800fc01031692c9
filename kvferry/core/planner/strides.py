"""The arithmetic of axes: windows into them, and the digits that two of them have in common.

An axis is a mixed-radix number: digits of (count, stride), coarse to fine. Two axes that hold the
same entries can be walked together where the digits of one refine those of the other; where they
cannot (3 x 4 against 4 x 3), the entries are enumerated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.core.layout import Axis
from kvferry.core.memory import I64Array

Digits = tuple[tuple[int, int], ...]
"""(count, stride in bytes), coarse to fine, normalised: no count of 1, nothing left to merge."""

Joint = tuple[tuple[int, int, int], ...]
"""(count, local stride, remote stride), in any order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrideWalk:
    """Entries of two axes, side by side: every offset with every combination of the digits.

    Attributes:
        local: (n,) int64, bytes from the first local entry of the axis.
        remote: (n,) int64, likewise.
        digits: the steps from there.
    """

    local: I64Array
    remote: I64Array
    digits: Joint


def digits_of(axis: Axis) -> Digits:
    """An axis of a layout, normalised."""
    return normalised(tuple((digit.count, digit.stride) for digit in axis))


def normalised(digits: Digits) -> Digits:
    """The same entries with as few digits as possible."""
    merged: list[tuple[int, int]] = []
    for count, stride in digits:
        if count == 1:
            continue
        if merged and merged[-1][1] == count * stride:
            count *= merged.pop()[0]
        merged.append((count, stride))
    return tuple(merged)


def offsets(digits: Digits, index: I64Array) -> I64Array:
    """Where the entries with these indices lie, in bytes from the first."""
    if len(digits) == 1:
        return index * digits[0][1]
    total = np.zeros(len(index), dtype=np.int64)
    for count, stride in reversed(digits):
        total += index % count * stride
        index = index // count
    return total


def coarse(digits: Digits, entries: int) -> Digits:
    """The axis of runs of ``entries`` entries, for a number that ``even`` approved."""
    kept: list[tuple[int, int]] = []
    for count, stride in reversed(digits):
        if entries >= count:
            entries //= count
        else:
            kept.append((count // entries, stride * entries))
            entries = 1
    return normalised(tuple(reversed(kept)))


def even(digits: Digits, entries: int) -> int:
    """The largest divisor of ``entries`` whose runs look alike wherever on the axis they start."""
    product = 1
    for count, _ in reversed(digits):
        product *= count
        if entries % product and product % entries:
            return even(digits, int(np.gcd(entries, product)))
    return entries


def walk(
    local: Digits, remote: Digits, starts: tuple[int, int], count: int, limit: int
) -> StrideWalk:
    """The ``count`` entries from the two ``starts`` on, side by side.

    Raises:
        OverflowError: the axes have no digits in common and ``count`` is above ``limit``.
    """
    near = _window(local, starts[0], count)
    far = _window(remote, starts[1], count)
    joint = _refined(near[1], far[1]) if near and far else None
    if near and far and joint is not None:
        return StrideWalk(local=_one(near[0]), remote=_one(far[0]), digits=joint)
    if count > limit:
        raise OverflowError
    index = np.arange(count, dtype=np.int64)
    return StrideWalk(
        local=offsets(local, index + starts[0]),
        remote=offsets(remote, index + starts[1]),
        digits=(),
    )


def _one(offset: int) -> I64Array:
    return np.array([offset], dtype=np.int64)


def _window(digits: Digits, start: int, count: int) -> tuple[int, Digits] | None:
    """Offset and digits of ``count`` entries from ``start`` on; ``None`` if they are no box."""
    offset = 0
    kept: list[tuple[int, int]] = []
    for size, stride in reversed(digits):
        start, within = divmod(start, size)
        if within + count <= size:
            kept.append((count, stride))
            offset += within * stride
            count = 1
        elif within or count % size:
            return None
        else:
            kept.append((size, stride))
            count //= size
    return offset, tuple(digit for digit in reversed(kept) if digit[0] > 1)


def _refined(local: Digits, remote: Digits) -> Joint | None:
    """The coarsest digits that both axes can be walked with, or ``None``."""
    near, far = list(local), list(remote)
    joint: list[tuple[int, int, int]] = []
    while near and far:
        (near_count, near_stride), (far_count, far_stride) = near.pop(), far.pop()
        count = min(near_count, far_count)
        if near_count % count or far_count % count:
            return None
        joint.append((count, near_stride, far_stride))
        if near_count > count:
            near.append((near_count // count, near_stride * count))
        if far_count > count:
            far.append((far_count // count, far_stride * count))
    return tuple(joint)
