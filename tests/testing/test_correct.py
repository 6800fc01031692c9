"""The suite passes drivers that are correct, however little they can do.

Each runs the topics that it is different in; and, marked slow, those that differ most run it whole.
"""

from __future__ import annotations

import pytest

from kvferry.testing import (
    ContractSettings,
    FlightTests,
    MachineTests,
    NotificationTests,
    QuietTests,
    StoppedTests,
    TransferTests,
    TransportContract,
)

pytestmark = pytest.mark.faults

LASTING = 200 << 30


class TestModest(NotificationTests, FlightTests, StoppedTests, MachineTests):
    factory = "tests.testing.factories:Modest"
    lasting_bytes = 2 << 30


class TestWriter(NotificationTests, StoppedTests):
    factory = "tests.testing.factories:Writer"
    lasting_bytes = LASTING


class TestManual(NotificationTests, StoppedTests, MachineTests):
    factory = "tests.testing.factories:Manual"
    lasting_bytes = LASTING


class TestBlocking(FlightTests):
    factory = "tests.testing.factories:Blocking"
    lasting_bytes = 1 << 30


class TestDoomed(FlightTests, QuietTests, StoppedTests, MachineTests):
    factory = "tests.testing.factories:Doomed"
    lasting_bytes = LASTING
    quiet_seconds = 0.05


class TestLate(MachineTests):
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
