"""What a step is told, and what it reports: by variables of its environment and lines of JSON.

What matters most runs first, and each outcome is written at once, as a step may end early.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.long.gpu.device import Device, load_torch

NEAR, FAR, DRIVER, SECONDS, SHARD, FILE = (
    os.environ.get(f"KVFERRY_GPU_{name}", default)
    for name, default in (
        ("NEAR", "cuda:0"),
        ("FAR", "cuda:0"),
        ("DRIVER", "nixl"),
        ("SECONDS", "inf"),
        ("SHARD", "0/1"),
        ("FILE", os.devnull),
    )
)
"""The device that reads, and that of the other process; the driver; after how many seconds no
further test begins; which of the tests run in this process, such as ``0/4`` for the first of four;
and where the lines go."""

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
    "StateMachineTests",
    "RefusalTests",
)
"""The topics of the suite, beginning with those that depend most on the memory and its library."""
KNOWN_FAILURES = {
    ("nixl", "test_close_gives_threads_and_descriptors_back"): (
        "each thread that UCX has beside its progress thread keeps a socket of a peer that is gone"
    )
}
"""Driver and test to the reason why the test may fail."""

Table = Callable[[str, Mapping[str, str | int | float]], None]
"""A function that adds a row to a table of the results, by its title."""

_begun = time.monotonic()
_sessions: list[pytest.Session] = []


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
def table(record_property: Callable[[str, object], None]) -> Table:
    return lambda title, row: record_property(title, dict(row))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the suite into the order of ``TOPICS``, and keep those of the shard."""
    for item in items:
        if (reason := KNOWN_FAILURES.get((DRIVER, item.name))) is not None:
            item.add_marker(pytest.mark.xfail(reason=reason))
    shard, _, shards = SHARD.partition("/")
    items[:] = sorted(items, key=_order)[int(shard) :: int(shards)]


def _order(item: pytest.Item) -> int:
    name = getattr(getattr(item, "function", None), "__qualname__", "").partition(".")[0]
    return TOPICS.index(name) if name in TOPICS else len(TOPICS)


def pytest_collection_finish(session: pytest.Session) -> None:
    _sessions.append(session)
    _write(collected=len(session.items))


def pytest_runtest_protocol(item: pytest.Item) -> None:
    _write(began=item.name)


def pytest_runtest_logfinish() -> None:
    if time.monotonic() - _begun > float(SECONDS):
        _sessions[0].shouldstop = "the time for this step is up"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test; of its phases, that of the call, or the one that failed."""
    if report.when == "call" or report.outcome != "passed":
        skipped = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        _write(
            test=report.nodeid.rpartition("::")[2],
            outcome=report.outcome,
            seconds=round(report.duration, 2),
            text=str(report.longrepr)[-4000:] if report.failed else skipped,
            tables=report.user_properties,
        )


def pytest_sessionfinish() -> None:
    _write(ended=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End the process: some libraries crash in their exit handlers."""
    if os.devnull != FILE:
        sys.stdout.flush()
        os._exit(0)


def _write(**fields: object) -> None:
    with Path(FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")
