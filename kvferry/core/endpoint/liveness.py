"""Liveness checks: one thread pings all producers over their side channels.

It never waits for a single one: it connects without blocking, to the numeric address that the
handshake found. A producer takes two file descriptors, for libzmq's socket and the connection.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.errors import HandshakeError, KVFerryError, PeerLostError, WireError
from kvferry.core.handshake.connection import AGAIN_SECONDS
from kvferry.core.handshake.dialer import Dialer, answer, why_unreachable
from kvferry.core.handshake.sockets import Socket, endpoint
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.side_channel_messages import MAX_PONG_BYTES, Ping, Pong, Refusal, Reply, encode

logger = logging.getLogger(__name__)

# Not a whole interval, so that a process that has ended, whose pings are missed at once, is soon
# given up.
QUICK_SECONDS = 0.1
"""Pause after a missed ping."""

Lost = Callable[[KVFerryError | None], None]
"""Called with the error when a producer is lost; with ``None`` when it is not wanted any more."""


def always() -> bool:
    """Return ``True``: a producer is watched until the caller ends that."""
    return True


class LivenessCheck:
    """Ping one producer. Used by the pinging thread only, whose epoll object ``polled`` is.

    An answer with another ``incarnation`` means a restart. The check ends if ``wanted``, called
    before each ping, returns ``False``.
    """

    def __init__(
        self,
        key: PeerKey,
        numeric: str,
        incarnation: Incarnation,
        *,
        options: EndpointOptions,
        polled: select.epoll,
        wanted: Callable[[], bool] = always,
    ) -> None:
        self.wanted = wanted
        self._incarnation = incarnation
        self._options = options
        self._polled = polled
        self._numeric = numeric
        self._dialer = Dialer(
            host=key.host,
            port=key.port,
            timeout=options.liveness_interval,
            context=None,
            access=options.access,
            key=key.key,
            longest=MAX_PONG_BYTES,
        )
        self._ping = encode(Ping(engine=key.engine))
        self._name = f"engine {key.engine}"
        self._misses = 0
        self._attempt: socket.socket | None = None
        """A plain TCP connection that is being made, to see whether somebody listens."""
        self._channel: Socket | None = None
        """The ZMQ socket for pings; made once ``_attempt`` has succeeded."""
        self._descriptor = -1
        """That of ``_attempt`` or ``_channel``, whichever exists; -1 if neither does."""
        self._unanswered = 0
        self._is_reached = False
        self._is_second = False
        """Whether ``_channel`` is the second connection made for the same unanswered ping."""
        self._deadline: float | None = None
        """When the ping under way counts as missed; ``None`` if there is none."""
        self.due = 0.0
        """When to call ``turn``, by ``time.monotonic``, if the descriptor is not ready before."""
        self.queued: float | None = None
        """The ``due`` with which the check is in the thread's queue; ``None`` if it is not."""

    @property
    def descriptor(self) -> int:
        """Return the file descriptor that is polled for this producer now; -1 if there is none."""
        return self._descriptor

    def turn(self, now: float) -> None:
        """Connect, send a ping, process an answer, or count a miss, without blocking.

        Raises:
            PeerLostError: the producer is dead or was restarted, or refuses pings.
        """
        try:
            if self._attempt is not None:
                self._reach(self._attempt, now)
            elif self._channel is not None:
                self._listen(self._channel, now)
            elif now >= self.due:
                self._try(now)
        except HandshakeError as exc:
            self._miss(str(exc), now)
        except (OSError, zmq.ZMQError) as exc:
            self._miss(f"no connection can be made from here: {exc}", now)

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._descriptor >= 0:
            self._polled.unregister(self._descriptor)
            self._descriptor = -1
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        if self._channel is not None:
            self._channel.close(0)
            self._channel = None

    def _try(self, now: float) -> None:
        """Begin a plain TCP connection: libzmq alone would try for ever and report no error."""
        family = socket.AF_INET6 if ":" in self._numeric else socket.AF_INET
        self._attempt = socket.socket(family, socket.SOCK_STREAM)
        self._attempt.setblocking(False)
        self._deadline = self.due = now + self._options.liveness_interval
        status = self._attempt.connect_ex((self._numeric, self._dialer.port))
        if status not in (0, errno.EINPROGRESS):
            raise HandshakeError(why_unreachable(_os_error(status), self._dialer.timeout))
        self._poll(self._attempt.fileno(), select.EPOLLOUT)

    def _reach(self, attempt: socket.socket, now: float) -> None:
        """Once the plain connection is made, replace it by a ZMQ channel and send a ping."""
        status = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not status and not _is_writable(attempt):
            if now < self.due:
                return
            status = errno.ETIMEDOUT
        if status:
            raise HandshakeError(why_unreachable(_os_error(status), self._dialer.timeout))
        self.close()
        self._channel = self._dialer.channel(self._numeric)
        self._channel.connect(endpoint(self._numeric, self._dialer.port))
        self._poll(int(self._channel.getsockopt(zmq.FD)), select.EPOLLIN)
        self._unanswered, self._is_reached, self._deadline, self.due = 0, False, None, now
        self._listen(self._channel, now)

    def _listen(self, channel: Socket, now: float) -> None:
        self._hear(channel, now)
        if now < self.due:
            return
        if self._deadline is None:
            self._deadline = now + self._options.liveness_interval
        elif not self._is_reached and not self._is_second:
            # Connect once more: libzmq does not report it if nobody listened when it connected.
            self._is_second = True
            self.close()
            self._try(now)
            return
        elif now >= self._deadline:
            raise HandshakeError(
                f"it took the connection, but did not answer within {self._dialer.timeout:g} s: "
                "its process is stopped or overloaded"
            )
        with suppress(zmq.Again):  # there is no connection; _hear notices that below
            channel.send(self._ping, zmq.DONTWAIT)
            self._unanswered += 1
        self.due = min(self._deadline, now + AGAIN_SECONDS)
        self._hear(channel, now)  # sending may consume the event of an arrival

    def _hear(self, channel: Socket, now: float) -> None:
        while (events := int(channel.getsockopt(zmq.EVENTS))) & zmq.POLLIN:
            try:
                reply = answer(channel)
            except WireError as exc:
                raise HandshakeError(f"its answer is {exc}") from exc
            self._unanswered -= 1
            if self._unanswered < 0:
                raise HandshakeError("it sent what was not asked for")
            self._check(reply)
            self._is_reached, self._is_second = True, False
            if self._deadline is not None:  # else it is a second answer, to a ping sent twice
                self._misses, self._deadline = 0, None
                self.due = now + self._options.liveness_interval
        if not events & zmq.POLLOUT:
            raise HandshakeError("the connection was closed: the engine has ended, or refuses this")

    def _check(self, reply: Reply) -> None:
        """Refuse an answer that is not a ``Pong`` with the incarnation of the handshake."""
        if isinstance(reply, Refusal):
            raise PeerLostError(f"{self._name} does not serve this engine any more: {reply.reason}")
        if not isinstance(reply, Pong):
            raise HandshakeError(f"it answered a ping with a {type(reply).__name__}")
        if reply.incarnation != self._incarnation:
            raise PeerLostError(f"{self._name} was restarted: what it held is gone")

    def _miss(self, why: str, now: float) -> None:
        """Count a missed ping, close the connection, and schedule the next ping."""
        self.close()
        self._is_second = False
        self._misses += 1
        if self._misses >= self._options.liveness_misses:
            limit = self._options.liveness_misses
            raise PeerLostError(f"{self._name} missed {self._misses} of {limit} pings: {why}")
        self.due = now + QUICK_SECONDS

    def _poll(self, descriptor: int, events: int) -> None:
        self._polled.register(descriptor, events)
        self._descriptor = descriptor


