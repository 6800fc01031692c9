"""The property tests of the planner find planted faults, one at a time.

Each fault is a change of a function's source that breaks one rule of the plan or of the copies,
and names the check that must find it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from random import Random
from textwrap import dedent
from typing import Any

import pytest

from kvferry.core.errors import KVFerryError
from kvferry.core.planner import build_copies, coalesce, coverage, plan, strips
from kvferry.core.planner.coverage import EngineHoldings
from kvferry.core.planner.token_blocks import BlockMap, Pairing, share_tokens
from tests.core.planner.properties import CHECKS, SEEDS, pair_of

BYTES, FEWEST = "every byte is right", "equal layouts need the fewest copies"
NOTIFIED, EVEN = "producers are notified", "replicated ranks are read evenly"
MISSING_RANK, CHANGED_FIELDS = "a missing rank", "changed fields are refused"
BY_PAGES, BATCHES = "copies named by pages are the same", "batches are the whole"
DAMAGED, OUT_OF_RANGE = "damaged page lists", "page ids out of range"
ENTRY = "math.lcm(*(part.local.first.tokens_per_state for part in parts))"
ONE_REGION = "runs._replace(pair=0 * runs.pair).select(runs.local.argsort())"
UNLIKE = " | (np.diff(far) != batch.nbytes)"

PLANTED: list[tuple[Callable[..., Any], str, str, str]] = [
    # Which remote ranks are read.
    (coverage._read, "holders[begin:] + holders[:begin]", "holders", EVEN),
    (coverage._covered, "raise _gap(", "return (", MISSING_RANK),
    (coverage._covered, "(cursor, end)", "held.shard", BYTES),
    (coverage.assign_pieces, "_read(key, remote, local)", "pieces", MISSING_RANK),
    (share_tokens, "return lowest", "return one.rank == other.rank or lowest > 0", BYTES),
    (EngineHoldings.tensor_facts, '"element type": first.dtype,', "", CHANGED_FIELDS),
    (EngineHoldings.exclude, "for key in keys", "for key in ()", BYTES),
    (plan._check_drafts, "if False in holders", "if not holders", CHANGED_FIELDS),
    # Which ranks are notified.
    (plan.make_plan, "max(count, 1) for", "1 for", NOTIFIED),
    (plan.make_plan, "if count == 0", "if count < 0", NOTIFIED),
    # Which tokens are read, and where.
    (plan._source, "remote, pairing.granularity", f"remote, {ENTRY}", FEWEST),
    (Pairing.round_outwards, "-(-last // size)", "last // size", BYTES),
    (BlockMap.held, "== self.rank", "== 0", BYTES),
    (BlockMap.locate, "self.size > 1", "self.size > 9", BYTES),
    (build_copies._locate_on_side, "position - pages.first_index", "position", BYTES),
    (build_copies._locate, "request.remote[match.remote_group]", "request.remote[0]", BYTES),
    (build_copies._locate_on_side, "ids.min() <= HOLE", "ids.min() < HOLE", DAMAGED),
    (build_copies._locate_on_side, " or ids.max() >= limit", "", OUT_OF_RANGE),
    # Which bytes these are.
    (strips._shape, "page=o.remote.page_stride", "page=o.local.page_stride", BYTES),
    (strips._uniform_entries, "!= entries", "> entries", BYTES),
    (strips._inner_dims, "merge_dims((*dims, (f.unit // unit, unit)))", "dims[::-1]", BYTES),
    (coalesce.coalesce, "len(first) == runs.n", "len(first)", FEWEST),
    (coalesce.coalesce, "runs.select(np.lexsort((runs.local, runs.pair)))", ONE_REGION, BYTES),
    (build_copies._part, UNLIKE, "", BYTES),
    # Copies that are named by pages, and batches.
    (build_copies._Places.numbers, "self.within * pages + ", "self.within + ", BY_PAGES),
    (build_copies._Part.cut, "else self.nbytes[here]", "else self.nbytes[:places]", BATCHES),
    (build_copies._in_batches, "piece.copies > room", "piece.copies > room + 1", BATCHES),
    # What is zeroed.
    (build_copies._common, "return (start, stop)", "return (start, stop + 64 * entry)", BYTES),
    (plan._local_groups, "is_read: tuple(sets)", "is_read: tuple(sets[: int(is_read)])", BYTES),
]


@pytest.mark.parametrize(("function", "right", "wrong", "check"), PLANTED)
def test_planted_fault_is_found(
    function: Any, right: str, wrong: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dedent(inspect.getsource(function))
    assert source.count(right) == 1
    made: dict[str, Any] = {}
    exec(source.replace(right, wrong), function.__globals__, made)
    monkeypatch.setattr(function, "__code__", made[function.__name__].__code__)
    assert any(is_found(check, seed) for seed in SEEDS)


def is_found(check: str, seed: int) -> bool:
    """Return whether a check fails, in any way, for one pair of engines."""
    try:
        CHECKS[check](pair_of(seed), Random(seed))
    except (AssertionError, KVFerryError):
        return True
    return False
