"""More transfers at once than the queue of the engine holds."""

from __future__ import annotations

import numpy as np
import pytest
from kvferry_mooncake import MooncakeTransport

from kvferry.core.errors import DriverError
from kvferry.core.memory import region_of
from kvferry.core.transport import State
from kvferry.core.transport.copies import Copies, Segment

TRANSFERS, COPIES, SIZE = 100, 50, 8


def _make_transport() -> MooncakeTransport:
    try:
        return MooncakeTransport()
    except DriverError as exc:
        pytest.skip(str(exc))


def test_hundred_transfers_at_once_are_done() -> None:
    here, there = _make_transport(), _make_transport()
    data = np.arange(TRANSFERS * COPIES * SIZE, dtype=np.uint32).astype(np.uint8)
    into = np.zeros_like(data)
    here.register(region_of(into))
    there.register(region_of(data))
    peer = here.connect(there.address())
    offsets = np.arange(TRANSFERS * COPIES, dtype=np.uint64) * np.uint64(SIZE)
    transfers = []
    for part in np.random.default_rng(0).permutation(offsets).reshape(TRANSFERS, COPIES):
        copies = Copies(
            local=part + np.uint64(into.ctypes.data),
            remote=part + np.uint64(data.ctypes.data),
            nbytes=np.full(COPIES, SIZE, np.uint64),
            segments=(
                Segment(start=0, stop=COPIES, local=region_of(into), remote=region_of(data)),
            ),
        )
        transfers.append(here.read(peer, copies))
    while any(not status.state.final for status in here.poll(transfers)):
        pass
    assert {status.state for status in here.poll(transfers)} == {State.DONE}
    np.testing.assert_array_equal(into, data)
    here.close()
    there.close()
