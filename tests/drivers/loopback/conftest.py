"""Transports and peers, closed at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvferry.drivers.loopback import LoopbackTransport
from tests.drivers.loopback.peer import Peer
from tests.drivers.pairs import closed_at_end

Make = Callable[..., LoopbackTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    with closed_at_end(LoopbackTransport) as make_one:
        yield make_one


@pytest.fixture
def transport(make: Make) -> LoopbackTransport:
    return make()


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A peer process that only this test uses, and may kill."""
    with Peer() as started:
        yield started


@pytest.fixture(scope="session")
def shared_peer() -> Iterator[Peer]:
    """A peer process whose memory is only read."""
    with Peer() as started:
        yield started


@pytest.fixture(params=["same process", "other process"])
def remote(request: pytest.FixtureRequest, make: Make) -> LoopbackTransport | Peer:
    if request.param == "same process":
        return make()
    process: Peer = request.getfixturevalue("peer")
    return process
