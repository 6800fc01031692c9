"""``Hold``, its slot words, and random generations and incarnations."""

from __future__ import annotations

import pytest

from kvferry.core.errors import TicketError
from kvferry.core.lifecycle.holds import (
    NOTHING,
    EndedHold,
    Hold,
    HoldEnd,
    RequestId,
    random_generation,
    random_incarnation,
)
from kvferry.core.messages import MAX_SLOTS
from kvferry.core.side_channel_messages import GENERATION_LIMIT


def test_a_slot_word_has_the_generation_and_a_ready_bit() -> None:
    hold = Hold(slot=3, generation=5)
    assert (hold.computing, hold.ready) == (0b1010, 0b1011)
    assert hold.stands(hold.computing)
    assert hold.stands(hold.ready)


@pytest.mark.parametrize("generation", [1, 2, 4, GENERATION_LIMIT - 1])
def test_words_of_other_generations_do_not_stand_for_a_hold(generation: int) -> None:
    hold = Hold(slot=3, generation=5)
    other = Hold(slot=3, generation=generation)
    assert not any(hold.stands(word) for word in (NOTHING, other.computing, other.ready))


def test_the_largest_word_fits_into_8_bytes() -> None:
    assert Hold(slot=0, generation=GENERATION_LIMIT - 1).ready == 2**64 - 1


@pytest.mark.parametrize(
    ("slot", "generation"), [(-1, 1), (MAX_SLOTS, 1), (0, 0), (0, -1), (0, GENERATION_LIMIT)]
)
def test_a_hold_out_of_bounds_is_refused(slot: int, generation: int) -> None:
    with pytest.raises(TicketError, match=rf"slot {slot}, generation {generation}"):
        Hold(slot=slot, generation=generation)


@pytest.mark.parametrize("draw", [random_generation, random_incarnation])
def test_random_numbers_use_63_bits_and_do_not_repeat(draw: type[int]) -> None:
    drawn = [draw() for _ in range(256)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 < number < GENERATION_LIMIT for number in drawn)
    assert all(any(number >> bit & 1 for number in drawn) for bit in range(63))
    assert sorted(drawn) != drawn


@pytest.mark.parametrize(
    ("ends", "worst"),
    [
        ((HoldEnd.READ, HoldEnd.READ), HoldEnd.READ),
        ((HoldEnd.READ, HoldEnd.ABANDONED), HoldEnd.ABANDONED),
        ((HoldEnd.EXPIRED, HoldEnd.ABANDONED, HoldEnd.READ), HoldEnd.EXPIRED),
        ((None, HoldEnd.READ), HoldEnd.READ),
    ],
)
def test_the_worst_end_counts_for_all_ranks(
    ends: tuple[HoldEnd | None, ...], worst: HoldEnd
) -> None:
    first, *others = (EndedHold(request=RequestId("a"), end=end) for end in ends)
    for other in others:
        first = other.combine(first)
    assert first.end is worst
