"""``RoomFollower`` and the side channel that it follows rooms on, over real sockets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvferry.core.directory import RoomFollower, room_follower, room_questions
from kvferry.core.errors import (
    AdmissionError,
    DeadlineError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    RefusedError,
)
from kvferry.core.lifecycle.rooms import RoomId, Rooms, room_id
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.options import EndpointOptions
from kvferry.core.security import Access, Networks
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel_messages import (
    MAX_FOLLOWED_PROMPTS,
    PROMPT_BYTES,
    Follow,
    Followed,
    Pong,
    RoomNews,
    encode,
)
from tests.core.endpoint.engines import Clock, eventually
from tests.core.endpoint.side_channels import SideChannel
from tests.core.messages import encoded, payload

A, B = room_id("a"), room_id("b")
NO_WAIT = EndpointOptions(handshake_timeout=0.3)
PATIENT = EndpointOptions(handshake_timeout=600.0)


@contextlib.contextmanager
def producer(rooms: Rooms | None, incarnation: int = 7, **where: Any) -> Iterator[PeerKey]:
    """Run a side channel, and yield where it is."""
    ranks = encoded(payload(0, incarnation=incarnation))
    with HandshakeServer(
        ranks, engine="prefill", incarnation=incarnation, rooms=rooms, **where
    ) as server:
        yield PeerKey("prefill", server.host, server.port)


@contextlib.contextmanager
def follower(options: EndpointOptions) -> Iterator[RoomFollower]:
    with contextlib.closing(RoomFollower(options)) as made:
        yield made


@pytest.fixture
def rooms() -> Rooms:
    return Rooms()


@pytest.fixture
def key(rooms: Rooms) -> Iterator[PeerKey]:
    with producer(rooms) as made:
        yield made


@pytest.fixture
def following(clock: Clock) -> Iterator[RoomFollower]:
    with contextlib.closing(RoomFollower(EndpointOptions(), clock)) as made:
        yield made


def finished(rooms: Rooms, room: RoomId = A, ticket: bytes = b"ticket") -> None:
    rooms.open(room)
    rooms.finish(room, ticket)


def heard(follower: RoomFollower, request: Hashable) -> RoomNews | KVFerryError:
    """Wait for news of a request's room."""
    found: list[RoomNews | KVFerryError] = []

    def has_news() -> bool:
        if (news := follower.news(request)) is not None:
            found.append(news)
        return bool(found)

    eventually(has_news, f"news of {request}")
    return found[0]


def part(follower: RoomFollower, request: Hashable) -> bytes:
    """Wait for a part with content."""
    while isinstance(news := heard(follower, request), RoomNews):
        if news.part:
            return news.part
    raise AssertionError(news)


def failure(follower: RoomFollower, request: Hashable) -> KVFerryError:
    """Wait until a request's room has failed."""
    while isinstance(news := heard(follower, request), RoomNews):
        pass
    return news


def test_a_request_hears_of_its_room_until_the_ticket(
    rooms: Rooms, key: PeerKey, following: RoomFollower, clock: Clock
) -> None:
    following.follow("d", A, key)  # before prefill has the request
    rooms.open(A)
    queued = heard(following, "d")
    assert isinstance(queued, RoomNews)
    assert (queued.part, queued.is_last) == (b"", False)
    clock.skip(10_000.0)  # it waits as long as prefill answers
    assert following.news("d") is None
    for each in (b"one", b"two"):
        rooms.publish(A, each)
        assert part(following, "d") == each
        clock.skip(50.0)
    rooms.finish(A, b"ticket")
    last = heard(following, "d")
    assert isinstance(last, RoomNews)
    assert (last.part, last.is_last) == (b"ticket", True)
    assert following.news("d") is None
    clock.skip(1000.0)
    assert not following.pending


def test_requests_of_one_room_hear_the_newest_whenever_they_come(
    rooms: Rooms, key: PeerKey, following: RoomFollower
) -> None:
    rooms.open(A)
    following.follow("d-1", A, key)
    rooms.publish(A, b"one")
    assert part(following, "d-1") == b"one"
    following.follow("d-2", A, key)
    assert part(following, "d-2") == b"one"
    rooms.finish(A, b"ticket")
    assert [part(following, each) for each in ("d-1", "d-2")] == [b"ticket"] * 2
    following.end("d-1")
    following.follow("d-3", A, key)
    assert part(following, "d-3") == b"ticket"


