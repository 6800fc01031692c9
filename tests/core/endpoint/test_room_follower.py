"""``RoomFollower`` and the side channel that it follows rooms on, over real sockets."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from kvferry.core.endpoint import EndpointOptions, RoomFollower, room_follower, room_inbox
from kvferry.core.directory.room_follower import MAX_PRODUCERS, MAX_SILENT_AT_HOST
from kvferry.core.errors import (
    AdmissionError,
    DeadlineError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    RefusedError,
)
from kvferry.core.handshake import HandshakeServer, server, waiting_follows
from kvferry.core.lifecycle import rooms as rooms_module
from kvferry.core.lifecycle.rooms import Rooms, room_id
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.security import Access, Networks
from kvferry.core.side_channel_messages import (
    MAX_FOLLOWED,
    MAX_FOLLOWED_PROMPTS,
    MAX_PART_BYTES,
    MAX_REQUEST_BYTES,
    PROMPT_BYTES,
    Follow,
    Followed,
    Health,
    PayloadRequest,
    Ping,
    Pong,
    Refusal,
    Reply,
    RoomNews,
    decode,
    decode_reply,
    decode_request,
    encode,
)
from tests.core.endpoint.engines import Clock, eventually
from tests.core.messages import encoded, payload

A, B = room_id("a"), room_id("b")
NO_WAIT = EndpointOptions(handshake_timeout=0.3)
PATIENT = EndpointOptions(handshake_timeout=600.0)


@contextlib.contextmanager
def producer(
    rooms: Rooms | None, incarnation: int = 7, port: int = 0, host: str = "127.0.0.1"
) -> Iterator[PeerKey]:
    """Run a side channel, and yield where it is."""
    ranks = encoded(payload(0, incarnation=incarnation))
    with HandshakeServer(
        ranks, engine="prefill", incarnation=incarnation, host=host, port=port, rooms=rooms
    ) as server:
        yield PeerKey("prefill", server.host, server.port)


@contextlib.contextmanager
def follower(
    options: EndpointOptions | None = None, clock: Clock | None = None
) -> Iterator[RoomFollower]:
    made = RoomFollower(options or EndpointOptions(), clock or Clock())
    try:
        yield made
    finally:
        made.close()


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
    while True:
        news = heard(follower, request)
        assert isinstance(news, RoomNews), news
        if news.part:
            return news.part


def test_a_request_hears_of_its_room_until_the_ticket() -> None:
    rooms = Rooms()
    with producer(rooms) as key, follower() as following:
        following.follow("d", A, key)  # before prefill has the request
        rooms.open(A)
        queued = heard(following, "d")
        assert isinstance(queued, RoomNews)
        assert (queued.part, queued.is_last) == (b"", False)
        rooms.publish(A, b"one")
        assert part(following, "d") == b"one"
        rooms.publish(A, b"two")
        assert part(following, "d") == b"two"
        rooms.finish(A, b"ticket")
        last = heard(following, "d")
        assert isinstance(last, RoomNews)
        assert (last.part, last.is_last) == (b"ticket", True)
        assert following.news("d") is None
        assert not following.pending
        following.end("d")
        assert following.following == 0


def test_who_comes_late_hears_the_newest() -> None:
    rooms = Rooms()
    rooms.open(A)
    rooms.publish(A, b"one")
    rooms.finish(A, b"ticket")
    with producer(rooms) as key, follower() as following:
        following.follow("d", A, key)
        news = heard(following, "d")
        assert isinstance(news, RoomNews)
        assert (news.part, news.is_last) == (b"ticket", True)


def test_requests_of_one_room_hear_the_same() -> None:
    rooms = Rooms()
    rooms.open(A)
    with producer(rooms) as key, follower() as following:
        following.follow("d-1", A, key)
        rooms.finish(A, b"ticket")
        assert part(following, "d-1") == b"ticket"
        following.follow("d-2", A, key)
        assert part(following, "d-2") == b"ticket"
        following.end("d-1")
        following.follow("d-3", A, key)
        assert part(following, "d-3") == b"ticket"


def test_all_rooms_of_a_producer_are_asked_for_over_one_connection() -> None:
    rooms = Rooms()
    names = [room_id(str(i)) for i in range(2 * MAX_FOLLOWED + 1)]
    before = set(threading.enumerate())
    with producer(rooms) as key, follower() as following:
        for index, name in enumerate(names):
            rooms.open(name)
            following.follow(index, name, key)
        for name in names:
            rooms.finish(name, name.name)
        for index, name in enumerate(names):
            while not (isinstance(news := heard(following, index), RoomNews) and news.part):
                pass
            assert news.part == name.name
        made = set(threading.enumerate()) - before
        assert {t.name for t in made} <= {"kvferry-side-channels", "kvferry-handshake"}


def test_requests_with_one_name_and_unlike_prompts_hear_of_their_own() -> None:
    """Also where there are more of them than one question names."""
    rooms = Rooms()
    count = MAX_FOLLOWED_PROMPTS + 6
    names = [room_id("a", index.to_bytes(PROMPT_BYTES)) for index in range(count)]
    rooms.open(names[0])
    rooms.finish(names[0], b"ticket 0")
    with producer(rooms) as key, follower() as following:
        for index, name in enumerate(names):
            following.follow(index, name, key)
        assert part(following, 0) == b"ticket 0"
        for index, name in enumerate(names[1:], 1):
            assert following.news(index) is None
            rooms.open(name)
            rooms.finish(name, b"ticket %d" % index)
        for index in range(1, count):
            assert part(following, index) == b"ticket %d" % index


def test_an_older_producer_has_one_ticket_for_all_requests_of_a_name() -> None:
    """It says nothing of prompts, so that decode compares the tickets'."""
    names = [room_id("a", each) for each in (b"one", b"two")]

    def answer(request: Follow) -> bytes:
        return followed(RoomNews(room=A.name, version=3, part=b"ticket", is_last=True))

    with hostile(answer) as key, follower() as following:
        for name in names:
            following.follow(name, name, key)
        assert [part(following, name) for name in names] == [b"ticket"] * 2


