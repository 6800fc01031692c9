"""The client of a side channel. Its functions block until a timeout; any thread may call them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from kvferry.core.errors import AdmissionError, HandshakeError, WireError
from kvferry.core.handshake.compatibility import EngineInfo, answer_info
from kvferry.core.handshake.dialer import Dialer, HungUpError
from kvferry.core.handshake.exchange import asked, explained, unexpected
from kvferry.core.handshake.reply_limits import ReplyLimits
from kvferry.core.handshake.shapes import EngineShape, ShapeCache
from kvferry.core.handshake.sockets import Context, place
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.security import OPEN, Access
from kvferry.core.side_channel_messages import (
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


def fetch(
    host: str,
    port: int,
    engine: str,
    *,
    timeout: float,
    context: Context | None = None,
    access: Access = OPEN,
    key: bytes = b"",
) -> EngineInfo:
    """Ask an engine's side channel for what the engine's ranks publish, and return the answer.

    ``host``, ``port`` and ``key`` (empty: not encrypted) are as in the engine's tickets. The
    timeout is in seconds, for the whole call. Without a ``context``, the process shares one.

    Raises:
        IncompatibleError: the two builds have no protocol version in common.
        RefusedError: the side channel refuses the request; the message says why.
        AdmissionError: one of the two engines does not admit the key or address of the other.
        HandshakeError: there was no valid answer; the message says where, why and what to do.
    """
    call = Dialer(host=host, port=port, timeout=timeout, context=context, access=access, key=key)
    with fetching(call, engine, ReplyLimits()) as fetched:
        return fetched.info


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReply:
    """What an engine publishes, the bytes of each encoded payload, and who answered."""

    info: EngineInfo
    sizes: tuple[int, ...]
    numeric: str


@contextmanager
def fetching(call: Dialer, engine: str, reading: ReplyLimits) -> Iterator[EngineReply]:
    """Fetch what an engine's ranks publish; other handshakes wait until the ``with`` block ends.

    From decoding to the end of the block, no other handshake with the same ``reading`` decodes, so
    a caller that plans inside the block plans one engine at a time. Raises as ``fetch``, or
    ``HandshakeError`` if other replies were being decoded until the timeout.
    """
    deadline = time.monotonic() + call.timeout
    with ExitStack() as turn:
        with explained(engine, call), ExitStack() as long:
            published = _published(call, engine, reading, long, deadline)
            turn.enter_context(reading.turn(deadline))
            ranks = published.payloads()
            info = answer_info(engine, ranks, published.reply.ticket_key)
            shape = published.shape or EngineShape.of(ranks)
            if shape is not None:
                _shapes.remember(shape)
            sizes = tuple(map(len, ranks))
            del published, ranks, shape
        yield EngineReply(info=info, sizes=sizes, numeric=call.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """An engine's answer; ``shape`` is what was left out of it, ``None`` if the answer is whole."""

    reply: Payloads | PayloadHeads
    shape: EngineShape | None = None

    def payloads(self) -> list[bytes]:
        if self.shape is None or isinstance(self.reply, Payloads):
            return self.reply.ranks
        return self.shape.whole(self.reply)


@contextmanager
def receiving(call: Dialer, engine: str, reading: ReplyLimits) -> Iterator[Payloads]:
    """Fetch what an engine's ranks publish, undecoded, to pass it on to other processes.

    Until the ``with`` block ends, no other handshake with the same ``reading`` receives a reply
    beyond its limits; the caller counts the reply there (``ReplyLimits.made``) inside the block.
    Raises as ``fetching``.
    """
    deadline = time.monotonic() + call.timeout
    with ExitStack() as turn:
        with explained(engine, call):
            published = _published(call, engine, reading, turn, deadline)
            turn.enter_context(reading.turn(deadline))
            ranks = published.payloads()
            # Not checked here: a shape is known by its bytes, so it can only stand for itself.
            with suppress(WireError):  # whoever decodes the payloads says what is wrong with them
                if (shape := published.shape or EngineShape.of(ranks)) is not None:
                    _shapes.remember(shape)
        yield Payloads(ranks=ranks, ticket_key=published.reply.ticket_key)


def _published(
    call: Dialer, engine: str, reading: ReplyLimits, long: ExitStack, deadline: float
) -> _Published:
    """Return an engine's answer. For a long one, a room is entered on ``long``."""
    # The first connection accepts a short answer only, and is closed if the answer is long. Then
    # the request is sent again on a second connection, once there is room for a long answer.
    known = _shapes.known()
    try:
        reply = asked(call, _request(engine, list(known)), deadline)
        if isinstance(reply, PayloadHeads):
            shape = known.get(reply.shape)
            if shape is not None and len(shape.ends) == len(reply.ranks):
                return _Published(reply=reply, shape=shape)
            logger.warning(
                "engine %s at %s left the shape %s of %d ranks out of its answer, which it was not "
                "told to be known: it is asked for everything",
                *(engine, place(call.host, call.port), reply.shape.hex(), len(reply.ranks)),
            )
            reply = asked(call, _request(engine), deadline)
        return _Published(reply=_payloads(reply))
    except HungUpError as exc:
        # Keep only the text: the traceback would keep all that was decoded from the answer alive
        # until a garbage collection, which would stop all threads while it frees it.
        closed = str(exc)
    long.enter_context(reading.room(deadline))
    call.longest = MAX_REPLY_BYTES
    try:
        reply = asked(call, _request(engine), deadline)
    except AdmissionError:
        raise
    except HandshakeError as exc:
        raise HandshakeError(
            f"{closed}, or its answer has more than {MAX_REPLY_BYTES} bytes"
        ) from exc
    return _Published(reply=_payloads(reply))


def _request(engine: str, known: Sequence[bytes] = ()) -> PayloadRequest:
    return PayloadRequest(
        oldest=OLDEST_PROTOCOL, newest=NEWEST_PROTOCOL, engine=engine, known=list(known)
    )


def _payloads(reply: Reply) -> Payloads:
    if not isinstance(reply, Payloads):
        raise unexpected(reply)
    return reply


def ping(
    host: str,
    port: int,
    engine: str,
    *,
    timeout: float,
    context: Context | None = None,
    access: Access = OPEN,
    key: bytes = b"",
) -> Incarnation:
    """Return the incarnation of an engine that is alive; arguments and errors as for ``fetch``."""
    call = Dialer(host=host, port=port, timeout=timeout, context=context, access=access, key=key)
    with explained(engine, call):
        reply = asked(call, Ping(engine=engine))
        if not isinstance(reply, Pong):
            raise unexpected(reply)
        return Incarnation(reply.incarnation)


_shapes = ShapeCache()
