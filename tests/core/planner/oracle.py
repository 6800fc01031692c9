"""The expected result of a read, computed byte by byte from the definition in ``Field``.

Memory is simulated. Every byte is an int64 *label* that identifies a byte of a tensor, so that no
two bytes are equal by chance. None of the planner's arithmetic is used here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core.layout import HOLE, Field, Group, GroupKind, Layout
from kvferry.core.planner.build_copies import Pages, ReadRequest, Workspace, build_copies
from kvferry.core.planner.plan import make_plan
from kvferry.core.planner.unwritten import Spans, unwritten_spans
from kvferry.core.transport.copies import Copies
from tests.core.layouts import field_offsets

Labels = npt.NDArray[np.int64]

ZERO = 0
ENTRIES, SHARDS, BYTES = 1 << 16, 1 << 8, 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePair:
    """Two engines, and a request with the same ranges and pages for all local ranks."""

    local: tuple[Layout, ...]
    remote: tuple[Layout, ...]
    request: ReadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """All bytes of one token entry (or state, or opaque page) of one field in one page."""

    index: int  # the page's block index
    tokens: tuple[int, ...]  # the global tokens of the entry; empty for a state
    region: int  # index of the region
    where: Labels  # (s, b) offsets in the region
    labels: Labels  # (s, b) expected content


def pages(ids: Sequence[int], first_index: int = 0) -> Pages:
    """Return a page list."""
    return Pages(ids=np.array(ids, dtype=np.int64), first_index=first_index)


def tokens_of_page(group: Group, index: int) -> list[int]:
    """Return the global tokens that block index ``index`` of a request holds on a rank."""
    context, size = group.context, group.block_tokens
    held = (t for t in itertools.count() if t // context.interleave % context.size == context.rank)
    return list(itertools.islice(held, index * size, (index + 1) * size))


def label(key: int, entry: int, shard: int, byte: int) -> int:
    """Return a unique number above 0 for a byte."""
    return 1 + ((key * ENTRIES + entry) * SHARDS + shard) * BYTES + byte


def entries(layout: Layout, keys: dict[str, int], lists: Sequence[Pages]) -> Iterator[Entry]:
    """Yield all entries in a request's pages on one rank, without holes."""
    for f in layout.fields:
        where = field_offsets(f)
        for position, page in enumerate(lists[f.group].ids.tolist()):
            if page != HOLE:
                index = lists[f.group].first_index + position
                start = f.offset + page * f.page_stride
                yield from _page_entries(
                    f, keys[f.key], layout.groups[f.group], index, where + start
                )


def _page_entries(f: Field, key: int, group: Group, index: int, where: Labels) -> Iterator[Entry]:
    held = tokens_of_page(group, index) if group.kind is not GroupKind.STATE else []
    per_entry = f.tokens_per_state if group.kind is GroupKind.PAGED else max(len(held), 1)
    for entry, place in enumerate(where):
        tokens = held[entry * per_entry : (entry + 1) * per_entry]
        first = tokens[0] if tokens else index
        shards = range(*f.shard_range) if not f.packing else [f.shard_range[0]]
        labels = [[label(key, first, s, b) for b in range(place.shape[1])] for s in shards]
        yield Entry(
            index=index,
            tokens=tuple(tokens),
            region=f.region,
            where=place,
            labels=np.array(labels, dtype=np.int64),
        )