def test_requests_with_one_name_and_unlike_prompts_hear_of_their_own_over_one_connection(
    rooms: Rooms, key: PeerKey, following: RoomFollower
) -> None:
    """Also where there are more of them than one question names."""
    count = MAX_FOLLOWED_PROMPTS + 6
    names = [room_id("a", index.to_bytes(PROMPT_BYTES)) for index in range(count)]
    before = set(threading.enumerate())
    for index, name in enumerate(names):
        following.follow(index, name, key)
    # The last comes while all others are open, and most of them while the first are.
    for ending in ([count - 1], range(3, count - 1), range(3)):
        for index in ending:
            assert following.news(index) is None
            finished(rooms, names[index], b"ticket %d" % index)
        for index in ending:
            assert part(following, index) == b"ticket %d" % index
    assert {each.name for each in set(threading.enumerate()) - before} <= {"kvferry-side-channels"}


def test_an_older_producer_has_one_ticket_for_all_requests_of_a_name(
    following: RoomFollower,
) -> None:
    """It says nothing of prompts, so that decode compares the tickets'."""
    names = [room_id("a", each) for each in (b"one", b"two")]

    def answer(request: Follow) -> bytes:
        return followed(RoomNews(room=A.name, version=3, part=b"ticket", is_last=True))

    with hostile(answer) as key:
        for name in names:
            following.follow(name, name, key)
        assert [part(following, name) for name in names] == [b"ticket"] * 2


def test_a_room_that_ends_without_a_ticket_says_why(
    rooms: Rooms, key: PeerKey, following: RoomFollower
) -> None:
    rooms.open(A)
    following.follow("d", A, key)
    rooms.close(A, "it was aborted")
    error = failure(following, "d")
    assert "it was aborted" in str(error)
    assert following.news("d") is error


def test_every_request_waits_as_long_as_the_first_for_a_room_that_nobody_opens(
    key: PeerKey, following: RoomFollower, clock: Clock
) -> None:
    following.follow("d-1", A, key)
    assert following.news("d-1") is None
    clock.skip(50.0)
    following.follow("d-2", A, key)
    clock.skip(11.0)
    assert following.pending
    assert isinstance(heard(following, "d-1"), DeadlineError)
    assert following.news("d-2") is None
    following.end("d-1")
    assert not following.pending
    clock.skip(50.0)
    assert isinstance(heard(following, "d-2"), DeadlineError)


def test_a_room_that_changes_no_more_fails_after_the_load_timeout(
    rooms: Rooms, key: PeerKey, following: RoomFollower, clock: Clock
) -> None:
    rooms.open(A)
    following.follow("d", A, key)
    for each in (b"one", b"two"):
        rooms.publish(A, each)
        assert part(following, "d") == each
        clock.skip(50.0)
        assert not following.pending
    clock.skip(11.0)
    assert following.pending
    error = failure(following, "d")
    assert isinstance(error, DeadlineError)
    assert "hangs" in str(error)


def test_a_request_that_ended_is_forgotten(
    rooms: Rooms, key: PeerKey, following: RoomFollower
) -> None:
    following.follow("d", A, key)
    with pytest.raises(ValueError, match="end"):
        following.follow("d", B, key)
    following.end("d")
    following.end("d")
    assert following.news("d") is None
    following.follow("d", A, key)
    rooms.open(A)
    heard(following, "d")


def test_the_next_address_is_asked_if_one_refuses_or_is_silent(rooms: Rooms, key: PeerKey) -> None:
    finished(rooms)
    for first in (producer(None), silent()):
        with first as other, follower(EndpointOptions(handshake_timeout=2.0)) as following:
            following.follow("d", A, other._replace(routed=(key.host, key.port)))
            assert part(following, "d") == b"ticket"


