"""``Rooms``: what followers hear, and the limits."""

from __future__ import annotations

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


def news(rooms: Rooms, room: RoomId, version: int = 0) -> RoomNews | None:
    found = rooms.news([(room, version)])
    return found[0] if found else None


def heard(rooms: Rooms, room: RoomId, version: int = 0) -> RoomNews:
    [found] = rooms.news([(room, version)])
    return found


def test_a_follower_hears_each_change_once() -> None:
    rooms, version = Rooms(), 0
    assert news(rooms, A) is None
    assert rooms.open(A)
    for change, part, is_last in (
        (lambda: None, b"", False),
        (lambda: rooms.publish(A, b"one"), b"one", False),
        (lambda: rooms.publish(A, b"two"), b"two", False),
        (lambda: rooms.finish(A, b"ticket"), b"ticket", True),
    ):
        change()
        found = heard(rooms, A, version)
        assert (found.part, found.is_last, found.error) == (part, is_last, "")
        assert found.version > version
        version = found.version
        assert news(rooms, A, version) is None
        assert heard(rooms, A) == found


def test_a_room_that_is_closed_says_why() -> None:
    rooms = Rooms()
    rooms.open(A)
    rooms.close(A, "aborted \ud800" + "x" * 5000)
    found = heard(rooms, A)
    assert found.is_last
    assert found.error.startswith("aborted ")
    decode_reply(encode(Followed(incarnation=1, rooms=[found])))
    assert not rooms.publish(A, b"late")
    assert not rooms.finish(A, b"late")


def test_a_room_is_opened_again_when_it_is_over() -> None:
    rooms = Rooms()
    assert rooms.open(A)
    assert not rooms.open(A)
    rooms.finish(A, b"ticket")
    old = heard(rooms, A)
    assert rooms.open(A)
    new = heard(rooms, A, old.version)
    assert (new.part, new.is_last) == (b"", False)


def test_a_room_that_nobody_opened_cannot_be_published() -> None:
    rooms = Rooms()
    assert not rooms.publish(A, b"part")
    assert not rooms.finish(A, b"ticket")
    rooms.close(A, "nothing")
    assert len(rooms) == 0


def test_a_room_that_is_over_is_kept_for_a_while() -> None:
    now = 0.0
    rooms = Rooms(lambda: now)
    rooms.open(A)
    rooms.finish(A, b"ticket")
    now = KEPT_SECONDS - 1
    assert news(rooms, A) is not None
    now = KEPT_SECONDS
    assert news(rooms, A) is None
    found = heard(rooms, A, 3)
    assert found.error


@pytest.mark.parametrize(("limit", "most"), [("MAX_OVER", 2), ("MAX_KEPT_BYTES", 100)])
def test_rooms_that_are_over_make_room(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms_module, limit, most)
    rooms = Rooms()
    for name in "abc":
        rooms.open(room_id(name))
        rooms.finish(room_id(name), b"x" * 50)
    assert [news(rooms, room_id(name)) is None for name in "abc"] == [True, False, False]


def test_a_request_for_which_there_is_no_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms_module, "MAX_ROOMS", 2)
    told: list[RoomId] = []
    rooms = Rooms()
    rooms.listen(told.append)
    rooms.open(A)
    rooms.open(B)
    for name in "cde":
        assert not rooms.open(room_id(name))
        found = heard(rooms, room_id(name))
        assert found.is_last
        assert "2 requests" in found.error
        assert "more prefill engines" in found.error
    assert told == [A, B, *map(room_id, "cde")]
    rooms.finish(A, b"ticket")
    assert rooms.open(room_id("c"))
    found = heard(rooms, room_id("c"))
    assert not found.error
    assert news(rooms, A) is not None


def test_requests_with_one_name_and_unlike_prompts_have_rooms_of_their_own() -> None:
    rooms = Rooms()
    one, two = room_id("a", b"one"), room_id("a", b"two")
    assert rooms.open(one)
    rooms.finish(one, b"ticket of one")
    assert news(rooms, two) is None
    assert rooms.open(two)
    assert not rooms.open(two)
    rooms.publish(two, b"part of two")
    for room, wanted in ((one, b"ticket of one"), (two, b"part of two")):
        found = heard(rooms, room)
        assert (found.room, found.prompt, found.part) == (*room, wanted)
    rooms.close(two, "aborted")
    found = heard(rooms, one)
    assert found.part == b"ticket of one"


def test_who_knows_no_prompt_hears_of_the_first_open_room_of_the_name() -> None:
    now = 0.0
    rooms = Rooms(lambda: now)
    one, two = room_id("a", b"one"), room_id("a", b"two")
    for room, other in ((one, two), (two, one)):
        rooms.open(room)
        rooms.open(other)
        rooms.publish(other, b"other")
        rooms.publish(room, b"part")
        found = heard(rooms, A)
        assert (found.part, found.prompt) == (b"part", b"")
        rooms.finish(other, b"ticket")
        rooms.finish(room, b"ticket")
        now += KEPT_SECONDS
        assert news(rooms, A) is None


