"""What the author of a driver says about it, and the fixtures that follow from that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from kvferry.testing.contract.local_peer import LocalPeer
from kvferry.testing.contract.workbench import MIB, Workbench, settings_of
from kvferry.testing.peers import Process, Spares, TransportPeer

PLACES = ("itself", "neighbour", "other process")


class ContractSettings:
    """Base of every class of tests.

    Attributes:
        factory: what makes a transport: a class, or a function that takes its options, as
            ``package.module:name``. Importable, because the peers' processes import it.
        options: the keyword arguments it is called with.
        memory: which memory is tested: ``cpu``, ``cuda``, ``cuda:INDEX``, or
            ``package.module:function``, a function that makes a ``kvferry.testing.Buffer``.
        lasting_bytes: what a transfer has to move to take some seconds. It does not make the suite
            slower where the driver can cancel. If such a transfer is over sooner, the tests of
            transfers in flight still pass, but show less.
        known_within: seconds until the death of a peer's process has to be known.
        patience: seconds after which a transfer is taken to hang.
        quiet_seconds: how long memory is watched after a final state. What lands later is not
            found.
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
        """A transport under test, a registered buffer of 1 MiB, and what can be done with them."""
        with Workbench(settings_of(self)) as lab:
            yield lab

    @pytest.fixture(scope="class")
    @classmethod
    def lasting_process(cls) -> Iterator[Process]:
        made = settings_of(cls)
        with Process(made.factory, made.options, made.memory, MIB) as process:
            yield process

    @pytest.fixture
    def shared_process(self, lab: Workbench, lasting_process: Process) -> Iterator[Process]:
        """A process for tests that do no more to it than to move its bytes."""
        lasting_process.meanwhile = lab.turn
        lasting_process.patience = lab.settings.patience
        lasting_process.reset()
        yield lasting_process
        lasting_process.meanwhile = None

    @pytest.fixture(scope="class")
    @classmethod
    def spares(cls) -> Iterator[Spares]:
        made = settings_of(cls)
        spares = Spares(lambda: Process(made.factory, made.options, made.memory, MIB, wait=False))
        yield spares
        spares.end()

    @pytest.fixture
    def process(self, lab: Workbench, spares: Spares) -> Iterator[Process]:
        """A process for one test, which may kill it."""
        with spares.take() as process:
            process.meanwhile = lab.turn
            process.patience = lab.settings.patience
            yield process

    @pytest.fixture(params=PLACES)
    def remote(self, request: pytest.FixtureRequest, lab: Workbench) -> TransportPeer:
        """A peer in each of the places where one can be, with 1 MiB of a pattern."""
        if request.param == "other process":
            process: Process = request.getfixturevalue("shared_process")
            return process
        return LocalPeer(lab, lab.transport if request.param == "itself" else lab.make())

    @pytest.fixture
    def everywhere(self, lab: Workbench, shared_process: Process) -> list[TransportPeer]:
        """A peer in each of those places at once."""
        return [LocalPeer(lab, lab.transport), LocalPeer(lab, lab.make()), shared_process]

    @pytest.fixture(params=["read", "write"])
    def op(self, request: pytest.FixtureRequest) -> str:
        """Each direction, whether the driver has it or not."""
        direction: str = request.param
        return direction
