"""Answers of a side channel without what the asking engine knows already."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import pytest
import zmq

from kvferry.core import messages
from kvferry.core import side_channel_messages as wire
from kvferry.core.errors import HandshakeError
from kvferry.core.layout import Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.memory import Region
from kvferry.core.messages import RankPayload
from kvferry.core.security import TicketKey
from kvferry.core.side_channel import EngineInfo, HandshakeServer, client, fetch
from kvferry.core.side_channel.shapes import EngineShape
from kvferry.core.side_channel_messages import MAX_KNOWN_SHAPES, MAX_REPLY_BYTES
from tests.core.messages import encoded, payload
from tests.core.side_channel.servers import LONG, patient, scripted, serve

KEY = TicketKey().public


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LRUCache[EngineShape](MAX_KNOWN_SHAPES, client.MAX_ALL_SHAPE_BYTES)
    monkeypatch.setattr(client, "_shapes", cache)


def ranks(address: int = 1 << 20, incarnation: int = 7) -> list[RankPayload]:
    """Return what two ranks publish whose memory begins at ``address``."""
    made = [
        payload(rank, incarnation=incarnation, fingerprint=Region(address=1 << 22, nbytes=16))
        for rank in range(2)
    ]
    region = Region(address=address, nbytes=1 << 14)
    return [
        msgspec.structs.replace(each, layout=each.layout.with_regions((region,))) for each in made
    ]


def shape_of(payloads: Sequence[bytes]) -> EngineShape:
    found = EngineShape.of(payloads)
    assert found is not None
    return found


def request(*known: bytes) -> wire.PayloadRequest:
    return wire.PayloadRequest(oldest=1, newest=1, engine="prefill", known=list(known))


def fetched(port: int) -> EngineInfo:
    return fetch("127.0.0.1", port, "prefill", timeout=LONG)


def asked(port: int, *known: bytes) -> wire.Reply:
    with zmq.Context() as context, patient(context, zmq.DEALER) as channel:
        channel.connect(f"tcp://127.0.0.1:{port}")
        channel.send(wire.encode(request(*known)))
        return wire.decode_reply(channel.recv())


def test_a_server_leaves_out_the_shape_that_is_named() -> None:
    data = encoded(*ranks())
    shape = shape_of(data)
    with HandshakeServer(data, engine="prefill", incarnation=7, ticket_key=KEY) as server:
        whole = wire.Payloads(ranks=data, ticket_key=KEY)
        assert asked(server.port) == asked(server.port, bytes(32)) == whole
        heads = asked(server.port, bytes(32), shape.digest)
    assert isinstance(heads, wire.PayloadHeads)
    assert (heads.shape, heads.ticket_key) == (shape.digest, KEY)
    assert sum(map(len, heads.ranks)) == sum(map(len, data)) - sum(map(len, shape.ends))
    assert shape.whole(heads) == data


def test_the_second_engine_of_a_shape_is_asked_for_the_rest_only() -> None:
    first, second = ranks(), ranks(1 << 30, incarnation=8)
    shape = shape_of(encoded(*first))
    whole = wire.Payloads(ranks=encoded(*second), ticket_key=KEY)
    with serve(*first, ticket_key=KEY) as server:
        assert list(fetched(server.port).ranks) == first
    with scripted(shape.heads(whole)) as (port, requests):
        info = fetched(port)
    assert requests == [request(shape.digest)]
    assert (list(info.ranks), info.incarnation, info.ticket_key) == (second, 8, KEY)
    assert info.ranks[0].layout.fields is messages.decode_payload(encoded(*first)[0]).layout.fields


def test_an_engine_of_an_older_build_answers_with_everything() -> None:
    data = encoded(*ranks())
    whole = wire.Payloads(ranks=data)
    with scripted(whole, whole) as (port, requests):
        assert fetched(port) == fetched(port)
    assert requests == [request(), request(shape_of(data).digest)]


def test_the_longest_request_is_taken() -> None:
    known = [bytes([each]) * 32 for each in range(MAX_KNOWN_SHAPES)]
    longest = wire.PayloadRequest(oldest=1, newest=1 << 16, engine="\u20ac" * 256, known=known)
    assert wire.decode_request(wire.encode(longest)) == longest


def test_a_shape_that_was_not_named_or_does_not_fit_is_refused_and_everything_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = encoded(*ranks())
    whole, shape = wire.Payloads(ranks=data), shape_of(data)
    fewer = msgspec.structs.replace(shape.heads(whole), ranks=[b"one"])
    with (
        scripted(shape.heads(whole), whole, fewer, whole) as (port, requests),
        caplog.at_level(logging.WARNING),
    ):
        assert list(fetched(port).ranks) == list(fetched(port).ranks) == ranks()
    assert requests == [request(), request(), request(shape.digest), request()]
    assert f"engine prefill at 127.0.0.1 port {port} left the shape" in caplog.text
    assert "of 1 ranks out of its answer" in caplog.text


def test_an_engine_that_never_answers_with_everything_fails() -> None:
    data = encoded(*ranks())
    heads = shape_of(data).heads(wire.Payloads(ranks=data))
    with (
        scripted(heads, heads) as (port, _),
        pytest.raises(HandshakeError, match="PayloadHeads, wh"),
    ):
        fetched(port)


def test_what_was_left_out_does_not_make_an_answer_valid() -> None:
    data = encoded(*ranks())
    whole = wire.Payloads(ranks=data)
    with scripted(whole) as (port, _):
        fetched(port)
    twice = [data[0]] * 2
    short = shape_of(data).heads(whole)
    for head in (b"", b"\x80", bytes(300_000)):
        answer = msgspec.structs.replace(short, ranks=[head, short.ranks[1]])
        with (
            scripted(answer) as (port, _),
            pytest.raises(HandshakeError, match="rank 0: not a pay"),
        ):
            fetched(port)
    answer = msgspec.structs.replace(
        short, ranks=shape_of(twice).heads(wire.Payloads(ranks=twice)).ranks
    )
    with scripted(answer) as (port, _), pytest.raises(HandshakeError, match="is that of rank 0"):
        fetched(port)


def test_completed_payloads_are_bounded_as_a_whole_reply_is() -> None:
    shape = EngineShape(digest=bytes(32), ends=(bytes(MAX_REPLY_BYTES),))
    heads = wire.PayloadHeads(shape=bytes(32), ranks=[b"x"])
    with pytest.raises(
        HandshakeError, match=f"take {MAX_REPLY_BYTES + 1} bytes; {MAX_REPLY_BYTES}"
    ):
        shape.whole(heads)


def test_a_long_answer_is_always_whole() -> None:
    """Most of it is no shape."""
    data = encoded(*(payload(rank, address=bytes([rank]) * 300_000) for rank in range(2)))
    with HandshakeServer(data, engine="prefill", incarnation=7) as server:
        assert asked(server.port, shape_of(data).digest) == wire.Payloads(ranks=data)


def test_a_payload_that_does_not_end_with_its_fields_has_no_shape() -> None:
    grown = msgspec.msgpack.decode(encoded(payload())[0]) | {"of a newer version": 1}
    data = [msgspec.msgpack.encode(grown)]
    assert EngineShape.of(data) is None
    with HandshakeServer(data, engine="prefill", incarnation=7) as server:
        assert asked(server.port, bytes(32)) == wire.Payloads(ranks=data)
        assert list(fetched(server.port).ranks) == [payload()]


def test_the_bytes_of_remembered_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = sum(map(len, shape_of(encoded(payload(0), payload(1))).ends))
    monkeypatch.setattr(client, "_shapes", LRUCache[EngineShape](MAX_KNOWN_SHAPES, nbytes))
    met(1)
    digest = met(2)
    assert list(client._shapes.items()) == [digest]


def met(count: int) -> bytes:
    """Fetch what an engine of so many ranks publishes; return the digest of its shape."""
    published = [payload(rank) for rank in range(count)]
    with serve(*published) as server:
        assert list(fetched(server.port).ranks) == published
    return shape_of(encoded(*published)).digest


def test_equal_bytes_in_other_ranks_are_another_shape() -> None:
    empty = Layout(regions=(), groups=(), fields=())
    one = msgspec.structs.replace(payload(0), layout=empty)
    digests = {
        shape_of(data).digest
        for data in (encoded(*ranks()), encoded(*ranks()[::-1]), encoded(one), encoded(one, one))
    }
    assert len(digests) == 4
