"""UCX over TCP between two hosts: the conformance suite, and a link that is cut and restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.transport import PeerId, State, TransferId
from kvferry.testing import ContractSettings, TransportContract
from kvferry.testing.contract.workbench import MIB, Workbench
from kvferry.testing.memory import pattern
from kvferry.testing.peers import Process, TransportPeer
from tests.long.networks.namespaces import DEVICE, Networks, Side, two_networks

# Both hosts share one kernel: UCX would take their loopback devices for the same one, and likewise
# their memory.
ACROSS_LINK = {"transports": ["tcp"], "devices": [DEVICE]}
NOTICED_SECONDS = 15.0
"""How long after a cut a transfer has to be reported as failing."""


class PeersOnOtherHost(ContractSettings):
    """Every peer process runs on another host than the test."""

    factory = "kvferry.drivers.ucx:UcxTransport"
    lasting_bytes = 32 << 30

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def networks(cls) -> Iterator[Networks]:
        with two_networks() as networks:
            yield networks

    @pytest.fixture(scope="class")
    @classmethod
    def lasting_process(cls, networks: Networks) -> Iterator[Process]:
        with networks.far(Process, cls.factory, cls.options, cls.memory, MIB) as process:
            yield process

    @pytest.fixture
    def process(self, lab: Workbench, networks: Networks) -> Iterator[Process]:
        made = networks.far(Process, self.factory, self.options, self.memory, MIB)
        with made as process, lab.turning_for(process):
            yield process

    @pytest.fixture
    def remote(self, shared: Process) -> TransportPeer:
        """Only the peer on the other host: peers on this host do not use the link."""
        return shared

    @pytest.fixture
    def everywhere(self, shared: Process) -> list[TransportPeer]:
        return [shared]


class TestTwoHosts(PeersOnOtherHost, TransportContract):
    # A busy machine may answer later than a deployment would wait.
    options = ACROSS_LINK | {"connect_seconds": 60.0}


class TestCutLink(PeersOnOtherHost):
    """A cut link is noticed in time, final transfers are quiet, and a restored link works again."""

    options = ACROSS_LINK | {"deadline_seconds": 2.0, "connect_seconds": 15.0}

    @pytest.fixture(params=["near", "far"])
    def side(self, request: pytest.FixtureRequest, networks: Networks) -> Iterator[Side]:
        """The side whose link the test cuts; the link is restored afterwards."""
        side: Side = request.param
        yield side
        networks.restore()

    @pytest.mark.parametrize("when", ["before", "during"])
    def test_transfer_fails_when_link_is_cut(
        self, lab: Workbench, process: Process, networks: Networks, side: Side, when: str
    ) -> None:
        lab.works(process)
        peer = lab.connect(process)
        if when == "before":
            networks.cut(side)
            transfer = lab.transport.read(peer, lab.whole(process), lab.bound())
        else:
            lab.mine.put(np.zeros(MIB, np.uint8))
            transfer = lab.transport.read(peer, lab.lasting(process))
            assert lab.until(lambda: lab.mine.get(0, 8).any()), "no byte has arrived"
            assert lab.state(transfer) is State.PENDING, "it ended before the link was cut"
            networks.cut(side)
        self._fails_and_recovers(lab, process, networks, peer, transfer)
        assert process.notifications(1, 0.2) == []

    def test_calls_while_link_is_cut_raise_nothing(
        self, lab: Workbench, process: Process, networks: Networks, side: Side
    ) -> None:
        """Transfers that start after the failure is known fail by their state, too."""
        peer = lab.connect(process)
        lab.works(process)
        networks.cut(side)
        transfers = []
        for _ in range(3):
            transfers.append(lab.transport.read(peer, lab.whole(process)))
            self._is_noticed(lab, transfers[-1])
            lab.transport.notify(peer, b"may be lost")
        networks.restore()
        lab.transport.disconnect(peer)
        assert {lab.state(transfer) for transfer in transfers} == {State.FAILED}
        lab.works(process)

    def test_link_cut_before_connecting_fails_connect_or_first_transfer(
        self, lab: Workbench, process: Process, networks: Networks, side: Side
    ) -> None:
        address = process.address()
        networks.cut(side)
        with contextlib.suppress(ConnectError):
            peer = lab.transport.connect(address)
            transfer = lab.transport.read(peer, lab.whole(process))
            self._fails_and_recovers(lab, process, networks, peer, transfer)
        networks.restore()
        lab.works(process)
        networks.cut(side)  # between transfers
        networks.restore()
        lab.works(process)

    @staticmethod
    def _is_noticed(lab: Workbench, transfer: TransferId) -> None:
        status = lab.known(transfer, seconds=NOTICED_SECONDS)
        assert status.state in (State.FAILING, State.FAILED), status

    def _fails_and_recovers(
        self,
        lab: Workbench,
        process: Process,
        networks: Networks,
        peer: PeerId,
        transfer: TransferId,
    ) -> None:
        """A final transfer changes nothing once the link is back, any other becomes final."""
        self._is_noticed(lab, transfer)
        # While the link is down, disconnect may raise: it cannot prove that the transfer is quiet.
        with contextlib.suppress(TransportError):
            lab.settled(transfer, peer)
        quiet = lab.state(transfer) is State.FAILED
        theirs, mine = process.get(), pattern(MIB, 12)
        if quiet:
            lab.mine.put(mine)
        networks.restore()
        if not quiet:
            assert lab.settled(transfer, peer).state is State.FAILED
            theirs = process.get()
            lab.mine.put(mine)
        lab.stays(lab.mine, mine, 0.5)
        lab.stays(process, theirs)
        lab.transport.forget(transfer)
        process.reset()
        lab.works(process)
