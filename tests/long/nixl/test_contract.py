"""The conformance suite on NIXL without its progress thread, and with long transfers."""

from __future__ import annotations

import pytest

from kvferry.testing.contract import (
    ClosingTests,
    InFlightTests,
    NotificationTests,
    PeerTests,
    ProcessTests,
    QuiescenceTests,
    StoppedPeerTests,
    TransferTests,
)
from kvferry.testing.contract.workbench import Workbench
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


class TestNixlWithLongTransfers(
    InFlightTests, QuiescenceTests, ClosingTests, StoppedPeerTests, ProcessTests
):
    factory = FACTORY
    lasting_bytes = 4 << 30

    @pytest.mark.xfail(
        strict=True,
        reason="each thread that UCX has beside its progress thread keeps a socket of a peer that "
        "is gone, until a large transfer wakes it or the transport is closed",
    )
    def test_close_gives_threads_and_descriptors_back(self, lab: Workbench) -> None:
        super().test_close_gives_threads_and_descriptors_back(lab)
