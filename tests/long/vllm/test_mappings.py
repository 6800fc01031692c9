"""What every rank reads of a cache, against what other connectors read.

``docs/planner.md`` has the numbers of pairs of engines, which are counted here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.mappings.test_mappings import FAMILIES, compare

PAGE = Path(__file__).parents[3] / "docs" / "planner.md"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_reads_in_the_same_way(name: str) -> None:
    assert compare(FAMILIES[name](), range).row(name) in PAGE.read_text().splitlines()
