"""A producer is killed while decode reads over nixl or ucx, with the other policy of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.engines import Engine
from tests.engines.test_killed_producer import check_in_the_middle_of_a_read, started

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("driver", "policy"), [("nixl", "fail"), ("ucx", "recompute")])
def test_in_the_middle_of_a_read(
    reference: Engine, checkpoint: Path, tmp_path: Path, driver: str, policy: str
) -> None:
    with started(checkpoint, tmp_path, driver, policy) as world:
        check_in_the_middle_of_a_read(reference, world, policy)
