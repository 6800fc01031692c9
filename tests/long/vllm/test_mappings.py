"""What every rank reads of a cache, against what other connectors read."""

from __future__ import annotations

import pytest

from tests.vllm.mappings.test_mappings import FAMILIES, all_ranks, check_family

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_reads_in_the_same_way(name: str) -> None:
    check_family(name, all_ranks)