def test_a_request_for_which_prefill_has_no_room_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rooms_module, "MAX_ROOMS", 1)
    rooms = Rooms()
    rooms.open(A)
    with producer(rooms) as key, follower() as following:
        following.follow("d", B, key)
        assert not rooms.open(B)
        error = heard(following, "d")
        assert isinstance(error, HandshakeError)
        assert "it has 1 requests with a transfer_id" in str(error)
        assert "use more prefill engines" in str(error)


def test_a_room_that_ends_without_a_ticket_says_why() -> None:
    rooms = Rooms()
    with producer(rooms) as key, follower() as following:
        rooms.open(A)
        following.follow("d", A, key)
        rooms.close(A, "it was aborted")
        error = heard(following, "d")
        while isinstance(error, RoomNews):
            error = heard(following, "d")
        assert "it was aborted" in str(error)
        assert following.news("d") is error


def test_who_comes_after_the_ticket_hears_that_the_room_has_ended_otherwise_since() -> None:
    inbox, room = room_inbox.RoomInbox(Clock()), room_inbox.FollowedRoom()
    room.requests["d"] = room_inbox.RoomUser(since=0.0)
    inbox.keep(room, RoomNews(room=A.name, version=2, part=b"ticket", is_last=True))
    room.requests["d"].seen = room.version
    inbox.trim(room)
    room.requests["late"] = room_inbox.RoomUser(since=0.0)
    room.is_wanted = True
    inbox.keep(room, RoomNews(room=A.name, version=4, is_last=True, error="it was aborted"))
    assert "it was aborted" in str(room.error)
    assert "late" in inbox.changed


def test_a_request_that_comes_later_waits_as_long_as_the_first() -> None:
    clock = Clock()
    with producer(Rooms()) as key, follower(clock=clock) as following:
        following.follow("d-1", A, key)
        clock.skip(50.0)
        following.follow("d-2", A, key)
        clock.skip(11.0)
        assert isinstance(heard(following, "d-1"), DeadlineError)
        assert following.news("d-2") is None
        following.end("d-1")
        assert not following.pending
        clock.skip(50.0)
        assert isinstance(heard(following, "d-2"), DeadlineError)


def test_a_room_that_changes_no_more_fails_after_the_load_timeout() -> None:
    rooms, clock = Rooms(), Clock()
    rooms.open(A)
    rooms.publish(A, b"one")
    with producer(rooms) as key, follower(clock=clock) as following:
        following.follow("d", A, key)
        assert part(following, "d") == b"one"
        clock.skip(50.0)
        assert not following.pending
        rooms.publish(A, b"two")
        assert part(following, "d") == b"two"
        clock.skip(50.0)
        assert not following.pending
        clock.skip(11.0)
        assert following.pending
        error = heard(following, "d")
        assert isinstance(error, DeadlineError)
        assert "hangs" in str(error)


