"""The conformance suite for one driver and one kind of memory, which the environment names."""

from __future__ import annotations

import os

from kvferry.core.transport.registry import installed
from kvferry.testing import TransportContract

DRIVER, MEMORY = (os.environ.get(f"KVFERRY_CHECK_{name}", "") for name in ("DRIVER", "MEMORY"))

KNOWN_FAILURES = {
    ("nixl", "test_close_gives_threads_and_descriptors_back"): (
        "each thread that UCX has beside its progress thread keeps a socket of a peer that is gone"
    )
}
"""Driver and test to the reason why the test may fail."""


class TestDriver(TransportContract):
    """All tests of the suite."""

    factory = next((info.entry_point for info in installed() if info.name == DRIVER), "")
    memory = MEMORY or "cpu"
    # A GPU copies some terabytes in a second, and a CPU some gigabytes.
    lasting_bytes = (256 << 30) if MEMORY.startswith("cuda") else (8 << 30)
    options = {"connect_seconds": 30.0} if DRIVER == "ucx" else {}
