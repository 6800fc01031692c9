"""The settings of the conformance suite, and its fixtures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from kvferry.testing.contract.local_peer import LocalPeer
from kvferry.testing.contract.workbench import MIB, Workbench
from kvferry.testing.peers import Process, Spares, TransportPeer

PEER_KINDS = ("itself", "neighbour", "other process")


class ContractSettings:
    """The settings of a driver's tests; the base of every class of tests.

    Attributes:
        factory: What makes a transport, as ``package.module:name``: a class, or a function that
            takes its options. It must be importable, because the peers' processes import it.
        options: The keyword arguments of the factory.
        memory: Which memory is tested: ``cpu``, ``cuda``, ``cuda:INDEX``, or
            ``package.module:function``, a function that takes a number of bytes and returns a
            ``kvferry.testing.Buffer``.
        lasting_bytes: How many bytes a transfer has to move to take some seconds. A large number
            does not slow down the suite if the driver can cancel. With a number that is too small,
            the tests of transfers in flight still pass, but show less.
        known_within: Within how many seconds the death of a peer's process has to be reported.
        patience: After how many seconds a transfer counts as hanging.
        quiet_seconds: For how many seconds memory is watched after a transfer is DONE or FAILED.
            Bytes that arrive later are not noticed.
    """

    factory: ClassVar[str]
    options: ClassVar[Mapping[str, object]] = {}
    memory: ClassVar[str] = "cpu"
    lasting_bytes: ClassVar[int] = 16 << 30
    known_within: ClassVar[float] = 1.0
    patience: ClassVar[float] = 30.0
    quiet_seconds: ClassVar[float] = 0.5

    @pytest.fixture
    def lab(self) -> Iterator[Workbench]:
        """A ``Workbench``: the transport under test with a registered buffer, and helpers."""
        with Workbench(self) as lab:
            yield lab

    @pytest.fixture(scope="class")
    @classmethod
    def lasting_process(cls) -> Iterator[Process]:
        """A peer in a process of its own, which the tests of a class share.

        Tests use it through ``shared_process``.
        """
        with Process(cls.factory, cls.options, cls.memory, MIB) as process:
            yield process

    @pytest.fixture
    def shared_process(self, lab: Workbench, lasting_process: Process) -> Iterator[Process]:
        """A peer in a process of its own, for tests that neither kill nor stop the process.

        The tests of a class share the process; the buffer is filled anew before each test.
        """
        lasting_process.meanwhile = lab.turn
        lasting_process.patience = lab.settings.patience
        lasting_process.reset()
        yield lasting_process
        lasting_process.meanwhile = None

    @pytest.fixture(scope="class")
    @classmethod
    def spares(cls) -> Iterator[Spares]:
        """The supply of processes for the fixture ``process``, started before a test needs them."""
        spares = Spares(lambda: Process(cls.factory, cls.options, cls.memory, MIB, wait=False))
        yield spares
        spares.end()

    @pytest.fixture
    def process(self, lab: Workbench, spares: Spares) -> Iterator[Process]:
        """A peer in a process of its own, for one test, which may kill or stop the process."""
        with spares.take() as process:
            process.meanwhile = lab.turn
            process.patience = lab.settings.patience
            yield process

    @pytest.fixture(params=PEER_KINDS)
    def remote(self, request: pytest.FixtureRequest, lab: Workbench) -> TransportPeer:
        """A peer with a buffer of 1 MiB, filled with a pattern. A test runs once per kind of peer.

        The kinds are the transport under test itself, another transport of this process, and a
        transport of another process.
        """
        if request.param == "other process":
            process: Process = request.getfixturevalue("shared_process")
            return process
        return LocalPeer(lab, lab.transport if request.param == "itself" else lab.make())

    @pytest.fixture
    def everywhere(self, lab: Workbench, shared_process: Process) -> list[TransportPeer]:
        """A list with one peer of each kind that the fixture ``remote`` has."""
        return [LocalPeer(lab, lab.transport), LocalPeer(lab, lab.make()), shared_process]
