from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import Context
from tests.core.side_channel.servers import serve


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    with serve() as running:
        yield running


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as created:
        yield created
