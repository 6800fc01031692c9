"""Whether strided sets of bytes can meet.

The question is asked of every layout, also of a peer's, so the answer must be cheap for hundreds of
fields with tens of thousands of pages: it works on strides and enumerates only as a last resort.
Strides that do not nest count as meeting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MAX_RUNS = 1 << 20
"""How many runs are enumerated for one question; what is left open then is taken to meet."""

Digits = tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """The bytes ``offset + sum(i * stride) + [0, run)``, for all ``0 <= i < count`` per digit."""

    label: str
    offset: int
    run: int
    digits: Digits

    @property
    def end(self) -> int:
        return self.offset + _span(self.run, self.digits)


@lru_cache(maxsize=256)
def _span(run: int, digits: Digits) -> int:
    return run + sum((count - 1) * stride for count, stride in digits)


def overlapping(pieces: Sequence[Piece]) -> tuple[str, str] | None:
    """Labels of two pieces that meet (or of one that meets itself), or ``None``."""
    reduced: list[Piece] = []
    known: dict[tuple[int, Digits], tuple[int, Digits] | None] = {}
    for piece in pieces:
        shape = (piece.run, piece.digits)
        if shape not in known:
            known[shape] = _nested(*shape)
        nested = known[shape]
        if nested is None:
            return piece.label, piece.label
        reduced.append(Piece(piece.label, piece.offset, *nested))
    return _Sweep().clash(reduced)


def _nested(run: int, digits: Digits) -> tuple[int, Digits] | None:
    """The same bytes with the digits merged and sorted, coarse first; ``None`` if not nested."""
    merged: list[tuple[int, int]] = []
    extent = run
    for count, stride in sorted(digits, key=lambda digit: digit[1]):
        if count == 1:
            continue
        if stride < extent:
            return None
        extent += (count - 1) * stride
        if not merged and stride == run:
            run *= count
        elif merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * count, merged[-1][1])
        else:
            merged.append((count, stride))
    return run, tuple(reversed(merged))


class _Sweep:
    """One question: remembers which constellations are clear, and how much it has enumerated."""

    def __init__(self) -> None:
        self._clear: set[object] = set()
        self._runs = MAX_RUNS

    def clash(self, pieces: list[Piece]) -> tuple[str, str] | None:
        """Sweep by bounding range; look closer only where ranges meet."""
        pieces = sorted(pieces, key=lambda piece: piece.offset)
        cluster: list[Piece] = []
        end = -1
        for piece in [*pieces, None]:
            if piece is not None and piece.offset < end:
                cluster.append(piece)
                end = max(end, piece.end)
                continue
            if len(cluster) > 1 and (found := self._within(cluster)):
                return found
            if piece is not None:
                cluster, end = [piece], piece.end
        return None

    def _within(self, cluster: list[Piece]) -> tuple[str, str] | None:
        """Pieces whose bounding ranges meet: take off a digit that all share, or enumerate."""
        first = cluster[0].offset
        shape = tuple((p.offset - first, p.run, p.digits) for p in cluster)
        if shape in self._clear:
            return None
        found = self.clash(_peeled(cluster)) if _peelable(cluster) else self._enumerated(cluster)
        if found is None:
            self._clear.add(shape)
        return found

    def _enumerated(self, cluster: list[Piece]) -> tuple[str, str] | None:
        runs = [math.prod(count for count, _ in p.digits) for p in cluster]
        self._runs -= sum(runs)
        if self._runs < 0:
            return cluster[0].label, cluster[1].label
        starts = np.concatenate([_starts(p) for p in cluster])
        lengths = np.repeat([p.run for p in cluster], runs)
        owner = np.repeat(np.arange(len(cluster)), runs)
        order = np.argsort(starts, kind="stable")
        ends = (starts + lengths)[order]
        meets = np.flatnonzero(ends[:-1] > starts[order][1:])
        if not len(meets):
            return None
        here = int(meets[0])
        return cluster[owner[order[here]]].label, cluster[owner[order[here + 1]]].label


def _peelable(cluster: list[Piece]) -> bool:
    """Whether all share their coarsest digit, and lie within one step of it."""
    tops = {p.digits[:1] for p in cluster}
    if len(tops) != 1 or tops == {()}:
        return False
    count, stride = cluster[0].digits[0]
    first = min(p.offset for p in cluster)
    return max(p.end for p in cluster) - (count - 1) * stride - first <= stride


def _peeled(cluster: list[Piece]) -> list[Piece]:
    return [p._replace(digits=p.digits[1:]) for p in cluster]


def _starts(piece: Piece) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    starts = np.array([piece.offset], dtype=np.int64)
    for count, stride in piece.digits:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return starts
