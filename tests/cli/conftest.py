"""The command ``kvferry plan`` as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.plan_command import PlanCommand


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PlanCommand:
    return PlanCommand(tmp_path, capsys)
