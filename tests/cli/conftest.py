"""The command as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.cli.plan_command import PlanCommand


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def plan(tmp_path: Path, command: Command) -> PlanCommand:
    return PlanCommand(tmp_path, command)
