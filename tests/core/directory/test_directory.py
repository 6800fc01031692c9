"""``Directory`` asks and pings each producer once, for all ranks of an engine."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvferry.core.backoff import LONGEST_BACKOFF_SECONDS
from kvferry.core.directory import Directory, EncodedReply, ProducerNews, directory
from kvferry.core.endpoint import EndpointOptions, Load
from kvferry.core.errors import ConnectError, HandshakeError, KVFerryError, PeerLostError
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.planner.build_copies import Pages
from kvferry.core.security import TicketKey
from kvferry.core.side_channel import tasks
from kvferry.core.side_channel_messages import PayloadRequest, Payloads, Pong, encode
from kvferry.testing.engines import CacheShape
from tests.core import messages
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually
from tests.core.endpoint.side_channels import SideChannel
from tests.core.endpoint.transports import ScriptedTransport
from tests.core.messages import payload
from tests.core.resource_limits import no_threads

LONG = 20.0
TTL = 100.0
BAD = HandshakeError("nobody there")


class Relay(Directory):
    """A directory, its clock, and what is gone."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        self.clock = clock
        self.gone: list[tuple[str, KVFerryError | None]] = []
        super().__init__(EndpointOptions(**options), clock)

    def outcome(self) -> EncodedReply | KVFerryError:
        """Take steps until a handshake is over; return what came of it."""
        found: list[EncodedReply | KVFerryError] = []

        def is_over() -> bool:
            news = self.take()
            self.gone += [(key.engine, error) for key, _, error in news.gone]
            found.extend(outcome for _, outcome in news.outcomes)
            return bool(found)

        eventually(is_over, "a handshake is over")
        [outcome] = found
        return outcome

    def is_watched(self) -> bool:
        """Wait until a handshake is over; return whether the producer is watched."""
        outcome = self.outcome()
        return isinstance(outcome, EncodedReply) and bool(outcome.ranks)


# Handshakes that end when the test says so.


class StillClock(Clock):
    def __call__(self) -> float:
        return self._ahead


