"""The suite finds faults: each planted one by the test that is named with it.

All of them run in one pytest of their own, which is what a driver's author would run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.planted import CAUGHT_BY

_SECONDS = 600.0
pytestmark = pytest.mark.timeout(_SECONDS)  # all of them run within the first one's fixture

ROOT = Path(__file__).parents[2]

MODULE = """
from kvferry.testing import TransportContract

{classes}
"""

CLASS = """
class Test{name}(TransportContract):
    factory = "tests.testing.planted:{name}"
    lasting_bytes = 20 << 30
    patience = 2.0
    examples = 100
"""

# Which tests failed in their own body: what breaks a fixture has been found by nobody. One failure
# of a fault's test is enough.
REPORT = """
import pytest
from hypothesis import Phase, settings

# Found is enough; nobody reads the shortest program.
settings.register_profile("found", phases=[Phase.generate], derandomize=True)
settings.load_profile("found")
caught = set()

def pytest_runtest_setup(item):
    if item.cls in caught:
        pytest.skip("caught already")

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.failed:
        caught.add(item.cls)
        with open({path!r}, "a") as out:
            print(item.cls.__name__, item.originalname, file=out)
    return report
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """``TestFault test`` for each test that failed."""
    folder = tmp_path_factory.mktemp("planted")
    report = folder / "report"
    classes = "\n".join(CLASS.format(name=name) for name in CAUGHT_BY)
    module = folder / "test_all.py"
    module.write_text(MODULE.format(classes=classes))
    (folder / "conftest.py").write_text(REPORT.format(path=str(report)))
    tests = [f"{module}::Test{name}::{test}" for name, test in CAUGHT_BY.items()]
    options = ["-q", f"--rootdir={folder}", "-p", "no:cacheprovider", "-o", "timeout=30"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        check=False,
        timeout=_SECONDS,
    )
    return set(report.read_text().splitlines())


def test_there_are_thirty_at_least() -> None:
    assert len(CAUGHT_BY) >= 30


@pytest.mark.parametrize("fault", CAUGHT_BY)
def test_a_planted_fault_is_caught(outcomes: set[str], fault: str) -> None:
    assert f"Test{fault} {CAUGHT_BY[fault]}" in outcomes
