"""From fields that meet to strips: the longest runs of bytes that lie alike on both sides.

What two fields share of one sub-block is a box: a run of bytes, repeated along digits that have a
stride on each side. A digit whose strides both equal the run lengthens the run; boxes under equal
digits that touch on both sides become one. This goes on until nothing changes; then the digits
that are left over are enumerated. So equal pages end as one strip, and so do neighbouring fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from kvferry.core.axes import Digits, Joint, Walk, coarse, digits_of, even, normalised, walk
from kvferry.core.errors import PlanError
from kvferry.core.layout import Field, Layout
from kvferry.core.memory import I64Array, Region

MAX_STRIPS = 1 << 22
"""Above this many strips in one sub-block two layouts are refused: nobody could read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The part ``shard`` (global range) of a tensor that a local and a remote field both hold."""

    local: Field
    remote: Field
    shard: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How far a place in a page is from the same place of page 0 and of its first sub-block.

    Attributes:
        page: bytes from one page to the next.
        within: digits from one sub-block of a page to the next.
    """

    page: int
    within: Digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """What strips have in common that go through the sub-blocks of a request together."""

    grain: int
    local: Steps
    remote: Steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Contiguous runs; four arrays of one length.

    Attributes:
        place: (n,) int64, which pair of regions it lies in.
        local: (n,) int64, first local byte; an address, or relative where a field is not known yet.
        remote: (n,) int64, first remote byte.
        nbytes: (n,) int64, length.
    """

    place: I64Array
    local: I64Array
    remote: I64Array
    nbytes: I64Array

    def __len__(self) -> int:
        return len(self.nbytes)

    def at(self, index: I64Array | slice) -> Runs:
        """Some of them."""
        return Runs(
            place=self.place[index],
            local=self.local[index],
            remote=self.remote[index],
            nbytes=self.nbytes[index],
        )

    def of_length(self, nbytes: int) -> Runs:
        """The same starts with another length."""
        return replace(self, nbytes=np.full(len(self), nbytes))


_Boxes = tuple[Joint, Runs]
"""Runs, all of which repeat along the same digits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Strips of one length and one motion, ordered by region pair and local address.

    Attributes:
        motion: how they go through the sub-blocks.
        nbytes: length of each in one sub-block.
        local: (n,) int64, local address in page 0, sub-block 0.
        remote: (n,) int64, remote address there.
        cuts: (stop, local region, remote region) of every stretch of strips in one region pair.
    """

    motion: Motion
    nbytes: int
    local: I64Array
    remote: I64Array
    cuts: tuple[tuple[int, Region, Region], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shape:
    """What the fields of a model repeat layer after layer: everything but where they start."""

    motion: Motion
    local: I64Array
    remote: I64Array
    nbytes: int
    digits: Joint


def batches(
    meetings: Sequence[Meeting], local: Layout, remote: Layout, grain: int, skip: int = 0
) -> tuple[Batch, ...]:
    """The strips of fields of one local and one remote group, per sub-block of ``grain`` tokens.

    With ``skip``, of the tokens from there to the sub-block's end only.

    Raises:
        PlanError: they are too many; names a field.
    """
    places: dict[tuple[int, int], int] = {}
    shapes: dict[object, tuple[_Shape, list[tuple[int, int, int]]]] = {}
    for m in meetings:
        key = _geometry(m)
        if key not in shapes:
            shapes[key] = _shape(m, grain, skip), []
        place = places.setdefault((m.local.region, m.remote.region), len(places))
        shapes[key][1].append((place, m.local.offset, m.remote.offset))
    regions = [(local.regions[near], remote.regions[far]) for near, far in places]
    boxes: dict[Motion, list[_Boxes]] = {}
    for shape, fields in shapes.values():
        boxes.setdefault(shape.motion, []).append((shape.digits, _runs(shape, fields, regions)))
    return tuple(
        batch
        for motion, found in boxes.items()
        for batch in _batches(motion, _enumerated(_joined(found), meetings[0]), regions)
    )


def _geometry(m: Meeting) -> object:
    near, far = m.local, m.remote
    start, stop = m.shard
    return (
        (near.tokens, near.shard, near.inner, near.unit, near.page_stride, near.tokens_per_state),
        (far.tokens, far.shard, far.inner, far.unit, far.page_stride),
        (start - near.shard_range[0], start - far.shard_range[0], stop - start),
    )


def _shape(m: Meeting, grain: int, skip: int) -> _Shape:
    near, far = digits_of(m.local.tokens), digits_of(m.remote.tokens)
    per_entry = m.local.tokens_per_state if near or far else grain
    first = skip // per_entry
    entries = grain // per_entry
    if not skip:
        entries = _even(near, far, entries)
    try:
        walks = (walk(near, far, (first, first), entries - first, MAX_STRIPS), *_entry_walks(m))
    except OverflowError:
        raise _too_many(m) from None
    unit = math.gcd(m.local.unit, m.remote.unit)
    nbytes, digits = _absorbed(unit, tuple(digit for w in walks for digit in w.digits))
    return _Shape(
        motion=Motion(
            grain=entries * per_entry,
            local=Steps(page=m.local.page_stride, within=coarse(near, entries)),
            remote=Steps(page=m.remote.page_stride, within=coarse(far, entries)),
        ),
        local=_sums([w.local for w in walks]),
        remote=_sums([w.remote for w in walks]),
        nbytes=nbytes,
        digits=digits,
    )


def _even(near: Digits, far: Digits, entries: int) -> int:
    """The most entries of a sub-block that all look alike on both sides."""
    while (fewer := even(far, even(near, entries))) != entries:
        entries = fewer
    return entries


def _entry_walks(m: Meeting) -> tuple[Walk, Walk]:
    """The shard axis, and the bytes of one (token entry, shard index)."""
    near, far = m.local, m.remote
    start, stop = m.shard
    starts = start - near.shard_range[0], start - far.shard_range[0]
    unit = math.gcd(near.unit, far.unit)
    return (
        walk(digits_of(near.shard), digits_of(far.shard), starts, stop - start, MAX_STRIPS),
        walk(_inner(near, unit), _inner(far, unit), (0, 0), near.entry_bytes // unit, MAX_STRIPS),
    )


def _inner(f: Field, unit: int) -> Digits:
    digits = tuple((digit.count, digit.stride) for axis in f.inner for digit in axis)
    return normalised((*digits, (f.unit // unit, unit)))


def _sums(parts: Sequence[I64Array]) -> I64Array:
    """Every sum of one number of each part."""
    total = parts[0]
    for part in parts[1:]:
        total = (total[:, None] + part).ravel()
    return total


def _absorbed(nbytes: int, digits: Joint) -> tuple[int, Joint]:
    """The same bytes as longer runs under fewer digits, coarse to fine."""
    kept: list[tuple[int, int, int]] = []
    for count, near, far in sorted(digits, key=lambda digit: digit[1:]):
        if not kept and near == far == nbytes:
            nbytes *= count
        elif kept and (near, far) == (kept[-1][0] * kept[-1][1], kept[-1][0] * kept[-1][2]):
            kept[-1] = (kept[-1][0] * count, *kept[-1][1:])
        else:
            kept.append((count, near, far))
    return nbytes, tuple(reversed(kept))


def _runs(
    shape: _Shape, fields: list[tuple[int, int, int]], regions: list[tuple[Region, Region]]
) -> Runs:
    """The first run of every box of the fields that have this shape."""
    place, near, far = np.array(fields, dtype=np.int64).T
    address = np.array([(a.address, b.address) for a, b in regions], dtype=np.int64)[place]
    boxes = len(shape.local)
    return Runs(
        place=np.repeat(place, boxes),
        local=_sums([address[:, 0] + near, shape.local]),
        remote=_sums([address[:, 1] + far, shape.remote]),
        nbytes=np.full(len(fields) * boxes, shape.nbytes),
    )


def _joined(boxes: list[_Boxes]) -> list[_Boxes]:
    """The same bytes in as few boxes as can be found."""
    while True:
        alike: dict[Joint, list[Runs]] = {}
        for digits, runs in boxes:
            for length in np.unique(runs.nbytes).tolist():
                nbytes, fewer = _absorbed(length, digits)
                part = runs.at(runs.nbytes == length)
                alike.setdefault(fewer, []).append(part.of_length(nbytes))
        boxes = [(digits, touching(concatenated(parts))) for digits, parts in alike.items()]
        if sum(len(runs) for _, runs in boxes) == sum(map(len, chain(*alike.values()))):
            return boxes


def concatenated(parts: Sequence[Runs]) -> Runs:
    """All of them, in this order."""
    if len(parts) == 1:
        return parts[0]
    return Runs(
        place=np.concatenate([part.place for part in parts]),
        local=np.concatenate([part.local for part in parts]),
        remote=np.concatenate([part.remote for part in parts]),
        nbytes=np.concatenate([part.nbytes for part in parts]),
    )


def touching(runs: Runs) -> Runs:
    """By place and local address, neighbours that touch on both sides made one."""
    runs = runs.at(np.lexsort((runs.local, runs.place)))
    apart = (
        (np.diff(runs.place) != 0)
        | (np.diff(runs.local) != runs.nbytes[:-1])
        | (np.diff(runs.remote) != runs.nbytes[:-1])
    )
    if apart.all():
        return runs
    first = np.flatnonzero(np.concatenate(([True], apart)))
    return replace(runs.at(first), nbytes=np.add.reduceat(runs.nbytes, first))


def _enumerated(boxes: list[_Boxes], m: Meeting) -> Runs:
    """Every run of every box, sorted and joined where the boxes did not show it."""
    if sum(len(runs) * math.prod(count for count, _, _ in digits) for digits, runs in boxes) > (
        MAX_STRIPS
    ):
        raise _too_many(m)
    return touching(concatenated([_unfolded(digits, runs) for digits, runs in boxes]))


def _unfolded(digits: Joint, runs: Runs) -> Runs:
    if not digits:
        return runs
    near = _sums([np.arange(count) * stride for count, stride, _ in digits])
    far = _sums([np.arange(count) * stride for count, _, stride in digits])
    return Runs(
        place=np.repeat(runs.place, len(near)),
        local=_sums([runs.local, near]),
        remote=_sums([runs.remote, far]),
        nbytes=np.repeat(runs.nbytes, len(near)),
    )


def _batches(motion: Motion, runs: Runs, regions: list[tuple[Region, Region]]) -> Iterator[Batch]:
    """Sorted runs, by length."""
    for nbytes in np.unique(runs.nbytes).tolist():
        part = runs.at(runs.nbytes == nbytes)
        stops = [*(np.flatnonzero(np.diff(part.place)) + 1).tolist(), len(part)]
        yield Batch(
            motion=motion,
            nbytes=nbytes,
            local=part.local,
            remote=part.remote,
            cuts=tuple((stop, *regions[int(part.place[stop - 1])]) for stop in stops),
        )


def _too_many(m: Meeting) -> PlanError:
    return PlanError(
        f"field {m.local.key!r}: the two layouts share no runs longer than a few bytes, which "
        f"makes more than {MAX_STRIPS} copies for one page"
    )
