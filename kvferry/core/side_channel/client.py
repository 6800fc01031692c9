"""The client of a side channel: what an engine publishes, and whether it is alive.

Each reply is bounded by its message's limits and ``work_budget``, many hostile ones together by
``ReplyLimits``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Unpack

from kvferry.core.errors import HandshakeError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.side_channel.compatibility import EngineInfo, engine_info
from kvferry.core.side_channel.connection import answered, asked, explained, unexpected
from kvferry.core.side_channel.dialer import Dialer, DialerOptions, HungUpError
from kvferry.core.side_channel.tasks import call, post
from kvferry.core.side_channel_messages import (
    MAX_REPLY_BYTES,
    NEWEST_PROTOCOL,
    OLDEST_PROTOCOL,
    PayloadRequest,
    Payloads,
    Ping,
    Pong,
)

MAX_LONG_REPLIES = 2
"""The most long replies that are received, or wait to be decoded, at a time."""
MAX_UNUSED_BYTES = 1 << 24
"""While more bytes of decoded replies than this wait to be used, no further reply is decoded."""


def ping(host: str, port: int, engine: str, **how: Unpack[DialerOptions]) -> Incarnation:
    """Return the incarnation of an engine that is alive; errors as for ``fetch``."""
    dialer = Dialer(host=host, port=port, **how)
    return Incarnation(answered(dialer, engine, Ping(engine=engine), Pong).incarnation)


def fetch(host: str, port: int, engine: str, **how: Unpack[DialerOptions]) -> EngineInfo:
    """Ask an engine's side channel for what its ranks publish. Blocks, for the timeout at most.

    Raises:
        IncompatibleError: the two builds have no protocol version in common.
        RefusedError: the side channel refuses the request; the message says why.
        AdmissionError: one of the two engines does not admit the key or address of the other.
        HandshakeError: there was no valid answer; the message says where, why and what to do.
    """
    dialer = Dialer(host=host, port=port, **how)
    published = call(payloads(dialer, engine, ReplyLimits()))
    with explained(engine, dialer):
        return engine_info(published.ranks, published.ticket_key, engine=engine)


async def payloads(dialer: Dialer, engine: str, limits: ReplyLimits) -> Payloads:
    """Fetch what an engine's ranks publish, not decoded; raises as ``fetch``.

    The caller tells ``limits.made`` of it before it waits for anything else.
    """
    deadline = time.monotonic() + dialer.timeout
    request = PayloadRequest(oldest=OLDEST_PROTOCOL, newest=NEWEST_PROTOCOL, engine=engine)
    with explained(engine, dialer):
        # The first connection accepts a short answer only, and is closed if the answer is long.
        # Then the request is sent again on a second connection, once a long answer may be received.
        try:
            return await _payloads(dialer, request, limits, deadline)
        except HungUpError as exc:
            # Keep only the text: the traceback would keep all that was decoded from the answer
            # alive until a garbage collection, which would stop all threads while it frees it.
            closed = str(exc)
        async with limits.long_reply(deadline):
            dialer.longest = MAX_REPLY_BYTES
            try:
                return await _payloads(dialer, request, limits, deadline)
            except HungUpError as exc:
                raise HandshakeError(
                    f"{closed}, or its answer has more than {MAX_REPLY_BYTES} bytes"
                ) from exc


async def _payloads(
    dialer: Dialer, request: PayloadRequest, limits: ReplyLimits, deadline: float
) -> Payloads:
    reply = await asked(dialer, request, deadline)
    if not isinstance(reply, Payloads):
        raise unexpected(reply)
    await limits.wait_to_use(deadline)
    return reply


class ReplyLimits:
    """Limit what tasks receive and decode of other engines' replies; ``used`` is for any thread.

    Deadlines are by ``time.monotonic``; ``HandshakeError`` is raised when they pass.
    """

    def __init__(self) -> None:
        self._long = asyncio.Semaphore(MAX_LONG_REPLIES)
        self._unused = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def long_reply(self, deadline: float) -> AsyncIterator[None]:
        """Wait until a long reply may be received; it counts while the context is open."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._long.acquire()
        except TimeoutError:
            raise HandshakeError(
                f"its reply is long, and of such ones {MAX_LONG_REPLIES} are received at once: "
                "others took until the deadline; raise handshake_timeout if they are yours"
            ) from None
        try:
            yield
        finally:
            self._long.release()

    async def wait_to_use(self, deadline: float) -> None:
        """Wait until a reply may be used."""
        try:
            async with asyncio.timeout_at(deadline):
                while self._unused > MAX_UNUSED_BYTES:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise HandshakeError(
                "it answered, but the replies of other engines were being read until the "
                "deadline; raise handshake_timeout if they are yours"
            ) from None

    def made(self, nbytes: int) -> None:
        """Count the bytes of a reply as not used yet."""
        self._unused += nbytes

    def used(self, nbytes: int) -> None:
        """Subtract the bytes given to ``made`` for a reply, once it was used or dropped."""
        post(partial(self._used, nbytes))

    def _used(self, nbytes: int) -> None:
        self._unused -= nbytes
        self._changed.set()
