"""Whether producers live: all of them are asked over their side channels, from one thread.

A producer costs two descriptors, libzmq's for its socket and for the connection. Nothing here waits
for a single producer: it is reached at the address that the handshake found, so that no name is
looked up, by a connect that does not block.
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

from kvferry.core.endpoint.handshakes import PeerKey
from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.errors import HandshakeError, KVFerryError, PeerLostError, WireError
from kvferry.core.handshake.connection import AGAIN_SECONDS
from kvferry.core.handshake.dialer import Dialer, answer, why_unreachable
from kvferry.core.handshake.sockets import Socket, endpoint
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.messages import MAX_PONG_BYTES, Ping, Pong, Refusal, Reply, encode

logger = logging.getLogger(__name__)

QUICK_SECONDS = 0.1
"""Between misses that are known at once: the connection was closed, or nobody listens any more. A
process that ended is given up after some of these, and not only after as many intervals."""

Lost = Callable[[KVFerryError], None]


class LivenessCheck:
    """One producer, which is asked again and again. Used by the thread of its ``LivenessChecks``.

    Args:
        key: where its side channel is.
        numeric: the address of it that the handshake found.
        incarnation: the start of it that is meant; another one is not it.
        options: how often, and how many misses mean that it is dead.
        polled: what the thread waits for.
    """

    def __init__(
        self,
        key: PeerKey,
        numeric: str,
        incarnation: Incarnation,
        *,
        options: EndpointOptions,
        polled: select.epoll,
    ) -> None:
        self._incarnation = incarnation
        self._options = options
        self._polled = polled
        self._numeric = numeric
        self._call = Dialer(
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
        """A connection that is being made, to see whether somebody listens."""
        self._channel: Socket | None = None
        self._descriptor = -1
        """Of one of the two."""
        self._unanswered = 0
        self._is_reached = False
        """This connection has brought an answer."""
        self._is_second = False
        """It is the second one for a question that had no answer."""
        self._deadline: float | None = None
        """Until when an answer must be there, while one is waited for."""
        self.due = 0.0
        """When the next turn is, by ``time.monotonic``, if nothing happens before."""
        self.queued: float | None = None
        """For when the thread has it in its queue."""

    @property
    def descriptor(self) -> int:
        """What is polled for this producer now; -1 for nothing."""
        return self._descriptor

    def turn(self, now: float) -> None:
        """Go on: something happened, or it is time.

        Raises:
            PeerLostError: the producer is dead, or another one.
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
        """Hang up."""
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
        """libzmq would try for ever, and not say why it fails."""
        family = socket.AF_INET6 if ":" in self._numeric else socket.AF_INET
        self._attempt = socket.socket(family, socket.SOCK_STREAM)
        self._attempt.setblocking(False)
        self._deadline = self.due = now + self._options.liveness_interval
        status = self._attempt.connect_ex((self._numeric, self._call.port))
        if status not in (0, errno.EINPROGRESS):
            raise HandshakeError(why_unreachable(_os_error(status), self._call.timeout))
        self._poll(self._attempt.fileno(), select.EPOLLOUT)

    def _reach(self, attempt: socket.socket, now: float) -> None:
        status = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not status and not _is_writable(attempt):
            if now < self.due:
                return
            status = errno.ETIMEDOUT
        if status:
            raise HandshakeError(why_unreachable(_os_error(status), self._call.timeout))
        self.close()
        self._channel = self._call.channel(self._numeric)
        self._channel.connect(endpoint(self._numeric, self._call.port))
        self._poll(int(self._channel.getsockopt(zmq.FD)), select.EPOLLIN)
        self._unanswered, self._is_reached, self._deadline, self.due = 0, False, None, now
        self._listen(self._channel, now)

    def _listen(self, channel: Socket, now: float) -> None:
        """Take what came, and ask if it is time. A socket that cannot send has no connection."""
        self._hear(channel, now)
        if now < self.due:
            return
        if self._deadline is None:
            self._deadline = now + self._options.liveness_interval
        elif not self._is_reached and not self._is_second:
            # libzmq does not say so where nobody listened any more when it connected.
            self._is_second = True
            self.close()
            self._try(now)
            return
        elif now >= self._deadline:
            raise HandshakeError(
                f"it took the connection, but did not answer within {self._call.timeout:g} s: its "
                "process is stopped or overloaded"
            )
        with suppress(zmq.Again):  # there is no connection, as is noticed below
            channel.send(self._ping, zmq.DONTWAIT)
            self._unanswered += 1
        self.due = min(self._deadline, now + AGAIN_SECONDS)
        self._hear(channel, now)  # to send may take the word that something came

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
            if self._deadline is not None:  # else it came late, to a question asked twice
                self._misses, self._deadline = 0, None
                self.due = now + self._options.liveness_interval
        if not events & zmq.POLLOUT:
            raise HandshakeError("the connection was closed: the engine has ended, or refuses this")

    def _check(self, reply: Reply) -> None:
        if isinstance(reply, Refusal):
            raise PeerLostError(f"{self._name} is not at its address any more: {reply.reason}")
        if not isinstance(reply, Pong):
            raise HandshakeError(f"it answered a ping with a {type(reply).__name__}")
        if reply.incarnation != self._incarnation:
            raise PeerLostError(f"{self._name} was restarted: what it held is gone")

    def _miss(self, why: str, now: float) -> None:
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
    """All producers that are watched, on one thread, which the first of them starts.

    Args:
        options: how often each is asked, and how many misses mean that it is dead.
    """

    def __init__(self, options: EndpointOptions) -> None:
        self._options = options
        self._poller: _Poller | None = None

    def start(
        self, key: PeerKey, numeric: str, incarnation: Incarnation, *, lost: Lost
    ) -> Callable[[], None]:
        """Watch a producer until it is lost.

        Args:
            key, numeric, incarnation: as of ``LivenessCheck``.
            lost: called once, on the thread, when it is dead or another one.

        Returns:
            What ends the watch before that; it returns at once, and may be called twice.

        Raises:
            OSError, RuntimeError: no file descriptor, or no thread, is to be had.
        """
        if self._poller is None:
            self._poller = _Poller()
        poller = self._poller
        watch = LivenessCheck(
            key, numeric, incarnation, options=self._options, polled=poller.polled
        )
        poller.post(lambda: poller.add(watch, lost))
        return lambda: poller.post(lambda: poller.remove(watch))

    def close(self) -> None:
        """Watch nobody any more; returns at once."""
        if self._poller is not None:
            self._poller.post(self._poller.end)
            self._poller = None


