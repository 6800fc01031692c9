"""From a plan and the pages of a request to copies."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.copies import Copies
from kvferry.core.layout import Layout
from kvferry.core.memory import I64Array, Region, U64Array
from kvferry.core.topology import Plan, Source


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
    """The pages that one group of one engine holds for a request.

    Attributes:
        ids: (n,) int64, page ids; ``layout.HOLE`` is a hole.
        first_index: entry *i* is block index ``first_index + i`` of the request.
    """

    ids: I64Array
    first_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadRequest:
    """What to pull for one request.

    Attributes:
        ranges: per local group, the global tokens ``[first, last)`` to pull; ``None`` where
            nothing is pulled. ``(0, T)`` for a state group.
        local: per local group, its pages.
        remote: per remote group (numbered as the remote engine numbers them), its pages.
    """

    ranges: tuple[tuple[int, int] | None, ...]
    local: tuple[Pages, ...]
    remote: tuple[Pages, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSegment:
    """Spans ``[start, stop)``, all within one local region."""

    start: int
    stop: int
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Ranges of local memory.

    Attributes:
        address: (n,) uint64, first byte of each.
        nbytes: (n,) uint64, length of each.
        segments: which regions they lie in, in order and without gaps.
    """

    address: U64Array
    nbytes: U64Array
    segments: tuple[SpanSegment, ...]


class Workspace:
    """Arrays that ``copies`` fills again and again; what it returned is valid until its next use.

    Not for two threads at once.
    """


def copies(
    plan: Plan, source: Source, request: ReadRequest, workspace: Workspace | None = None
) -> Copies:
    """The copies that pull one request's pages from one source.

    Raises:
        PageError: a page list does not fit; names side, group, position, id and limit.
    """
    raise NotImplementedError


def unwritten(layout: Layout, plan: Plan, request: ReadRequest) -> Spans:
    """What the reads of ``request`` leave unwritten in the pages that they load.

    Every byte of a field, in local pages that are no holes, that lies at or after a range's first
    token and that no read writes. Zero it before the reads start.

    Raises:
        PageError: a local page list does not fit.
    """
    raise NotImplementedError
