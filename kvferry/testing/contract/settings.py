"""The settings of the conformance suite, and its fixtures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, TypeVar

import numpy as np
import pytest

from kvferry.testing.contract.local_peer import LocalPeer
from kvferry.testing.contract.workbench import MIB, Workbench, settings_of
from kvferry.testing.peers import Process, Spares, TransportPeer

T = TypeVar("T")


def each_peer(
    test: Callable[[T, Workbench, TransportPeer], None],
) -> Callable[[T, Workbench, list[TransportPeer]], None]:
    """Let a test of one peer run with each peer of the fixture ``everywhere``, in turn.

    Each time, the local buffer is registered and full of zeros at first. An error's note says with
    which peer it came.
    """

    @functools.wraps(test)
    def tests(self: T, lab: Workbench, everywhere: list[TransportPeer]) -> None:
        for number, peer in enumerate(everywhere):
            lab.transport.register(lab.mine.region)
            lab.mine.put(np.zeros(MIB, np.uint8))
            try:
                test(self, lab, peer)
            except BaseException as exc:
                exc.add_note(f"with peer {number} of everywhere: {peer.name}")
                raise

    del tests.__wrapped__  # pytest takes the names of the fixtures from there
    return tests


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
        with Workbench(settings_of(self)) as lab:
            yield lab

    @pytest.fixture(scope="class")
    @classmethod
    def lasting_process(cls) -> Iterator[Process]:
        """A peer in a process of its own, which the tests of a class share.

        Tests use it through ``shared_process``.
        """
        parameters = settings_of(cls)
        with Process(parameters.factory, parameters.options, parameters.memory, MIB) as process:
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
        parameters = settings_of(cls)
        spares = Spares(
            lambda: Process(
                parameters.factory, parameters.options, parameters.memory, MIB, wait=False
            )
        )
        yield spares
        spares.end()

    @pytest.fixture
    def process(self, lab: Workbench, spares: Spares) -> Iterator[Process]:
        """A peer in a process of its own, for one test, which may kill or stop the process."""
        with spares.take() as process:
            process.meanwhile = lab.turn
            process.patience = lab.settings.patience
            yield process

    @pytest.fixture(scope="class")
    @classmethod
    def lasting_neighbour(cls) -> Iterator[LocalPeer]:
        """Another transport of this process, which the tests of a class share.

        Tests use it through ``neighbour``.
        """
        with Workbench(settings_of(cls)) as bench:
            yield LocalPeer(bench, bench.transport)

    @pytest.fixture
    def neighbour(self, lab: Workbench, lasting_neighbour: LocalPeer) -> LocalPeer:
        """Another transport of this process, for tests that do not close it.

        The tests of a class share the transport; the buffer is filled anew before each test.
        """
        lasting_neighbour.lab, lab.beside = lab, lasting_neighbour.transport
        lasting_neighbour.reset()
        return lasting_neighbour

    @pytest.fixture
    def everywhere(
        self, lab: Workbench, neighbour: LocalPeer, shared_process: Process
    ) -> list[TransportPeer]:
        """A list with a peer of each kind, each with a buffer of 1 MiB, filled with a pattern.

        The kinds are the transport under test itself, another transport of this process, and a
        transport of another process.
        """
        return [LocalPeer(lab, lab.transport), neighbour, shared_process]
