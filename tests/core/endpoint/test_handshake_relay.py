"""``HandshakeRelay`` asks and pings each producer once, for all ranks of an engine."""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from kvferry.core.endpoint import (
    EndpointOptions,
    HandshakeRelay,
    RelayedHandshakes,
    handshake_relay,
    handshakes,
    relayed_replies,
)
from kvferry.core.endpoint.handshakes import LONGEST_BACKOFF_SECONDS
from kvferry.core.endpoint.relayed_replies import (
    ERROR_SECONDS,
    MAX_STORED_BYTES,
    EncodedReply,
    RelayedReplies,
)
from kvferry.core.errors import (
    ConnectError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    TicketError,
)
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.security import TicketKey
from kvferry.core.side_channel_messages import (
    PayloadRequest,
    Payloads,
    Pong,
    encode,
)
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually
from tests.core.endpoint.side_channels import SideChannel
from tests.core.endpoint.transports import ScriptedTransport
from tests.core.messages import payload

KEY = PeerKey("prefill", "127.0.0.1", 1)
TTL = 100.0


class Channel(SideChannel):
    """Answers for what a producer's ranks publish, and counts who asks."""

    def __init__(self, producer: Engine, *, payloads: list[bytes] | None = None) -> None:
        key = producer.ticket_key.public if producer.ticket_key is not None else b""
        published = [encode(rank.endpoint.payload) for rank in producer.ranks]
        self._payloads = encode(Payloads(ranks=payloads or published, ticket_key=key))
        self._producer = producer
        self.asked = 0
        self.pinged_by: set[bytes] = set()
        super().__init__(self._answer_one)

    def serve(self, number: int = 1) -> Ticket:
        """Return a ticket of the producer that names this side channel."""
        ticket = self._producer.serve(f"p-{number}", [number], 4)
        return replace(ticket, port=self.port)

    def _answer_one(self, client: bytes, request: Any) -> bytes:
        if isinstance(request, PayloadRequest):
            self.asked += 1
            return self._payloads
        self.pinged_by.add(client)
        return encode(Pong(incarnation=self._producer.incarnation))


@pytest.fixture
def channel(prefill: Engine) -> Iterator[Channel]:
    with Channel(prefill) as made:
        yield made


@pytest.fixture
def relay(clock: Clock) -> Iterator[HandshakeRelay]:
    with contextlib.closing(HandshakeRelay(EndpointOptions(), clock)) as made:
        yield made


def outcome_of(relay: HandshakeRelay) -> EncodedReply | KVFerryError:
    """Take steps until a handshake is over."""
    taken: list[RelayedHandshakes] = []

    def is_over() -> bool:
        taken.append(relay.take())
        return bool(taken[-1].outcomes)

    eventually(is_over, "a handshake is over")
    [(_, outcome)] = taken[-1].outcomes
    return outcome


def reply_of(relay: HandshakeRelay) -> EncodedReply:
    outcome = outcome_of(relay)
    assert isinstance(outcome, EncodedReply)
    return outcome


@pytest.mark.parametrize(("relays", "times"), [(True, 1), (False, 2)])
def test_a_producer_is_asked_and_pinged_once_for_two_ranks(
    channel: Channel, relays: bool, times: int
) -> None:
    options = EndpointOptions(liveness_interval=0.05, liveness_misses=100)
    with Engine("decode", CacheShape(tp=2), options=options, relays=relays) as decode:
        for number in range(1, 4):
            assert decode.load(f"d-{number}", channel.serve(number), [2]) is None
        eventually(lambda: len(channel.pinged_by) >= times, "the producer is pinged")
        assert (channel.asked, len(channel.pinged_by)) == (times, times)


def test_all_ranks_learn_that_a_producer_died_and_release_it(prefill: Engine) -> None:
    drivers = [RecordingTransport(), RecordingTransport()]
    free = iter(drivers)
    with Engine("decode", CacheShape(tp=2), transport=lambda: next(free), relays=True) as decode:
        decode.pull("d-1", prefill.serve_later("p-1", [1]), [2])
        eventually(lambda: all(each.open_connections for each in drivers), "all are connected")
        prefill.server.close()
        error = decode.error("d-1")
        assert isinstance(error, PeerLostError)
        assert "missed 3 of 3 pings" in str(error)
        eventually(lambda: not any(each.open_connections for each in drivers), "all are released")


