"""Limits on each reply, and on all replies that a process handles at once."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from contextlib import AsyncExitStack
from functools import partial

import pytest

from kvferry.core.errors import HandshakeError
from kvferry.core.messages import RankPayload
from kvferry.core.side_channel.client import (
    MAX_LONG_REPLIES,
    MAX_UNUSED_BYTES,
    ReplyLimits,
    fetch,
    payloads,
)
from kvferry.core.side_channel.compatibility import engine_info
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.tasks import call, start
from tests.core.messages import encoded, payload
from tests.core.side_channel.servers import LONG, dialer, serve

LONG_RANKS = [payload(rank, address=bytes([rank]) * 400_000) for rank in range(3)]


def deadline() -> float:
    return time.monotonic() + LONG


def fetched(server: HandshakeServer, limits: ReplyLimits, timeout: float = LONG) -> list[bytes]:
    return call(payloads(dialer(server.port, timeout=timeout), "prefill", limits)).ranks


def test_no_reply_is_decoded_while_too_much_waits_to_be_used() -> None:
    limits = ReplyLimits()
    limits.made(MAX_UNUSED_BYTES)
    call(limits.wait_to_use(deadline()))
    limits.made(1)
    with serve(payload()) as server:
        with pytest.raises(HandshakeError, match="replies of other engines were being read"):
            fetched(server, limits, timeout=0.5)
        over = queue.SimpleQueue[Exception | None]()
        start(partial(limits.wait_to_use, deadline()), over.put)
        limits.used(1)
        assert over.get(timeout=LONG) is None
        assert fetched(server, limits) == encoded(payload())


def test_only_few_long_replies_are_received_at_once() -> None:
    limits, begun = ReplyLimits(), threading.Event()

    async def receive_as_many_as_may_be() -> None:
        async with AsyncExitStack() as held:
            for _ in range(MAX_LONG_REPLIES):
                await held.enter_async_context(limits.long_reply(deadline()))
            begun.set()
            await asyncio.Future()

    with serve(*LONG_RANKS) as server, serve(payload()) as brief:
        assert fetched(server, limits) == encoded(*LONG_RANKS)
        task = start(receive_as_many_as_may_be, lambda _: None)
        assert begun.wait(LONG)
        with pytest.raises(HandshakeError, match="its reply is long"):
            fetched(server, limits, timeout=0.5)
        assert fetched(brief, limits) == encoded(payload())
        task.cancel()
        assert fetched(server, limits) == encoded(*LONG_RANKS)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([payload(address=bytes((1 << 19) - 100))], "the payload of rank 0 takes"),
        (
            [payload(rank, address=bytes([rank]) * ((1 << 19) - 2000)) for rank in range(17)],
            "all ranks' payloads take",
        ),
    ],
)
def test_an_engine_that_publishes_too_much_is_refused_at_its_start(
    ranks: list[RankPayload], message: str
) -> None:
    with pytest.raises(HandshakeError, match=f"{message} .* allowed.*fewer fields and regions"):
        serve(*ranks)


def test_a_reply_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(*LONG_RANKS) as server:
        monkeypatch.setattr("kvferry.core.side_channel.client.MAX_REPLY_BYTES", 1_000_000)
        with pytest.raises(HandshakeError, match="or its answer has more than 1000000 bytes"):
            fetch(server.host, server.port, "prefill", timeout=LONG)


def test_the_number_of_fields_of_all_ranks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = encoded(*(payload(rank) for rank in range(3)))
    monkeypatch.setattr("kvferry.core.side_channel.compatibility.MAX_ENGINE_FIELDS", 2)
    assert len(engine_info(ranks[:2]).ranks) == 2
    with pytest.raises(HandshakeError, match="ranks 0 to 2 have 3 fields; 2 are allowed"):
        engine_info(ranks)