def test_a_room_whose_ticket_has_come_is_not_late() -> None:
    rooms, clock = Rooms(), Clock()
    rooms.open(A)
    rooms.finish(A, b"ticket")
    with producer(rooms) as key, follower(clock=clock) as following:
        following.follow("d-1", A, key)
        following.follow("never opened", B, key)
        assert part(following, "d-1") == b"ticket"
        clock.skip(100.0)
        following.follow("d-2", A, key)
        assert following.pending  # because of the request that is late
        assert part(following, "d-2") == b"ticket"


def test_parts_that_every_request_has_seen_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_inbox, "MAX_UNSEEN_BYTES", 10)
    rooms = Rooms()
    with producer(rooms) as key, follower() as following:
        for name in (A, B):
            rooms.open(name)
            following.follow(name, name, key)
            rooms.publish(name, b"123456")
            assert part(following, name) == b"123456"
        rooms.publish(A, b"abcdef")
        eventually(lambda: following.pending, "a part")
        rooms.publish(B, b"abcdef")
        error = heard(following, B)
        assert isinstance(error, HandshakeError)
        assert "10 bytes" in str(error)
        assert part(following, A) == b"abcdef"
        following.end(B)
        rooms.finish(A, b"7890")
        assert part(following, A) == b"7890"


def test_errors_keep_nothing_else_in_memory() -> None:
    with silent() as key, follower(NO_WAIT) as following:
        following.follow("d", A, key)
        error: BaseException | None = heard(following, "d")  # type: ignore[assignment]
        while error is not None:
            assert error.__traceback__ is None
            error = error.__cause__ or error.__context__


def test_a_room_that_is_forgotten_fails() -> None:
    rooms, clock = Rooms(), Clock()
    rooms.open(A)
    with producer(rooms) as key, follower(clock=clock) as following:
        following.follow("d", A, key)
        heard(following, "d")
        rooms._rooms.clear()
        assert "forgotten" in str(heard(following, "d"))


def test_a_room_that_nobody_opens_fails_after_the_load_timeout() -> None:
    clock = Clock()
    with producer(Rooms()) as key, follower(clock=clock) as following:
        following.follow("d", A, key)
        assert following.news("d") is None
        clock.skip(61.0)
        assert following.pending
        assert isinstance(heard(following, "d"), DeadlineError)


def test_a_request_in_the_queue_waits_as_long_as_prefill_answers() -> None:
    rooms, clock = Rooms(), Clock()
    rooms.open(A)
    with producer(rooms) as key, follower(clock=clock) as following:
        following.follow("d", A, key)
        heard(following, "d")
        clock.skip(10_000.0)
        assert following.news("d") is None
        rooms.finish(A, b"ticket")
        assert part(following, "d") == b"ticket"


def test_a_request_that_ended_is_forgotten() -> None:
    rooms = Rooms()
    with producer(rooms) as key, follower() as following:
        following.follow("d", A, key)
        with pytest.raises(ValueError, match="end"):
            following.follow("d", B, key)
        following.end("d")
        following.end("d")
        assert following.news("d") is None
        following.follow("d", A, key)
        rooms.open(A)
        heard(following, "d")


def test_an_engine_without_rooms_refuses() -> None:
    with producer(None) as key, follower() as following:
        following.follow("d", A, key)
        error = heard(following, "d")
        assert isinstance(error, RefusedError)
        assert "upgrade" in str(error)


def test_an_older_build_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    known = msgspec.msgpack.Decoder(PayloadRequest | Ping | Health)
    monkeypatch.setattr(
        server, "decode_request", lambda data: decode(known, data, MAX_REQUEST_BYTES, "request")
    )
    with producer(Rooms()) as key, follower() as following:
        following.follow("d", A, key)
        error = heard(following, "d")
        assert isinstance(error, RefusedError)
        assert "follow" in str(error)
        assert "upgrade" in str(error)


def test_the_next_address_is_asked_if_one_refuses() -> None:
    rooms = Rooms()
    rooms.open(A)
    rooms.finish(A, b"ticket")
    with producer(None) as refusing, producer(rooms) as key, follower() as following:
        both = refusing._replace(routed=(key.host, key.port))
        following.follow("d", A, both)
        assert part(following, "d") == b"ticket"


