"""The server of a side channel: one thread per engine, which survives every request."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import zmq

from kvferry.core.errors import HandshakeError, WireError
from kvferry.core.lifecycle.rooms import Rooms
from kvferry.core.security import OPEN, Access, is_here
from kvferry.core.side_channel.compatibility import engine_info, unspoken
from kvferry.core.side_channel.connection_limits import ConnectionLimits
from kvferry.core.side_channel.sockets import (
    Context,
    Socket,
    bare,
    make_socket,
    numeric_hosts,
    port_at,
    tcp_url,
)
from kvferry.core.side_channel.waiting_follows import WaitingFollows
from kvferry.core.side_channel.zap import ZapHandler
from kvferry.core.side_channel_messages import (
    MAX_PAYLOAD_BYTES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    SPOKEN,
    Condition,
    Follow,
    Followed,
    Health,
    PayloadRequest,
    Payloads,
    Pong,
    Refusal,
    Reply,
    Request,
    Revoke,
    Revoked,
    RoomNews,
    decode_request,
    encode,
)

logger = logging.getLogger(__name__)

MAX_FRAMES = 3
"""The most frames of a request: routing id, the empty frame of a REQ client, and the message."""
USER_ID = "User-Id"
"""The property of a message that has the user id of its connection's admission (ZAP)."""
PEER_ADDRESS = "Peer-Address"
"""The property of a message that has the address of its connection's peer, by libzmq."""
MAX_REASON = 1024
MAX_PROBLEMS = 64
QUEUED_REQUESTS = 64
QUEUED_REPLIES = 4
"""The most replies that wait for one client; further replies are dropped until the client reads."""
BACKLOG = 4096
"""The most connections that wait to be accepted; beyond, clients retry after 1 s, and after 3 s."""
RECEIVE_BUFFER = 1 << 16
"""The kernel's receive buffer per client, in bytes; its content is delivered even after a close."""
SILENT_MS = 30_000
"""A client that does not answer ZMQ's heartbeats for this time is disconnected."""
PAUSE_SECONDS = 0.1


