"""What a step is told by variables of its environment; what its tests write onto the page."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.long.gpu.device import Device, load_torch

NEAR, FAR, DRIVER, SECONDS, SHARD, PAGE = (
    os.environ.get(f"KVFERRY_GPU_{name}", default)
    for name, default in (
        ("NEAR", "cuda:0"),
        ("FAR", "cuda:0"),
        ("DRIVER", "nixl"),
        ("SECONDS", "inf"),
        ("SHARD", "0/1"),
        ("PAGE", ""),
    )
)
"""The device that reads, and that of the other process; the driver; after how many seconds no
further test begins; which of the tests run in this process, such as ``0/4`` for the first of four;
and the page of results, if there is one."""

TOPICS = (
    "ThreadTests",
    "TransferTests",
    "QuiescenceTests",
    "InFlightTests",
    "NotificationTests",
    "ProcessTests",
    "ConcurrentConnectTests",
    "StoppedPeerTests",
    "PeerTests",
    "ClosingTests",
)
"""The topics of the suite that depend most on the memory and its library: a step may end early."""
KNOWN_FAILURES = {
    ("nixl", "test_close_gives_threads_and_descriptors_back"): (
        "each thread that UCX has beside its progress thread keeps a socket of a peer that is gone"
    )
}
"""Driver and test to the reason why the test may fail."""

Table = Callable[[str, Mapping[str, str | int | float]], None]
"""A function that writes figures onto the page, below a title."""

_begun = time.monotonic()
_begun_tests: list[str] = []
_statuses: list[int] = []


def pytest_configure() -> None:
    settings.register_profile("gpu", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("gpu")


@pytest.fixture(scope="session")
def device() -> Device:
    """The device that reads; without it, a test is skipped."""
    torch = pytest.importorskip("torch")
    if NEAR != "cpu" and not load_torch().cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU here")
    found = Device(NEAR)
    found.enter()
    return found


@pytest.fixture
def table() -> Table:
    def write(title: str, row: Mapping[str, str | int | float]) -> None:
        note(f"{title}: " + "; ".join(f"{name} {value}" for name, value in row.items()))

    return write


def note(line: str) -> None:
    """Write a line onto the page."""
    if PAGE:
        with Path(PAGE).open("a", encoding="utf-8") as page:
            page.write(f"- {' '.join(line.split())}\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (reason := KNOWN_FAILURES.get((DRIVER, item.name))) is not None:
            item.add_marker(pytest.mark.xfail(reason=reason))
    shard, _, shards = SHARD.partition("/")
    items[:] = sorted(items, key=_order)[int(shard) :: int(shards)]


def _order(item: pytest.Item) -> int:
    name = getattr(getattr(item, "function", None), "__qualname__", "").partition(".")[0]
    return TOPICS.index(name) if name in TOPICS else len(TOPICS)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if time.monotonic() - _begun > float(SECONDS):
        item.session.shouldstop = "the time for this step is up"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "setup":
        _begun_tests.append(report.nodeid)
    if report.failed:
        error = [line[1:] for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        note(f"FAILED {report.nodeid}: {(error or ['the log says more'])[0]}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    _statuses.append(int(bool(session.testsfailed) or not session.testscollected))
    ran = f"{len(_begun_tests)} of {session.testscollected} tests"
    note(f"{ran}, {session.testsfailed} failed")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End a step's process at once: some libraries crash in their exit handlers."""
    if PAGE and _statuses:
        sys.stdout.flush()
        os._exit(_statuses[0])
