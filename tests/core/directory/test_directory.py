"""``Directory`` asks and pings each producer once, for all ranks of an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.core.backoff import LONGEST_BACKOFF_SECONDS
from kvferry.core.directory import Directory, EncodedReply, ProducerNews, directory
from kvferry.core.endpoint import EndpointOptions, Load
from kvferry.core.errors import (
    ConnectError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
)
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.planner.build_copies import Pages
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
        published = payloads or [encode(rank.endpoint.payload) for rank in producer.ranks]
        self._payloads = encode(Payloads(ranks=published, ticket_key=key))
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
def relay(clock: Clock) -> Iterator[Directory]:
    with contextlib.closing(Directory(EndpointOptions(), clock)) as made:
        yield made


def outcome_of(relay: Directory, gone: list[object] | None = None) -> EncodedReply | KVFerryError:
    """Take steps until a handshake is over; add what is gone meanwhile to ``gone``."""
    taken: list[ProducerNews] = []

    def is_over() -> bool:
        taken.append(relay.take())
        return bool(taken[-1].outcomes)

    eventually(is_over, "a handshake is over")
    if gone is not None:
        gone += [each for news in taken for each in news.gone]
    [(_, outcome)] = taken[-1].outcomes
    return outcome


def reply_of(relay: Directory) -> EncodedReply:
    outcome = outcome_of(relay)
    assert isinstance(outcome, EncodedReply)
    return outcome


def test_a_producer_is_asked_and_pinged_once_for_two_ranks(channel: Channel) -> None:
    with Engine("decode", CacheShape(tp=2)) as decode:
        for number in range(1, 4):
            assert decode.load(f"d-{number}", channel.serve(number), [2]) is None
        eventually(lambda: len(channel.pinged_by) >= 1, "the producer is pinged")
        assert (channel.asked, len(channel.pinged_by)) == (1, 1)


def unknown(ticket: Ticket) -> Load:
    """Return a load of whose producer the directory is not told."""
    pages = Pages(ids=np.array([2]))
    ranges = ((0, ticket.tokens),)
    return Load(request=RequestId("d-1"), ticket=ticket, ranges=ranges, local=(pages,))


def test_a_rank_that_lacks_a_reply_says_so_and_waits_for_it(
    channel: Channel, decode: Engine, relay: Directory
) -> None:
    ticket = channel.serve()
    decode.endpoint.load(unknown(ticket))
    wanted: set[tuple[PeerKey, int]] = set()

    def is_wanted() -> bool:
        wanted.update(decode.endpoint.take_wanted())
        return bool(wanted)

    eventually(is_wanted, "the reply is wanted")
    assert wanted == {(PeerKey.of(ticket), ticket.incarnation)}
    relay.ask_again(wanted)
    reply = reply_of(relay)
    decode.endpoint.relay(ProducerNews(outcomes=((PeerKey.of(ticket), reply),)))
    assert decode.error("d-1") is None


def test_nothing_is_asked_again_whose_answer_is_on_its_way(
    channel: Channel, relay: Directory, clock: Clock
) -> None:
    ticket = channel.serve()
    wanted = [(PeerKey.of(ticket), ticket.incarnation)]
    relay.begin("r", ticket)
    relay.ask_again(wanted)
    assert reply_of(relay).ranks
    relay.ask_again(wanted)
    assert not relay.pending
    clock.skip(2 * directory.AGAIN_SECONDS)
    relay.ask_again(wanted)
    assert reply_of(relay).ranks
    assert channel.asked == 2


def test_a_load_fails_of_whose_producer_nothing_is_heard(channel: Channel, clock: Clock) -> None:
    with Engine("decode", clock=clock) as decode:
        decode.endpoint.load(unknown(channel.serve()))
        clock.skip_until(lambda: decode.endpoint.wait(0.05), 20.0)
        error = decode.error("d-1")
    assert isinstance(error, HandshakeError)
    assert "nothing was heard of engine 'prefill' for 15 s" in str(error)


def test_a_rank_that_could_not_connect_does_so_later_without_asking_anybody(
    channel: Channel, driver: ScriptedTransport, clock: Clock
) -> None:
    driver.raises["connect"] = ConnectError("the cable is out")
    drivers = iter([driver, RecordingTransport()])
    with Engine("decode", CacheShape(tp=2), transport=drivers.__next__, clock=clock) as decode:
        error = decode.load("d-1", channel.serve(), [2])
        assert "the cable is out" in str(error)
        driver.raises.clear()
        clock.skip(LONGEST_BACKOFF_SECONDS)
        assert decode.load("d-2", channel.serve(2), [3]) is None
        assert channel.asked == 1
        assert len(channel.pinged_by) <= 1


def test_a_producer_that_is_gone_is_used_no_more(channel: Channel, decode: Engine) -> None:
    ticket = channel.serve()
    assert decode.load("d-1", ticket, [2]) is None
    gone = (PeerKey.of(ticket), ticket.incarnation, PeerLostError("it died"))
    decode.endpoint.relay(ProducerNews(gone=(gone,)))
    decode.endpoint.load(unknown(channel.serve(2)))
    eventually(lambda: bool(decode.endpoint.take_wanted()), "its reply is wanted")
    decode.endpoint.relay(ProducerNews(gone=(gone,)))
    assert isinstance(decode.error("d-1"), PeerLostError)


def test_a_producer_is_gone_as_it_was_asked_last(
    prefill: Engine, driver: ScriptedTransport, relay: Directory
) -> None:
    with Engine("decode", transport=lambda: driver) as decode:
        ticket = prefill.serve_later("p-1", [1])
        decode.pull("d-1", ticket, [2])
        eventually(lambda: driver.open_connections == 1, "it is connected")
        relay.begin("r", ticket)
        other = PeerKey.of(ticket)._replace(routed=("router", 2))
        decode.endpoint.relay(ProducerNews(outcomes=((other, reply_of(relay)),)))
        gone = (other, ticket.incarnation, PeerLostError("it died"))
        decode.endpoint.relay(ProducerNews(gone=(gone,)))
        assert isinstance(decode.error("d-1"), PeerLostError)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\xc1", "payload of rank 0: not a payload"),
        (encode(Pong(incarnation=1)), "payload of rank 0: not a payload"),
        (encode(payload(engine="other")), "it answered with the ranks of engine 'other'"),
    ],
)
def test_a_reply_of_no_rank_of_the_engine_fails_the_handshake(
    prefill: Engine, relay: Directory, payload: bytes, words: str
) -> None:
    with Channel(prefill, payloads=[payload]) as channel:
        relay.begin("r", channel.serve())
        error = outcome_of(relay)
    assert isinstance(error, HandshakeError)
    assert words in str(error)
    assert str(channel.port) in str(error)


def test_a_producer_that_cannot_be_watched_is_not_used(
    channel: Channel, relay: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise HandshakeError("can't start new thread")

    monkeypatch.setattr(directory, "start_pings", refuse)
    relay.begin("r", channel.serve())
    error = outcome_of(relay)
    assert isinstance(error, ConnectError)
    assert "cannot watch engine prefill: can't start new thread" in str(error)


def test_only_the_maker_of_a_ticket_is_watched(relay: Directory) -> None:
    with Engine("prefill", ticket_key=TicketKey()) as prefill, Channel(prefill) as channel:
        ticket = channel.serve()
        assert ticket.proof is not None
        for each in (
            replace(ticket, incarnation=ticket.incarnation ^ 1),
            replace(ticket, proof=None),
            replace(ticket, proof=replace(ticket.proof, content=bytes(32))),
        ):
            relay.begin("forged", each)
            assert not reply_of(relay).ranks
        relay.begin("genuine", ticket)
        assert reply_of(relay).ranks
        relay.begin("next", ticket)
        assert not relay.take()
        assert channel.asked == 4


@pytest.mark.parametrize("pings", [True, False])
def test_a_producer_that_nobody_uses_is_released_and_asked_again(
    prefill: Engine, clock: Clock, pings: bool
) -> None:
    options = EndpointOptions(
        engine_ttl=TTL, liveness_interval=0.05 if pings else 0.0, liveness_misses=1000
    )
    ticket = prefill.serve("p-1", [1], 4)
    with contextlib.closing(Directory(options, clock)) as relay:
        relay.begin("r", ticket)
        assert reply_of(relay).ranks
        clock.skip(2 * TTL)
        assert not relay.take().gone  # a request uses it
        relay.end("r")
        clock.skip(2 * TTL)
        if pings:
            eventually(lambda: relay.pending, "the check has ended without a step")
        assert relay.take().gone == ((PeerKey.of(ticket), ticket.incarnation, None),)
        relay.begin("s", ticket)
        assert reply_of(relay).ranks


def test_a_producer_that_is_asked_elsewhere_is_unused_for_less_time_than_others(
    clock: Clock,
) -> None:
    options = EndpointOptions(engine_ttl=TTL, liveness_interval=0.0)
    with (
        Engine("one") as one,
        Engine("two") as two,
        contextlib.closing(Directory(options, clock)) as relay,
    ):
        tickets = [each.serve("p-1", [1], 4) for each in (one, two)]
        for ticket in tickets:
            relay.ask(ticket)
            assert reply_of(relay).ranks
        clock.skip(TTL / 2)
        elsewhere = PeerKey.of(tickets[0])._replace(routed=("router", 2))
        relay.ask_again([(elsewhere, tickets[0].incarnation)])
        assert reply_of(relay).ranks
        clock.skip(TTL / 2 + 1)
        assert [key.engine for key, _, _ in relay.take().gone] == ["two"]


def test_the_longest_unused_producer_makes_room(
    relay: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "most_peers", lambda: 1)
    with Engine("one") as one, Engine("two") as two:
        ticket = one.serve("p-1", [1], 4)
        relay.begin("r", ticket)
        assert reply_of(relay).ranks
        relay.begin("s", two.serve("p-1", [1], 4))
        error = outcome_of(relay)  # the first is used
        assert isinstance(error, ConnectError)
        assert "there is no room for another engine: 1 are in use" in str(error)
        relay.end("r")
        relay.end("s")
        relay.begin("t", two.serve("p-2", [2], 4))
        gone: list[object] = []
        assert isinstance(outcome_of(relay, gone), EncodedReply)
        assert gone == [(PeerKey.of(ticket), ticket.incarnation, None)]


def test_a_handshake_that_no_rank_waits_for_asks_for_no_steps(
    channel: Channel, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MAX_HANDSHAKES", 0)
    with contextlib.closing(Directory(EndpointOptions(), clock)) as relay:
        relay.begin("r", channel.serve())
        assert relay.take().is_asking
        relay.end("r")
        assert relay.pending  # ranks wait for it
        clock.skip(20.0)
        assert not relay.pending
        assert relay.take() == ProducerNews()


def test_long_replies_are_spread_over_steps(
    relay: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MAX_STEP_BYTES", 1)
    with Engine("one") as one, Engine("two") as two:
        for each in (one, two):
            relay.begin(each.name, each.serve("p-1", [1], 4))
        taken = [relay.take()]
        while sum(len(each.outcomes) for each in taken) < 2:
            taken.append(relay.take())
        assert max(len(each.outcomes) for each in taken) == 1
        assert not relay.pending


def test_a_reply_that_was_not_sent_yet_is_not_sent_if_its_producer_is_lost(
    channel: Channel, relay: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(directory, "MAX_STEP_BYTES", 0)
        relay.begin("r", channel.serve())
        eventually(lambda: not relay.take().is_asking, "the producer has answered")
        channel.close()
        eventually(lambda: bool(relay.take().gone), "the producer is lost")
    assert isinstance(outcome_of(relay), PeerLostError)
