"""Batches become pieces: copies are joined or split, and every byte is in exactly one piece."""

from __future__ import annotations

from kvferry_mooncake.pieces import PIECE_BYTES, pieces_of

from kvferry.core.memory import Region
from kvferry.core.transport.copies import Copies, copies_between

HERE = Region(address=1 << 20, nbytes=1 << 30)
THERE = Region(address=1 << 40, nbytes=1 << 30)


def _copies(*offsets: tuple[int, int, int]) -> Copies:
    pairs = [(HERE.address + a, THERE.address + b, size) for a, b, size in offsets]
    return copies_between(pairs, local=HERE, remote=THERE)


def _offsets(copies: Copies) -> list[tuple[int, int, int]]:
    return [(a - HERE.address, b - THERE.address, size) for a, b, size in pieces_of(copies)]


def test_copies_adjacent_on_both_sides_are_joined() -> None:
    assert _offsets(_copies((0, 64, 8), (8, 72, 8), (16, 80, 1))) == [(0, 64, 17)]


def test_copies_adjacent_on_one_side_only_are_not_joined() -> None:
    apart = [(0, 64, 8), (8, 73, 8), (32, 81, 8)]
    assert _offsets(_copies(*apart)) == apart


def test_empty_copies_are_left_out() -> None:
    assert _offsets(_copies((0, 0, 0), (5, 6, 7), (12, 13, 0))) == [(5, 6, 7)]
    assert pieces_of(_copies()) == []


def test_long_copies_are_split() -> None:
    cut = [(5, 9, PIECE_BYTES), (5 + PIECE_BYTES, 9 + PIECE_BYTES, 3)]
    assert _offsets(_copies((5, 9, PIECE_BYTES + 3))) == cut
    assert _offsets(_copies((0, 0, PIECE_BYTES))) == [(0, 0, PIECE_BYTES)]
