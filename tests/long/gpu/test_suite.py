"""The conformance suite for one driver and one kind of memory."""

from __future__ import annotations

from kvferry.core.transport.registry import installed
from kvferry.testing import TransportContract
from tests.long.gpu.conftest import DRIVER, NEAR


class TestDriver(TransportContract):
    """All tests of the suite."""

    factory = next((info.entry_point for info in installed() if info.name == DRIVER), "")
    memory = NEAR
    # A GPU copies some terabytes in a second, and a CPU some gigabytes.
    lasting_bytes = (256 << 30) if NEAR.startswith("cuda") else (8 << 30)
    options = {"connect_seconds": 30.0} if DRIVER == "ucx" else {}