def poison(layout: Layout) -> list[Labels]:
    """Return memory in which every byte has a unique label below 0."""
    sizes = [region.nbytes for region in layout.regions]
    starts = itertools.accumulate(sizes, initial=1)
    return [-np.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def remote_memory(pair: EnginePair, rank: int, keys: dict[str, int]) -> list[Labels]:
    """Return the memory of a remote rank: correct pages of the request, poison elsewhere."""
    memory = poison(pair.remote[rank])
    for entry in entries(pair.remote[rank], keys, pair.request.remote):
        if np.max(entry.where, initial=0) < len(memory[entry.region]):  # else nobody may read it
            memory[entry.region][entry.where] = entry.labels
    return memory


def run(
    found: Copies, layout: Layout, memory: list[Labels], far: Layout, theirs: list[Labels]
) -> list[Labels]:
    """Perform copies in ``memory`` with all checks; return how often each byte was written."""
    written = [np.zeros_like(region) for region in memory]
    done = 0
    for segment in found.segments:
        assert segment.start == done < segment.stop
        done = segment.stop
        here, there = layout.regions.index(segment.local), far.regions.index(segment.remote)
        for i in range(segment.start, segment.stop):
            size = int(found.nbytes[i])
            near = int(found.local[i]) - segment.local.address
            far_off = int(found.remote[i]) - segment.remote.address
            assert size > 0
            assert 0 <= near <= near + size <= segment.local.nbytes
            assert 0 <= far_off <= far_off + size <= segment.remote.nbytes
            memory[here][near : near + size] = theirs[there][far_off : far_off + size]
            written[here][near : near + size] += 1
    assert done == len(found) == len(found.local) == len(found.remote)
    return written


def zero(spans: Sequence[Spans], layout: Layout, memory: list[Labels]) -> None:
    """Zero spans in ``memory`` with all checks."""
    assert len({each.region for each in spans}) == len(spans)
    for each in spans:
        here, end = layout.regions.index(each.region), 0
        for near, size in zip(each.offsets.tolist(), each.nbytes.tolist(), strict=True):
            assert end <= near < near + size <= each.region.nbytes
            end = near + size
            memory[here][near:end] = ZERO


def check_rank(pair: EnginePair, rank: int, workspace: Workspace | None = None) -> None:
    """Plan, zero and read for one local rank, and compare every byte of its memory."""
    layout = pair.local[rank]
    everyone = (*pair.remote, *pair.local)
    keys = {f.key: i for i, f in enumerate(f for one in everyone for f in one.fields)}
    memory = poison(layout)
    ours = make_plan(pair.local, pair.remote, rank)
    zero(unwritten_spans(layout, ours, pair.request), layout, memory)
    total = [np.zeros_like(region) for region in memory]
    for source in ours.sources:
        far = pair.remote[source.remote]
        found = build_copies(source, pair.request, workspace)
        theirs = remote_memory(pair, source.remote, keys)
        for counts, more in zip(total, run(found, layout, memory, far, theirs), strict=True):
            counts += more
    assert all(counts.max() <= 1 for counts in total), "a byte was written twice"
    compare(pair, layout, keys, memory)


def compare(pair: EnginePair, layout: Layout, keys: dict[str, int], memory: list[Labels]) -> None:
    """Compare every byte of memory with what is expected.

    In the listed pages, requested bytes must be right and others right or zero; elsewhere nothing
    may have changed.
    """
    want, blank = poison(layout), [np.zeros(len(m), dtype=bool) for m in memory]
    names = {keys[f.key]: f.key for f in layout.fields}
    there = {f.key for one in pair.remote for f in one.fields}
    for f in layout.fields:
        wanted = pair.request.ranges[f.group]
        if wanted is None:
            continue
        one = Layout(regions=layout.regions, groups=layout.groups, fields=(f,))
        for entry in entries(one, keys, pair.request.local):
            want[f.region][entry.where] = entry.labels if f.key in there else ZERO
            blank[f.region][entry.where] = not is_wanted(entry, wanted)
    for region, (is_, should, may) in enumerate(zip(memory, want, blank, strict=True)):
        wrong = np.flatnonzero((is_ != should) & ~(may & (is_ == ZERO)))
        if len(wrong):
            at = int(wrong[0])
            raise AssertionError(
                f"{len(wrong)} bytes of region {region} are wrong, the first at {at}: it is "
                f"{told(int(is_[at]), names)} and should be {told(int(should[at]), names)}"
            )


def is_wanted(entry: Entry, wanted: tuple[int, int]) -> bool:
    """Return whether a range includes an entry; a state is included in any range with tokens."""
    if not entry.tokens:
        return entry.index == 0 and wanted[1] > 0
    return any(wanted[0] <= token < wanted[1] for token in entry.tokens)


def told(value: int, names: dict[int, str]) -> str:
    """Describe a label."""
    if value <= 0:
        return "zero" if value == ZERO else f"poison {value}"
    rest, byte = divmod(value - 1, BYTES)
    rest, shard = divmod(rest, SHARDS)
    key, entry = divmod(rest, ENTRIES)
    return f"{names.get(key, key)} entry {entry} shard {shard} byte {byte}"