def test_rooms_fail_once_every_address_has_refused() -> None:
    with producer(None) as one, producer(None) as two, follower() as following:
        following.follow("d", A, one._replace(routed=(two.host, two.port)))
        error = heard(following, "d")
        assert isinstance(error, RefusedError)
        assert str(one.port) in str(error)
        assert str(two.port) in str(error)


def test_the_connection_is_made_anew_after_a_pause() -> None:
    rooms = Rooms()
    rooms.open(A)
    rooms.finish(A, b"one")
    with follower(EndpointOptions(handshake_timeout=2.0)) as following:
        with producer(rooms) as key:
            following.follow("d-1", A, key)
            assert part(following, "d-1") == b"one"
            following.end("d-1")
        time.sleep(2.5)  # longer than the timeout, while nothing is followed
        rooms.open(B)
        rooms.finish(B, b"two")
        with producer(rooms, port=key.port):
            following.follow("d-2", B, key)
            assert part(following, "d-2") == b"two"


def test_more_open_files_than_select_takes() -> None:
    rooms = Rooms()
    rooms.open(A)
    with producer(rooms) as key, contextlib.ExitStack() as opened:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
        first = os.open(os.devnull, os.O_RDONLY)
        opened.callback(os.close, first)
        while (last := os.dup(first)) < 1100:
            opened.callback(os.close, last)
        opened.callback(os.close, last)
        following = opened.enter_context(follower())
        following.follow("d-1", A, key)
        rooms.finish(A, b"one")
        assert part(following, "d-1") == b"one"
        following.end("d-1")
        following.follow("d-2", A, key)
        assert part(following, "d-2") == b"one"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_producer_whose_thread_has_ended_is_followed_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends(_: object) -> None:
        raise SystemExit

    rooms = Rooms()
    rooms.open(A)
    rooms.finish(A, b"ticket")
    with producer(rooms) as key, follower() as following:
        with monkeypatch.context() as broken:
            broken.setattr(room_follower, "SideChannelConnection", ends)
            following.follow("d-1", A, key)
            assert isinstance(heard(following, "d-1"), HandshakeError)
        following.end("d-1")
        following.follow("d-2", A, key)
        assert part(following, "d-2") == b"ticket"


def test_a_producer_without_rooms_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_follower, "MAX_PRODUCERS", 1)
    monkeypatch.setattr(room_follower, "LINGER_SECONDS", 1000.0)
    rooms = Rooms()
    rooms.open(A)
    rooms.finish(A, b"ticket")
    with producer(rooms) as one, producer(rooms) as two, follower() as following:
        following.follow("d-1", A, one)
        assert part(following, "d-1") == b"ticket"
        following.end("d-1")

        def is_taken() -> bool:
            following.follow("d-2", A, two)
            is_refused = isinstance(following.news("d-2"), HandshakeError)
            if is_refused:
                following.end("d-2")
            return not is_refused

        eventually(is_taken, "the first one gives way")
        following.follow("d-3", A, two)  # what there was of d-2 may have been heard above
        assert part(following, "d-3") == b"ticket"


def test_a_producer_that_nobody_reaches_fails_its_rooms() -> None:
    with producer(Rooms()) as key:
        pass
    with follower(NO_WAIT) as following:
        following.follow("d", A, key)
        assert isinstance(heard(following, "d"), HandshakeError)


def test_a_producer_that_ends_fails_its_rooms() -> None:
    rooms = Rooms()
    rooms.open(A)
    with follower(NO_WAIT) as following:
        with producer(rooms) as key:
            following.follow("d", A, key)
            heard(following, "d")
        assert isinstance(heard(following, "d"), HandshakeError)


def test_a_producer_that_was_restarted_fails_its_rooms() -> None:
    rooms = Rooms()
    rooms.open(A)
    with follower() as following:
        with producer(rooms) as key:
            following.follow("d", A, key)
            heard(following, "d")
        with producer(Rooms(), incarnation=8, port=key.port):
            assert isinstance(heard(following, "d"), PeerLostError)


def test_an_address_that_is_not_admitted_is_not_dialled() -> None:
    access = Access(networks=Networks.of(["10.1.2.0/24"]))
    with producer(Rooms()) as key, follower(EndpointOptions(access=access)) as following:
        following.follow("d", A, key)
        assert isinstance(heard(following, "d"), AdmissionError)


