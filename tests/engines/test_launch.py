"""What cannot work is refused when an engine is launched, before its model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integrations.vllm.test_launch import check_launches_of


@pytest.mark.timeout(300)
def test_vllm_refuses_before_it_starts_an_engine(checkpoint: Path) -> None:
    check_launches_of(sys.executable, checkpoint)
