"""The conformance suite passes correct drivers, however little they can do.

Each driver runs the topics in which it differs from loopback. The drivers that differ most also run
the whole suite.
"""

from __future__ import annotations

from kvferry.testing import (
    ContractSettings,
    InFlightTests,
    NotificationTests,
    QuiescenceTests,
    StateMachineTests,
    StoppedPeerTests,
    TransferTests,
    TransportContract,
)

LASTING = 200 << 30


class TestReadOnly(NotificationTests, InFlightTests, StoppedPeerTests, StateMachineTests):
    factory = "tests.long.drivers.correct_drivers:ReadOnly"
    lasting_bytes = 2 << 30


class TestWriteOnly(NotificationTests, StoppedPeerTests):
    factory = "tests.long.drivers.correct_drivers:WriteOnly"
    lasting_bytes = LASTING


class TestProgressOnlyInPoll(NotificationTests, StoppedPeerTests, StateMachineTests):
    factory = "tests.long.drivers.correct_drivers:ProgressOnlyInPoll"
    lasting_bytes = LASTING


class TestBlocking(InFlightTests):
    factory = "tests.long.drivers.correct_drivers:Blocking"
    lasting_bytes = 1 << 30


class TestFailingUntilDisconnect(
    InFlightTests, QuiescenceTests, StoppedPeerTests, StateMachineTests
):
    factory = "tests.long.drivers.correct_drivers:FailingUntilDisconnect"
    lasting_bytes = LASTING
    quiet_seconds = 0.05


class TestWithoutBase(NotificationTests, InFlightTests, StoppedPeerTests, StateMachineTests):
    factory = "tests.long.drivers.correct_drivers:WithoutBase"
    lasting_bytes = 2 << 30


class TestDelayed(StateMachineTests):
    factory = "tests.long.drivers.correct_drivers:delayed"
    lasting_bytes = LASTING


class TestPaced(InFlightTests, StateMachineTests):
    factory = "tests.long.drivers.correct_drivers:paced"
    lasting_bytes = 2 << 30


class TestTwoMemoryKinds(ContractSettings):
    factory = "tests.long.drivers.correct_drivers:TwoMemoryKinds"
    memory = "tests.long.drivers.correct_drivers:OddBuffer"
    test_several_regions = TransferTests.test_several_regions_in_one_transfer
    test_two_kinds = TransferTests.test_two_memory_kinds_in_one_transfer


class TestMinimalWholeSuite(TransportContract):
    factory = "tests.long.drivers.correct_drivers:Minimal"
    lasting_bytes = 1 << 30


class TestWriteOnlyWholeSuite(TransportContract):
    factory = "tests.long.drivers.correct_drivers:WriteOnly"
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