@pytest.mark.parametrize("limit", ["MAX_REQUESTS", "MAX_PRODUCERS"])
def test_there_are_limits(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_follower, limit, 1)
    with producer(Rooms()) as key, follower() as following:
        following.follow("d-1", A, key)
        following.follow("d-2", B, key._replace(port=1))
        assert isinstance(
            heard(following, "d-1" if limit == "MAX_REQUESTS" else "d-2"), KVFerryError
        )


def test_the_longest_unknown_of_the_host_with_most_makes_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that prefill has in its queue stays, and so does one of a host with fewer."""
    monkeypatch.setattr(room_follower, "MAX_REQUESTS", 4)
    rooms, clock = Rooms(), Clock()
    rooms.open(A)
    with (
        producer(rooms) as key,
        producer(Rooms(), host="127.0.0.2") as other,
        follower(clock=clock) as following,
    ):
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
        rooms.open(room_id("3"))
        assert isinstance(heard(following, 3), RoomNews)


def test_requests_that_prefill_knows_do_not_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_follower, "MAX_REQUESTS", 1)
    rooms = Rooms()
    rooms.open(A)
    with producer(rooms) as key, follower() as following:
        following.follow("d-1", A, key)
        heard(following, "d-1")
        following.follow("d-2", B, key)
        error = following.news("d-2")
        assert isinstance(error, HandshakeError)
        assert "1 requests wait here" in str(error)
        rooms.finish(A, b"ticket")
        assert part(following, "d-1") == b"ticket"


def test_one_address_that_never_answers_does_not_take_every_place() -> None:
    rooms = Rooms()
    rooms.open(A)
    rooms.finish(A, b"ticket")
    before = threading.active_count()
    with (
        producer(rooms, host="127.0.0.2") as key,
        silent() as nobody,
        follower(PATIENT) as following,
    ):
        for index in range(MAX_PRODUCERS):
            following.follow(index, A, nobody._replace(engine=f"invented {index}"))
        assert threading.active_count() - before < MAX_SILENT_AT_HOST + 8
        following.follow("honest", A, key)
        assert part(following, "honest") == b"ticket"
        assert following.news(MAX_SILENT_AT_HOST - 1) is None
        error = following.news(MAX_SILENT_AT_HOST)
        assert isinstance(error, HandshakeError)
        assert f"'invented 32' at 127.0.0.1 port {nobody.port} is not asked" in str(error)
        assert "32 of them at 127.0.0.1 (at most 32 at one host)" in str(error)
        assert "remote_bootstrap_addr" in str(error)


def test_addresses_that_never_answer_leave_places_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Above all to a producer that has answered before."""
    monkeypatch.setattr(room_follower, "MAX_SILENT_PRODUCERS", 3)
    monkeypatch.setattr(room_follower, "MAX_SILENT_AT_HOST", 2)
    rooms = Rooms()
    rooms.open(A)
    rooms.finish(A, b"ticket")
    with producer(rooms) as key, silent() as nobody, follower(PATIENT) as following:
        following.follow("first", A, key)
        assert part(following, "first") == b"ticket"
        following.end("first")
        for index, host in enumerate(["127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.4"]):
            following.follow(index, A, nobody._replace(host=host, engine=str(index)))
        error = following.news(3)
        assert isinstance(error, HandshakeError)
        assert "3 have never answered (at most 3), 2 of them at 127.0.0.3" in str(error)
        following.follow("honest", A, key)
        assert part(following, "honest") == b"ticket"


def test_one_host_does_not_take_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_follower, "MAX_AT_HOST", 1)
    rooms = Rooms()
    rooms.open(A)
    with (
        producer(rooms) as one,
        producer(rooms) as two,
        producer(rooms, host="127.0.0.2") as key,
        follower() as following,
    ):
        for name, each in (("one", one), ("two", two), ("other", key)):
            following.follow(name, A, each)
        error = following.news("two")
        assert isinstance(error, HandshakeError)
        assert "1 prefill engines at 127.0.0.1" in str(error)
        assert isinstance(heard(following, "one"), RoomNews)
        assert isinstance(heard(following, "other"), RoomNews)


