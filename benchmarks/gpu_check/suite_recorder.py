"""A pytest plugin for a suite that may be longer than its time: what matters most runs first.

Each test's outcome is written to a file at once, so that a test that ends the process loses none.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from . import suite

settings.register_profile("check", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("check")

FILE, SECONDS, SHARD = (f"KVFERRY_CHECK_{name}" for name in ("FILE", "SECONDS", "SHARD"))
"""Environment variables: the file, after how many seconds no further test begins, and which of the
tests run in this process, such as ``0/4`` for the first of four."""

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


class Recorder:
    """Append a line of JSON for the number of tests, for each that begins, and for each result."""

    def __init__(self) -> None:
        self._file = Path(os.environ[FILE])
        self._session: pytest.Session | None = None
        self._until = time.monotonic() + float(os.environ[SECONDS])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the tests into the order of ``TOPICS``, reads first, and keep those of the shard."""
        for item in items:
            if (reason := suite.KNOWN_FAILURES.get((suite.DRIVER, item.name))) is not None:
                item.add_marker(pytest.mark.xfail(reason=reason))
        shard, _, shards = os.environ.get(SHARD, "0/1").partition("/")
        items[:] = sorted(items, key=_order)[int(shard) :: int(shards)]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the number of tests."""
        self._session = session
        self._write(collected=len(session.items))

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Write that a test begins."""
        self._write(began=item.nodeid.rpartition("::")[2])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome of a test; of its phases, that of the call, or the one that failed."""
        if report.when == "call" or report.outcome != "passed":
            self._write(
                test=report.nodeid.rpartition("::")[2],
                outcome=report.outcome,
                seconds=round(report.duration, 2),
                text=str(report.longrepr)[-2000:] if report.failed else "",
            )

    def pytest_runtest_logfinish(self) -> None:
        """Stop the run after this test if the time is up."""
        if self._session is not None and time.monotonic() > self._until:
            self._session.shouldstop = "the time for this step is up"

    def pytest_sessionfinish(self) -> None:
        """Write that the run has ended by itself."""
        self._write(ended=True)

    def _write(self, **fields: object) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def _order(item: pytest.Item) -> int:
    name = getattr(getattr(item, "function", None), "__qualname__", "").partition(".")[0]
    return TOPICS.index(name) if name in TOPICS else len(TOPICS)


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder if a file is named."""
    if FILE in os.environ:
        config.pluginmanager.register(Recorder(), "kvferry-recorder")
