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

from kvferry.core.layout.fields import Dims, FieldSet
from kvferry.core.memory import I64Array, Region
from kvferry.core.work_budget import (
    OVERLAP_CLUSTER_STEPS,
    OVERLAP_MEMBER_STEPS,
    OVERLAP_RUN_STEPS,
    OVERLAP_SET_STEPS,
    WorkBudget,
)

WHERE = "bytes that fields of one group might share"


class _Form(NamedTuple):
    """A field's bytes in all pages, relative to the first; dims nest, merged where possible."""

    run: int  # number of bytes, repeated along the dims
    dims: Dims  # coarse to fine


class _Cluster(NamedTuple):
    """n fields to compare: number, address of the first byte, bytes spanned, ``_Form`` index."""

    number: I64Array
    start: I64Array
    span: I64Array
    form: I64Array

    def select(self, index: I64Array | slice) -> _Cluster:
        return _Cluster(*(each[index] for each in self))


def find_overlap(
    field_sets: Sequence[FieldSet], regions: Sequence[Region], budget: WorkBudget
) -> tuple[str, str] | None:
    """Return the keys of two fields of one group that share a byte; ``None`` if no two do.

    One key twice: the strides of that field do not nest, so it may overlap itself. Every field must
    lie in its region.
    """
    if not field_sets:
        return None
    budget.spend(OVERLAP_SET_STEPS * len(field_sets), WHERE)
    sweep = _Sweep(budget)
    kinds: list[tuple[int, int, int]] = []
    for some in field_sets:
        first = some.first
        dims = ((dim.extent, dim.stride) for dim in first.dims)
        form = _nested(first.unit, ((first.pages, first.page_stride), *dims))
        if form is None:
            return some.keys[0], some.keys[0]
        span = form.run + sum((extent - 1) * stride for extent, stride in form.dims)
        kinds.append((first.group, span, sweep.index_of(form)))
    counts = [len(some.keys) for some in field_sets]
    groups, spans, forms = np.repeat(np.array(kinds, np.int64), counts, axis=0).T
    region = np.concatenate([some.regions for some in field_sets])
    numbers: dict[object, int] = {}
    devices = np.array([numbers.setdefault((r.kind, r.device), len(numbers)) for r in regions])
    # 1 is subtracted from addresses, so that an end at ``ADDRESS_LIMIT`` fits 64 signed bits, too.
    addresses = np.array([r.address - 1 for r in regions], dtype=np.int64)
    starts = addresses[region] + np.concatenate([some.offsets for some in field_sets])
    # Fields can share bytes only in one place: a group on a device.
    places = groups * len(numbers) + devices[region]
    order = np.argsort(places, kind="stable")
    by_place = np.split(order, np.flatnonzero(np.diff(places[order])) + 1)
    budget.spend(OVERLAP_SET_STEPS * len(by_place), WHERE)
    for here in by_place:
        overlap = sweep.find(_Cluster(here, starts[here], spans[here], forms[here]))
        if overlap is not None:
            keys = [key for some in field_sets for key in some.keys]
            return keys[overlap[0]], keys[overlap[1]]
    return None


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
            # Runs are enumerated only if no dim can be dropped.
            peeled = cluster = sets.select(slice(start, stop))
            while (fewer := self._without_coarsest_dim(peeled)) is not None:
                peeled = fewer
            overlap = self._enumerate(cluster) if peeled is cluster else self.find(peeled)
            if overlap is not None:
                return overlap
            self._disjoint.add(arrangement)
        return None

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
