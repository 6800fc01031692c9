"""Find fields of a layout that share bytes.

Each field is a set of bytes: runs of one length, repeated along dims. Peers' layouts are checked,
too, so the check must be cheap for hundreds of fields with tens of thousands of pages: it compares
strides, and enumerates runs only where strides do not decide. Strides nest if each is at least as
long as all that the dims with shorter strides cover; a set whose strides do not nest is treated as
if it overlapped itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvferry.core.layout.fields import Dims
from kvferry.core.memory import I64Array
from kvferry.core.work_budget import (
    OVERLAP_CLUSTER_STEPS,
    OVERLAP_MEMBER_STEPS,
    OVERLAP_RUN_STEPS,
    OVERLAP_SET_STEPS,
    WorkBudget,
)

WHERE = "bytes that fields of one group might share"


class ByteSets(NamedTuple):
    """n sets of bytes that differ only in where they start, each a run repeated along dims.

    Set *k* has ``offsets[k] + sum(i * stride) + [0, run)`` for all ``0 <= i < extent`` of each dim.
    """

    labels: Sequence[str]
    offsets: I64Array
    run: int  # number of bytes
    dims: Dims  # (extent, stride in bytes), in any order


class _Form(NamedTuple):
    """A set relative to its first byte: nested dims, coarse to fine, merged where possible."""

    run: int
    dims: Dims


class _Cluster(NamedTuple):
    """n sets to compare: index in ``find_overlap``, first byte, bytes spanned, ``_Form`` index."""

    number: I64Array
    start: I64Array
    span: I64Array
    form: I64Array

    def select(self, index: I64Array | slice) -> _Cluster:
        return _Cluster(*(each[index] for each in self))


def find_overlap(byte_sets: Sequence[ByteSets], budget: WorkBudget) -> tuple[str, str] | None:
    """Return the labels of two sets of bytes that overlap; ``None`` if no two do.

    One label twice: the strides of that set do not nest, so it may overlap itself.
    """
    budget.spend(OVERLAP_SET_STEPS * len(byte_sets), WHERE)
    sweep = _Sweep(budget)
    forms: list[tuple[int, int]] = []
    for sets in byte_sets:
        nested = _nested(sets.run, sets.dims)
        if nested is None:
            return sets.labels[0], sets.labels[0]
        forms.append((_span(nested), sweep.index_of(nested)))
    counts = [len(sets.labels) for sets in byte_sets]
    span, form = np.repeat(np.array(forms, np.int64), counts, axis=0).T
    start = np.concatenate([sets.offsets for sets in byte_sets])
    overlap = sweep.find(_Cluster(np.arange(len(start)), start, span, form))
    if overlap is None:
        return None
    labels = [label for sets in byte_sets for label in sets.labels]
    return labels[overlap[0]], labels[overlap[1]]


def _span(form: _Form) -> int:
    return form.run + sum((extent - 1) * stride for extent, stride in form.dims)


def _nested(run: int, dims: Dims) -> _Form | None:
    """Return the ``_Form`` of a set of bytes, or ``None`` if its strides do not nest."""
    merged: list[tuple[int, int]] = []
    span = run
    for extent, stride in sorted(dims, key=lambda dim: dim[1]):
        if extent == 1:
            continue
        if stride < span:
            return None
        span += (extent - 1) * stride
        if not merged and stride == run:
            run *= extent
        elif merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * extent, merged[-1][1])
        else:
            merged.append((extent, stride))
    return _Form(run, tuple(reversed(merged)))


_ROW_BYTES = 2 * np.dtype(np.int64).itemsize


class _Sweep:
    """A search for two sets that overlap; each arrangement of sets is searched only once."""

    def __init__(self, budget: WorkBudget) -> None:
        self._budget = budget
        self._forms: list[_Form] = []
        self._indices: dict[_Form, int] = {}
        self._disjoint: set[object] = set()

    def index_of(self, form: _Form) -> int:
        index = self._indices.setdefault(form, len(self._forms))
        if index == len(self._forms):
            self._forms.append(form)
        return index

    def find(self, sets: _Cluster) -> tuple[int, int] | None:
        """Return the ``number`` of two sets that overlap; ``None`` if none do."""
        self._budget.spend(OVERLAP_CLUSTER_STEPS + OVERLAP_MEMBER_STEPS * len(sets.start), WHERE)
        sets = sets.select(np.argsort(sets.start, kind="stable"))
        # Only sets whose ranges, first byte to last, overlap are compared with each other.
        ends = np.maximum.accumulate(sets.start + sets.span)
        heads = np.flatnonzero(np.append(True, sets.start[1:] >= ends[:-1]))
        bounds = [*heads.tolist(), len(ends)]
        # An arrangement is the starts of sets, relative to the first of them, and their forms.
        within = sets.start - np.repeat(sets.start[heads], np.diff(bounds))
        arrangements = np.stack([within, sets.form], axis=1).tobytes()
        for start, stop in pairwise(bounds):
            arrangement = arrangements[_ROW_BYTES * start : _ROW_BYTES * stop]
            if stop - start == 1 or arrangement in self._disjoint:
                continue
            if overlap := self._find_within(sets.select(slice(start, stop))):
                return overlap
            self._disjoint.add(arrangement)
        return None

    def _find_within(self, cluster: _Cluster) -> tuple[int, int] | None:
        """Do ``find`` for sets whose ranges overlap; enumerates runs if no dim can be dropped."""
        peeled = cluster
        while (fewer := self._without_coarsest_dim(peeled)) is not None:
            peeled = fewer
        return self._enumerate(cluster) if peeled is cluster else self.find(peeled)

    def _without_coarsest_dim(self, cluster: _Cluster) -> _Cluster | None:
        """Return the sets without their coarsest dim; ``None`` if that may change the result."""
        self._budget.spend(OVERLAP_CLUSTER_STEPS + OVERLAP_MEMBER_STEPS * len(cluster.form), WHERE)
        forms = {index: self._forms[index] for index in set(cluster.form.tolist())}
        coarsest = {form.dims[:1] for form in forms.values()}
        if len(coarsest) != 1 or coarsest == {()}:
            return None
        [[(extent, stride)]] = coarsest
        # If one repetition of all sets together spans at most the stride of this dim, which all
        # share, repetitions do not overlap each other: one of them decides.
        span = cluster.span - (extent - 1) * stride
        if (cluster.start + span).max() - cluster.start[0] > stride:
            return None
        fewer = {
            index: self.index_of(form._replace(dims=form.dims[1:])) for index, form in forms.items()
        }
        form = np.array([fewer[index] for index in cluster.form.tolist()])
        return cluster._replace(span=span, form=form)

    def _enumerate(self, cluster: _Cluster) -> tuple[int, int] | None:
        forms = [self._forms[index] for index in cluster.form.tolist()]
        runs = [math.prod(extent for extent, _ in form.dims) for form in forms]
        self._budget.spend(OVERLAP_CLUSTER_STEPS * len(runs) + OVERLAP_RUN_STEPS * sum(runs), WHERE)
        starts = np.concatenate(
            [_run_starts(start, form) for start, form in zip(cluster.start, forms, strict=True)]
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


def _run_starts(start: int, form: _Form) -> I64Array:
    starts = np.array([start], dtype=np.int64)
    for extent, stride in form.dims:
        starts = (starts[:, None] + np.arange(extent, dtype=np.int64) * stride).ravel()
    return starts
