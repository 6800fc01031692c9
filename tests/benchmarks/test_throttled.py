"""The driver that keeps reads to a rate, for a benchmark."""

from __future__ import annotations

from contextlib import closing

from benchmarks.throttled import ThrottledTransport
from kvferry.core.transport import State
from kvferry.drivers.loopback import LoopbackTransport
from tests.drivers.pairs import paired, until


def test_a_read_is_pending_until_its_time_or_it_is_cancelled() -> None:
    with (
        closing(ThrottledTransport(bytes_per_second=1e-3)) as slow,
        closing(LoopbackTransport()) as source,
    ):
        pair = paired(slow, source, 4096)
        transfers = [pair.read(), pair.read()]
        assert until(lambda: (pair.mine == pair.theirs).all())
        assert {pair.status(transfers[0]).state for _ in range(20)} == {State.PENDING}
        slow.cancel(transfers[0])
        assert pair.comes_to(transfers[0], State.DONE)
        slow.disconnect(pair.peer)
        assert pair.status(transfers[1]).state.final