def test_a_load_waits_for_the_step_that_brings_the_reply(channel: Channel) -> None:
    with Engine("decode", CacheShape(tp=2), relays=True) as decode:
        assert decode.steps is not None
        decode.steps.may_step.clear()
        decode.pull("d-1", channel.serve(), [2])
        assert not decode.endpoint.wait(0.3)
        decode.steps.may_step.set()
        assert decode.error("d-1") is None
        assert channel.asked == 1


def test_ranks_ask_themselves_if_no_reply_comes_in_time(channel: Channel, clock: Clock) -> None:
    with Engine("decode", CacheShape(tp=2), clock=clock, relays=True) as decode:
        assert decode.steps is not None
        decode.steps.may_step.clear()
        decode.pull("d-1", channel.serve(), [2])
        eventually(lambda: channel.asked == 1, "the producer is asked")
        clock.skip(20.0)
        assert decode.error("d-1") is None
        assert channel.asked == 3


def test_all_ranks_get_the_error_of_a_failed_handshake(prefill: Engine) -> None:
    with Engine("decode", CacheShape(tp=2), relays=True) as decode:
        ticket = prefill.serve("p-1", [1], 4)
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        error = decode.load("d-1", replace(ticket, port=port), [2])
        assert type(error) is HandshakeError
        assert f"engine 'prefill' at 127.0.0.1 port {port}: nobody listens there" in str(error)


def test_a_rank_that_could_not_connect_does_so_later_without_asking_anybody(
    channel: Channel, driver: ScriptedTransport, clock: Clock
) -> None:
    driver.raises["connect"] = ConnectError("the cable is out")
    drivers = iter([driver, RecordingTransport()])
    with Engine(
        "decode", CacheShape(tp=2), transport=drivers.__next__, clock=clock, relays=True
    ) as decode:
        error = decode.load("d-1", channel.serve(), [2])
        assert "the cable is out" in str(error)
        driver.raises.clear()
        clock.skip(LONGEST_BACKOFF_SECONDS)
        assert decode.load("d-2", channel.serve(2), [3]) is None
        assert channel.asked == 1
        assert len(channel.pinged_by) <= 1


def test_a_reply_whose_watch_has_ended_is_not_used(
    prefill: Engine, channel: Channel, decode: Engine
) -> None:
    ticket = channel.serve()
    place = PeerKey.of(ticket)
    ranks = tuple(encode(each.endpoint.payload) for each in prefill.ranks)
    reply = EncodedReply(place=place, ranks=ranks, numeric="127.0.0.1", watch=7)
    decode.endpoint.relay(RelayedHandshakes(outcomes=((place, reply),)))
    decode.endpoint.relay(RelayedHandshakes(unwatched=((7, PeerLostError("it died")),)))
    assert decode.load("d-1", ticket, [2]) is None
    eventually(lambda: len(channel.pinged_by) == 1, "the rank pings the producer itself")
    assert channel.asked == 1


def test_a_relayed_reply_is_checked_as_one_that_the_rank_has_fetched(clock: Clock) -> None:
    with (
        Engine("prefill", agreement={"model": "one"}) as prefill,
        Channel(prefill) as channel,
        Engine(
            "decode", CacheShape(tp=2), agreement={"model": "two"}, clock=clock, relays=True
        ) as decode,
    ):
        for number in range(1, 3):
            error = decode.load(f"d-{number}", channel.serve(number), [2])
            assert "They differ in model: 'two' here, 'one' there" in str(error)
            clock.skip(LONGEST_BACKOFF_SECONDS)
        assert channel.asked == 1


@pytest.mark.parametrize("payload", [b"\xc1", encode(Pong(incarnation=1))])
def test_a_malformed_reply_fails_the_handshake(
    prefill: Engine, relay: HandshakeRelay, payload: bytes
) -> None:
    with Channel(prefill, payloads=[payload]) as channel:
        relay.begin("r", channel.serve())
        error = outcome_of(relay)
    assert isinstance(error, HandshakeError)
    assert "payload of rank 0: not a payload" in str(error)
    assert str(channel.port) in str(error)


def test_only_the_maker_of_a_ticket_is_watched(relay: HandshakeRelay) -> None:
    with Engine("prefill", ticket_key=TicketKey()) as prefill, Channel(prefill) as channel:
        ticket = channel.serve()
        relay.begin("old", replace(ticket, incarnation=ticket.incarnation ^ 1))
        assert reply_of(relay).watch is None
        relay.begin("forged", replace(ticket, proof=None))
        assert reply_of(relay).watch is None
        relay.begin("genuine", ticket)
        assert reply_of(relay).watch is not None
        relay.begin("next", ticket)
        assert not relay.take()
        assert channel.asked == 3


