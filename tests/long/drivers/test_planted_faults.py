"""The conformance suite finds every planted fault, by the test that the fault names.

The suite runs in separate pytest processes, as an author of a driver would run it. The peer process
that tests share has a correct driver, so that only this side has the fault. Tests that kill a peer,
stop it or give it commands start a peer with the fault.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.long.drivers.planted import CAUGHT_BY

_TIMEOUT_SECONDS = 600.0
_PROCESSES = 3
_ATTEMPTS = 3
# The fixture of the first test runs the suite for all faults.
pytestmark = pytest.mark.timeout(_TIMEOUT_SECONDS)

ROOT = Path(__file__).parents[3]

MODULE_CODE = """
import pytest
from kvferry.testing import TransportContract

class Planted(TransportContract):
    lasting_bytes = 20 << 30
    patience = 2.0
    examples = 100

    @pytest.fixture(scope="class")
    @classmethod
    def lasting_process(cls, correct_process):
        return correct_process

del TransportContract
{classes}
"""

CLASS_CODE = """
class Test{name}(Planted):
    factory = "tests.long.drivers.planted:{name}"
"""

# Reports the tests that failed in their own body; an error in a fixture does not count. One failure
# of a fault is enough.
CONFTEST_CODE = """
import pytest
from hypothesis import Phase, settings
from kvferry.testing.peers import Process

@pytest.fixture(scope="session")
def correct_process():
    with Process("kvferry.drivers.loopback:LoopbackTransport", {{}}, "cpu", 1 << 20) as process:
        yield process

# Hypothesis need not shrink a failing example.
settings.register_profile("found", phases=[Phase.generate], derandomize=True)
settings.load_profile("found")
caught = set()

def pytest_runtest_setup(item):
    if item.cls in caught:
        pytest.skip("already caught")

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
    """A line ``TestFault test`` for each test that failed.

    Many faults are races, which a busy machine may hide. Faults that were not caught run again.
    """
    found: set[str] = set()
    for _ in range(_ATTEMPTS):
        missed = [fault for fault in CAUGHT_BY if f"Test{fault} {CAUGHT_BY[fault]}" not in found]
        if missed:
            found |= run_suite(tmp_path_factory.mktemp("planted"), missed)
    return found


def run_suite(folder: Path, faults: Sequence[str]) -> set[str]:
    """Run the tests that have to find these faults, and return ``TestFault test`` for each failure.

    The tests mostly wait, so several processes run at once.
    """
    parts = [folder / str(part) for part in range(_PROCESSES)]
    running = [_start_pytest(part, faults[index::_PROCESSES]) for index, part in enumerate(parts)]
    try:
        for one in running:
            one.wait(_TIMEOUT_SECONDS)
    finally:
        for one in running:
            one.kill()
    return {line for part in parts for line in (part / "report").read_text().splitlines()}


def _start_pytest(folder: Path, faults: Sequence[str]) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "report").touch()
    classes = "\n".join(CLASS_CODE.format(name=name) for name in faults)
    module = folder / "test_all.py"
    module.write_text(MODULE_CODE.format(classes=classes))
    (folder / "conftest.py").write_text(CONFTEST_CODE.format(path=str(folder / "report")))
    tests = [f"{module}::Test{name}::{CAUGHT_BY[name]}" for name in faults]
    options = ["-q", f"--rootdir={folder}", "-p", "no:cacheprovider", "-o", "timeout=120"]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=folder,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def test_at_least_thirty_faults_are_planted() -> None:
    assert len(CAUGHT_BY) >= 30


@pytest.mark.parametrize("fault", CAUGHT_BY)
def test_planted_fault_is_caught(outcomes: set[str], fault: str) -> None:
    assert f"Test{fault} {CAUGHT_BY[fault]}" in outcomes