class HandshakeServer:
    """Serve what the ranks of one engine publish, on a thread of its own.

    Args:
        payloads: every rank's encoded ``RankPayload``, in rank order; checked as clients do.
        engine: id of the engine; requests for another engine are refused.
        incarnation: random number that identifies this start of the engine.
        host: address to bind, also put into tickets; peers must be able to reach it.
        port: port to bind; 0 for any free port.
        access: the engine's keys, and which clients are admitted.
        problems: returns the engine's problems as texts, for health requests; called on the
            server's thread, and must not block.
        revoke: has the engine's holds end with its next step, with ``True`` those of conversations
            only; returns the number of tickets. Called as ``problems``. ``None`` refuses that.
        ticket_key: the public key that proves the engine's tickets; empty if they have no proofs.
        rooms: the engine's rooms, which others may follow; ``None`` if it has none. Another server
            may be given the same rooms when this one is closed.

    Raises:
        HandshakeError: a client would refuse the payloads, or the address cannot be bound.
    """

    def __init__(
        self,
        payloads: Sequence[bytes],
        *,
        engine: str,
        incarnation: int,
        host: str = "127.0.0.1",
        port: int = 0,
        access: Access = OPEN,
        problems: Callable[[], Sequence[str]] = tuple,
        revoke: Callable[[bool], int] | None = None,
        ticket_key: bytes = b"",
        rooms: Rooms | None = None,
    ) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._problems = problems
        self._revoke = revoke
        self._is_keyed = access.own is not None
        self._payloads = _frame(_checked(payloads, engine, incarnation, ticket_key))
        self._pong = zmq.Frame(encode(Pong(incarnation=incarnation)), copy=True)
        self.host = bare(host)
        """The host that the server listens on, as configured, without brackets."""
        self._closing = threading.Lock()
        self._stopped = threading.Event()
        self._context: Context = zmq.Context()
        try:
            self._gate, self._watch, self._socket = _bind(self._context, self.host, port, access)
        except HandshakeError:
            self._context.destroy(0)
            raise
        self._has_rooms = rooms is not None
        self._follows = WaitingFollows(rooms if rooms is not None else Rooms(), self._send_news)
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        """The port that the server listens on."""
        self._thread = threading.Thread(target=self._serve, name="kvferry-handshake", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, free the port and wait for the thread to end. May be called twice."""
        with self._closing:
            self._stopped.set()
            self._context.term()  # wakes the thread, and waits until it has closed its socket
            self._thread.join()
            self._follows.close()

    def __enter__(self) -> HandshakeServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for each in (self._socket, self._gate.socket, self._watch.socket, self._watch.arrivals):
            poller.register(each, zmq.POLLIN)
        poller.register(self._follows.descriptor, zmq.POLLIN)
        while not self._stopped.is_set():
            try:
                self._turn(dict(poller.poll(self._follows.pause(self._watch.pause))))
            except zmq.ContextTerminated:
                break
            except Exception:
                # Whatever one request did, the next one must be served: without this thread no
                # consumer can read from the engine any more.
                logger.exception("engine %s: a handshake request failed", self._engine)
                self._stopped.wait(PAUSE_SECONDS)
        self._socket.close(0)
        self._gate.socket.close(0)
        self._watch.close()

    def _turn(self, ready: Mapping[Socket | int, int]) -> None:
        self._watch.hear()
        self._watch.look()
        if self._gate.socket in ready:
            self._gate.answer()
        if self._socket in ready:
            self._receive()
        if self._follows.descriptor in ready:
            self._follows.hear()
        self._follows.progress()

    def _receive(self) -> None:
        """Receive and answer one message; its frames beyond ``MAX_FRAMES + 1`` are dropped."""
        frames: list[bytes] = []
        while True:
            frame: Any = self._socket.recv(zmq.DONTWAIT, copy=False)
            if len(frames) <= MAX_FRAMES:
                frames.append(frame.bytes)
            if not frame.more:
                break
        self._watch.heard(frame.get(zmq.SRCFD))
        reason = self._gate.reason_against_user(frame.get(USER_ID))
        self._answer(frames, reason, frame)

    def _answer(self, frames: list[bytes], reason: str, frame: zmq.Frame) -> None:
        """Answer a request, or refuse it if there is a reason why its client is not admitted."""
        routing_id, *rest = frames
        envelope = [b""] if len(rest) > 1 and not rest[0] else []
        leading = (routing_id, *envelope)
        if reason:
            self._send(leading, _refusal(reason))
        elif len(rest) != len(envelope) + 1:
            self._send(leading, _refusal("a request is one frame, or an empty one and one"))
        elif isinstance(reply := self._reply(rest[-1], frame), Follow):
            self._follows.add(leading, reply, self._address(frame))
        else:
            self._send(leading, reply)

    def _address(self, frame: zmq.Frame) -> str:
        """Return the address of a message's connection, by its descriptor, libzmq's."""
        return self._watch.address(int(frame.get(zmq.SRCFD)))

    def _send_news(self, envelope: Sequence[bytes], news: list[RoomNews]) -> None:
        self._send(envelope, _frame(Followed(incarnation=self._incarnation, rooms=news)))

    def _send(self, envelope: Sequence[bytes], reply: zmq.Frame) -> None:
        # A ROUTER socket never blocks: it drops a reply for which the client's queue has no room.
        for frame in envelope:
            self._socket.send(frame, zmq.SNDMORE | zmq.DONTWAIT)
        self._socket.send(reply, zmq.DONTWAIT, copy=False)

    def _reply(self, message: bytes, frame: zmq.Frame) -> zmq.Frame | Follow:
        """Return the reply to a request, or the request if it may have to wait for an answer."""
        try:
            request = decode_request(message)
        except WireError as exc:
            return _refusal(f"{exc}. This side channel speaks protocol versions {SPOKEN.spoken}")
        reason = self._reason_against(request)
        if not reason and isinstance(request, Revoke):
            reason = self._reason_against_revoking(frame)
        if reason:
            logger.info("a request for engine %s was refused: %s", request.engine, reason)
            return _refusal(reason)
        if isinstance(request, Health):
            return self._condition()
        if isinstance(request, Revoke):
            return self._revoked(request)
        if isinstance(request, Follow):
            return request
        if isinstance(request, PayloadRequest):
            return self._payloads
        return self._pong

    def _condition(self) -> zmq.Frame:
        problems = [problem[:MAX_REASON] for problem in self._problems()][:MAX_PROBLEMS]
        return _frame(
            Condition(engine=self._engine, incarnation=self._incarnation, problems=problems)
        )

    def _revoked(self, request: Revoke) -> zmq.Frame:
        if self._revoke is None:
            return _refusal(f"engine {self._engine!r} does not end its holds by request")
        tickets = self._revoke(request.conversations)
        which = "conversations" if request.conversations else "all tickets"
        logger.info("engine %s: %s are revoked by request: %d", self._engine, which, tickets)
        return _frame(Revoked(engine=self._engine, incarnation=self._incarnation, tickets=tickets))

    def _reason_against_revoking(self, frame: zmq.Frame) -> str:
        if self._is_keyed:
            return ""
        # Both: the descriptor may be that of a later connection, and where libzmq knows no address,
        # a client could name any.
        address = self._address(frame)
        with suppress(zmq.ZMQError):  # without the property
            peer = str(frame.get(PEER_ADDRESS)).partition("%")[0]
            if peer == address and is_here(peer):
                return ""
        return (
            f"{address or 'who asks'} is not on the engine's host, and without keys only that host "
            "may end its holds: ask there, or set curve_secret_key and curve_peers on the engines"
        )

    def _reason_against(self, request: Request) -> str:
        if isinstance(request, Health | Revoke) and not request.engine:
            return ""
        if request.engine != self._engine:
            return f"engine {request.engine!r} is not here: this is engine {self._engine!r}"
        if isinstance(request, PayloadRequest) and request.common(SPOKEN) is None:
            return f"who asks is incompatible: {unspoken(request)}"
        if isinstance(request, Follow) and not self._has_rooms:
            return "this engine has no rooms that can be followed"
        return ""


def check_address(host: str, port: int) -> None:
    """Raise ``HandshakeError`` if a server could not bind an address now. Nothing stays bound."""
    numeric = numeric_hosts(host, port)[0]
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As ZMQ does, so that only a listening socket is in the way, not an old connection.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((numeric, port))
    except OSError as exc:
        raise HandshakeError(_why_not_bound(host, port, exc)) from exc


def _checked(
    payloads: Sequence[bytes], engine: str, incarnation: int, ticket_key: bytes
) -> Payloads:
    """Return the answer to a ``PayloadRequest``; raise if a peer would refuse it."""
    for rank, payload in enumerate(payloads):
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise HandshakeError(
                f"the payload of rank {rank} takes {len(payload)} bytes; {MAX_PAYLOAD_BYTES} are "
                "allowed, or no peer would read it: describe its memory with fewer fields and "
                "regions, or give each rank fewer layers (pipeline_parallel_size)"
            )
    info = engine_info(payloads, ticket_key)
    if (info.engine, info.incarnation) != (engine, incarnation):
        raise HandshakeError(
            f"payloads of engine {info.engine!r}, incarnation {info.incarnation}, for the side "
            f"channel of engine {engine!r}, incarnation {incarnation}"
        )
    return Payloads(ranks=list(payloads), ticket_key=ticket_key)


def _frame(reply: Reply) -> zmq.Frame:
    """Return an answer as a frame; raise if a peer would refuse it as too long."""
    data = encode(reply)
    if len(data) > MAX_REPLY_BYTES:
        raise HandshakeError(
            f"all ranks' payloads take {len(data)} bytes; {MAX_REPLY_BYTES} are allowed, or no "
            "peer would read them: use fewer ranks per engine, or describe each rank's memory "
            "with fewer fields and regions"
        )
    # Copied once for all clients: to lend Python's memory to ZMQ takes pyzmq's collector thread.
    return zmq.Frame(data, copy=True)


def _refusal(reason: str) -> zmq.Frame:
    return _frame(Refusal(reason=reason[:MAX_REASON]))


def _bind(
    context: Context, host: str, port: int, access: Access
) -> tuple[ZapHandler, ConnectionLimits, Socket]:
    """Return the handler that admits clients, the limits on connections, and the bound socket."""
    numeric = numeric_hosts(host, port)[0]
    made = make_socket(
        context,
        zmq.ROUTER,
        numeric,
        MAXMSGSIZE=MAX_REQUEST_BYTES,
        RCVHWM=QUEUED_REQUESTS,
        SNDHWM=QUEUED_REPLIES,
        RCVBUF=RECEIVE_BUFFER,
        BACKLOG=BACKLOG,
        HEARTBEAT_IVL=SILENT_MS // 3,
        HEARTBEAT_TIMEOUT=SILENT_MS,
    )
    gate = ZapHandler(context, access)
    gate.guard(made)
    watch = ConnectionLimits(context, made, access, gate.tell)
    try:
        made.bind(tcp_url(numeric, port))
    except zmq.ZMQError as exc:
        watch.close()
        raise HandshakeError(_why_not_bound(host, port, exc)) from exc
    return gate, watch, made


def _why_not_bound(host: str, port: int, exc: zmq.ZMQError | OSError) -> str:
    what = f"the side channel cannot listen at {port_at(host, port)}"
    if exc.errno == errno.EADDRINUSE:
        return (
            f"{what}: the port is in use. Set side_channel_port to a free port, or to 0 to take "
            "any; a fixed one counts up by data-parallel index"
        )
    if exc.errno == errno.EACCES:
        return f"{what}: this user may not. Set side_channel_port to 1024 or above, or to 0"
    return f"{what}: {exc}. Set side_channel_host to an address of this host"
