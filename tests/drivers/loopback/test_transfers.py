"""Reads in chunks, by the caller and by threads, that are cancelled or fail."""

from __future__ import annotations

from kvferry.core.transport import State
from kvferry.drivers.loopback import LoopbackTransport
from tests.drivers.loopback.conftest import Make
from tests.drivers.loopback.peer import Peer
from tests.drivers.pairs import paired, until


def test_transfer_that_has_not_begun_is_cancelled_at_once_and_small_ones_do_not_wait(
    make: Make, remote: LoopbackTransport | Peer
) -> None:
    pair = paired(make(threads=1), remote)
    other = paired(pair.reader, remote)
    running = pair.lasting()
    assert until(pair.mine.any)
    waiting = other.lasting()
    small = pair.read([(0, 0, 8)])
    pair.reader.cancel(waiting)
    states = [status.state for status in pair.reader.poll([running, waiting, small])]
    assert states == [State.PENDING, State.FAILED, State.DONE]
    pair.reader.cancel(running)
    assert pair.final(pair.read(times=2)).state is State.DONE  # by the thread, after the others
    assert not other.mine.any(), "bytes of a transfer that had failed"
