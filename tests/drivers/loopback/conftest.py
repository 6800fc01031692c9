"""Fixtures for transports and peers, closed at the end of the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import pytest

from kvferry.core.memory import Region, region_of
from kvferry.drivers.loopback import LoopbackTransport
from tests.drivers.loopback.peer import Bytes, Peer, pattern


class MakeTransport(Protocol):
    """Make a transport that is closed at the end of the test."""

    def __call__(self, **options: Any) -> LoopbackTransport: ...


@pytest.fixture
def make() -> Iterator[MakeTransport]:
    made: list[LoopbackTransport] = []

    def make_transport(**options: Any) -> LoopbackTransport:
        made.append(LoopbackTransport(**options))
        return made[-1]

    yield make_transport
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
    """A peer process that only this test uses, and may kill."""
    with Peer() as started:
        yield started


@pytest.fixture(scope="session")
def lasting_peer() -> Iterator[Peer]:
    with Peer() as started:
        yield started


@pytest.fixture
def shared_peer(lasting_peer: Peer) -> Peer:
    """A peer process that is shared by all tests that only read and write its memory."""
    lasting_peer.reset()
    return lasting_peer


class LocalPeer:
    """A peer in this process, with the methods of ``Peer``; it may use the test's own transport."""

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


@pytest.fixture(params=["itself", "same process", "other process"])
def remote(
    request: pytest.FixtureRequest, transport: LoopbackTransport, make: MakeTransport
) -> LocalPeer | Peer:
    """A peer with 1 MiB registered: the transport itself, in this process, or in another one."""
    if request.param == "other process":
        shared: Peer = request.getfixturevalue("shared_peer")
        return shared
    return LocalPeer(transport if request.param == "itself" else make())
