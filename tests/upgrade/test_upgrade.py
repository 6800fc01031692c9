"""What ``make upgrade`` is made of: trees, and the program of a side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.upgrade.sides import Way, check_tickets, two_sides
from tests.upgrade.trees import ROOT, TreeError, tree
from tests.waiting import eventually


def test_two_engines_of_this_tree_hand_over_and_a_wrong_byte_is_found(tmp_path: Path) -> None:
    """This tree also takes the place of the older one."""
    trees = tree("old", tmp_path / "old"), tree("new", tmp_path / "new")
    way = Way(driver="loopback", ranks=(2, 1))
    with two_sides(trees, way) as (old, new):
        check_tickets((old, new), way)
        ticket = old.serve(lease=way.lease)
        assert "numbers are others" in new.load(replace(ticket, seed=ticket.seed + 1000))
        # Until the producer has heard of the first load, another one finds the pages still held.
        eventually(lambda: new.load(ticket).startswith("stale:"), "the hold has ended")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_an_unknown_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match="FROM=no-such-commit is no commit of"):
        tree("old", tmp_path, "no-such-commit")
