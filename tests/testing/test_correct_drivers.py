"""The conformance suite passes correct drivers, however little they can do.

Each driver runs the topics in which it differs from loopback. The drivers that differ most also run
the whole suite, marked slow.
"""

from __future__ import annotations

import pytest

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

pytestmark = pytest.mark.faults

LASTING = 200 << 30


class TestReadOnly(NotificationTests, InFlightTests, StoppedPeerTests, StateMachineTests):
    factory = "tests.testing.correct_drivers:ReadOnly"
    lasting_bytes = 2 << 30


class TestWriteOnly(NotificationTests, StoppedPeerTests):
    factory = "tests.testing.correct_drivers:WriteOnly"
    lasting_bytes = LASTING


class TestProgressOnlyInPoll(NotificationTests, StoppedPeerTests, StateMachineTests):
    factory = "tests.testing.correct_drivers:ProgressOnlyInPoll"
    lasting_bytes = LASTING


class TestBlocking(InFlightTests):
    factory = "tests.testing.correct_drivers:Blocking"
    lasting_bytes = 1 << 30


class TestFailingUntilDisconnect(
    InFlightTests, QuiescenceTests, StoppedPeerTests, StateMachineTests
):
    factory = "tests.testing.correct_drivers:FailingUntilDisconnect"
    lasting_bytes = LASTING
    quiet_seconds = 0.05


class TestWithoutBase(NotificationTests, InFlightTests, StoppedPeerTests, StateMachineTests):
    factory = "tests.testing.correct_drivers:WithoutBase"
    lasting_bytes = 2 << 30


class TestDelayed(StateMachineTests):
    factory = "tests.testing.correct_drivers:delayed"
    lasting_bytes = LASTING


class TestPaced(InFlightTests, StateMachineTests):
    factory = "tests.testing.correct_drivers:paced"
    lasting_bytes = 2 << 30


class TestTwoMemoryKinds(ContractSettings):
    factory = "tests.testing.correct_drivers:TwoMemoryKinds"
    memory = "tests.testing.correct_drivers:OddBuffer"
    test_several_regions = TransferTests.test_several_regions_in_one_transfer
    test_two_kinds = TransferTests.test_two_memory_kinds_in_one_transfer


@pytest.mark.slow
class TestMinimalWholeSuite(TransportContract):
    factory = "tests.testing.correct_drivers:Minimal"
    lasting_bytes = 1 << 30


@pytest.mark.slow
class TestWriteOnlyWholeSuite(TransportContract):
    factory = "tests.testing.correct_drivers:WriteOnly"
    lasting_bytes = LASTING


@pytest.mark.slow
class TestProgressOnlyInPollWholeSuite(TransportContract):
    factory = "tests.testing.correct_drivers:ProgressOnlyInPoll"
    lasting_bytes = LASTING


@pytest.mark.slow
class TestBlockingWholeSuite(TransportContract):
    factory = "tests.testing.correct_drivers:Blocking"
    lasting_bytes = 1 << 30


@pytest.mark.slow
class TestTwoMemoryKindsWholeSuite(TransportContract):
    factory = "tests.testing.correct_drivers:TwoMemoryKinds"
    memory = "tests.testing.correct_drivers:OddBuffer"
