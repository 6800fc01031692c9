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
from kvferry.core.errors import HandshakeError, KVFerryError, PeerLostError
from kvferry.core.handshake.connection import SideChannelConnection
from kvferry.core.handshake.poller import Steps, Task, pause, start
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.options import EndpointOptions
from kvferry.core.side_channel_messages import MAX_PONG_BYTES, Ping, Pong, Refusal, Reply

logger = logging.getLogger(__name__)

# Not a whole interval, so that a process that has ended, whose pings are missed at once, is soon
# given up.
QUICK_SECONDS = 0.1
"""Pause after a missed ping."""

Lost = Callable[[KVFerryError | None], None]
"""Called with the error when a producer is lost; with ``None`` when it is not wanted any more."""


class LivenessChecks:
    """Ping producers. Used by one thread only."""

    def __init__(self, options: EndpointOptions) -> None:
        self._options = options
        self._checks: set[_LivenessCheck] = set()

    def start(
        self,
        key: PeerKey,
        numeric: str,
        incarnation: Incarnation,
        *,
        lost: Lost,
        wanted: Callable[[], bool],
    ) -> Callable[[], None]:
        """Ping a producer until it is lost; return a function that ends that at once.

        An answer with another ``incarnation`` means a restart. ``lost`` is called at most once, on
        the thread of all tasks (``poller``), and ``wanted`` there before each ping.

        Raises:
            HandshakeError: that thread cannot be started.
        """
        check = _LivenessCheck(key, numeric, incarnation, self._options)

        def over(outcome: Exception | None) -> None:
            self._checks.discard(check)
            if outcome is not None and not isinstance(outcome, PeerLostError):
                logger.error("a producer cannot be watched any more", exc_info=outcome)
                outcome = PeerLostError(f"it cannot be watched any more: {outcome!r}")
            lost(outcome)

        def stop() -> None:
            self._checks.discard(check)
            check.cancel()

        self._checks.add(check)
        try:
            check.task = start(check.ping_while(wanted), over)
        except HandshakeError:
            self._checks.discard(check)
            raise
        return stop

    def close(self) -> None:
        """End all checks, and return at once."""
        for check in list(self._checks):
            check.cancel()
        self._checks.clear()


class _LivenessCheck:
    def __init__(
        self, key: PeerKey, numeric: str, incarnation: Incarnation, options: EndpointOptions
    ) -> None:
        self.task: Task | None = None
        self._incarnation = incarnation
        self._interval = options.liveness_interval
        self._limit = options.liveness_misses
        self._ping = Ping(engine=key.engine)
        self._name = f"engine {key.engine}"
        self._misses = 0
        self._dialer = dialer(key, options.liveness_interval, options)
        self._dialer.longest = MAX_PONG_BYTES
        self._dialer.numeric.append(numeric)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def ping_while(self, wanted: Callable[[], bool]) -> Steps[None]:
        """Ping; raise ``PeerLostError`` if the producer is dead, restarted or refuses pings."""
        while wanted():
            try:
                yield from self._ping_over_one_connection(wanted)
            except HandshakeError as exc:
                self._miss(str(exc))
            except (OSError, zmq.ZMQError) as exc:
                self._miss(f"no connection can be made from here: {exc}")
            else:
                return
            yield from pause(QUICK_SECONDS)

    def _ping_over_one_connection(self, wanted: Callable[[], bool]) -> Steps[None]:
        with closing(SideChannelConnection(self._dialer)) as connection:
            yield from connection.open()
            while wanted():
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
