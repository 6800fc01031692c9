"""``RoomFollower`` and the side channel that it follows rooms on, over real sockets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any, Self

import pytest

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


class Scene(RoomFollower):
    """A follower, and a producer whose rooms it follows."""

    def __init__(self, options: EndpointOptions = EndpointOptions()) -> None:  # noqa: B008
        self.clock = Clock()
        self.rooms = Rooms()
        self._stack = contextlib.ExitStack()
        self.key = self._stack.enter_context(producer(self.rooms))
        super().__init__(options, self.clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._stack.close()

    def follow(self, request: Hashable, room: RoomId, producer: PeerKey | None = None) -> None:
        super().follow(request, room, producer or self.key)

    def finish(self, room: RoomId = A, ticket: bytes = b"ticket") -> None:
        self.rooms.open(room)
        self.rooms.finish(room, ticket)

    def heard(self, request: Hashable) -> RoomNews | KVFerryError:
        """Wait for news of a request's room."""
        found: list[RoomNews | KVFerryError] = []

        def has_news() -> bool:
            if (news := self.news(request)) is not None:
                found.append(news)
            return bool(found)

        eventually(has_news, f"news of {request}")
        return found[0]

    def part(self, request: Hashable) -> bytes:
        """Wait for a part with content."""
        while isinstance(news := self.heard(request), RoomNews):
            if news.part:
                return news.part
        raise AssertionError(news)

    def failure(self, request: Hashable) -> KVFerryError:
        """Wait until a request's room has failed."""
        while isinstance(news := self.heard(request), RoomNews):
            pass
        return news


@pytest.fixture
def at() -> Iterator[Scene]:
    with Scene() as made:
        yield made


def test_a_request_hears_of_its_room_until_the_ticket(at: Scene) -> None:
    at.follow("d", A)  # before prefill has the request
    at.rooms.open(A)
    queued = at.heard("d")
    assert isinstance(queued, RoomNews)
    assert (queued.part, queued.is_last) == (b"", False)
    at.clock.skip(10_000.0)  # it waits as long as prefill answers
    assert at.news("d") is None
    for each in (b"one", b"two"):
        at.rooms.publish(A, each)
        assert at.part("d") == each
        at.clock.skip(50.0)
    at.rooms.finish(A, b"ticket")
    last = at.heard("d")
    assert isinstance(last, RoomNews)
    assert (last.part, last.is_last) == (b"ticket", True)
    assert at.news("d") is None
    at.clock.skip(1000.0)
    assert not at.pending


def test_requests_with_one_name_and_unlike_prompts_hear_of_their_own_over_one_connection(
    at: Scene,
) -> None:
    """Also where there are more of them than one question names."""
    count = MAX_FOLLOWED_PROMPTS + 6
    names = [room_id("a", index.to_bytes(PROMPT_BYTES)) for index in range(count)]
    before = set(threading.enumerate())
    for index, name in enumerate(names):
        at.follow(index, name)
    # The last comes while all others are open, and most of them while the first are.
    for ending in ([count - 1], range(3, count - 1), range(3)):
        for index in ending:
            assert at.news(index) is None
            at.finish(names[index], b"ticket %d" % index)
        for index in ending:
            assert at.part(index) == b"ticket %d" % index
    assert {each.name for each in set(threading.enumerate()) - before} <= {"kvferry-side-channels"}


def test_an_older_producer_has_one_ticket_for_all_requests_of_a_name(at: Scene) -> None:
    """It says nothing of prompts, so that decode compares the tickets'."""
    names = [room_id("a", each) for each in (b"one", b"two")]

    def answer(request: Follow) -> bytes:
        return followed(RoomNews(room=A.name, version=3, part=b"ticket", is_last=True))

    with hostile(answer) as at.key:
        for name in names:
            at.follow(name, name)
        assert [at.part(name) for name in names] == [b"ticket"] * 2


def test_a_room_that_ends_without_a_ticket_says_why(at: Scene) -> None:
    at.rooms.open(A)
    at.follow("d", A)
    at.rooms.close(A, "it was aborted")
    error = at.failure("d")
    assert "it was aborted" in str(error)
    assert at.news("d") is error


def test_every_request_waits_as_long_as_the_first_for_a_room_that_nobody_opens(at: Scene) -> None:
    at.follow("d-1", A)
    assert at.news("d-1") is None
    at.clock.skip(50.0)
    at.follow("d-2", A)
    at.clock.skip(11.0)
    assert at.pending
    assert isinstance(at.heard("d-1"), DeadlineError)
    assert at.news("d-2") is None
    at.end("d-1")
    assert not at.pending
    at.clock.skip(50.0)
    assert isinstance(at.heard("d-2"), DeadlineError)