class Handshakes(Relay):
    """A directory without pings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: float) -> None:
        self.begun = queue.SimpleQueue[str]()
        self._futures: dict[str, asyncio.Future[EncodedReply]] = {}
        super().__init__(StillClock(), liveness_interval=0.0, engine_ttl=TTL, **options)
        monkeypatch.setattr(directory, "fetched", self._fetch)

    def want(self, *names: str, incarnation: int = 1) -> None:
        for name in names:
            self.ask(messages.ticket(engine=name, incarnation=incarnation))

    def begins(self) -> str:
        """Wait until a further handshake begins; return with whom."""
        return self.begun.get(timeout=LONG)

    def answer(self, name: str, outcome: Exception | None = None, incarnation: int = 1) -> None:
        """End a handshake that has begun."""
        future = self._futures[name]
        key = PeerKey.of(messages.ticket(engine=name))
        reply = EncodedReply(address=key, incarnation=Incarnation(incarnation), ranks=(b"a",))
        end: Any = future.set_result if outcome is None else future.set_exception
        future.get_loop().call_soon_threadsafe(end, outcome or reply)

    def watch(self, request: str, name: str) -> None:
        """Begin a request of a producer that is not watched yet, and then is."""
        self.begin(request, messages.ticket(engine=name, incarnation=1))
        self.answer(self.begins())
        assert self.is_watched()

    async def _fetch(self, key: PeerKey, *_: object) -> EncodedReply:
        future: asyncio.Future[EncodedReply] = asyncio.get_running_loop().create_future()
        self._futures[key.engine] = future
        self.begun.put(key.engine)
        return await future


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handshakes]:
    monkeypatch.setattr(directory, "MAX_HANDSHAKES", 2)
    with closing(Handshakes(monkeypatch)) as made:
        yield made


def test_handshakes_run_concurrently_up_to_a_limit_in_the_order_asked(at: Handshakes) -> None:
    at.want(*"abcd", *"abcd")
    assert [at.begins() for _ in range(2)] == ["a", "b"]
    for ended, begun in ("b", "c"), ("a", "d"):
        assert at.begun.empty()
        at.answer(ended)
        assert at.begins() == begun
    at.close()
    at.want("e")
    assert at.begins() == "e", "those that were under way have ended"


@pytest.mark.parametrize("failures", [1, 2, 5, 20])
def test_the_wait_after_failures_grows(
    at: Handshakes, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for _ in range(failures):
        at.clock.skip(TTL)
        at.want("a")
        at.answer(at.begins(), BAD)
        assert at.outcome() is BAD
    at.want("a", "another")
    for _ in range(2):
        at.begins()
    assert pauses[-2] == pytest.approx(min(0.1 * 2 ** (failures - 1), 5.0))
    assert pauses[-1] <= 0.0
    at.answer("a")
    assert at.is_watched()
    at.want("a", incarnation=2)
    at.begins()
    assert pauses[-1] <= 0.0


def test_a_handshake_that_cannot_start_or_begin_in_time_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "MAX_HANDSHAKES", 0)
    monkeypatch.setattr(directory, "LONGEST_BACKOFF_SECONDS", 0.0)
    at = Handshakes(monkeypatch, handshake_timeout=0.01)
    at.want("a")
    assert "was not asked within 0.01 s" in str(at.outcome())
    monkeypatch.setattr(tasks, "_loops", {})
    with no_threads("kvferry-side-channels"):
        at.want("a")
    assert "can't start new thread" in str(at.outcome())


@pytest.mark.parametrize(("incarnation", "is_watched"), [(16, False), (17, True), (32, True)])
def test_one_handshake_is_for_the_newest_incarnations_that_tickets_name(
    at: Handshakes, incarnation: int, is_watched: bool
) -> None:
    for each in (*range(1, 33), 32):
        at.want("a", incarnation=each)
    at.answer(at.begins(), incarnation=incarnation)
    assert at.is_watched() is is_watched
    assert at.begun.empty()


def test_any_error_is_reported_without_a_reference_to_decoded_data(
    at: Handshakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    references: list[weakref.ref[Mock]] = []

    async def fail(key: PeerKey, *_: object) -> EncodedReply:
        decoded = Mock()
        references.append(weakref.ref(decoded))
        try:
            raise KeyError(key.engine)
        except KeyError as exc:
            raise ZeroDivisionError from exc

    monkeypatch.setattr(directory, "fetched", fail)
    at.want("a")
    error = at.outcome()
    assert isinstance(error, HandshakeError)
    assert "ZeroDivisionError" in str(error)
    assert references[0]() is None


def test_nothing_is_asked_again_whose_answer_is_on_its_way(at: Handshakes) -> None:
    wanted = [(PeerKey.of(messages.ticket(engine="a")), 1)]
    at.want("a")
    at.ask_again(wanted)
    at.answer(at.begins())
    assert at.is_watched()
    at.ask_again(wanted)
    assert not at.pending
    at.clock.skip(2 * directory.AGAIN_SECONDS)
    at.ask_again(wanted)
    at.answer(at.begins())
    assert at.is_watched()


def test_a_producer_that_nobody_uses_is_released_and_asked_again(at: Handshakes) -> None:
    at.watch("r", "a")
    at.clock.skip(2 * TTL)
    assert not at.take().gone  # a request uses it
    at.end("r")
    at.clock.skip(2 * TTL)
    assert at.take().gone == ((PeerKey.of(messages.ticket(engine="a")), 1, None),)
    at.watch("s", "a")


def test_the_longest_unused_producer_makes_room(
    at: Handshakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "most_peers", lambda: 1)
    at.watch("r", "one")
    at.want("two")
    at.answer(at.begins())
    error = at.outcome()  # the first is used
    assert isinstance(error, ConnectError)
    assert "there is no room for another engine: 1 are in use" in str(error)
    at.end("r")
    at.watch("t", "two")
    assert at.gone == [("one", None)]


def test_a_handshake_that_no_rank_waits_for_asks_for_no_steps(at: Handshakes) -> None:
    at.want("a")
    assert at.take().is_asking
    assert at.pending  # ranks wait for it
    at.clock.skip(20.0)
    assert not at.pending
    assert at.take() == ProducerNews()


def test_long_replies_are_spread_over_steps(
    at: Handshakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MAX_STEP_BYTES", 1)
    at.want("one", "two")
    for _ in range(2):
        at.answer(at.begins())
    assert [at.is_watched() for _ in range(2)] == [True, True]  # one in each step
    assert not at.pending


# Over side channels.


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
def relay(clock: Clock) -> Iterator[Relay]:
    with closing(Relay(clock)) as made:
        yield made


def unknown(ticket: Ticket) -> Load:
    """Return a load of whose producer the directory is not told."""
    pages = Pages(ids=np.array([2]))
    ranges = ((0, ticket.tokens),)
    return Load(request=RequestId("d-1"), ticket=ticket, ranges=ranges, local=(pages,))


def test_a_rank_that_lacks_a_reply_says_so_and_waits_for_it(
    channel: Channel, decode: Engine, relay: Relay
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
    decode.endpoint.relay(ProducerNews(outcomes=((PeerKey.of(ticket), relay.outcome()),)))
    assert decode.error("d-1") is None


def test_a_load_fails_of_whose_producer_nothing_is_heard(channel: Channel, clock: Clock) -> None:
    with Engine("decode", clock=clock) as decode:
        decode.endpoint.load(unknown(channel.serve()))
        while not decode.endpoint.wait(0.05):
            clock.skip(20.0)
        error = decode.error("d-1")
    assert isinstance(error, HandshakeError)
    assert "nothing was heard of engine 'prefill' for 15 s" in str(error)


def test_a_producer_is_asked_and_pinged_once_for_two_ranks_also_if_one_could_not_connect(
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
        assert decode.load("d-3", channel.serve(3), [4]) is None
        eventually(lambda: bool(channel.pinged_by), "the producer is pinged")
        assert (channel.asked, len(channel.pinged_by)) == (1, 1)


def test_a_producer_is_gone_as_it_was_asked_last(
    prefill: Engine, driver: ScriptedTransport, relay: Relay
) -> None:
    with Engine("decode", transport=lambda: driver) as decode:
        ticket = prefill.serve_later("p-1", [1])
        decode.pull("d-1", ticket, [2])
        eventually(lambda: driver.open_connections == 1, "it is connected")
        relay.begin("r", ticket)
        other = PeerKey.of(ticket)._replace(routed=("router", 2))
        decode.endpoint.relay(ProducerNews(outcomes=((other, relay.outcome()),)))
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
    prefill: Engine, relay: Relay, payload: bytes, words: str
) -> None:
    with Channel(prefill, payloads=[payload]) as channel:
        relay.begin("r", channel.serve())
        error = relay.outcome()
    assert isinstance(error, HandshakeError)
    assert words in str(error)
    assert str(channel.port) in str(error)


def test_a_producer_that_cannot_be_watched_is_not_used(
    channel: Channel, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "start_pings", Mock(side_effect=BAD))
    relay.begin("r", channel.serve())
    error = relay.outcome()
    assert isinstance(error, ConnectError)
    assert "cannot watch engine prefill: nobody there" in str(error)


def test_only_the_maker_of_a_ticket_is_watched(relay: Relay) -> None:
    with Engine("prefill", ticket_key=TicketKey()) as prefill, Channel(prefill) as channel:
        ticket = channel.serve()
        assert ticket.proof is not None
        for each in (
            replace(ticket, incarnation=ticket.incarnation ^ 1),
            replace(ticket, proof=None),
            replace(ticket, proof=replace(ticket.proof, content=bytes(32))),
        ):
            relay.begin("forged", each)
            assert not relay.is_watched()
        relay.begin("genuine", ticket)
        assert relay.is_watched()
        relay.begin("next", ticket)
        assert not relay.take()
        assert channel.asked == 4


def test_pings_end_without_a_step_if_nobody_uses_the_producer(
    channel: Channel, clock: Clock
) -> None:
    with closing(Relay(clock, engine_ttl=TTL, liveness_interval=0.05)) as relay:
        relay.begin("r", channel.serve())
        assert relay.is_watched()
        relay.end("r")
        clock.skip(2 * TTL)
        eventually(lambda: relay.pending, "the check has ended without a step")
        [(_, _, error)] = relay.take().gone
        assert error is None


def test_a_reply_that_was_not_sent_yet_is_not_sent_if_its_producer_is_lost(
    channel: Channel, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(directory, "MAX_STEP_BYTES", 0)
        relay.begin("r", channel.serve())
        eventually(lambda: not relay.take().is_asking, "the producer has answered")
        channel.close()
        eventually(lambda: bool(relay.take().gone), "the producer is lost")
    assert isinstance(relay.outcome(), PeerLostError)
