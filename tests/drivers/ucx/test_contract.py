"""The conformance suite on UCX: over this host's shared memory, and over tcp."""

from __future__ import annotations

import pytest

from kvferry.testing import TransportContract

pytestmark = pytest.mark.ucx


class TestSharedMemory(TransportContract):
    factory = "kvferry.drivers.ucx:UcxTransport"
    lasting_bytes = 64 << 30


class TestTcp(TransportContract):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = {"transports": ["tcp"]}  # noqa: RUF012
    lasting_bytes = 32 << 30
