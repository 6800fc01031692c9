"""What a step is told by variables of its environment, and the order of the suite's tests."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, settings

from tests.long.gpu.device import Device, load_torch

NEAR, FAR, DRIVER, SECONDS, SHARD = (
    os.environ.get(f"KVFERRY_GPU_{name}", default)
    for name, default in (
        ("NEAR", "cuda:0"),
        ("FAR", "cuda:0"),
        ("DRIVER", "nixl"),
        ("SECONDS", "inf"),
        ("SHARD", ""),
    )
)
"""The device that reads, and that of the other process; the driver; after how many seconds no
further test begins; and which of the tests run in this process, such as ``0/4`` for the first of
four."""

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
"""A function that adds a row to a table of the results, by its title."""

_begun = time.monotonic()


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
    return lambda title, row: record_property(title, json.dumps(dict(row)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (reason := KNOWN_FAILURES.get((DRIVER, item.name))) is not None:
            item.add_marker(pytest.mark.xfail(reason=reason))
    shard, _, shards = (SHARD or "0/1").partition("/")
    items[:] = sorted(items, key=_order)[int(shard) :: int(shards)]


def _order(item: pytest.Item) -> int:
    name = getattr(getattr(item, "function", None), "__qualname__", "").partition(".")[0]
    return TOPICS.index(name) if name in TOPICS else len(TOPICS)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if time.monotonic() - _begun > float(SECONDS):
        item.session.shouldstop = "the time for this step is up"


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End a step's process: some libraries crash in their exit handlers."""
    if SHARD:
        sys.stdout.flush()
        os._exit(0)
