"""``Rooms``: what followers hear, and the limits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.core.errors import WireError
from kvferry.core.lifecycle import rooms as rooms_module
from kvferry.core.lifecycle.rooms import KEPT_SECONDS, RoomId, Rooms, room_id
from kvferry.core.side_channel_messages import (
    MAX_FOLLOWED,
    MAX_FOLLOWED_PROMPTS,
    MAX_PART_BYTES,
    MAX_SHORT_REPLY_BYTES,
    MAX_VERSION,
    PROMPT_BYTES,
    Follow,
    Followed,
    RoomNews,
    decode_reply,
    decode_request,
    encode,
)

A, B = room_id("a"), room_id("b")
ONE, TWO = room_id("a", b"one"), room_id("a", b"two")


class House(Rooms):
    """Rooms, with a clock, and the changes that were told."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now)
        self.now = 0.0
        self.told: list[RoomId] = []
        self.listen(self.told.append)

    def heard(self, room: RoomId, version: int = 0) -> Any:
        """Return the news of a room; ``None`` if there are none."""
        return next(iter(self.news([(room, version)])), None)

    def fill(self, *names: str, part: bytes) -> list[RoomId]:
        """Open rooms, and publish a part in each."""
        rooms = [room_id(name) for name in names]
        for room in rooms:
            assert self.open(room)
            assert self.publish(room, part)
        return rooms


@pytest.fixture
def rooms() -> House:
    return House()


def test_a_follower_hears_each_change_once(rooms: House) -> None:
    version = 0
    assert rooms.heard(A) is None
    assert rooms.open(A)
    for change, part, is_last in (
        (lambda: None, b"", False),
        (lambda: rooms.publish(A, b"one"), b"one", False),
        (lambda: rooms.publish(A, b"two"), b"two", False),
        (lambda: rooms.finish(A, b"ticket"), b"ticket", True),
    ):
        change()
        found = rooms.heard(A, version)
        assert (found.part, found.is_last, found.error) == (part, is_last, "")
        assert found.version > version
        version = found.version
        assert rooms.heard(A, version) is None
        assert rooms.heard(A) == found
    assert rooms.told == [A] * 4


def test_only_an_open_room_takes_parts_and_one_that_is_closed_says_why(rooms: House) -> None:
    rooms.close(A, "nothing")
    assert not rooms.publish(A, b"part")
    assert not rooms.finish(A, b"ticket")
    assert not len(rooms)
    rooms.open(A)
    rooms.close(A, "aborted \ud800" + "x" * 5000)
    found = rooms.heard(A)
    assert found.is_last
    assert found.error.startswith("aborted ")
    decode_reply(encode(Followed(incarnation=1, rooms=[found])))
    assert not rooms.publish(A, b"late")
    assert not rooms.finish(A, b"late")
    assert rooms.told == [A, A]


def test_a_room_is_opened_again_when_it_is_over(rooms: House) -> None:
    assert [rooms.open(A), rooms.open(A)] == [True, False]
    rooms.finish(A, b"ticket")
    old = rooms.heard(A)
    assert rooms.open(A)
    new = rooms.heard(A, old.version)
    assert (new.part, new.is_last) == (b"", False)


def test_a_room_that_is_over_is_kept_for_a_while(rooms: House) -> None:
    rooms.open(A)
    rooms.finish(A, b"ticket")
    rooms.now = KEPT_SECONDS - 1
    assert rooms.heard(A)
    rooms.now = KEPT_SECONDS
    assert rooms.heard(A) is None
    assert rooms.heard(A, 3).error


@pytest.mark.parametrize(("limit", "most"), [("MAX_OVER", 2), ("MAX_KEPT_BYTES", 100)])
def test_rooms_that_are_over_make_room(
    limit: str, most: int, rooms: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms_module, limit, most)
    for name in "abc":
        rooms.open(room_id(name))
        rooms.finish(room_id(name), b"x" * 50)
    assert [rooms.heard(room_id(name)) is None for name in "abc"] == [True, False, False]


def test_a_request_for_which_there_is_no_room_is_told(
    rooms: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms_module, "MAX_ROOMS", 2)
    assert [rooms.open(room_id(name)) for name in "abcde"] == [True] * 2 + [False] * 3
    for name in "cde":
        found = rooms.heard(room_id(name))
        assert found.is_last
        assert "2 requests" in found.error
        assert "more prefill engines" in found.error
    assert rooms.told == [room_id(name) for name in "abcde"]
    rooms.finish(A, b"ticket")
    assert rooms.open(room_id("c"))
    assert not rooms.heard(room_id("c")).error
    assert rooms.heard(A)


