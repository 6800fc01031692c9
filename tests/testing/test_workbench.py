"""Where a test of the conformance suite gives up waiting, it says how long it has waited."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvferry.core.transport import PeerId, TransferId
from kvferry.testing.contract.workbench import ContractSettings, Workbench
from kvferry.testing.peer_process import LocalPeer


class Impatient(ContractSettings):
    factory = "kvferry.drivers.loopback:LoopbackTransport"
    lasting_bytes = 200 << 30
    patience = 0.05
    known_within = 0.04


@pytest.fixture
def lab() -> Iterator[Workbench]:
    with Workbench(Impatient) as lab:
        yield lab


@pytest.fixture
def remote(lab: Workbench) -> LocalPeer:
    return lab.neighbour()


@pytest.fixture
def peer(lab: Workbench, remote: LocalPeer) -> PeerId:
    return lab.connect(remote)


@pytest.fixture
def endless(lab: Workbench, remote: LocalPeer, peer: PeerId) -> TransferId:
    """A transfer that takes longer than anybody waits."""
    return lab.transport.read(peer, lab.lasting(remote))


def test_a_transfer_that_does_not_end(lab: Workbench, peer: PeerId, endless: TransferId) -> None:
    said = rf"transfer {endless} is still PENDING after 0\.05 s \(the setting patience\)"
    for wait in (lambda: lab.finish(endless), lambda: lab.settled(endless, peer)):
        with pytest.raises(AssertionError, match=said):
            wait()


def test_a_death_that_is_not_noticed(lab: Workbench, endless: TransferId) -> None:
    said = r"is still PENDING after 0\.04 s \(the setting known_within\)"
    with pytest.raises(AssertionError, match=said):
        lab.known_in_time(endless, time.monotonic())


def test_notifications_that_do_not_arrive(lab: Workbench, remote: LocalPeer) -> None:
    said = r"0 notifications of 2 after 0\.05 s \(the setting patience\)"
    with pytest.raises(AssertionError, match=said):
        lab.receive(lab.transport, 2)
    with pytest.raises(AssertionError, match=said):
        lab.received_by(remote, 2)


def test_a_call_that_takes_long(lab: Workbench) -> None:
    with (
        pytest.raises(AssertionError, match=r"close took \d+\.\d s of 0\.05 s \(the setting pat"),
        lab.within_patience("close"),
    ):
        lab.until(lambda: False, 0.1)
