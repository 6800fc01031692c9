"""ReadPacer: what reads move together keeps to the rate, in equal shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.testing.pacer import ReadPacer
from tests.testing.test_faulty import Clock

RATE = 1000.0


def test_small_read_ends_soon_beside_a_large_one() -> None:
    clock = Clock()
    pacer = ReadPacer(RATE, clock)
    pacer.begin(1, 1000)
    pacer.begin(2, 10)
    clock.seconds += 0.021
    assert (pacer.is_under_way(1), pacer.is_under_way(2)) == (True, False)
    clock.seconds += 0.98
    assert pacer.is_under_way(1)
    clock.seconds += 0.01
    assert not pacer.is_under_way(1)


@given(
    reads=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 5000)), min_size=1, max_size=8),
    looks=st.lists(st.floats(0.001, 1), max_size=20),
)
def test_the_last_read_ends_when_all_bytes_had_their_time(
    reads: list[tuple[float, int]], looks: list[float]
) -> None:
    clock = Clock()
    pacer = ReadPacer(RATE, clock)
    end = clock.seconds
    for number, (pause, nbytes) in enumerate(reads):
        clock.seconds += pause
        end = max(end, clock.seconds) + nbytes / RATE
        pacer.begin(number, nbytes)
    for pause in looks:
        clock.seconds += pause
        busy = any(pacer.is_under_way(number) for number in range(len(reads)))
        if abs(clock.seconds - end) > 1e-6:
            assert busy == (clock.seconds < end)