def test_the_host_whose_parts_take_most_memory_goes_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_inbox, "MAX_UNSEEN_BYTES", 20)
    many, one = Rooms(), Rooms()
    names = [room_id(str(index)) for index in range(3)]
    with producer(many) as key, producer(one, host="127.0.0.2") as other, follower() as following:
        for index, name in enumerate(names):
            following.follow(index, name, key)
            many.open(name)
            many.finish(name, b"x" * (5 + index))
            eventually(lambda index=index: index in following._inbox.changed, "a ticket")  # type: ignore[misc]
        following.follow("other", A, other)
        one.open(A)
        one.finish(A, b"12345678")
        assert part(following, "other") == b"12345678"
        error = heard(following, 2)
        assert isinstance(error, HandshakeError)
        assert "18 bytes, are of prefill engines at 127.0.0.1" in str(error)
        assert [part(following, index) for index in (0, 1)] == [b"x" * 5, b"x" * 6]


# Hostile side channels.


@contextlib.contextmanager
def hostile(answer: Callable[[Follow], bytes]) -> Iterator[PeerKey]:
    """Run a side channel that answers every request so."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            if socket.poll(10):
                client, *_, message = socket.recv_multipart()
                request = decode_request(message)
                if isinstance(request, Follow):
                    socket.send_multipart([client, answer(request)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield PeerKey("prefill", "127.0.0.1", port)
    finally:
        over.set()
        thread.join()
        context.destroy(0)


def followed(*rooms: RoomNews, incarnation: int = 7) -> bytes:
    return encode(Followed(incarnation=incarnation, rooms=list(rooms)))


@contextlib.contextmanager
def silent() -> Iterator[PeerKey]:
    """Run a side channel that takes connections and requests, and answers nothing."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield PeerKey("prefill", "127.0.0.1", port)


def test_a_silent_side_channel_fails_its_rooms() -> None:
    with silent() as key, follower(NO_WAIT) as following:
        following.follow("d", A, key)
        error = heard(following, "d")
        assert isinstance(error, HandshakeError)
        assert "stopped or overloaded" in str(error)


def test_new_requests_do_not_put_off_the_end_of_a_silent_side_channel() -> None:
    with silent() as key, follower(NO_WAIT) as following:
        following.follow("d", A, key)
        requests = iter(range(1000))

        def is_over() -> bool:
            request = next(requests)
            following.follow(request, B, key)
            following.end(request)
            time.sleep(0.01)
            return following.news("d") is not None

        eventually(is_over, "an error")
        assert isinstance(following.news("d"), HandshakeError)


def test_the_next_address_is_asked_if_one_is_silent() -> None:
    rooms = Rooms()
    rooms.open(A)
    rooms.finish(A, b"ticket")
    options = EndpointOptions(handshake_timeout=2.0)
    with silent() as first, producer(rooms) as key, follower(options) as following:
        following.follow("d", A, first._replace(routed=(key.host, key.port)))
        assert part(following, "d") == b"ticket"


BAD_ANSWERS: dict[str, bytes] = {
    "no message": b"\xc1",
    "a pong": encode(Pong(incarnation=7)),
    "too long a part": followed(RoomNews(room=A.name, version=1, part=b"x" * (MAX_PART_BYTES + 1))),
    "a refusal": encode(Refusal(reason="no")),
    "too many rooms": followed(*[RoomNews(room=A.name, version=1)] * (MAX_FOLLOWED + 1)),
    "a short room": followed(RoomNews(room=A.name[:3], version=1)),
    "version 0": followed(RoomNews(room=A.name, version=0)),
}


@pytest.mark.parametrize("what", BAD_ANSWERS)
def test_a_bad_answer_fails_the_rooms(what: str) -> None:
    with hostile(lambda _: BAD_ANSWERS[what]) as key, follower(NO_WAIT) as following:
        following.follow("d", A, key)
        assert isinstance(heard(following, "d"), HandshakeError)


def test_news_that_were_not_asked_for_or_are_old_are_ignored() -> None:
    other = RoomNews(room=B.name, version=9, part=b"other")
    five, four = (RoomNews(room=A.name, version=each, part=b"%d" % each) for each in (5, 4))
    last = RoomNews(room=A.name, version=6, part=b"6", is_last=True)
    late = RoomNews(room=A.name, version=7, part=b"7")

    def answer(request: Follow) -> bytes:
        [(_, version)] = request.rooms
        return followed(four, last, late) if version else followed(other, five)

    with hostile(answer) as key, follower() as following:
        following.follow("d", A, key)
        seen: list[RoomNews] = []
        while not seen or not seen[-1].is_last:
            news = heard(following, "d")
            assert isinstance(news, RoomNews)
            seen.append(news)
        assert [news.part for news in seen] in ([b"5", b"6"], [b"6"])
        assert following.news("d") is None


