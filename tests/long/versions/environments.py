"""The environments of other versions of vLLM, which ``make long-versions`` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.engines import ROOT

OTHERS = ("0.29.0", "0.30.0", "0.31.0")
"""The versions of vLLM that are run beside that of this environment, the oldest first."""

HERE = "here"
"""The version of vLLM in the environment that runs the tests."""

VERSIONS = (*OTHERS, HERE)


def interpreter(version: str) -> Path | None:
    """The interpreter of a version's environment; `None` for that of this process.

    A test is skipped whose environment was not made.
    """
    if version == HERE:
        return None
    python = ROOT / "build" / "versions" / version / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment of vLLM {version}: make long-versions makes them")
    return python
