"""The conformance suite on loopback: as it comes, and with everything on the driver's threads."""

from __future__ import annotations

from kvferry.testing import TransportContract


class TestLoopback(TransportContract):
    factory = "kvferry.drivers.loopback:LoopbackTransport"
    lasting_bytes = 200 << 30
