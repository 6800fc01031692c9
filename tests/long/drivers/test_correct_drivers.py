"""The conformance suite passes correct drivers, however little they can do.

Each driver runs the topics in which it differs from loopback; those that differ most run the whole
suite.
"""

from __future__ import annotations

from kvferry.testing import (
    InFlightTests,
    NotificationTests,
    StateMachineTests,
    StoppedPeerTests,
    TransportContract,
)

LASTING = 200 << 30


class TestDelayed(NotificationTests, InFlightTests, StoppedPeerTests, StateMachineTests):
    factory = "tests.long.drivers.correct_drivers:delayed"
    lasting_bytes = LASTING


class TestMinimalWholeSuite(TransportContract):
    factory = "tests.long.drivers.correct_drivers:Minimal"
    lasting_bytes = 4 << 30


class TestOneAtOnceWholeSuite(TransportContract):
    factory = "tests.long.drivers.correct_drivers:OneAtOnce"
    lasting_bytes = LASTING


class TestProgressOnlyInPollWholeSuite(TransportContract):
    factory = "tests.long.drivers.correct_drivers:ProgressOnlyInPoll"
    lasting_bytes = LASTING


class TestBlockingWholeSuite(TransportContract):
    factory = "tests.long.drivers.correct_drivers:Blocking"
    lasting_bytes = 1 << 30


class TestTwoMemoryKindsWholeSuite(TransportContract):
    factory = "tests.long.drivers.correct_drivers:TwoMemoryKinds"
    memory = "tests.long.drivers.correct_drivers:OddBuffer"
