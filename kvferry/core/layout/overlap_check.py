"""Whether strided sets of bytes can meet.

The question is asked of every layout, also of a peer's, so the answer must be cheap for hundreds of
fields with tens of thousands of pages: it works on strides and enumerates only as a last resort.
Strides that do not nest count as meeting. What it takes is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvferry.core.memory import I64Array
from kvferry.core.work_budget import WorkBudget

QUESTION_STEPS, CLUSTER_STEPS, PIECE_STEPS, RUN_STEPS = 500, 100, 5, 8
"""Of a question, of pieces whose ranges meet, of each of them, of a run that is enumerated."""
WHERE = "bytes that fields of one group might share"

Digits = tuple[tuple[int, int], ...]


class ByteSets(NamedTuple):
    """Sets of bytes that differ in where they start: ``offset + sum(i * stride) + [0, run)``, for
    all ``0 <= i < count`` per digit.

    Attributes:
        labels: one for each.
        offsets: (n,) int64, one for each.
        run, digits: of all of them.
    """

    labels: Sequence[str]
    offsets: I64Array
    run: int
    digits: Digits


class _Form(NamedTuple):
    """Bytes but for where they start, their digits nested, coarse first."""

    run: int
    digits: Digits


class _Set(NamedTuple):
    """Some pieces, four arrays of one length.

    Attributes:
        number: (n,) int64, which they are.
        start: (n,) int64, first byte.
        span: (n,) int64, bytes from there to just after the last.
        form: (n,) int64, index into the forms of the question.
    """

    number: I64Array
    start: I64Array
    span: I64Array
    form: I64Array

    def at(self, index: I64Array | slice) -> _Set:
        """Some of them."""
        return _Set(*(each[index] for each in self))


def overlapping(pieces: Sequence[ByteSets], effort: WorkBudget) -> tuple[str, str] | None:
    """Labels of two pieces that meet (or of one that meets itself), or ``None``."""
    effort.spend(QUESTION_STEPS * len(pieces), WHERE)
    sweep = _Sweep(effort)
    forms: list[tuple[int, int]] = []
    for some in pieces:
        nested = _nested(some.run, some.digits)
        if nested is None:
            return some.labels[0], some.labels[0]
        forms.append((_span(nested), sweep.number(nested)))
    counts = [len(some.labels) for some in pieces]
    span, form = np.repeat(np.array(forms, np.int64), counts, axis=0).T
    start = np.concatenate([some.offsets for some in pieces])
    found = sweep.clash(_Set(np.arange(len(start)), start, span, form))
    if found is None:
        return None
    labels = [label for some in pieces for label in some.labels]
    return labels[found[0]], labels[found[1]]


def _span(form: _Form) -> int:
    return form.run + sum((count - 1) * stride for count, stride in form.digits)


def _nested(run: int, digits: Digits) -> _Form | None:
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
    return _Form(run, tuple(reversed(merged)))


ROW = 2 * np.dtype(np.int64).itemsize


class _Sweep:
    """One question: remembers which constellations are clear."""

    def __init__(self, effort: WorkBudget) -> None:
        self._effort = effort
        self._forms: list[_Form] = []
        self._numbers: dict[_Form, int] = {}
        self._clear: set[object] = set()

    def number(self, form: _Form) -> int:
        """What stands for a form."""
        number = self._numbers.setdefault(form, len(self._forms))
        if number == len(self._forms):
            self._forms.append(form)
        return number

    def clash(self, some: _Set) -> tuple[int, int] | None:
        """Sweep by bounding range; look closer only where ranges meet."""
        self._effort.spend(CLUSTER_STEPS + PIECE_STEPS * len(some.start), WHERE)
        some = some.at(np.argsort(some.start, kind="stable"))
        ends = np.maximum.accumulate(some.start + some.span)
        heads = np.flatnonzero(np.append(True, some.start[1:] >= ends[:-1]))
        bounds = [*heads.tolist(), len(ends)]
        within = some.start - np.repeat(some.start[heads], np.diff(bounds))
        shapes = np.stack([within, some.form], axis=1).tobytes()
        for start, stop in pairwise(bounds):
            shape = shapes[ROW * start : ROW * stop]
            if stop - start == 1 or shape in self._clear:
                continue
            if found := self._within(some.at(slice(start, stop))):
                return found
            self._clear.add(shape)
        return None

    def _within(self, cluster: _Set) -> tuple[int, int] | None:
        """Pieces whose bounding ranges meet: take off the digits that all share, or enumerate."""
        peeled = cluster
        while (fewer := self._peeled(peeled)) is not None:
            peeled = fewer
        return self._enumerated(cluster) if peeled is cluster else self.clash(peeled)

    def _peeled(self, cluster: _Set) -> _Set | None:
        """All without their coarsest digit, if they share it and lie within one step of it."""
        self._effort.spend(CLUSTER_STEPS + PIECE_STEPS * len(cluster.form), WHERE)
        forms = {number: self._forms[number] for number in set(cluster.form.tolist())}
        tops = {form.digits[:1] for form in forms.values()}
        if len(tops) != 1 or tops == {()}:
            return None
        [[(count, stride)]] = tops
        span = cluster.span - (count - 1) * stride
        if (cluster.start + span).max() - cluster.start[0] > stride:
            return None
        fewer = {
            number: self.number(form._replace(digits=form.digits[1:]))
            for number, form in forms.items()
        }
        form = np.array([fewer[number] for number in cluster.form.tolist()])
        return cluster._replace(span=span, form=form)

    def _enumerated(self, cluster: _Set) -> tuple[int, int] | None:
        forms = [self._forms[number] for number in cluster.form.tolist()]
        runs = [math.prod(count for count, _ in form.digits) for form in forms]
        self._effort.spend(CLUSTER_STEPS * len(runs) + RUN_STEPS * sum(runs), WHERE)
        starts = np.concatenate(
            [_starts(start, form) for start, form in zip(cluster.start, forms, strict=True)]
        )
        lengths = np.repeat([form.run for form in forms], runs)
        owner = np.repeat(cluster.number, runs)
        order = np.argsort(starts, kind="stable")
        ends = (starts + lengths)[order]
        meets = np.flatnonzero(ends[:-1] > starts[order][1:])
        if not len(meets):
            return None
        here = int(meets[0])
        return int(owner[order[here]]), int(owner[order[here + 1]])


def _starts(start: int, form: _Form) -> I64Array:
    starts = np.array([start], dtype=np.int64)
    for count, stride in form.digits:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return starts
