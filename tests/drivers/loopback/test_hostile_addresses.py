"""A sample of the hostile addresses that ``tests.drivers.hostile_addresses`` makes."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.drivers.loopback import LoopbackTransport
from tests.drivers.hostile_addresses import COUNT, crash_no_process
from tests.drivers.loopback.conftest import Make
from tests.drivers.pairs import paired


@pytest.mark.timeout(300 + COUNT)
def test_hostile_addresses_crash_no_process() -> None:
    crash_no_process("loopback")


def test_address_with_another_peers_instance_does_not_replace_that_peer(
    transport: LoopbackTransport, make: Make
) -> None:
    pair = paired(transport, make())
    fields = msgspec.msgpack.decode(pair.other.address())
    forged = fields | {"socket": msgspec.msgpack.decode(make().address())["socket"], "regions": []}
    assert transport.connect(msgspec.msgpack.encode(forged)) != pair.peer
    assert pair.works()
