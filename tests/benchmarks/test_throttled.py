"""The driver that keeps reads to a rate, for a benchmark."""

from __future__ import annotations

from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.throttled import ReadPacer, ThrottledTransport
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


def test_small_read_ends_soon_beside_a_large_one() -> None:
    seconds = 100.0
    pacer = ReadPacer(1000.0, lambda: seconds)
    pacer.begin(1, 1000)
    pacer.begin(2, 10)
    for seconds, under_way in ((100.021, [True, False]), (101.001, [True]), (101.011, [False])):  # noqa: B007
        assert [pacer.is_under_way(n) for n, _ in enumerate(under_way, 1)] == under_way


@given(
    reads=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 5000)), min_size=1, max_size=8),
    looks=st.lists(st.floats(0.001, 1), max_size=20),
)
def test_the_last_read_ends_when_all_bytes_had_their_time(
    reads: list[tuple[float, int]], looks: list[float]
) -> None:
    now = end = 100.0
    pacer = ReadPacer(1000.0, lambda: now)
    for number, (pause, nbytes) in enumerate(reads):
        now += pause
        end = max(end, now) + nbytes / 1000.0
        pacer.begin(number, nbytes)
    for pause in looks:
        now += pause
        busy = any(pacer.is_under_way(number) for number in range(len(reads)))
        assert busy == (now < end) or abs(now - end) <= 1e-6
