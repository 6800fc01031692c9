"""``WaitingFollows``: who follows rooms is answered with news, or when its time is over."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from kvferry.core.lifecycle.rooms import Rooms, room_id
from kvferry.core.side_channel import waiting_follows
from kvferry.core.side_channel.waiting_follows import WaitingFollows
from kvferry.core.side_channel_messages import Follow

A, B = room_id("a"), room_id("b")


class Follows:
    """Some that follow rooms, and with what they were answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.answered: list[tuple[bytes, list[bytes]]] = []
        self.rooms = Rooms()
        self.waiting = WaitingFollows(
            self.rooms, lambda to, news: self.answered.append((to[0], [each.room for each in news]))
        )
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(waiting_follows, "time", clock)

    def add(self, client: bytes, *names: bytes, wait_ms: int = 200, address: str = "") -> None:
        rooms = [(name, 0) for name in names]
        follow = Follow(engine="prefill", rooms=rooms, wait_ms=wait_ms)
        self.waiting.add((client,), follow, address)

    def taken(self) -> list[tuple[bytes, list[bytes]]]:
        """Return the answers since the last call."""
        if select.select([self.waiting.descriptor], [], [], 0)[0]:
            self.waiting.hear()
        self.waiting.progress()
        answered, self.answered = self.answered, []
        return answered


@pytest.fixture
def follows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Follows]:
    made = Follows(monkeypatch)
    with closing(made.waiting):
        yield made


def test_a_request_is_answered_when_there_is_news_or_its_time_is_over(follows: Follows) -> None:
    assert follows.waiting.pause(None) is None
    follows.rooms.open(A)
    follows.add(b"knows", A.name)
    follows.add(b"asks", B.name, wait_ms=0)
    assert follows.taken() == [(b"knows", [A.name]), (b"asks", [])]
    follows.add(b"late", B.name, wait_ms=100)
    follows.add(b"waits", B.name)
    assert [follows.waiting.pause(longest) for longest in (None, 50)] == [101, 50]
    assert follows.taken() == []
    follows.now = 0.1
    assert follows.taken() == [(b"late", [])]
    assert follows.waiting.pause(None) == 101
    follows.rooms.open(B)
    assert follows.taken() == [(b"waits", [B.name])]
    assert follows.waiting.pause(None) is None


def test_a_further_request_replaces_the_one_that_waits(follows: Follows) -> None:
    follows.add(b"one", A.name)
    follows.add(b"one", B.name)
    follows.rooms.open(A)
    assert follows.taken() == []
    follows.rooms.open(B)
    assert follows.taken() == [(b"one", [B.name])]


def test_the_address_with_most_requests_that_wait_makes_room_for_others(
    follows: Follows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_follows, "MAX_WAITING", 2)
    for client, address in (b"other", "one"), (b"oldest", "two"), (b"newest", "two"):
        follows.add(client, A.name, address=address)
    assert follows.taken() == [(b"oldest", [])]


def test_changes_are_not_heard_after_close(follows: Follows) -> None:
    follows.waiting.close()
    follows.waiting.close()
    follows.rooms.open(A)
