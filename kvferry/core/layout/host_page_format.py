"""The layout of a pool of host pages, for memory that no transport can register.

A host page has the bytes of one block id in all regions of a cache, one after the other. So one
copy moves it between device and pool, or between pools of engines with equal layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import msgspec
import numpy as np

from kvferry.core.errors import LayoutError
from kvferry.core.layout.fields import Dim, Field
from kvferry.core.layout.layout import Layout
from kvferry.core.memory import I64Array, Region

ROW_ALIGNMENT = 16
"""Rows begin at multiples of this in a host page, so that all elements are aligned."""

MAX_PLANES = 1 << 20
"""The most rows, of all fields together, that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Rows:
    """A run of bytes that every block id has at one place of a cache's memory: one row per id."""

    region: int  # index in the cache's layout
    offset: int  # bytes from the region's start to the row of id 0
    stride: int  # bytes from one row to the next
    nbytes: int  # of a row
    page_offset: int = 0  # bytes from the start of a host page to the row


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPageFormat:
    """What a host page consists of."""

    cache: Layout
    rows: tuple[Rows, ...]  # in the order in which they lie in a page
    page_bytes: int  # 0 if the cache has no fields

    @classmethod
    def of(cls, cache: Layout) -> HostPageFormat:
        """Return the format of a cache's host pages; ``LayoutError`` if rows cannot describe it."""
        if not cache.fields:
            return cls(cache=cache, rows=(), page_bytes=0)
        rows, end = [], 0
        merged = list(_merge(_field_rows(cache.fields)))
        _check_disjoint(merged, max(f.pages for f in cache.fields))
        for row in merged:
            rows.append(replace(row, page_offset=end))
            end += -(-row.nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return cls(cache=cache, rows=tuple(rows), page_bytes=end)

    def layout(self, memory: Region | None, pages: int) -> Layout:
        """Return the layout of a pool of ``pages`` pages; ``memory`` is ``None`` without fields.

        Raises ``LayoutError`` if they do not fit, or elements are not evenly spaced in them.
        """
        fields = self.cache.fields
        if not fields or memory is None:
            return Layout(regions=(), groups=self.cache.groups, fields=())
        rows: dict[tuple[int, int], list[Rows]] = {}
        for row in self.rows:
            rows.setdefault((row.region, row.stride), []).append(row)
        return Layout(
            regions=(memory,),
            groups=self.cache.groups,
            fields=tuple([self._field(f, rows[f.region, f.page_stride], pages) for f in fields]),
        )

    def _field(self, f: Field, rows: Sequence[Rows], pages: int) -> Field:
        there = _in_host_page(rows, _starts(f))
        dims = iter(_spaced(f, there))

        def moved(axis: tuple[Dim, ...]) -> tuple[Dim, ...]:
            return tuple([next(dims) if _is_outer(f, dim) else dim for dim in axis])

        return msgspec.structs.replace(
            f,
            region=0,
            offset=int(there.flat[0]),
            page_stride=self.page_bytes,
            pages=pages,
            tokens=moved(f.tokens),
            shard=moved(f.shard),
            inner=tuple([moved(axis) for axis in f.inner]),
        )


def _in_host_page(rows: Sequence[Rows], starts: I64Array) -> I64Array:
    """Map bytes of block id 0, from their region's start, to bytes of a host page."""
    first = np.array([row.offset for row in rows], dtype=np.int64)
    there = np.array([row.page_offset for row in rows], dtype=np.int64)
    index = np.searchsorted(first, starts, side="right") - 1
    places: I64Array = starts - first[index] + there[index]
    return places


def _is_outer(f: Field, dim: Dim) -> bool:
    """Return whether a dim of a field steps from one row of a block id to another."""
    return dim.extent > 1 and dim.stride >= f.page_stride


def _starts(f: Field) -> I64Array:
    """Return each row's first byte for id 0, from the region's start: one axis per outer dim."""
    outer = [dim for dim in f.dims if _is_outer(f, dim)]
    starts = np.array(f.offset, dtype=np.int64)
    for dim in outer:
        starts = np.add.outer(starts, dim.stride * np.arange(dim.extent, dtype=np.int64))
    return starts


def _spaced(f: Field, places: I64Array) -> list[Dim]:
    """Return the outer dims with their strides in a host page; refuse uneven ``places``."""
    dims, expected = [], np.array(places.flat[0], dtype=np.int64)
    for axis, extent in enumerate(places.shape):
        stride = int(np.diff(places, axis=axis).flat[0])
        expected = np.add.outer(expected, stride * np.arange(extent, dtype=np.int64))
        dims.append(Dim(extent=extent, stride=stride))
    if not np.array_equal(expected, places):
        raise _unstageable(f"field {f.key!r}")
    return dims


def _unstageable(
    what: str, why: str = "its elements lie so that no rows of bytes belong to one block id"
) -> LayoutError:
    return LayoutError(
        f"{what} cannot be staged in host memory: {why}; choose another order of the cache's axes"
    )


def _field_rows(fields: Iterable[Field]) -> Iterator[Rows]:
    """Yield each row of each field, in any order."""
    count = 0
    for f in fields:
        nbytes = f.unit + sum((d.extent - 1) * d.stride for d in f.dims if not _is_outer(f, d))
        starts = _starts(f)
        count += starts.size
        if nbytes > f.page_stride or count > MAX_PLANES:
            raise _unstageable(f"field {f.key!r}")
        for start in starts.ravel().tolist():
            yield Rows(region=f.region, offset=start, stride=f.page_stride, nbytes=nbytes)


def _merge(rows: Iterable[Rows]) -> Iterator[Rows]:
    """Yield rows that cover the given ones; those between two rows of one id are merged."""
    series = attrgetter("region", "stride")
    first, *others = sorted(set(rows), key=attrgetter("region", "stride", "offset"))
    current = first
    for row in others:
        if series(row) != series(current) or row.offset >= current.offset + current.stride:
            yield current
            current = row
            continue
        end = max(current.offset + current.nbytes, row.offset + row.nbytes)
        if end > current.offset + current.stride:
            why = f"rows of {row.stride} bytes reach from one block id into the next"
            raise _unstageable(f"region {row.region}", f"at byte {row.offset}, {why}")
        current = replace(current, nbytes=end - current.offset)
    yield current


def _check_disjoint(rows: Sequence[Rows], pages: int) -> None:
    """Refuse merged rows in which bytes of one block id are also another's."""
    # A page is copied with all bytes of its id: an overlap would change another request's pages.
    before, end = -1, 0
    for row in sorted(rows, key=lambda row: (row.region, row.offset)):
        if row.region == before and row.offset < end:
            why = "pages of different block ids overlap"
            raise _unstageable(f"region {row.region}", f"at byte {row.offset}, {why}")
        before, end = row.region, row.offset + (pages - 1) * row.stride + row.nbytes
