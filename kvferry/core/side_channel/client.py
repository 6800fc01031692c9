"""The client of a side channel: what an engine publishes, and whether it is alive.

What other engines publish is large and untrusted. Each reply is bounded by its message's limits and
``work_budget``; ``ReplyLimits`` bounds many hostile ones together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress

from kvferry.core.errors import AdmissionError, HandshakeError, WireError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lru_cache import LRUCache
from kvferry.core.security import OPEN, Access
from kvferry.core.side_channel.compatibility import EngineInfo, engine_info
from kvferry.core.side_channel.connection import answered, asked, explained, unexpected
from kvferry.core.side_channel.dialer import Dialer, HungUpError
from kvferry.core.side_channel.poller import Steps, Task, call, running, wait_for
from kvferry.core.side_channel.shapes import EngineShape
from kvferry.core.side_channel.sockets import port_at
from kvferry.core.side_channel_messages import (
    MAX_KNOWN_SHAPES,
    MAX_REPLY_BYTES,
    NEWEST_PROTOCOL,
    OLDEST_PROTOCOL,
    PayloadHeads,
    PayloadRequest,
    Payloads,
    Ping,
    Pong,
    Reply,
)

logger = logging.getLogger(__name__)

MAX_ALL_SHAPE_BYTES = 1 << 23
"""The most bytes of all shapes that are remembered."""
MAX_LONG_REPLIES = 2
"""The most long replies that are received, or wait to be decoded, at a time."""
MAX_UNUSED_BYTES = 1 << 24
"""While more bytes of decoded replies than this wait to be used, no further reply is decoded."""


def ping(
    host: str,
    port: int,
    engine: str,
    *,
    timeout: float,
    access: Access = OPEN,
    key: bytes = b"",
) -> Incarnation:
    """Return the incarnation of an engine that is alive; arguments and errors as for ``fetch``."""
    dialer = Dialer(host=host, port=port, timeout=timeout, access=access, key=key)
    return Incarnation(answered(dialer, engine, Ping(engine=engine), Pong).incarnation)


def fetch(
    host: str,
    port: int,
    engine: str,
    *,
    timeout: float,
    access: Access = OPEN,
    key: bytes = b"",
) -> EngineInfo:
    """Ask an engine's side channel for what the engine's ranks publish, and return the answer.

    Blocks. ``host``, ``port`` and ``key`` (empty: not encrypted) are as in the engine's tickets.
    The timeout is in seconds, for the whole call.

    Raises:
        IncompatibleError: the two builds have no protocol version in common.
        RefusedError: the side channel refuses the request; the message says why.
        AdmissionError: one of the two engines does not admit the key or address of the other.
        HandshakeError: there was no valid answer; the message says where, why and what to do.
    """
    dialer = Dialer(host=host, port=port, timeout=timeout, access=access, key=key)
    published = call(payloads(dialer, engine, ReplyLimits()))
    with explained(engine, dialer):
        return engine_info(published.ranks, published.ticket_key, engine=engine)


def payloads(dialer: Dialer, engine: str, limits: ReplyLimits) -> Steps[Payloads]:
    """Fetch what an engine's ranks publish, not decoded; raises as ``fetch``.

    The caller tells ``limits.made`` of it before it waits for anything else. ``HandshakeError`` is
    also raised if others' replies were not used before the timeout.
    """
    deadline = time.monotonic() + dialer.timeout
    with explained(engine, dialer), ExitStack() as held:
        known = _shapes.items()
        reply = yield from _answer(dialer, engine, known, limits, held, deadline)
        yield from limits.wait_to_decode(deadline)
        shape: EngineShape | None = None
        if isinstance(reply, PayloadHeads):
            shape = known[reply.shape]
            ranks = shape.whole(reply)
        else:
            ranks = reply.ranks
            # Not checked here: a shape is known by its bytes, so it can only stand for itself.
            with suppress(WireError):  # whoever decodes the payloads says what is wrong with them
                shape = EngineShape.of(ranks)
        if shape is not None:
            _shapes.put(shape.digest, shape, sum(map(len, shape.ends)))
    return Payloads(ranks=ranks, ticket_key=reply.ticket_key)


def _answer(
    dialer: Dialer,
    engine: str,
    known: Mapping[Hashable, EngineShape],
    limits: ReplyLimits,
    held: ExitStack,
    deadline: float,
) -> Steps[Payloads | PayloadHeads]:
    """Return an engine's answer, maybe less its shape; a long one counts while ``held`` is open."""
    # The first connection accepts a short answer only, and is closed if the answer is long. Then
    # the request is sent again on a second connection, once a long answer may be received.
    try:
        digests = [shape.digest for shape in known.values()]
        reply = yield from asked(dialer, _request(engine, digests), deadline)
        if isinstance(reply, PayloadHeads):
            shape = known.get(reply.shape)
            if shape is not None and len(shape.ends) == len(reply.ranks):
                return reply
            logger.warning(
                "engine %s at %s left the shape %s of %d ranks out of its answer, which it was not "
                "told to be known: it is asked for everything",
                *(engine, port_at(dialer.host, dialer.port), reply.shape.hex(), len(reply.ranks)),
            )
            reply = yield from asked(dialer, _request(engine), deadline)
        return _whole(reply)
    except HungUpError as exc:
        # Keep only the text: the traceback would keep all that was decoded from the answer alive
        # until a garbage collection, which would stop all threads while it frees it.
        closed = str(exc)
    yield from limits.wait_to_receive(deadline, held)
    dialer.longest = MAX_REPLY_BYTES
    try:
        return _whole((yield from asked(dialer, _request(engine), deadline)))
    except AdmissionError:
        raise
    except HandshakeError as exc:
        raise HandshakeError(
            f"{closed}, or its answer has more than {MAX_REPLY_BYTES} bytes"
        ) from exc


