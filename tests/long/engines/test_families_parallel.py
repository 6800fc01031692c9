"""The other families' states and latents, between engines that split their model differently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import test_families_parallel as families
from tests.engines.pairs import Pair
from tests.engines.test_families_parallel import SPLIT, start_world, test_bytes

__all__ = ["test_bytes"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=SPLIT[1:], ids=lambda family: str(family.name))
def world(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    with start_world(request.param, checkpoints, tmp_path_factory) as started:
        yield started


@pytest.mark.parametrize(
    "world", [each for each in SPLIT[1:] if each.steady], indirect=True, ids=lambda each: each.name
)
def test_texts(world: Pair) -> None:
    families.test_texts(world)
