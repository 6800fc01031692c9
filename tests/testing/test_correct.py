"""The suite passes drivers that are correct, however little they can do.

Each runs the topics that it is different in.
"""

from __future__ import annotations

from kvferry.testing import (
    FlightTests,
    MachineTests,
    NotificationTests,
    ProcessTests,
    TransferTests,
)


class TestModest(TransferTests, NotificationTests, FlightTests, MachineTests):
    factory = "tests.testing.factories:Modest"
    lasting_bytes = 2 << 30


class TestManual(NotificationTests, ProcessTests, MachineTests):
    factory = "tests.testing.factories:Manual"
    lasting_bytes = 200 << 30


class TestDoomed(FlightTests, ProcessTests, MachineTests):
    factory = "tests.testing.factories:Doomed"
    lasting_bytes = 200 << 30


class TestLate(FlightTests, MachineTests):
    factory = "tests.testing.factories:late"
    lasting_bytes = 200 << 30