def test_a_room_without_a_prompt_is_for_every_prompt() -> None:
    rooms = Rooms()
    rooms.open(A)
    found = heard(rooms, room_id("a", b"one"))
    assert found.prompt == b"one"


def test_a_room_is_forgotten_once_its_ticket_is_used_up() -> None:
    rooms = Rooms()
    rooms.forget(A)
    rooms.open(A)
    rooms.forget(A)
    assert news(rooms, A) is not None
    rooms.finish(A, b"ticket")
    rooms.forget(A)
    assert news(rooms, A) is None
    assert rooms.open(A)


@pytest.mark.parametrize("forgotten", ["xyz", "yxz", "zyx"])
def test_rooms_of_one_name_are_forgotten_in_any_order(forgotten: str) -> None:
    rooms, ids = Rooms(), {prompt: room_id("a", prompt.encode()) for prompt in "xyz"}
    for prompt in "xyz":
        assert rooms.open(ids[prompt])
    for prompt in "yxz":
        assert rooms.finish(ids[prompt], b"ticket")
    for prompt in forgotten:
        rooms.forget(ids[prompt])
    assert not len(rooms)
    assert rooms.open(ids["y"])
    assert news(rooms, A) is not None


def test_a_part_that_is_too_long_is_not_published() -> None:
    rooms = Rooms()
    rooms.open(A)
    assert rooms.publish(A, b"x" * MAX_PART_BYTES)
    assert not rooms.publish(A, b"x" * (MAX_PART_BYTES + 1))
    assert not rooms.finish(A, b"x" * (MAX_PART_BYTES + 1))
    found = heard(rooms, A)
    assert str(MAX_PART_BYTES) in found.error


def test_an_answer_has_as_many_rooms_as_fit() -> None:
    rooms = Rooms()
    names = [room_id(str(i)) for i in range(MAX_FOLLOWED)]
    for name in names:
        rooms.open(name)
        rooms.publish(name, b"x" * (MAX_PART_BYTES // 10))
    found = rooms.news([(name, 0) for name in names])
    assert len(found) == 10
    data = encode(Followed(incarnation=1, rooms=found))
    assert len(data) <= MAX_SHORT_REPLY_BYTES
    assert decode_reply(data) == Followed(incarnation=1, rooms=found)


def test_the_longest_answers_fit() -> None:
    rooms = Rooms()
    names = [room_id(str(i), bytes(PROMPT_BYTES)) for i in range(MAX_FOLLOWED)]
    for name in names:
        rooms.open(name)
        rooms.close(name, "\U0001f600" * 5000)
    found = rooms.news([(name, 0) for name in names])
    decode_reply(encode(Followed(incarnation=1, rooms=found)))


def test_the_longest_request_fits() -> None:
    rooms = [(room_id(str(i)).name, MAX_VERSION) for i in range(MAX_FOLLOWED)]
    request = Follow(engine="e" * 256, rooms=rooms, wait_ms=200)
    assert decode_request(encode(request)) == request
    prompts = [bytes(PROMPT_BYTES)] * MAX_FOLLOWED_PROMPTS
    longest = Follow(
        engine="\U0001f600" * 256,
        rooms=rooms[:MAX_FOLLOWED_PROMPTS],
        wait_ms=200,
        prompts=prompts,
    )
    assert decode_request(encode(longest)) == longest
    uneven = msgspec.msgpack.decode(encode(longest)) | {"prompts": prompts[1:]}
    with pytest.raises(WireError, match="63 prompts for 64 rooms"):
        decode_request(msgspec.msgpack.encode(uneven))


def test_an_empty_ticket_ends_the_room_with_an_error() -> None:
    rooms = Rooms()
    rooms.open(A)
    assert not rooms.publish(A, b"")
    assert not rooms.finish(A, b"")
    [news] = rooms.news([(A, 0)])
    assert (news.part, news.is_last) == (b"", True)
    assert "its ticket has 0 bytes" in news.error


def test_last_news_without_ticket_or_reason_is_refused() -> None:
    good = Followed(
        incarnation=1, rooms=[RoomNews(room=A.name, version=1, is_last=True, error="E")]
    )
    bad = msgspec.msgpack.decode(encode(good))
    del bad["rooms"][0]["error"]
    with pytest.raises(WireError, match="neither"):
        decode_reply(msgspec.msgpack.encode(bad))


def test_changes_are_told() -> None:
    told: list[RoomId] = []
    rooms = Rooms()
    rooms.listen(told.append)
    rooms.open(A)
    rooms.publish(A, b"part")
    rooms.publish(B, b"part")
    rooms.close(A, "over")
    assert told == [A, A, A]