def test_a_genuine_ticket_after_many_others_is_watched(
    prefill: Engine, relay: HandshakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = prefill.serve("p-1", [1], 4)
    with monkeypatch.context() as context:
        context.setattr(handshakes, "MAX_HANDSHAKES", 0)
        for number in range(1, 2 * handshake_relay.MAX_TICKETS):
            relay.begin(f"r-{number}", replace(ticket, incarnation=ticket.incarnation ^ number))
        for number in range(2 * handshake_relay.MAX_TICKETS):
            relay.begin(f"s-{number}", ticket)
    assert reply_of(relay).watch is not None


@pytest.mark.parametrize("pings", [True, False])
def test_a_producer_that_nobody_uses_is_released_and_asked_again(
    prefill: Engine, clock: Clock, pings: bool
) -> None:
    options = EndpointOptions(
        engine_ttl=TTL, liveness_interval=0.05 if pings else 0.0, liveness_misses=1000
    )
    ticket = prefill.serve("p-1", [1], 4)
    with contextlib.closing(HandshakeRelay(options, clock)) as relay:
        relay.begin("r", ticket)
        watch = reply_of(relay).watch
        assert watch is not None
        clock.skip(2 * TTL)
        assert not relay.take().unwatched  # a request uses it
        relay.end("r")
        clock.skip(2 * TTL)
        if pings:
            eventually(lambda: relay.pending, "the check has ended without a step")
            assert relay.take().unwatched == ((watch, None),)
        relay.begin("s", ticket)
        assert pings or relay.take().unwatched == ((watch, None),)
        assert reply_of(relay).watch != watch


def test_the_longest_unused_producer_makes_room(
    relay: HandshakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_relay, "most_peers", lambda: 1)
    with Engine("one") as one, Engine("two") as two:
        relay.begin("r", one.serve("p-1", [1], 4))
        first = reply_of(relay).watch
        relay.begin("s", two.serve("p-1", [1], 4))
        assert reply_of(relay).watch is None  # the first is used, so the ranks ping the second
        relay.end("r")
        relay.end("s")
        relay.begin("t", two.serve("p-2", [2], 4))
        outcomes: list[EncodedReply | KVFerryError] = []
        ended: list[int] = []

        def is_over() -> bool:
            taken = relay.take()
            outcomes.extend(outcome for _, outcome in taken.outcomes)
            ended.extend(number for number, _ in taken.unwatched)
            return bool(outcomes)

        eventually(is_over, "the second is asked again")
        assert isinstance(outcomes[0], EncodedReply)
        assert outcomes[0].watch is not None
        assert ended == [first]


def test_a_handshake_that_no_rank_waits_for_asks_for_no_steps_and_does_not_begin(
    channel: Channel, relay: HandshakeRelay, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = channel.serve()
    with monkeypatch.context() as context:
        context.setattr(handshakes, "MAX_HANDSHAKES", 0)
        relay.begin("r", ticket)
        assert relay.take().is_asking
        relay.end("r")
        assert relay.pending  # ranks wait for what they were told to expect
        clock.skip(20.0)
        assert not relay.pending
    assert relay.take() == RelayedHandshakes()
    assert channel.asked == 0
    relay.begin("s", ticket)
    assert reply_of(relay).watch is not None


def test_long_replies_are_spread_over_steps(
    relay: HandshakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_relay, "MAX_STEP_BYTES", 1)
    with Engine("one") as one, Engine("two") as two:
        for name, each in (("r", one), ("s", two)):
            relay.begin(name, each.serve("p-1", [1], 4))
        taken = [relay.take()]
        while sum(len(each.outcomes) for each in taken) < 2:
            taken.append(relay.take())
        assert max(len(each.outcomes) for each in taken) == 1
        assert not relay.pending


def test_a_reply_that_was_not_sent_yet_is_not_sent_if_its_producer_is_lost(
    channel: Channel, relay: HandshakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(handshake_relay, "MAX_STEP_BYTES", 0)
        relay.begin("r", channel.serve())
        eventually(lambda: not relay.take().is_asking, "the producer has answered")
        channel.close()
        eventually(lambda: bool(relay.take().unwatched), "the producer is lost")
    assert isinstance(outcome_of(relay), PeerLostError)


def test_what_is_relayed_survives_the_way_to_another_process() -> None:
    reply = EncodedReply(place=KEY, ranks=(b"a", b"b"), numeric="127.0.0.1", watch=3)
    told = RelayedHandshakes(
        unwatched=((1, PeerLostError("it died")), (2, None)),
        expected=(KEY,),
        outcomes=((KEY, reply), (KEY, ConnectError("no file is left"))),
    )
    came = pickle.loads(pickle.dumps(told))
    assert (came.expected, came.outcomes[0]) == (told.expected, told.outcomes[0])
    errors = [came.unwatched[0][1], came.outcomes[1][1]]
    assert [(type(error), str(error)) for error in errors] == [
        (PeerLostError, "it died"),
        (ConnectError, "no file is left"),
    ]


def test_replies_that_nobody_takes_are_dropped(clock: Clock) -> None:
    replies = RelayedReplies(10.0, clock)
    replies.put(KEY, EncodedReply(place=KEY, ranks=(b"a",)))
    clock.skip(5.0)
    assert replies.take(KEY) is not None
    assert replies.take(KEY) is None
    replies.put(KEY, EncodedReply(place=KEY, ranks=(b"a",)))
    clock.skip(11.0)
    assert replies.take(KEY) is None


def test_an_error_is_not_kept_for_later_requests(clock: Clock) -> None:
    replies = RelayedReplies(10.0, clock)
    replies.put(KEY, HandshakeError("nobody listens"))
    with pytest.raises(HandshakeError, match="nobody listens"):
        replies.take(KEY)
    replies.put(KEY, HandshakeError("nobody listens"))
    clock.skip(2 * ERROR_SECONDS)
    assert replies.take(KEY) is None


@pytest.mark.parametrize("way", ["ended", "another reply", "too many"])
def test_a_used_reply_is_kept_as_long_as_its_watch_lasts(
    clock: Clock, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = RelayedReplies(10.0, clock)
    good = encode(payload())
    other = KEY._replace(routed=("router", 2))  # of the same producer
    for key in (KEY, other):
        replies.put(key, EncodedReply(place=KEY, ranks=(good,), watch=7))
    clock.skip(1000.0)
    replies.progress()
    for key in (KEY, other, KEY):
        reply = replies.take(key)
        assert reply is not None
        assert reply.ranks == (good,)
        replies.used(key, reply)
    if way == "ended":
        replies.end_watches([7])
    elif way == "another reply":
        for key in (KEY, other):
            replies.put(key, EncodedReply(place=KEY, ranks=(b"b",)))
            assert replies.take(key) is not None
    else:
        monkeypatch.setattr(relayed_replies, "MAX_WATCHES", 1)
        new = PeerKey("new", "127.0.0.1", 1)
        replies.put(new, EncodedReply(place=new, ranks=(b"b",), watch=8))
        assert replies.take(new) is not None
    assert replies.is_watched(7) == (way == "another reply")
    assert [replies.take(key) for key in (KEY, other)] == [None, None]


def test_the_oldest_replies_go_if_all_are_too_long() -> None:
    replies = RelayedReplies(10.0, Clock())
    keys = [PeerKey(f"e-{number}", "127.0.0.1", 1) for number in range(4)]
    for key in keys:
        replies.put(key, EncodedReply(place=key, ranks=(bytes(MAX_STORED_BYTES // 3),)))
    assert [replies.take(key) is not None for key in keys] == [False, True, True, True]


def test_used_replies_of_a_thousand_engines_of_one_deployment_are_kept() -> None:
    """Only their heads take memory of each."""
    with Engine("prefill", CacheShape(layers=200)) as prefill:
        [published] = [rank.endpoint.payload for rank in prefill.ranks]
    replies = RelayedReplies(10.0, Clock())
    sent = list[EncodedReply]()
    for number in range(1000):
        place = PeerKey(f"e-{number}", "127.0.0.1", 1)
        ours = replace_struct(published, incarnation=number + 1)
        sent.append(EncodedReply(place=place, ranks=(encode(ours),), watch=number))
        replies.put(place, sent[-1])
        replies.used(place, sent[-1])
    assert sum(reply.nbytes for reply in sent) > MAX_STORED_BYTES
    for reply in sent * 2:
        assert replies.take(reply.place) == reply
    replies.end_watches(range(1000))
    assert [replies.take(reply.place) for reply in sent] == [None] * len(sent)
    assert replies._used.nbytes == 0


def test_a_ticket_of_an_earlier_life_is_refused_by_every_rank(prefill: Engine) -> None:
    with Engine("decode", CacheShape(tp=2), relays=True) as decode:
        ticket = prefill.serve("p-1", [1], 4)
        error = decode.load("d-1", replace(ticket, incarnation=ticket.incarnation ^ 1), [2])
        assert isinstance(error, TicketError)
        assert "restarted since" in str(error)
        assert decode.load("d-2", ticket, [2]) is None
