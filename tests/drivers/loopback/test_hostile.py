"""Addresses of the right form with something hostile inside: a sample; see ``hostile``."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest

from kvferry.core.memory import Region
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.contract.copy_batches import batch
from tests.drivers.hostile import counted
from tests.drivers.loopback.conftest import MakeTransport, Neighbour
from tests.drivers.loopback.helpers import done
from tests.drivers.loopback.peer import MIB, Bytes

COUNT = int(os.environ.get("KVFERRY_HOSTILE", "500"))


@pytest.mark.timeout(300 + COUNT)
def test_a_hostile_address_ends_no_process() -> None:
    outcomes, tried = counted("loopback", COUNT)
    assert tried.deaths == []
    assert set(outcomes) <= {"refused", "connected"}
    assert outcomes["refused"]


def test_an_address_that_says_a_peers_instance_takes_nothing_from_it(
    transport: LoopbackTransport, local: Region, buffer: Bytes, make: MakeTransport
) -> None:
    """It leads elsewhere, and knows no region of the peer's."""
    neighbour = Neighbour(make())
    good = neighbour.address()
    peer = transport.connect(good)
    fields = msgspec.msgpack.decode(good)
    forged = fields | {"socket": msgspec.msgpack.decode(make().address())["socket"], "regions": []}
    assert transport.connect(msgspec.msgpack.encode(forged)) != peer
    copies = batch(local, neighbour.region, [0], [0], [MIB])
    assert done(transport, transport.read(peer, copies))
    np.testing.assert_array_equal(buffer, neighbour.content)
