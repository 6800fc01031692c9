"""Reads in chunks, by the caller and by threads, that overlap, are cancelled or fail."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import State
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.chunked_copy import CopyRuns
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.memory import pattern
from tests.drivers.loopback.conftest import Make
from tests.drivers.loopback.peer import Peer
from tests.drivers.pairs import MIB, Pair, copies_of, paired, until


def test_adjacent_copies_are_merged_in_any_order() -> None:
    near, far = (Region(address=address, nbytes=4096) for address in (1 << 20, 1 << 30))
    order = np.random.default_rng(5).permutation(4096 // 32) * 32
    assert CopyRuns(batch(near, far, order, order, np.full(len(order), 32))).count == 1


def test_source_and_target_may_overlap_in_one_buffer(transport: LoopbackTransport) -> None:
    content = pattern(MIB, 3)
    buffer = content.copy()
    region = region_of(buffer)
    transport.register(region)
    peer = transport.connect(transport.address())
    copies = copies_of(region, region, [(100, 0, 500_000)])
    [status] = transport.poll([transport.read(peer, copies)])
    assert status.state is State.DONE
    np.testing.assert_array_equal(buffer[100:500_100], content[:500_000])


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
        patched.setattr("kvferry.drivers.loopback.peer_memory.vm_read", lambda *_, **__: 1 / 0)
        status = pair.moved()
    assert status.state is State.FAILED
    assert isinstance(status.error, TransportError)
    assert pair.works()
