"""Limits on reads under way: page reads wait, and fences are posted before them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kvferry.core.endpoint import transfers
from kvferry.core.messages import WORD_BYTES
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import Engine, RecordingTransport, eventually
from tests.core.endpoint.loads import TOKENS, outcome, pull

PAGES, WORD = "pages", "word"


class StalledReadsTransport(RecordingTransport):
    """A transport whose page reads end in order, as the test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[str] = []
        self.ended = 0
        self._pages: list[TransferId] = []

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        is_word = copies.total == WORD_BYTES
        self.posted.append(WORD if is_word else PAGES)
        if not is_word:
            self._pages.append(transfer)
        return transfer

    def poll(self, transfers: list[TransferId]) -> list[Status]:  # type: ignore[override]
        held = set(self._pages[self.ended :])
        statuses = super().poll(transfers)
        return [
            Status(state=State.PENDING) if each in held else status
            for each, status in zip(transfers, statuses, strict=True)
        ]


@contextlib.contextmanager
def two_engines(driver: StalledReadsTransport) -> Iterator[tuple[Engine, Engine]]:
    """Run a producer, and a consumer that reads from it."""
    with Engine("prefill") as prefill, Engine("decode", transport=lambda: driver) as decode:
        try:
            yield prefill, decode
        finally:
            driver.ended = 1 << 30


def load_succeeds(decode: Engine, number: int) -> bool:
    """Return whether a load succeeded, with the right bytes."""
    return outcome(decode, number) is None and not decode.wrong_bytes([number], TOKENS)


def test_page_reads_beyond_the_limit_wait_and_fences_are_posted_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "UNDER_WAY_BYTES", 1)
    driver = StalledReadsTransport()
    with two_engines(driver) as (prefill, decode):
        pull(prefill, decode, 1, 2, 3)
        for number in (1, 2, 3):
            eventually(lambda: len(driver.posted) == 2 * number - 1, "the next is read")  # noqa: B023
            assert driver.posted.count(PAGES) == number
            driver.ended = number
            assert load_succeeds(decode, number)
            prefill.released(f"p-{number}")
    assert driver.posted == [PAGES, WORD] * 3


def test_small_reads_are_all_under_way_at_once() -> None:
    driver = StalledReadsTransport()
    with two_engines(driver) as (prefill, decode):
        pull(prefill, decode, 1, 2, 3)
        eventually(lambda: driver.posted == [PAGES] * 3, "all are read")
        for number in (1, 2, 3):
            driver.ended = number
            assert load_succeeds(decode, number)