# Hostile clients of a side channel.


@contextlib.contextmanager
def client(key: PeerKey, source: str = "127.0.0.1") -> Iterator[Callable[..., list[Reply]]]:
    """Yield a function that sends messages, and returns the answers that come before a pong."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://{source}:0;{key.host}:{key.port}")

        def ask(*messages: bytes) -> list[Reply]:
            for message in (*messages, encode(Ping(engine="prefill"))):
                socket.send(message)
            answers: list[Reply] = []
            while True:
                assert socket.poll(20_000), "no answer"
                answer = decode_reply(socket.recv())
                if isinstance(answer, Pong):
                    return answers
                answers.append(answer)

        yield ask


def follow(rooms: Sequence[tuple[bytes, int]], wait_ms: int = 0) -> bytes:
    return encode(Follow(engine="prefill", rooms=list(rooms), wait_ms=wait_ms))


BAD_REQUESTS: dict[str, bytes] = {
    "too many rooms": follow([(A.name, 0)] * (MAX_FOLLOWED + 1)),
    "too long a wait": follow([(A.name, 0)], wait_ms=201),
    "a negative version": follow([(A.name, -1)]),
    "a long room": follow([(A.name * 2, 0)]),
    "another engine": encode(Follow(engine="another", rooms=[])),
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_a_bad_request_is_refused(what: str) -> None:
    with producer(Rooms()) as key, client(key) as ask:
        [answer] = ask(BAD_REQUESTS[what])
        assert isinstance(answer, Refusal)


def test_a_further_request_replaces_the_one_that_waits() -> None:
    rooms = Rooms()
    with producer(rooms) as key, client(key) as ask:
        answers = ask(*[follow([(A.name, 0)], wait_ms=200)] * 100)
        rooms.open(A)
        answers += ask()
        assert len(answers) < 100


def test_beyond_the_limit_requests_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_follows, "MAX_WAITING", 0)
    with producer(Rooms()) as key, client(key) as ask:
        answers = ask(*[follow([(A.name, 0)], wait_ms=200)] * 3)
        assert answers == [Followed(incarnation=7, rooms=[])] * 3


def test_the_address_with_most_requests_that_wait_makes_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting_follows, "MAX_WAITING", 2)
    # No request has waited for too long.
    monkeypatch.setattr(waiting_follows, "time", SimpleNamespace(monotonic=float))
    question = follow([(A.name, 0)], wait_ms=200)
    with (
        producer(Rooms()) as key,
        client(key, "127.0.0.1") as other,
        client(key, "127.0.0.2") as oldest,
        client(key, "127.0.0.2") as newest,
    ):
        assert [ask(question) for ask in (other, oldest, newest)] == [[], [], []]
        assert [ask() for ask in (other, newest)] == [[], []]
        assert oldest() == [Followed(incarnation=7, rooms=[])]


def test_the_oldest_of_the_address_with_most_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_follows, "MAX_WAITING", 3)
    answered: list[bytes] = []
    rooms = Rooms()
    follows = waiting_follows.WaitingFollows(rooms, lambda to, _: answered.append(to[0]))
    question = Follow(engine="prefill", rooms=[(A.name, 0)], wait_ms=200)
    for name, address in ((b"a", "1"), (b"b", "2"), (b"c", "2"), (b"d", "3"), (b"e", "2")):
        follows.add([name], question, address)
    assert answered == [b"b", b"c"]
    rooms.open(A)
    follows.progress()
    assert sorted(answered) == [b"a", b"b", b"c", b"d", b"e"]
    follows.close()


def test_one_room_many_times_in_a_request_is_answered() -> None:
    rooms = Rooms()
    rooms.open(A)
    with producer(rooms) as key, client(key) as ask:
        [answer] = ask(follow([(A.name, 0)] * MAX_FOLLOWED))
        assert isinstance(answer, Followed)


def test_changes_after_the_server_was_closed_are_not_heard() -> None:
    rooms = Rooms()
    with producer(rooms) as key:
        port = key.port
    rooms.open(A)
    with producer(rooms, port=port) as key, follower() as following:
        following.follow("d", A, key)
        heard(following, "d")
