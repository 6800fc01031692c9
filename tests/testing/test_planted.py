"""The suite finds faults: each planted one by the test that is named with it.

All of them run in one pytest of their own, which is what a driver's author would run. The process
that tests share is a correct driver's there, one for all: the fault is on this side. Tests that
kill a peer, stop it or tell it what to do start one with the fault.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.testing.planted import CAUGHT_BY, FACTORIES

_SECONDS = 600.0
_AT_ONCE = 3
# All of them run within the first one's fixture.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(_SECONDS)]

ROOT = Path(__file__).parents[2]

MODULE = """
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

CLASS = """
class Test{name}(Planted):
    factory = "{factory}"
"""

# Which tests failed in their own body: what breaks a fixture has been found by nobody. One failure
# of a fault's test is enough.
REPORT = """
import pytest
from hypothesis import Phase, settings
from kvferry.testing.peers import Process

@pytest.fixture(scope="session")
def correct_process():
    with Process("kvferry.drivers.loopback:LoopbackTransport", {{}}, "cpu", 1 << 20) as process:
        yield process

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
    return found(tmp_path_factory.mktemp("planted"), list(CAUGHT_BY))


def found(folder: Path, faults: Sequence[str]) -> set[str]:
    """Run the tests that have to find some faults; ``TestFault test`` for each that failed.

    Most of their time is waiting, so several run at once.
    """
    parts = [folder / str(part) for part in range(_AT_ONCE)]
    running = [_started(part, faults[index::_AT_ONCE]) for index, part in enumerate(parts)]
    try:
        for one in running:
            one.wait(_SECONDS)
    finally:
        for one in running:
            one.kill()
    return {line for part in parts for line in (part / "report").read_text().splitlines()}


def _started(folder: Path, faults: Sequence[str]) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "report").touch()
    classes = "\n".join(CLASS.format(name=name, factory=FACTORIES[name]) for name in faults)
    module = folder / "test_all.py"
    module.write_text(MODULE.format(classes=classes))
    (folder / "conftest.py").write_text(REPORT.format(path=str(folder / "report")))
    tests = [f"{module}::Test{name}::{CAUGHT_BY[name]}" for name in faults]
    options = ["-q", f"--rootdir={folder}", "-p", "no:cacheprovider", "-o", "timeout=30"]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=folder,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def test_there_are_thirty_at_least() -> None:
    assert len(CAUGHT_BY) >= 30


@pytest.mark.parametrize("fault", CAUGHT_BY)
def test_a_planted_fault_is_caught(outcomes: set[str], fault: str) -> None:
    assert f"Test{fault} {CAUGHT_BY[fault]}" in outcomes