def test_a_room_that_changes_no_more_fails_after_the_load_timeout(at: Scene) -> None:
    at.rooms.open(A)
    at.follow("d", A)
    for each in (b"one", b"two"):
        at.rooms.publish(A, each)
        assert at.part("d") == each
        at.clock.skip(50.0)
        assert not at.pending
    at.clock.skip(11.0)
    assert at.pending
    error = at.failure("d")
    assert isinstance(error, DeadlineError)
    assert "hangs" in str(error)


def test_a_request_that_ended_is_forgotten(at: Scene) -> None:
    at.follow("d", A)
    with pytest.raises(ValueError, match="end"):
        at.follow("d", B)
    at.end("d")
    at.end("d")
    assert at.news("d") is None
    at.follow("d", A)
    at.rooms.open(A)
    at.heard("d")


def test_the_next_address_is_asked_if_one_refuses_or_is_silent() -> None:
    for first in (producer(None), silent()):
        with first as other, Scene(EndpointOptions(handshake_timeout=2.0)) as at:
            at.finish()
            at.follow("d", A, other._replace(routed=(at.key.host, at.key.port)))
            assert at.part("d") == b"ticket"


def test_rooms_fail_once_every_address_has_refused(at: Scene) -> None:
    with producer(None) as one, producer(None) as two:
        at.follow("d", A, one._replace(routed=(two.host, two.port)))
        error = at.failure("d")
        assert isinstance(error, RefusedError)
        for text in (str(one.port), str(two.port), "upgrade"):
            assert text in str(error)


def test_the_connection_is_made_anew_after_a_pause(
    at: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_questions, "time", SimpleNamespace(monotonic=at.clock))
    at.finish()
    with producer(at.rooms) as at.key:
        at.follow("d-1", A)
        assert at.part("d-1") == b"ticket"
        at.end("d-1")
    at.clock.skip(11.0)  # longer than the timeout, while nothing is followed
    at.finish(B, b"two")
    with producer(at.rooms, port=at.key.port):
        at.follow("d-2", B)
        assert at.part("d-2") == b"two"


# Producers that are gone.


def test_a_producer_that_is_gone_fails_its_rooms() -> None:
    with Scene(NO_WAIT) as at:
        at.rooms.open(A)
        with producer(at.rooms) as at.key:
            at.follow("d", A)
            at.heard("d")
        assert isinstance(at.failure("d"), HandshakeError)
        at.end("d")
        eventually(lambda: not at._producers, "it is forgotten")


def test_a_producer_that_was_restarted_fails_its_rooms(at: Scene) -> None:
    at.rooms.open(A)
    at.finish(B)
    with producer(at.rooms) as at.key:
        for request, room in (("has its ticket", B), ("d", A)):
            at.follow(request, room)
            at.heard(request)
    with producer(Rooms(), incarnation=8, port=at.key.port):
        assert isinstance(at.failure("d"), PeerLostError)
    assert at.news("has its ticket") is None


def test_an_address_that_is_not_admitted_is_not_dialled() -> None:
    access = Access(networks=Networks.of(["10.1.2.0/24"]))
    with Scene(EndpointOptions(access=access)) as at:
        at.follow("d", A)
        assert isinstance(at.failure("d"), AdmissionError)


# Limits.


def test_a_producer_without_rooms_makes_room_for_another(
    at: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_follower, "MAX_PRODUCERS", 1)
    monkeypatch.setattr(room_questions, "LINGER_SECONDS", 1000.0)
    at.finish()
    with producer(at.rooms) as two:
        at.follow("d-1", A)
        assert at.part("d-1") == b"ticket"
        at.follow("refused", A, two)
        assert "1 prefill engines wait here" in str(at.news("refused"))
        at.end("d-1")
        at.follow("d-2", A, two)
        assert at.part("d-2") == b"ticket"


