"""Liveness checks: a task for each producer pings it over its side channel.

It connects to the numeric address that the handshake found. A producer takes two file descriptors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing

import zmq

from kvferry.core.directory.handshake_queue import dialer
from kvferry.core.directory.news import EncodedReply
from kvferry.core.errors import HandshakeError, KVFerryError, PeerLostError
from kvferry.core.handshake.connection import connected
from kvferry.core.handshake.poller import Steps, Task, pause, start
from kvferry.core.options import EndpointOptions
from kvferry.core.side_channel_messages import MAX_PONG_BYTES, Ping, Pong, Refusal, Reply

logger = logging.getLogger(__name__)

# Not a whole interval, so that a process that has ended, whose pings are missed at once, is soon
# given up.
QUICK_SECONDS = 0.1
"""Pause after a missed ping."""


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
    the thread of all tasks (``poller``).

    Raises:
        HandshakeError: that thread cannot be started.
    """

    def over(outcome: Exception | None) -> None:
        if outcome is not None and not isinstance(outcome, PeerLostError):
            logger.error("a producer cannot be watched any more", exc_info=outcome)
            outcome = PeerLostError(f"it cannot be watched any more: {outcome!r}")
        lost(outcome)

    return start(_LivenessCheck(reply, options, wanted).ping(), over)


class _LivenessCheck:
    def __init__(
        self, reply: EncodedReply, options: EndpointOptions, wanted: Callable[[], bool]
    ) -> None:
        self._incarnation = reply.incarnation
        self._interval = options.liveness_interval
        self._limit = options.liveness_misses
        self._is_wanted = wanted
        self._name = f"engine {reply.place.engine}"
        self._ping = Ping(engine=reply.place.engine)
        self._misses = 0
        self._dialer = dialer(reply.place, options.liveness_interval, options)
        self._dialer.longest = MAX_PONG_BYTES
        self._dialer.numeric.append(reply.numeric)

    def ping(self) -> Steps[None]:
        """Ping; raise ``PeerLostError`` if the producer is dead, restarted or refuses pings."""
        while self._is_wanted():
            try:
                yield from self._ping_over_one_connection()
            except (HandshakeError, OSError, zmq.ZMQError) as exc:
                self._miss(str(exc))
            else:
                return
            yield from pause(QUICK_SECONDS)

    def _ping_over_one_connection(self) -> Steps[None]:
        with closing((yield from connected(self._dialer))) as connection:
            while self._is_wanted():
                deadline = time.monotonic() + self._interval
                self._check((yield from connection.ask(self._ping, deadline)))
                self._misses = 0
                yield from connection.rest(time.monotonic() + self._interval)

    def _check(self, reply: Reply) -> None:
        """Refuse an answer that is not a ``Pong`` with the incarnation of the handshake."""
        if isinstance(reply, Refusal):
            raise PeerLostError(f"{self._name} does not serve this engine any more: {reply.reason}")
        if not isinstance(reply, Pong):
            raise HandshakeError(f"it answered a ping with a {type(reply).__name__}")
        if reply.incarnation != self._incarnation:
            raise PeerLostError(f"{self._name} was restarted: what it held is gone")

    def _miss(self, why: str) -> None:
        self._misses += 1
        if self._misses >= self._limit:
            raise PeerLostError(f"{self._name} missed {self._misses} of {self._limit} pings: {why}")
