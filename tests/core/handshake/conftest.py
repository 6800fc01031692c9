from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from kvferry.core.handshake import HandshakeServer
from kvferry.core.handshake.sockets import Context
from tests.core.handshake.servers import serve


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    with serve() as running:
        yield running


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as created:
        yield created
