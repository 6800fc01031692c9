"""Reads in chunks, by the caller and by threads, that are cancelled or fail."""

from __future__ import annotations

import threading

import pytest

from kvferry.core.errors import TransportError
from kvferry.core.transport import State
from kvferry.drivers.loopback import LoopbackTransport
from tests.drivers.loopback.conftest import Make
from tests.drivers.loopback.peer import Peer
from tests.drivers.pairs import Pair, paired, until


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


def test_unexpected_exception_in_thread_fails_the_transfer(
    make: Make, shared_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair: Pair[LoopbackTransport, Peer] = paired(make(inline_bytes=0), shared_peer)
    with monkeypatch.context() as patched:
        patched.setattr("kvferry.drivers.loopback.process_memory.vm_read", lambda *_, **__: 1 / 0)
        status = pair.moved()
    assert status.state is State.FAILED
    assert isinstance(status.error, TransportError)
    assert pair.works()


def test_close_ends_the_threads(make: Make, shared_peer: Peer) -> None:
    before = set(threading.enumerate())
    pair: Pair[LoopbackTransport, Peer] = paired(make(inline_bytes=0, threads=2), shared_peer)
    assert pair.moved().state is State.DONE
    assert set(threading.enumerate()) > before
    pair.reader.close()
    assert set(threading.enumerate()) <= before
