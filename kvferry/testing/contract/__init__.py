"""The conformance suite: a class per topic, and all of them together."""

from __future__ import annotations

from kvferry.testing.contract.closing import ClosingTests, ThreadTests
from kvferry.testing.contract.in_flight import ConcurrentConnectTests, InFlightTests
from kvferry.testing.contract.notifications import NotificationTests
from kvferry.testing.contract.peers import PeerTests
from kvferry.testing.contract.processes import ProcessTests
from kvferry.testing.contract.quiescence import QuiescenceTests, StoppedPeerTests
from kvferry.testing.contract.refusals import RefusalTests
from kvferry.testing.contract.state_machine import StateMachineTests
from kvferry.testing.contract.transfers import PagedReadTests, TransferTests
from kvferry.testing.contract.workbench import ContractSettings

__all__ = [
    "ClosingTests",
    "ConcurrentConnectTests",
    "ContractSettings",
    "InFlightTests",
    "NotificationTests",
    "PagedReadTests",
    "PeerTests",
    "ProcessTests",
    "QuiescenceTests",
    "RefusalTests",
    "StateMachineTests",
    "StoppedPeerTests",
    "ThreadTests",
    "TransferTests",
    "TransportContract",
]


class TransportContract(
    TransferTests,
    PagedReadTests,
    NotificationTests,
    RefusalTests,
    PeerTests,
    InFlightTests,
    ConcurrentConnectTests,
    QuiescenceTests,
    ClosingTests,
    ThreadTests,
    ProcessTests,
    StoppedPeerTests,
    StateMachineTests,
):
    """All tests of the conformance suite for drivers.

    Inherit this class, set ``factory`` (see ``ContractSettings``), and run pytest.
    """