class _Poller:
    """The thread. All but ``post`` is for itself."""

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
        self._watches: dict[LivenessCheck, Lost] = {}
        self._polling: dict[int, LivenessCheck] = {}
        self._due: list[tuple[float, int, LivenessCheck]] = []
        self._numbers = itertools.count()
        self._ended = False
        try:
            threading.Thread(target=self._run, name="kvferry-liveness", daemon=True).start()
        except RuntimeError:
            self._close()
            raise

    def post(self, command: Callable[[], None]) -> None:
        """Run it on the thread, soon; from any thread. Nothing, if the thread has ended."""
        with self._lock:
            if self._ended:
                return
            self._posted.append(command)
            try:
                self._waker.send(b"\0")
            except BlockingIOError:  # it has been woken often enough
                return

    def add(self, watch: LivenessCheck, lost: Lost) -> None:
        self._watches[watch] = lost
        self._turn(watch, time.monotonic())

    def remove(self, watch: LivenessCheck) -> None:
        if self._watches.pop(watch, None) is not None:
            self._polling.pop(watch.descriptor, None)
            watch.close()

    def end(self) -> None:
        for watch in list(self._watches):
            self.remove(watch)
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
                    self._obey()
                    if self._ended:
                        return
                elif (watch := self._polling.get(descriptor)) is not None:
                    self._turn(watch, time.monotonic())
            self._catch_up(time.monotonic())

    def _pause(self) -> float | None:
        """Seconds until something is due; ``None`` if nothing is."""
        while self._due and not self._is_meant(self._due[0]):
            heapq.heappop(self._due)
        if not self._due:
            return None
        # Rounded up: what is not due yet would be looked at again and again until it is.
        return max(math.ceil((self._due[0][0] - time.monotonic()) * 1e3), 0) / 1e3

    def _is_meant(self, entry: tuple[float, int, LivenessCheck]) -> bool:
        """It was not put off, nor is its watch over."""
        due, _, watch = entry
        return watch in self._watches and watch.queued == due == watch.due

    def _obey(self) -> None:
        try:
            self._wake.recv(1 << 12)
        except BlockingIOError:
            return
        while self._posted and not self._ended:
            self._posted.popleft()()

    def _catch_up(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            entry = heapq.heappop(self._due)
            if self._is_meant(entry):
                entry[2].queued = None
                self._turn(entry[2], now)

    def _turn(self, watch: LivenessCheck, now: float) -> None:
        """Whatever goes wrong with one producer is none of the others' business."""
        self._polling.pop(watch.descriptor, None)
        try:
            watch.turn(now)
        except PeerLostError as exc:
            self._give_up(watch, exc)
            return
        except Exception as exc:
            logger.exception("a producer cannot be watched any more")
            self._give_up(watch, PeerLostError(f"it cannot be watched any more: {exc!r}"))
            return
        if watch.descriptor >= 0:
            self._polling[watch.descriptor] = watch
        if watch.queued != watch.due:
            watch.queued = watch.due
            heapq.heappush(self._due, (watch.due, next(self._numbers), watch))

    def _give_up(self, watch: LivenessCheck, error: KVFerryError) -> None:
        lost = self._watches.get(watch)
        self.remove(watch)
        if lost is not None:
            lost(error)


def _is_writable(attempt: socket.socket) -> bool:
    """A connection was made, or will not be."""
    polled = select.poll()
    polled.register(attempt, select.POLLOUT)
    return bool(polled.poll(0))


def _os_error(status: int) -> OSError:
    """As the system's calls would raise it."""
    return OSError(status, os.strerror(status))
