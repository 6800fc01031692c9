"""The suite passes drivers that are correct, however little they can do.

Each runs the topics that it is different in; and, marked slow, those that differ most run it whole.
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


class TestModest(NotificationTests, InFlightTests, StoppedPeerTests, StateMachineTests):
    factory = "tests.testing.factories:Modest"
    lasting_bytes = 2 << 30


class TestWriter(NotificationTests, StoppedPeerTests):
    factory = "tests.testing.factories:Writer"
    lasting_bytes = LASTING


class TestManual(NotificationTests, StoppedPeerTests, StateMachineTests):
    factory = "tests.testing.factories:Manual"
    lasting_bytes = LASTING


class TestBlocking(InFlightTests):
    factory = "tests.testing.factories:Blocking"
    lasting_bytes = 1 << 30


class TestFailing(InFlightTests, QuiescenceTests, StoppedPeerTests, StateMachineTests):
    factory = "tests.testing.factories:Failing"
    lasting_bytes = LASTING
    quiet_seconds = 0.05


class TestReadsByItself(NotificationTests, InFlightTests, StoppedPeerTests, StateMachineTests):
    """A driver that implements ``Transport`` alone."""

    factory = "tests.testing.factories:ReadsByItself"
    lasting_bytes = 2 << 30


class TestLate(StateMachineTests):
    factory = "tests.testing.factories:late"
    lasting_bytes = LASTING


class TestTwoKinds(ContractSettings):
    factory = "tests.testing.factories:TwoKinds"
    memory = "tests.testing.factories:OddBuffer"
    test_several_regions = TransferTests.test_several_regions_in_one_transfer
    test_two_kinds = TransferTests.test_two_memory_kinds_in_one_transfer


@pytest.mark.slow
class TestWholeMeek(TransportContract):
    factory = "tests.testing.factories:Meek"
    lasting_bytes = 1 << 30


@pytest.mark.slow
class TestWholeWriter(TransportContract):
    factory = "tests.testing.factories:Writer"
    lasting_bytes = LASTING


@pytest.mark.slow
class TestWholeManual(TransportContract):
    factory = "tests.testing.factories:Manual"
    lasting_bytes = LASTING


@pytest.mark.slow
class TestWholeBlocking(TransportContract):
    factory = "tests.testing.factories:Blocking"
    lasting_bytes = 1 << 30


@pytest.mark.slow
class TestWholeTwoKinds(TransportContract):
    factory = "tests.testing.factories:TwoKinds"
    memory = "tests.testing.factories:OddBuffer"