class LivenessChecks:
    """Ping producers, all on one thread, which is started with the first producer."""

    def __init__(self, options: EndpointOptions) -> None:
        self._options = options
        self._poller: _Poller | None = None

    def start(
        self,
        key: PeerKey,
        numeric: str,
        incarnation: Incarnation,
        *,
        lost: Lost,
        wanted: Callable[[], bool] = always,
    ) -> Callable[[], None]:
        """Ping a producer until it is lost; return a function that ends that at once.

        ``lost`` is called at most once, on the pinging thread, and ``wanted`` there before each
        ping.

        Raises:
            OSError: no file descriptor is left for the thread.
            RuntimeError: the thread cannot be started.
        """
        if self._poller is None:
            self._poller = _Poller()
        poller = self._poller
        check = LivenessCheck(
            key, numeric, incarnation, options=self._options, polled=poller.polled, wanted=wanted
        )
        poller.post(lambda: poller.add(check, lost))
        return lambda: poller.post(lambda: poller.remove(check))

    def close(self) -> None:
        """End all checks, and return at once."""
        if self._poller is not None:
            self._poller.post(self._poller.end)
            self._poller = None


class _Poller:
    """The thread that pings. Other threads may call only ``post``."""

    def __init__(self) -> None:
        self._waker, self._wake = socket.socketpair()
        try:
            self.polled = select.epoll()
        except OSError:
            self._waker.close()
            self._wake.close()
            raise
        self._waker.setblocking(False)
        self._wake.setblocking(False)
        self.polled.register(self._wake.fileno(), select.EPOLLIN)
        self._posted: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._checks: dict[LivenessCheck, Lost] = {}
        self._polling: dict[int, LivenessCheck] = {}
        self._due: list[tuple[float, int, LivenessCheck]] = []
        """Heap of (time by ``time.monotonic``, number that orders equal times, check)."""
        self._numbers = itertools.count()
        self._ended = False
        try:
            threading.Thread(target=self._run, name="kvferry-liveness", daemon=True).start()
        except RuntimeError:
            self._close()
            raise

    def post(self, command: Callable[[], None]) -> None:
        """Run a command on the pinging thread, soon; ignored if the thread has ended."""
        with self._lock:
            if self._ended:
                return
            self._posted.append(command)
            try:
                self._waker.send(b"\0")
            except BlockingIOError:  # the socket is full: the thread will wake
                return

    def add(self, check: LivenessCheck, lost: Lost) -> None:
        self._checks[check] = lost
        self._turn(check, time.monotonic())

    def remove(self, check: LivenessCheck) -> None:
        """End a check, without calling its ``lost``; ignored if the check was ended before."""
        if self._checks.pop(check, None) is not None:
            self._polling.pop(check.descriptor, None)
            check.close()

    def end(self) -> None:
        for check in list(self._checks):
            self.remove(check)
        self._close()

    def _close(self) -> None:
        with self._lock:
            self._ended = True
            self._posted.clear()
            self.polled.close()
            self._waker.close()
            self._wake.close()

    def _run(self) -> None:
        while not self._ended:
            ready = self.polled.poll(self._pause())
            for descriptor, _ in ready:
                if descriptor == self._wake.fileno():
                    self._run_commands()
                    if self._ended:
                        return
                elif (check := self._polling.get(descriptor)) is not None:
                    self._turn(check, time.monotonic())
            self._catch_up(time.monotonic())

    def _pause(self) -> float | None:
        while self._due and not self._is_current(self._due[0]):
            heapq.heappop(self._due)
        if not self._due:
            return None
        # Rounded up: otherwise the thread would spin during the last millisecond.
        return max(math.ceil((self._due[0][0] - time.monotonic()) * 1e3), 0) / 1e3

    def _is_current(self, entry: tuple[float, int, LivenessCheck]) -> bool:
        """Return whether an entry of ``_due`` holds: its check goes on, due at the same time."""
        due, _, check = entry
        return check in self._checks and check.queued == due == check.due

    def _run_commands(self) -> None:
        try:
            self._wake.recv(1 << 12)
        except BlockingIOError:
            return
        while self._posted and not self._ended:
            self._posted.popleft()()

    def _catch_up(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            entry = heapq.heappop(self._due)
            if self._is_current(entry):
                entry[2].queued = None
                self._turn(entry[2], now)

    def _turn(self, check: LivenessCheck, now: float) -> None:
        """Let one check take its next step; an error ends only this check."""
        if now >= check.due and not check.wanted():
            self._give_up(check, None)
            return
        self._polling.pop(check.descriptor, None)
        try:
            check.turn(now)
        except PeerLostError as exc:
            self._give_up(check, exc)
            return
        except Exception as exc:
            logger.exception("a producer cannot be watched any more")
            self._give_up(check, PeerLostError(f"it cannot be watched any more: {exc!r}"))
            return
        if check.descriptor >= 0:
            self._polling[check.descriptor] = check
        if check.queued != check.due:
            check.queued = check.due
            heapq.heappush(self._due, (check.due, next(self._numbers), check))

    def _give_up(self, check: LivenessCheck, error: KVFerryError | None) -> None:
        lost = self._checks.get(check)
        self.remove(check)
        if lost is not None:
            lost(error)


def _is_writable(attempt: socket.socket) -> bool:
    """Return whether a socket's non-blocking connect is over, with success or failure."""
    polled = select.poll()
    polled.register(attempt, select.POLLOUT)
    return bool(polled.poll(0))


def _os_error(status: int) -> OSError:
    return OSError(status, os.strerror(status))
