"""Transports and peers that are gone when the test is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pytest

from kvferry.core.memory import Region, region_of
from kvferry.drivers.loopback import LoopbackTransport
from tests.drivers.loopback.peer import Bytes, Peer, pattern


class MakeTransport(Protocol):
    """Makes a transport that is closed at the end of the test."""

    def __call__(self, **options: object) -> LoopbackTransport: ...


@pytest.fixture
def make() -> Iterator[MakeTransport]:
    made: list[LoopbackTransport] = []

    def make_one(**options: object) -> LoopbackTransport:
        made.append(LoopbackTransport(**options))
        return made[-1]

    yield make_one
    for transport in made:
        transport.close()


@pytest.fixture
def transport(make: MakeTransport) -> LoopbackTransport:
    return make()


@pytest.fixture
def buffer() -> Bytes:
    """1 MiB of zeros."""
    return np.zeros(1 << 20, np.uint8)


@pytest.fixture
def local(transport: LoopbackTransport, buffer: Bytes) -> Region:
    """``buffer``, registered with ``transport``."""
    region = region_of(buffer)
    transport.register(region)
    return region


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A process of this test's own, which the test may kill."""
    with Peer() as started:
        yield started


@pytest.fixture(scope="session")
def lasting_peer() -> Iterator[Peer]:
    with Peer() as started:
        yield started


@pytest.fixture
def shared_peer(lasting_peer: Peer) -> Peer:
    """A process that all tests share which do no more than write to its memory."""
    lasting_peer.reset()
    return lasting_peer


class Neighbour:
    """What ``Peer`` offers, in this process; its transport may be the test's own."""

    def __init__(self, transport: LoopbackTransport, seed: int = 1) -> None:
        self.transport = transport
        self.content = pattern(1 << 20, seed)
        self.buffer = self.content.copy()
        self.region = region_of(self.buffer)
        self.name = transport.name
        transport.register(self.region)

    def address(self) -> bytes:
        return self.transport.address()

    def get(self) -> Bytes:
        return self.buffer.copy()


@pytest.fixture(params=["itself", "neighbour", "other process"])
def remote(
    request: pytest.FixtureRequest, transport: LoopbackTransport, make: MakeTransport
) -> Neighbour | Peer:
    """A peer in each of the places where one can be, with 1 MiB registered."""
    if request.param == "other process":
        shared: Peer = request.getfixturevalue("shared_peer")
        return shared
    return Neighbour(transport if request.param == "itself" else make())
