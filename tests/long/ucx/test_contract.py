"""The conformance suite on UCX, over TCP."""

from __future__ import annotations

from kvferry.testing import TransportContract
from tests.ucx.test_contract import LONG_TIMEOUT


class TestTcp(TransportContract):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = LONG_TIMEOUT | {"transports": ["tcp"]}
    lasting_bytes = 32 << 30