def _request(engine: str, known: Sequence[bytes] = ()) -> PayloadRequest:
    return PayloadRequest(
        oldest=OLDEST_PROTOCOL, newest=NEWEST_PROTOCOL, engine=engine, known=list(known)
    )


def _whole(reply: Reply) -> Payloads:
    if not isinstance(reply, Payloads):
        raise unexpected(reply)
    return reply


_shapes = LRUCache[EngineShape](MAX_KNOWN_SHAPES, MAX_ALL_SHAPE_BYTES)
"""The shapes of the engines that were met last, by digest."""


class ReplyLimits:
    """Limit what tasks receive and decode of other engines' replies.

    Two are never decoded at a time: tasks have one thread, and do not wait while they decode. Any
    thread may call ``used``. Deadlines are by ``time.monotonic``; ``HandshakeError`` is raised when
    they pass.
    """

    def __init__(self) -> None:
        self._long = 0
        self._unused = 0
        self._waiting: set[Task] = set()
        self._lock = threading.Lock()

    def wait_to_receive(self, deadline: float, held: ExitStack) -> Steps[None]:
        """Wait until a long reply may be received; it counts until ``held`` is closed."""
        if not (yield from self._wait(lambda: self._long < MAX_LONG_REPLIES, deadline)):
            raise HandshakeError(
                f"its reply is long, and of such ones {MAX_LONG_REPLIES} are received at once: "
                "others took until the deadline; raise handshake_timeout if they are yours"
            )
        self._long += 1
        held.callback(self._received)

    def wait_to_decode(self, deadline: float) -> Steps[None]:
        """Wait until a reply may be decoded."""
        if not (yield from self._wait(lambda: self._unused <= MAX_UNUSED_BYTES, deadline)):
            raise HandshakeError(
                "it answered, but the replies of other engines were being read until the "
                "deadline; raise handshake_timeout if they are yours"
            )

    def made(self, nbytes: int) -> None:
        """Count the bytes of a decoded reply as not used yet."""
        with self._lock:
            self._unused += nbytes

    def used(self, nbytes: int) -> None:
        """Subtract the bytes given to ``made`` for a reply, once it was used or dropped."""
        with self._lock:
            self._unused -= nbytes
        self._wake()

    def _wait(self, is_so: Callable[[], bool], deadline: float) -> Steps[bool]:
        task = running()
        with self._lock:
            self._waiting.add(task)
        try:
            return (yield from wait_for(is_so, deadline))
        finally:
            with self._lock:
                self._waiting.discard(task)

    def _received(self) -> None:
        self._long -= 1
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for task in waiting:
            task.wake()
