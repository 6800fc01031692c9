"""The conformance suite on loopback: by default, and with all copies on threads in small chunks."""

from __future__ import annotations

from kvferry.testing import (
    InFlightTests,
    NotificationTests,
    StateMachineTests,
    TransferTests,
    TransportContract,
)

LASTING = 200 << 30


class TestLoopback(TransportContract):
    factory = "kvferry.drivers.loopback:LoopbackTransport"
    lasting_bytes = LASTING


class TestLoopbackOnThreads(TransferTests, NotificationTests, InFlightTests, StateMachineTests):
    factory = "kvferry.drivers.loopback:LoopbackTransport"
    options = {"inline_bytes": 0, "chunk_bytes": 4096, "threads": 3}  # noqa: RUF012
    lasting_bytes = 4 << 30
