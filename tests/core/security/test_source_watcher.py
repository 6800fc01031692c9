"""Keys and secrets that are read again while the engine runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import SecretError
from kvferry.core.security import Reading, SourceWatcher, WatchedSetting

START, OPEN_TO_OTHERS = "start", "file:x is open to others than its owner: chmod 600 it"
LONG = 60.0


class Source:
    """Something to read; ``content`` is a value, or an error to raise."""

    def __init__(self, used: Reading[str]) -> None:
        self.content: Reading[str] | SecretError = used
        self.uses: list[str] = []

    def read(self) -> Reading[str]:
        if isinstance(self.content, SecretError):
            raise self.content
        return self.content

    def use(self, value: str) -> str:
        self.uses.append(value)
        return f"{len(value)} characters"


def watched(exposed: Sequence[str] = ()) -> tuple[Source, WatchedSetting[str]]:
    used = Reading(START, frozenset(exposed))
    source = Source(used)
    return source, WatchedSetting("ticket_secrets", used, read=source.read, use=source.use)


def look(setting: WatchedSetting[str], times: int = 2) -> None:
    for _ in range(times):
        setting.look("rank 3")


def test_a_change_is_used_at_the_second_look_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, setting = watched()
    source.content = Reading("a newer one")
    with caplog.at_level(logging.INFO):
        look(setting, 1)
        assert source.uses == []
        look(setting, 9)
    assert source.uses == ["a newer one"]
    assert [each.getMessage() for each in caplog.records] == [
        "rank 3: ticket_secrets was read again: 11 characters"
    ]


def test_what_cannot_be_used_is_logged_once_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, setting = watched()
    source.content = SecretError("file:x is empty or not set: 'kvferry keygen' makes such files")
    with caplog.at_level(logging.INFO):
        look(setting, 9)
        source.content = Reading(START)
        look(setting)
    assert source.uses == []
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "ticket_secrets stays as it was: file:x is empty" in record.getMessage()


def test_a_source_that_others_can_read_by_now_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    source, setting = watched()
    source.content = Reading("a newer one", frozenset([OPEN_TO_OTHERS]))
    look(setting)
    assert source.uses == []
    assert f"ticket_secrets stays as it was: {OPEN_TO_OTHERS}" in caplog.text
    source.content = Reading("a newer one")
    look(setting)
    assert source.uses == ["a newer one"]


def test_a_source_that_others_could_read_at_start_is_used() -> None:
    """As files of Kubernetes are, whose mode cannot be 0600 for a user other than root."""
    source, setting = watched([OPEN_TO_OTHERS])
    source.content = Reading("a newer one", frozenset([OPEN_TO_OTHERS]))
    look(setting)
    assert source.uses == ["a newer one"]


CONTENTS = st.sampled_from(
    [Reading(START), Reading("b"), Reading("c"), SecretError("unreadable"), SecretError("short")]
)


@given(st.lists(CONTENTS, max_size=12))
def test_the_last_valid_content_of_two_looks_in_a_row_is_used(
    contents: list[Reading[str] | SecretError],
) -> None:
    source, setting = watched()
    expected, before = START, str(START)
    for content in contents:
        source.content = content
        look(setting, 1)
        now = content.value if isinstance(content, Reading) else None
        if now is not None and now == before:
            expected = now
        before = str(now)
        assert (source.uses or [START])[-1] == expected


def watcher(read: Callable[[], Reading[str]]) -> SourceWatcher:
    setting = WatchedSetting("curve_peers", Reading(""), read=read, use=str)
    return SourceWatcher([setting], who="rank 0", seconds=0.001)


def test_the_watcher_looks_until_it_is_closed_and_survives_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    again = threading.Semaphore(0)

    def read() -> Reading[str]:
        again.release()
        raise MemoryError("for this test")

    running = watcher(read)
    for _ in range(3):
        assert again.acquire(timeout=LONG)
    running.close()
    running.close()
    assert "rank 0: a key or secret could not be read again" in caplog.text


def test_a_reading_that_hangs_does_not_hold_up_the_end_of_the_engine() -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def read() -> Reading[str]:
        hangs.set()
        assert goes_on.wait(LONG)
        return Reading("")

    running = watcher(read)
    assert hangs.wait(LONG)
    running.close()
    goes_on.set()


def test_nothing_to_watch_needs_no_thread() -> None:
    before = set(threading.enumerate())
    SourceWatcher([], who="rank 0").close()
    assert set(threading.enumerate()) <= before
