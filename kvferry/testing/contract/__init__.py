"""The conformance suite: a class per topic, and all of them together."""

from __future__ import annotations

from kvferry.testing.contract.aside import AsideTests
from kvferry.testing.contract.ending import EndingTests
from kvferry.testing.contract.flight import FlightTests
from kvferry.testing.contract.machine import MachineTests
from kvferry.testing.contract.notifications import NotificationTests
from kvferry.testing.contract.peers import PeerTests
from kvferry.testing.contract.processes import ProcessTests
from kvferry.testing.contract.quiet import QuietTests
from kvferry.testing.contract.refusals import RefusalTests
from kvferry.testing.contract.settings import ContractSettings
from kvferry.testing.contract.stopped import StoppedTests
from kvferry.testing.contract.transfers import TransferTests

__all__ = [
    "AsideTests",
    "ContractSettings",
    "EndingTests",
    "FlightTests",
    "MachineTests",
    "NotificationTests",
    "PeerTests",
    "ProcessTests",
    "QuietTests",
    "RefusalTests",
    "StoppedTests",
    "TransferTests",
    "TransportContract",
]


class TransportContract(
    TransferTests,
    NotificationTests,
    RefusalTests,
    PeerTests,
    FlightTests,
    AsideTests,
    QuietTests,
    EndingTests,
    ProcessTests,
    StoppedTests,
    MachineTests,
):
    """Every rule for a driver. Inherit it, say how to make a transport, and run pytest."""