def test_the_longest_unknown_of_the_host_with_most_makes_room_for_another(
    at: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that prefill has in its queue stays, and so does one of a host with fewer."""
    monkeypatch.setattr(room_follower, "MAX_REQUESTS", 4)
    at.rooms.open(A)
    with producer(Rooms(), host="127.0.0.2") as other:
        at.follow("known", A)
        at.heard("known")
        at.follow("other", room_id("other"), other)
        for index in range(4):
            at.clock.skip(1.0)
            at.follow(index, room_id(str(index)))
        for index in range(2):
            error = at.heard(index)
            assert isinstance(error, DeadlineError)
            assert f"127.0.0.1 port {at.key.port} has said nothing" in str(error)
            assert "and 4 requests wait here" in str(error)
        assert [at.news(each) for each in ("known", "other", 2, 3)] == [None] * 4
        at.end("other")
        at.follow("other", room_id("other"), other)  # there is room: two have failed
        assert [at.news(each) for each in ("known", "other", 2, 3)] == [None] * 4
        at.rooms.open(room_id("3"))
        assert isinstance(at.heard(3), RoomNews)


def test_requests_that_prefill_knows_do_not_make_room(
    at: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_follower, "MAX_REQUESTS", 1)
    at.rooms.open(A)
    at.follow("d-1", A)
    at.heard("d-1")
    at.follow("d-2", B)
    assert "1 requests wait here" in str(at.news("d-2"))
    at.rooms.finish(A, b"ticket")
    assert at.part("d-1") == b"ticket"


def test_producers_that_never_answer_make_room_where_most_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that have answered stay."""
    monkeypatch.setattr(room_follower, "MAX_PRODUCERS", 4)
    with silent() as nobody, Scene(PATIENT) as at:
        at.rooms.open(A)
        at.follow("honest", A)
        at.heard("honest")
        for index, last in enumerate([2, 3, 3, 4]):
            name = f"invented {index}"
            at.follow(index, A, nobody._replace(host=f"127.0.0.{last}", engine=name))
        assert [at.news(each) for each in (0, 2, 3, "honest")] == [None] * 4
        error = str(at.news(1))
        assert f"'invented 1' at 127.0.0.3 port {nobody.port} has never answered" in error
        assert "at most 4 prefill engines" in error
        at.rooms.finish(A, b"ticket")
        assert at.part("honest") == b"ticket"


def test_one_host_does_not_take_every_place(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_follower, "MAX_AT_HOST", 1)
    at.rooms.open(A)
    with producer(at.rooms) as two, producer(at.rooms, host="127.0.0.2") as other:
        at.follow("one", A)
        assert isinstance(at.heard("one"), RoomNews)
        at.follow("two", A, two)
        assert "1 prefill engines at 127.0.0.1 wait here" in str(at.news("two"))
        at.follow("other", A, other)
        assert isinstance(at.heard("other"), RoomNews)
        assert at.news("one") is None


# Hostile side channels.


@contextlib.contextmanager
def hostile(answer: Callable[[Follow], bytes | None]) -> Iterator[PeerKey]:
    """Run a side channel that answers every request so."""
    with SideChannel(lambda _, asked: answer(asked) if isinstance(asked, Follow) else None) as made:
        yield PeerKey("prefill", "127.0.0.1", made.port)


def followed(*rooms: RoomNews, incarnation: int = 7) -> bytes:
    return encode(Followed(incarnation=incarnation, rooms=list(rooms)))


def silent() -> contextlib.AbstractContextManager[PeerKey]:
    """Run a side channel that takes connections and requests, and answers nothing."""
    return hostile(lambda _: None)


def test_a_silent_side_channel_fails_its_rooms_whatever_requests_come() -> None:
    with Scene(NO_WAIT) as at, silent() as at.key:
        at.follow("d", A)

        def is_over() -> bool:
            at.follow("another", B)
            at.end("another")
            time.sleep(0.01)
            return at.news("d") is not None

        eventually(is_over, "an error")
        error: BaseException | None = at.failure("d")
        assert "stopped or overloaded" in str(error)
        while error is not None:
            assert error.__traceback__ is None, "it would keep frames, and what is in them"
            error = error.__cause__ or error.__context__


def test_a_bad_answer_fails_the_rooms() -> None:
    pong = encode(Pong(incarnation=7))
    with Scene(NO_WAIT) as at, hostile(lambda _: pong) as at.key:
        at.follow("d", A)
        assert isinstance(at.heard("d"), HandshakeError)


def test_news_that_were_not_asked_for_or_are_old_are_ignored(at: Scene) -> None:
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

    with hostile(answer) as at.key:
        at.follow("d", A)
        assert at.part("d") in (b"5", b"6")
        eventually(lambda: known.count(5) > 1, "the room is asked for again")
        eventually(lambda: at._requests["d"].is_last, "the last news")
    assert set(known) == {0, 5}
    assert at.news("d") in (None, last)
    assert at.news("d") is None