def test_requests_with_one_name_and_unlike_prompts_have_rooms_of_their_own(rooms: House) -> None:
    assert rooms.open(ONE)
    rooms.finish(ONE, b"ticket of one")
    assert rooms.heard(TWO) is None
    assert [rooms.open(TWO), rooms.open(TWO)] == [True, False]
    rooms.publish(TWO, b"part of two")
    for room, wanted in ((ONE, b"ticket of one"), (TWO, b"part of two")):
        found = rooms.heard(room)
        assert (found.room, found.prompt, found.part) == (*room, wanted)
    rooms.close(TWO, "aborted")
    assert rooms.heard(ONE).part == b"ticket of one"


def test_who_knows_no_prompt_hears_of_the_first_open_room_of_the_name(rooms: House) -> None:
    for room, other in ((ONE, TWO), (TWO, ONE)):
        rooms.open(room)
        rooms.open(other)
        rooms.publish(other, b"other")
        rooms.publish(room, b"part")
        found = rooms.heard(A)
        assert (found.part, found.prompt) == (b"part", b"")
        rooms.finish(other, b"ticket")
        rooms.finish(room, b"ticket")
        rooms.now += KEPT_SECONDS
        assert rooms.heard(A) is None
    rooms.open(A)  # without a prompt, it is for every prompt
    assert rooms.heard(ONE).prompt == b"one"


@pytest.mark.parametrize("nbytes", [0, MAX_PART_BYTES + 1])
def test_a_part_of_another_length_is_not_published_and_such_a_ticket_is_an_error(
    nbytes: int, rooms: House
) -> None:
    rooms.fill("a", part=b"x" * MAX_PART_BYTES)
    assert not rooms.publish(A, b"x" * nbytes)
    assert not rooms.finish(A, b"x" * nbytes)
    found = rooms.heard(A)
    assert (found.part, found.is_last) == (b"", True)
    assert f"its ticket has {nbytes} bytes; 1 to {MAX_PART_BYTES}" in found.error


def test_an_answer_has_as_many_rooms_as_fit(rooms: House) -> None:
    names = rooms.fill(*map(str, range(MAX_FOLLOWED)), part=b"x" * (MAX_PART_BYTES // 10))
    found = rooms.news([(name, 0) for name in names])
    assert len(found) == 10
    data = encode(Followed(incarnation=1, rooms=found))
    assert len(data) <= MAX_SHORT_REPLY_BYTES
    assert decode_reply(data) == Followed(incarnation=1, rooms=found)


def test_the_longest_answers_fit(rooms: House) -> None:
    names = [room_id(str(i), bytes(PROMPT_BYTES)) for i in range(MAX_FOLLOWED)]
    for name in names:
        rooms.open(name)
        rooms.close(name, "\U0001f600" * 5000)
    found = rooms.news([(name, 0) for name in names])
    decode_reply(encode(Followed(incarnation=1, rooms=found)))


def test_the_longest_requests_fit() -> None:
    rooms = [(room_id(str(i)).name, MAX_VERSION) for i in range(MAX_FOLLOWED)]
    request = Follow(engine="e" * 256, rooms=rooms, wait_ms=200)
    assert decode_request(encode(request)) == request
    prompts = [bytes(PROMPT_BYTES)] * MAX_FOLLOWED_PROMPTS
    some = rooms[:MAX_FOLLOWED_PROMPTS]
    longest = Follow(engine="\U0001f600" * 256, rooms=some, wait_ms=200, prompts=prompts)
    assert decode_request(encode(longest)) == longest
    uneven = msgspec.msgpack.decode(encode(longest)) | {"prompts": prompts[1:]}
    with pytest.raises(WireError, match="63 prompts for 64 rooms"):
        decode_request(msgspec.msgpack.encode(uneven))


def test_last_news_without_ticket_or_reason_is_refused() -> None:
    last = RoomNews(room=A.name, version=1, is_last=True, error="E")
    bad = msgspec.msgpack.decode(encode(Followed(incarnation=1, rooms=[last])))
    del bad["rooms"][0]["error"]
    with pytest.raises(WireError, match="neither"):
        decode_reply(msgspec.msgpack.encode(bad))
