"""What ``make upgrade`` stands on: trees, the program of a side, and that a wrong byte is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.upgrade import hand_over
from tests.upgrade.hand_over import WAYS, both, load, serve
from tests.upgrade.report import Report
from tests.upgrade.trees import ROOT, TreeError, older_tree, prepared, this_tree


def test_two_engines_of_this_tree(tmp_path: Path) -> None:
    """In place of the older one stands this one, so that the program of a side is tried."""
    old, new = prepared("old", ROOT, tmp_path / "old"), this_tree(tmp_path)
    report = Report()
    with both(old, new, WAYS["loopback"][0], (2, 1)) as (one, other):
        hand_over.check_tickets(one, other, report)
        hand_over.check_tickets(other, one, report)
        ticket = serve(one)
        assert "numbers are others" in load(other, replace(ticket, seed=ticket.seed + 1000))
        assert load(other, ticket).startswith("stale:")
    assert report.conclude()


def test_a_finding_that_does_not_hold_is_remembered() -> None:
    report = Report()
    report.check("one", True)
    report.check("another", False, "since it is so")
    assert not report.conclude()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_commit_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match="FROM=no-such-commit is no commit of"):
        older_tree("no-such-commit", tmp_path)
