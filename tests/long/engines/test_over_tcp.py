"""The hand-over between real engines over the driver ucx: TCP only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.fixtures import StartEngine
from tests.engines.test_over_ucx import Engines, test_early, test_hand_over, test_swapped_caches

__all__ = ["test_early", "test_hand_over", "test_swapped_caches"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def engines(start_engine: StartEngine) -> Iterator[Engines]:
    engines = Engines(way="tcp", start=start_engine)
    yield engines
    engines.close()
