"""Every version of vLLM refuses a wrong configuration when an engine is launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.test_launch import check_launches_of
from tests.long.versions.environments import OTHERS, interpreter

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("version", OTHERS)
def test_refused_before_an_engine_starts(version: str, checkpoint: Path, tmp_path: Path) -> None:
    check_launches_of(str(interpreter(version)), checkpoint, tmp_path)
