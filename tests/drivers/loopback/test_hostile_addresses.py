"""A sample of the hostile addresses that ``tests.drivers.hostile_addresses`` makes."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest

from kvferry.core.memory import Region
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.contract.copy_batches import batch
from tests.drivers.hostile_addresses import try_addresses
from tests.drivers.loopback.conftest import LocalPeer, MakeTransport
from tests.drivers.loopback.helpers import done
from tests.drivers.loopback.peer import MIB, Bytes

COUNT = int(os.environ.get("KVFERRY_HOSTILE", "500"))


@pytest.mark.timeout(300 + COUNT)
def test_hostile_addresses_crash_no_process() -> None:
    outcomes, tried = try_addresses("loopback", COUNT)
    assert tried.deaths == []
    assert set(outcomes) <= {"refused", "connected"}
    assert outcomes["refused"]


def test_address_with_another_peers_instance_does_not_replace_that_peer(
    transport: LoopbackTransport, local: Region, buffer: Bytes, make: MakeTransport
) -> None:
    local_peer = LocalPeer(make())
    good = local_peer.address()
    peer = transport.connect(good)
    fields = msgspec.msgpack.decode(good)
    forged = fields | {"socket": msgspec.msgpack.decode(make().address())["socket"], "regions": []}
    assert transport.connect(msgspec.msgpack.encode(forged)) != peer
    copies = batch(local, local_peer.region, [0], [0], [MIB])
    assert done(transport, transport.read(peer, copies))
    np.testing.assert_array_equal(buffer, local_peer.content)
