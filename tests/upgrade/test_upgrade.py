"""The parts of ``make upgrade``: trees, the program of a side, and the checks."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.upgrade import hand_over
from tests.upgrade.hand_over import WAYS, both, load, serve
from tests.upgrade.report import Report
from tests.upgrade.trees import ROOT, TreeError, older_tree, prepared, this_tree


def test_two_engines_of_this_tree_hand_over_and_a_wrong_byte_is_found(tmp_path: Path) -> None:
    """This tree also takes the place of the older one, which tests the program of a side."""
    old, new = prepared("old", ROOT, tmp_path / "old"), this_tree(tmp_path)
    report = Report()
    with both(old, new, WAYS["loopback"][0], (2, 1)) as (old_side, new_side):
        hand_over.check_tickets(old_side, new_side, report)
        hand_over.check_tickets(new_side, old_side, report)
        ticket = serve(old_side)
        assert "numbers are others" in load(new_side, replace(ticket, seed=ticket.seed + 1000))
        # Until the producer has heard of the first load, another one finds the pages still held.
        deadline = time.monotonic() + 60.0
        while not (said := load(new_side, ticket)).startswith("stale:"):
            assert not said
            assert time.monotonic() < deadline
    assert report.conclude()


def test_a_failed_check_fails_the_report() -> None:
    report = Report()
    report.check("one", True)
    report.check("another", False, "since it is so")
    assert not report.conclude()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_an_unknown_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match="FROM=no-such-commit is no commit of"):
        older_tree("no-such-commit", tmp_path)
