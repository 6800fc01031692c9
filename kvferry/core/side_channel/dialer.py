"""Reach a side channel, and say what is wrong if no answer comes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Required, TypedDict

import zmq
from zmq.utils import z85

from kvferry.core.errors import AdmissionError, HandshakeError
from kvferry.core.security import OPEN, Access
from kvferry.core.side_channel.sockets import Context, Socket, encrypt, make_socket, resolved
from kvferry.core.side_channel_messages import MAX_SHORT_REPLY_BYTES

if TYPE_CHECKING:
    from kvferry.core.lifecycle.ticket import PeerKey

NO_SIDE_CHANNEL = (
    "what listens there is no side channel of kvferry (give side_channel_port, not the port of "
    "vLLM's server)"
)
STRANGER = f"{NO_SIDE_CHANNEL}, or the engine has just ended"
ENDINGS: dict[int, str] = {
    zmq.EVENT_CLOSED: "the connection could not be made again: the engine has just ended",
    zmq.EVENT_DISCONNECTED: f"the connection was closed without an answer: {STRANGER}",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: STRANGER,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: STRANGER,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refuses this engine",
}
"""Events of a ZMQ monitor socket after which no answer can come, with their meaning in words."""
UNCLEAR = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
"""Events of which only the other side may know the reason: mostly its key is another."""

HALF_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"
"""ZMTP's signature and version, after which the other side sends its security mechanism."""
GREETING_BYTES = 64
MECHANISM = slice(12, 32)
"""Where a greeting of ZMTP contains the name of the security mechanism."""


class HungUpError(HandshakeError):
    """A connection was closed before an answer came, or because the answer was too long."""


class DialerOptions(TypedDict, total=False):
    """The fields of a ``Dialer`` beside the address."""

    timeout: Required[float]
    access: Access
    key: bytes


