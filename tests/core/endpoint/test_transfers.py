"""Reads that wait for others: how many are under way at once, and what goes ahead of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.core.endpoint import transfers
from kvferry.core.messages import WORD_BYTES
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import LAYERS, Engine, Watched, engine, eventually, expected

TOKENS = 4
PAGES, WORD = "pages", "word"


class Held(Watched):
    """A driver of which reads of pages go on until they are let go, in the order of their posts."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[str] = []
        self.let_go = 0
        self._pages: list[TransferId] = []

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        is_word = copies.total == WORD_BYTES
        self.posted.append(WORD if is_word else PAGES)
        if not is_word:
            self._pages.append(transfer)
        return transfer

    def poll(self, transfers: list[TransferId]) -> list[Status]:  # type: ignore[override]
        held = set(self._pages[self.let_go :])
        statuses = super().poll(transfers)
        return [
            Status(state=State.PENDING) if each in held else status
            for each, status in zip(transfers, statuses, strict=True)
        ]


@contextlib.contextmanager
def two(driver: Held) -> Iterator[tuple[Engine, Engine]]:
    """A producer, and who reads from it."""
    with engine("prefill") as prefill, engine("decode", transport=lambda: driver) as decode:
        try:
            yield prefill, decode
        finally:
            driver.let_go = 1 << 30


def arrived(decode: Engine, number: int) -> bool:
    """Whether a load succeeded, with the right bytes."""
    (rank,) = decode.ranks
    failed = decode.outcome(f"d-{number}").failed
    want = [expected(decode.shape, TOKENS, layer, 0) for layer in range(LAYERS)]
    pages = [rank.tokens([number], layer)[:TOKENS] for layer in range(LAYERS)]
    return not failed and np.array_equal(pages, want)


def test_while_enough_is_under_way_others_wait_and_a_fence_goes_ahead_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "UNDER_WAY_BYTES", 1)
    driver = Held()
    with two(driver) as (prefill, decode):
        for number in (1, 2, 3):
            ticket = prefill.serve(f"p-{number}", [number], TOKENS)
            decode.pull(f"d-{number}", ticket, [number])
        for number in (1, 2, 3):
            eventually(lambda: len(driver.posted) == 2 * number - 1, "the next is read")  # noqa: B023
            assert driver.posted.count(PAGES) == number
            driver.let_go = number
            assert arrived(decode, number)
            prefill.released(f"p-{number}")
    assert driver.posted == [PAGES, WORD] * 3


def test_reads_of_a_few_bytes_are_all_under_way() -> None:
    driver = Held()
    with two(driver) as (prefill, decode):
        for number in (1, 2, 3):
            ticket = prefill.serve(f"p-{number}", [number], TOKENS)
            decode.pull(f"d-{number}", ticket, [number])
        eventually(lambda: driver.posted == [PAGES] * 3, "all are read")
        for number in (1, 2, 3):
            driver.let_go = number
            assert arrived(decode, number)
