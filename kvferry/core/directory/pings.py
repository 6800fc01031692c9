"""Ping a producer, to notice that it has died or was restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

import zmq

from kvferry.core.directory.news import EncodedReply
from kvferry.core.errors import HandshakeError, KVFerryError, PeerLostError
from kvferry.core.options import EndpointOptions
from kvferry.core.side_channel.connection import connected
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel.tasks import Task, start
from kvferry.core.side_channel_messages import MAX_PONG_BYTES, Ping, Pong, Refusal, Reply

logger = logging.getLogger(__name__)

# Not a whole interval, so that a process that has ended, whose pings are missed at once, is soon
# given up.
MISSED_SECONDS = 0.1
"""The pause after a missed ping."""


def start_pings(
    reply: EncodedReply,
    options: EndpointOptions,
    *,
    wanted: Callable[[], bool],
    lost: Callable[[KVFerryError | None], None],
) -> Task:
    """Ping the producer of a reply until it is lost, not wanted any more, or the task cancelled.

    An answer with another incarnation means a restart. ``wanted`` is called before each ping, and
    at the end ``lost`` with the error, or with ``None`` for a producer that is not wanted; both on
    the thread of all tasks. Raises ``HandshakeError`` if that cannot be started.
    """

    def over(outcome: Exception | None) -> None:
        if outcome is not None and not isinstance(outcome, PeerLostError):
            logger.error("a producer cannot be watched any more", exc_info=outcome)
            outcome = PeerLostError(f"it cannot be watched any more: {outcome!r}")
        lost(outcome)

    return start(partial(_pinged, reply, options, wanted), over)


async def _pinged(
    reply: EncodedReply, options: EndpointOptions, wanted: Callable[[], bool]
) -> None:
    """Ping; raise ``PeerLostError`` if the producer is dead, restarted or refuses pings."""
    engine, interval = reply.address.engine, options.liveness_interval
    ping = Ping(engine=engine)
    dialer = Dialer.to(reply.address, interval, options.access)
    dialer.longest = MAX_PONG_BYTES
    dialer.numeric.append(reply.numeric)
    misses, limit = 0, options.liveness_misses
    while wanted():
        try:
            with contextlib.closing(await connected(dialer)) as connection:
                while wanted():
                    answer = await connection.ask(ping, time.monotonic() + interval)
                    _check(answer, reply)
                    misses = 0
                    await connection.rest(time.monotonic() + interval)
            return
        except (HandshakeError, OSError, zmq.ZMQError) as exc:
            misses += 1
            if misses >= limit:
                raise PeerLostError(
                    f"engine {engine} missed {misses} of {limit} pings: {exc}"
                ) from exc
        await asyncio.sleep(MISSED_SECONDS)


def _check(answer: Reply, reply: EncodedReply) -> None:
    """Refuse an answer that is not a ``Pong`` with the incarnation of the handshake."""
    engine = reply.address.engine
    if isinstance(answer, Refusal):
        raise PeerLostError(f"engine {engine} does not serve this engine any more: {answer.reason}")
    if not isinstance(answer, Pong):
        raise HandshakeError(f"it answered a ping with a {type(answer).__name__}")
    if answer.incarnation != reply.incarnation:
        raise PeerLostError(f"engine {engine} was restarted: what it held is gone")