@dataclass(slots=True, kw_only=True)
class Dialer:
    """How to reach one side channel."""

    host: str
    port: int
    timeout: float  # seconds for connecting, and for each answer
    access: Access = OPEN
    key: bytes = b""  # the public key that the side channel must have; empty if it must have none
    longest: int = MAX_SHORT_REPLY_BYTES  # a longer answer ends the connection
    numeric: list[str] = field(default_factory=list)  # empty until ``host`` has been resolved
    found: str = field(default="", init=False)  # what of these has accepted a connection last

    @classmethod
    def to(cls, address: PeerKey, timeout: float, access: Access) -> Dialer:
        """Return how to reach an address of ``PeerKey.addresses``."""
        host, port, key = address.host, address.port, address.key
        return cls(host=host, port=port, timeout=timeout, access=access, key=key)

    async def find(self) -> None:
        """Set ``found`` to the first address of the host that accepts a TCP connection.

        Raises ``AdmissionError`` if ``access`` allows none, or only one side has keys, and
        ``HandshakeError`` if there is no address, or no side channel in time.
        """
        self.access.check_server(self.key)
        if not self.numeric:
            self.numeric = await resolved(self.host, self.port, self.timeout)
        # ZMQ is not given the name: it would use only its first address (::1 for localhost), retry
        # for ever without an error, and the name could resolve to an address that was not checked.
        deadline = time.monotonic() + self.timeout
        reasons: dict[str, None] = {}
        for numeric in self._allowed():
            try:
                async with asyncio.timeout_at(deadline):
                    reader, writer = await asyncio.open_connection(numeric, self.port)
            except OSError as exc:
                reasons[_why_unreachable(exc, self.timeout)] = None
                continue
            with closing(writer):
                self._check_mechanism(await self._mechanism(reader, writer, deadline))
            self.found = numeric
            return
        raise HandshakeError(" and ".join(reasons))

    def channel(self) -> Socket:
        """Return a new, unconnected ZMQ socket for the address ``found``, with the own keys."""
        made = make_socket(
            _shared_context(),
            zmq.DEALER,
            self.found,
            MAXMSGSIZE=self.longest,
            # Keep only the last frame: libzmq limits the size of frames, not how many a message
            # has.
            CONFLATE=1,
            RECONNECT_IVL=-1,
        )
        if self.access.own is not None:
            encrypt(made, self.access.own)
            made.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(self.key))
        return made

    def why_ended(self, event: int) -> HandshakeError:
        """Return the error for a connection's end, which the monitor reported (``ENDINGS``)."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return AdmissionError(self._why_refused())
        if event in UNCLEAR and self.access.own is not None:
            return AdmissionError(
                "whoever listens there does not have the secret key of the public key "
                f"{self.key.hex()}, by which it is known here (--curve-peer of a command)"
            )
        error = HungUpError if event == zmq.EVENT_DISCONNECTED else HandshakeError
        return error(ENDINGS.get(event, STRANGER))

    def no_answer(self) -> HandshakeError:
        """Return the error for a side channel that says nothing."""
        return HandshakeError(
            f"it took the connection, but did not answer within {self.timeout:g} s: its process is "
            f"stopped or overloaded, or {NO_SIDE_CHANNEL}"
        )

    def _allowed(self) -> list[str]:
        allowed = [numeric for numeric in self.numeric if self.access.allows(numeric)]
        if not allowed:
            raise AdmissionError(
                f"it was not connected to, since {' and '.join(self.numeric)} is in none of the "
                f"networks of allowed_peers ({self.access.networks}): list one that has it there, "
                "if an engine of yours is at that address, or set allowed_peers to 'anywhere'"
            )
        return allowed

    def _why_refused(self) -> str:
        own = self.access.own
        if own is None:
            return (
                "it refuses this host: add the address by which this host reaches it to "
                "allowed_peers there"
            )
        return (
            f"it refuses this engine's key, {own.public.hex()}, or this host's address: add them "
            "to curve_peers and allowed_peers there; its log says which"
        )

    async def _mechanism(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline: float
    ) -> bytes:
        """Return a ZMQ socket's security mechanism (``NULL``, ``CURVE``); empty without one."""
        # ZMQ itself tells only one of the sides that their mechanisms differ.
        try:
            async with asyncio.timeout_at(deadline):
                writer.write(HALF_GREETING)
                heard = await reader.readexactly(GREETING_BYTES)
        except TimeoutError:
            raise self.no_answer() from None
        except (OSError, EOFError):
            return b""
        return heard[MECHANISM].rstrip(b"\0") if heard[:1] == HALF_GREETING[:1] else b""

    def _check_mechanism(self, mechanism: bytes) -> None:
        is_keyed = self.access.own is not None
        if mechanism == b"CURVE" and not is_keyed:
            raise AdmissionError(
                "its side channel is encrypted: set curve_secret_key and curve_peers here, or ask "
                "with --curve-secret-key and --curve-peer"
            )
        if mechanism == b"NULL" and is_keyed:
            raise AdmissionError(
                "its side channel is open: set curve_secret_key and curve_peers on that engine, or "
                "ask without --curve-secret-key and --curve-peer"
            )
        if not mechanism:
            raise HandshakeError(STRANGER)


def _why_unreachable(exc: OSError, timeout: float) -> str:
    """Return the error text for what connecting raised within ``timeout`` seconds."""
    if isinstance(exc, ConnectionRefusedError):
        return (
            "nobody listens there: the engine has ended, or it listens at another address "
            "(side_channel_host and side_channel_port on that engine)"
        )
    if isinstance(exc, TimeoutError):
        return f"no connection within {timeout:g} s: its host is down, or a firewall is between"
    return f"cannot be reached ({exc.strerror or exc}): is side_channel_host right there?"


_context: tuple[int, Context] | None = None
_context_lock = threading.Lock()


def _shared_context() -> Context:
    """Return the ZMQ context that this process shares; a forked child makes its own."""
    global _context
    with _context_lock:
        if _context is None or _context[0] != os.getpid():
            made: Context = zmq.Context()
            # Each watched producer has a socket; libzmq allows 1,023 by default.
            made.set(zmq.MAX_SOCKETS, made.get(zmq.SOCKET_LIMIT))
            _context = (os.getpid(), made)
        return _context[1]
