"""The conformance suite on NIXL without its progress thread, and with long transfers."""

from __future__ import annotations

from kvferry.testing.contract import (
    InFlightTests,
    NotificationTests,
    PeerTests,
    ProcessTests,
    QuiescenceTests,
    StoppedPeerTests,
    TransferTests,
)
from tests.nixl.test_contract import FACTORY


class TestNixlWithoutProgressThread(TransferTests, NotificationTests, PeerTests, ProcessTests):
    """Without a progress thread, transfers end and peers are served in the driver's calls.

    Other topics end transfers on connections that are new. Those transfers begin only after the
    peer has made progress, which a peer in this process does not while the test waits.
    """

    factory = FACTORY
    options = {"progress_thread": False}  # noqa: RUF012 - as the base class has it

    # Its large transfer is moved by the CPU, within ``poll``, which the test expects to be quick.
    test_a_stopped_peer_ends_by_the_deadline = None  # type: ignore[assignment]


class TestNixlWithLongTransfers(InFlightTests, QuiescenceTests, StoppedPeerTests, ProcessTests):
    factory = FACTORY
    lasting_bytes = 4 << 30
