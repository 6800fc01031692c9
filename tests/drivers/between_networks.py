"""What a driver that leads to other hosts does when the network between two of them fails.

For subclasses in modules of tests, as ``TransportContract``; and the fixtures with which that suite
has its processes on another host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.transport import PeerId, State, TransferId
from kvferry.testing.contract.settings import ContractSettings
from kvferry.testing.contract.workbench import MIB, Workbench, settings_of
from kvferry.testing.memory import pattern
from kvferry.testing.peers import Process, Spares, TransportPeer
from tests.drivers.networks import Networks, Side, two_networks


class FarAway(ContractSettings):
    """Every process of a test is on another host than the test."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def networks(cls) -> Iterator[Networks]:
        with two_networks() as networks:
            yield networks

    @pytest.fixture(scope="class")
    @classmethod
    def lasting_process(cls, networks: Networks) -> Iterator[Process]:
        with _far_away(cls, networks) as process:
            yield process

    @pytest.fixture(scope="class")
    @classmethod
    def spares(cls, networks: Networks) -> Iterator[Spares]:
        spares = Spares(lambda: _far_away(cls, networks, wait=False))
        yield spares
        spares.end()

    @pytest.fixture
    def remote(self, shared_process: Process) -> TransportPeer:
        """What a host does with itself needs no cable."""
        return shared_process


def _far_away(tests: type[ContractSettings], networks: Networks, *, wait: bool = True) -> Process:
    made = settings_of(tests)
    return networks.far(Process, made.factory, made.options, made.memory, MIB, wait=wait)


class CutLinkTests(FarAway):
    """A link that is cut, on either side: known in time, quiet when final, and back again.

    Attributes:
        noticed_within: seconds until a transfer has to be known to fail after its link was cut.
    """

    noticed_within: ClassVar[float]

    @pytest.fixture
    def process(self, lab: Workbench, networks: Networks) -> Iterator[Process]:
        """None is started ahead: a link that is down at that time has no device to start with."""
        with _far_away(type(self), networks) as process:
            process.meanwhile = lab.turn
            process.patience = lab.settings.patience
            yield process

    @pytest.fixture(params=["near", "far"])
    def side(self, request: pytest.FixtureRequest, networks: Networks) -> Iterator[Side]:
        """Whose link is cut; whole again afterwards."""
        side: Side = request.param
        yield side
        networks.mend()

    def test_both_ways_with_a_notification(self, lab: Workbench, process: Process) -> None:
        lab.works(process)
        peer = lab.transport.connect(process.address())
        for op in lab.ops:
            transfer = lab.start(op, peer, lab.whole(process), b"arrived")
            lab.finish(transfer)
            assert [seen.payload for seen in process.notifications(1)] == [b"arrived"]
        np.testing.assert_array_equal(lab.mine.get(), process.get())

    def test_cut_in_the_middle(
        self, lab: Workbench, process: Process, networks: Networks, op: str, side: Side
    ) -> None:
        peer = lab.transport.connect(process.address())
        copies = lab.lasting(process)
        if lab.refuses(op, peer, copies):
            return
        transfer = lab.start(op, peer, copies)
        assert lab.until(lambda: self._begun(lab, process, op)), "no byte has arrived"
        assert lab.state(transfer) is State.PENDING, "it was over before the link was cut"
        networks.cut(side)
        self._fails(lab, peer, transfer)
        self._comes_back(lab, process, networks, peer, transfer)

    def test_cut_before_a_transfer(
        self, lab: Workbench, process: Process, networks: Networks, op: str, side: Side
    ) -> None:
        peer = lab.transport.connect(process.address())
        if lab.refuses(op, peer, lab.whole(process)):
            return
        lab.works(process)
        networks.cut(side)
        transfer = lab.start(op, peer, lab.whole(process), b"x" if lab.notifies else None)
        self._fails(lab, peer, transfer)
        self._comes_back(lab, process, networks, peer, transfer)
        assert process.notifications(1, 0.2) == []

    def test_whatever_one_does_while_it_is_cut(
        self, lab: Workbench, process: Process, networks: Networks, side: Side
    ) -> None:
        """Outcomes are states, not exceptions, also of what is begun when the failure is known."""
        peer = lab.transport.connect(process.address())
        lab.works(process)
        networks.cut(side)
        transfers = []
        for _ in range(3):
            transfers.append(lab.start(lab.an_op, peer, lab.whole(process)))
            status = lab.known(transfers[-1], seconds=self.noticed_within)
            assert status.state in (State.FAILING, State.FAILED), status
            if lab.notifies:
                lab.transport.notify(peer, b"who hears this?")
        networks.mend()
        lab.transport.disconnect(peer)
        assert {lab.state(transfer) for transfer in transfers} == {State.FAILED}
        lab.works(process)

    def test_cut_before_connecting(
        self, lab: Workbench, process: Process, networks: Networks, side: Side
    ) -> None:
        """``connect`` says so, or the first transfer does."""
        address = process.address()
        networks.cut(side)
        with contextlib.suppress(ConnectError):
            peer = lab.transport.connect(address)
            transfer = lab.start(lab.an_op, peer, lab.whole(process))
            self._fails(lab, peer, transfer)
            self._comes_back(lab, process, networks, peer, transfer)
        networks.mend()
        lab.works(process)

    def test_cut_and_back_between_transfers(
        self, lab: Workbench, process: Process, networks: Networks, side: Side
    ) -> None:
        """Nothing was under way: nobody need know."""
        lab.works(process)
        networks.cut(side)
        networks.mend()
        lab.works(process)

    @staticmethod
    def _begun(lab: Workbench, process: Process, op: str) -> bool:
        if op == "read":
            return bool(lab.mine.get(0, 8).any())
        return not process.get()[:8].any()  # this side's memory holds zeros

    def _fails(self, lab: Workbench, peer: PeerId, transfer: TransferId) -> None:
        status = lab.known(transfer, seconds=self.noticed_within)
        assert status.state in (State.FAILING, State.FAILED), status
        # An error says that nothing is proven, as long as the link is down.
        with contextlib.suppress(TransportError):
            lab.settled(transfer, peer)

    def _comes_back(
        self,
        lab: Workbench,
        process: Process,
        networks: Networks,
        peer: PeerId,
        transfer: TransferId,
    ) -> None:
        """What is final stays so when the link is back; what is not becomes it; and all works."""
        quiet = lab.state(transfer) is State.FAILED
        theirs, mine = process.get(), pattern(MIB, 12)
        if quiet:
            lab.mine.put(mine)
        networks.mend()
        if not quiet:
            assert lab.settled(transfer, peer).state is State.FAILED
            theirs = process.get()
            lab.mine.put(mine)
        lab.stays(lab.mine, mine, 0.5)
        lab.stays(process, theirs)
        lab.transport.forget(transfer)
        process.reset()
        lab.works(process)