def test_rooms_fail_once_every_address_has_refused(following: RoomFollower) -> None:
    with producer(None) as one, producer(None) as two:
        following.follow("d", A, one._replace(routed=(two.host, two.port)))
        error = failure(following, "d")
        assert isinstance(error, RefusedError)
        for text in (str(one.port), str(two.port), "upgrade"):
            assert text in str(error)


def test_the_connection_is_made_anew_after_a_pause(
    rooms: Rooms, following: RoomFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(room_questions, "time", SimpleNamespace(monotonic=clock))
    finished(rooms)
    with producer(rooms) as key:
        following.follow("d-1", A, key)
        assert part(following, "d-1") == b"ticket"
        following.end("d-1")
    clock.skip(11.0)  # longer than the timeout, while nothing is followed
    finished(rooms, B, b"two")
    with producer(rooms, port=key.port):
        following.follow("d-2", B, key)
        assert part(following, "d-2") == b"two"


# Producers that are gone.


def test_a_producer_that_is_gone_fails_its_rooms(rooms: Rooms) -> None:
    rooms.open(A)
    with follower(NO_WAIT) as following:
        with producer(rooms) as key:
            following.follow("d", A, key)
            heard(following, "d")
        assert isinstance(failure(following, "d"), HandshakeError)
        following.end("d")
        eventually(lambda: not following._producers, "it is forgotten")


def test_a_producer_that_was_restarted_fails_its_rooms(
    rooms: Rooms, following: RoomFollower
) -> None:
    rooms.open(A)
    finished(rooms, B)
    with producer(rooms) as key:
        for request, room in (("has its ticket", B), ("d", A)):
            following.follow(request, room, key)
            heard(following, request)
    with producer(Rooms(), incarnation=8, port=key.port):
        assert isinstance(failure(following, "d"), PeerLostError)
    assert following.news("has its ticket") is None


def test_an_address_that_is_not_admitted_is_not_dialled(key: PeerKey) -> None:
    access = Access(networks=Networks.of(["10.1.2.0/24"]))
    with follower(EndpointOptions(access=access)) as following:
        following.follow("d", A, key)
        assert isinstance(failure(following, "d"), AdmissionError)


# Limits.


def test_a_producer_without_rooms_makes_room_for_another(
    rooms: Rooms, key: PeerKey, following: RoomFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_follower, "MAX_PRODUCERS", 1)
    monkeypatch.setattr(room_questions, "LINGER_SECONDS", 1000.0)
    finished(rooms)
    with producer(rooms) as two:
        following.follow("d-1", A, key)
        following.follow("refused", A, two)
        assert "1 prefill engines wait here" in str(following.news("refused"))
        assert part(following, "d-1") == b"ticket"
        following.end("d-1")
        following.follow("d-2", A, two)
        assert part(following, "d-2") == b"ticket"


def test_the_longest_unknown_of_the_host_with_most_makes_room_for_another(
    rooms: Rooms,
    key: PeerKey,
    following: RoomFollower,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that prefill has in its queue stays, and so does one of a host with fewer."""
    monkeypatch.setattr(room_follower, "MAX_REQUESTS", 4)
    rooms.open(A)
    with producer(Rooms(), host="127.0.0.2") as other:
        following.follow("known", A, key)
        heard(following, "known")
        following.follow("other", room_id("other"), other)
        for index in range(4):
            clock.skip(1.0)
            following.follow(index, room_id(str(index)), key)
        for index in range(2):
            error = heard(following, index)
            assert isinstance(error, DeadlineError)
            assert f"127.0.0.1 port {key.port} has said nothing" in str(error)
            assert "and 4 requests wait here" in str(error)
        assert [following.news(each) for each in ("known", "other", 2, 3)] == [None] * 4
        following.end("other")
        following.follow("other", room_id("other"), other)  # there is room: two have failed
        assert [following.news(each) for each in ("known", "other", 2, 3)] == [None] * 4
        rooms.open(room_id("3"))
        assert isinstance(heard(following, 3), RoomNews)


def test_requests_that_prefill_knows_do_not_make_room(
    rooms: Rooms, key: PeerKey, following: RoomFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_follower, "MAX_REQUESTS", 1)
    rooms.open(A)
    following.follow("d-1", A, key)
    heard(following, "d-1")
    following.follow("d-2", B, key)
    assert "1 requests wait here" in str(following.news("d-2"))
    rooms.finish(A, b"ticket")
    assert part(following, "d-1") == b"ticket"


def test_addresses_that_never_answer_leave_places_to_others(
    rooms: Rooms, key: PeerKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above all to a producer that has answered before."""
    monkeypatch.setattr(room_follower, "MAX_SILENT_PRODUCERS", 3)
    monkeypatch.setattr(room_follower, "MAX_SILENT_AT_HOST", 2)
    monkeypatch.setattr(room_questions, "LINGER_SECONDS", 0.05)
    finished(rooms)
    with silent() as nobody, follower(PATIENT) as following:
        following.follow("first", A, key)
        assert part(following, "first") == b"ticket"
        following.end("first")
        eventually(lambda: not following._producers, "it is followed no more")
        for index, at in enumerate([3, 3, 3, 2, 4]):
            name = f"invented {index}"
            following.follow(index, A, nobody._replace(host=f"127.0.0.{at}", engine=name))
        assert [following.news(index) for index in (0, 1, 3)] == [None] * 3
        for index, silent_ones, at in ((2, 2, 3), (4, 3, 4)):
            error = str(following.news(index))
            assert f"'invented {index}' at 127.0.0.{at} port {nobody.port} is not asked" in error
            assert f"{silent_ones} have never answered (at most 3), 2 of them at 127.0.0.3" in error
            assert "remote_bootstrap_addr" in error
        following.follow("honest", A, key)
        assert part(following, "honest") == b"ticket"


# Hostile side channels.


@contextlib.contextmanager
def hostile(answer: Callable[[Follow], bytes]) -> Iterator[PeerKey]:
    """Run a side channel that answers every request so."""
    with SideChannel(lambda _, asked: answer(asked) if isinstance(asked, Follow) else None) as made:
        yield PeerKey("prefill", "127.0.0.1", made.port)


def followed(*rooms: RoomNews, incarnation: int = 7) -> bytes:
    return encode(Followed(incarnation=incarnation, rooms=list(rooms)))


@contextlib.contextmanager
def silent() -> Iterator[PeerKey]:
    """Run a side channel that takes connections and requests, and answers nothing."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield PeerKey("prefill", "127.0.0.1", port)


def test_a_silent_side_channel_fails_its_rooms_whatever_requests_come() -> None:
    with silent() as key, follower(NO_WAIT) as following:
        following.follow("d", A, key)

        def is_over() -> bool:
            following.follow("another", B, key)
            following.end("another")
            time.sleep(0.01)
            return following.news("d") is not None

        eventually(is_over, "an error")
        error: BaseException | None = failure(following, "d")
        assert "stopped or overloaded" in str(error)
        while error is not None:
            assert error.__traceback__ is None, "it would keep frames, and what is in them"
            error = error.__cause__ or error.__context__


def test_a_bad_answer_fails_the_rooms() -> None:
    with hostile(lambda _: encode(Pong(incarnation=7))) as key, follower(NO_WAIT) as following:
        following.follow("d", A, key)
        assert isinstance(heard(following, "d"), HandshakeError)


def test_news_that_were_not_asked_for_or_are_old_are_ignored(following: RoomFollower) -> None:
    other = RoomNews(room=B.name, version=9, part=b"other")
    five, four = (RoomNews(room=A.name, version=each, part=b"%d" % each) for each in (5, 4))
    last = RoomNews(room=A.name, version=6, part=b"6", is_last=True)
    late = RoomNews(room=A.name, version=7, part=b"7")
    known: list[int] = []

    def answer(request: Follow) -> bytes:
        known.extend(version for _, version in request.rooms)
        if 5 not in known:
            return followed(other, five)
        return followed(four) if known.count(5) == 1 else followed(last, late)

    with hostile(answer) as key:
        following.follow("d", A, key)
        assert part(following, "d") in (b"5", b"6")
        eventually(lambda: known.count(5) > 1, "the room is asked for again")
        eventually(lambda: following._requests["d"].is_last, "the last news")
    assert set(known) == {0, 5}
    assert following.news("d") in (None, last)
    assert following.news("d") is None
