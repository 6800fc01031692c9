"""Older versions' schedulers and cores: pauses, new weights and preemption, without engines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engines.engines import ROOT
from tests.long.versions.environments import OTHERS, interpreter

FOLDER = "tests/vllm/geometry"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", OTHERS)
def test_weights_and_preemption(version: str) -> None:
    """What a version cannot do is skipped there."""
    files = [f"{FOLDER}/test_weights.py", f"{FOLDER}/test_preemption.py"]
    python = interpreter(version) or sys.executable
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
