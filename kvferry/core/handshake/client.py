"""The client of a side channel: what an engine publishes, and whether it is alive."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from kvferry.core.errors import AdmissionError, HandshakeError, WireError
from kvferry.core.handshake.compatibility import EngineInfo, answer_info
from kvferry.core.handshake.dialer import Dialer, HungUpError
from kvferry.core.handshake.exchange import answered, asked, explained, unexpected
from kvferry.core.handshake.poller import Steps, call
from kvferry.core.handshake.reply_limits import ReplyLimits
from kvferry.core.handshake.shapes import EngineShape, ShapeCache
from kvferry.core.handshake.sockets import place
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
    with ExitStack() as held:
        published = call(payloads(dialer, engine, ReplyLimits(), held))
        with explained(engine, dialer):
            return answer_info(engine, published.ranks, published.ticket_key)


def payloads(dialer: Dialer, engine: str, limits: ReplyLimits, held: ExitStack) -> Steps[Payloads]:
    """Fetch what an engine's ranks publish, not decoded; raises as ``fetch``.

    No other task with these limits decodes a reply until ``held`` is closed, so a caller that plans
    meanwhile plans one engine at a time. ``HandshakeError`` is also raised if that could not begin
    before the timeout. What the caller makes of the reply is counted there (``ReplyLimits.made``).
    """
    deadline = time.monotonic() + dialer.timeout
    with explained(engine, dialer):
        published = yield from _published(dialer, engine, limits, held, deadline)
        yield from limits.turn(deadline, held)
        ranks = published.ranks()
        # Not checked here: a shape is known by its bytes, so it can only stand for itself.
        with suppress(WireError):  # whoever decodes the payloads says what is wrong with them
            if (shape := published.shape or EngineShape.of(ranks)) is not None:
                _shapes.remember(shape)
    return Payloads(ranks=ranks, ticket_key=published.reply.ticket_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """An engine's answer; ``shape`` is what was left out of it, ``None`` if the answer is whole."""

    reply: Payloads | PayloadHeads
    shape: EngineShape | None = None

    def ranks(self) -> list[bytes]:
        if self.shape is None or isinstance(self.reply, Payloads):
            return self.reply.ranks
        return self.shape.whole(self.reply)


def _published(
    dialer: Dialer, engine: str, limits: ReplyLimits, held: ExitStack, deadline: float
) -> Steps[_Published]:
    """Return an engine's answer. For a long one, a room is entered on ``held``."""
    # The first connection accepts a short answer only, and is closed if the answer is long. Then
    # the request is sent again on a second connection, once there is room for a long answer.
    known = _shapes.known()
    try:
        reply = yield from asked(dialer, _request(engine, list(known)), deadline)
        if isinstance(reply, PayloadHeads):
            shape = known.get(reply.shape)
            if shape is not None and len(shape.ends) == len(reply.ranks):
                return _Published(reply=reply, shape=shape)
            logger.warning(
                "engine %s at %s left the shape %s of %d ranks out of its answer, which it was not "
                "told to be known: it is asked for everything",
                *(engine, place(dialer.host, dialer.port), reply.shape.hex(), len(reply.ranks)),
            )
            reply = yield from asked(dialer, _request(engine), deadline)
        return _Published(reply=_payloads(reply))
    except HungUpError as exc:
        # Keep only the text: the traceback would keep all that was decoded from the answer alive
        # until a garbage collection, which would stop all threads while it frees it.
        closed = str(exc)
    yield from limits.room(deadline, held)
    dialer.longest = MAX_REPLY_BYTES
    try:
        reply = yield from asked(dialer, _request(engine), deadline)
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
    access: Access = OPEN,
    key: bytes = b"",
) -> Incarnation:
    """Return the incarnation of an engine that is alive; arguments and errors as for ``fetch``."""
    dialer = Dialer(host=host, port=port, timeout=timeout, access=access, key=key)
    return Incarnation(answered(dialer, engine, Ping(engine=engine), Pong).incarnation)


_shapes = ShapeCache()
