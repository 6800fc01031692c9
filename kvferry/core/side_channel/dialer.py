"""Reach a side channel, and find out what is wrong if no answer comes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from kvferry.core.errors import AdmissionError, HandshakeError
from kvferry.core.security import Access
from kvferry.core.side_channel.sockets import Context, Socket, encrypt, make_socket, resolved
from kvferry.core.side_channel_messages import MAX_SHORT_REPLY_BYTES

if TYPE_CHECKING:
    from kvferry.core.lifecycle.ticket import PeerKey

STRANGER = "what listens there is no side channel of kvferry, or the engine has just ended"
RIGHT_PORT = "Give side_channel_port, not the port of vLLM's server"
"""What the user of a command can correct if no side channel listens at the port."""
ENDINGS: dict[int, str] = {
    zmq.EVENT_CLOSED: "the connection could not be made again: the engine has just ended",
    zmq.EVENT_DISCONNECTED: f"the connection was closed without an answer: {STRANGER}",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: STRANGER,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: STRANGER,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refuses this engine",
}
"""Events of a ZMQ monitor socket after which no answer can come, with their meaning in words."""
UNCLEAR = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
"""Events whose reason may be known to the other side only."""

LOOK_SECONDS = 1.0
"""The most seconds to find out after a failed connection how the peer is secured."""
HALF_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"
"""ZMTP's signature and version, after which the other side sends its security mechanism."""
GREETING_BYTES = 64
MECHANISM = slice(12, 32)
"""Where a greeting of ZMTP contains the name of the security mechanism."""


class HungUpError(HandshakeError):
    """A connection was closed before an answer came, or because the answer was too long."""


@dataclass(slots=True, kw_only=True)
class Dialer:
    """How to reach one side channel."""

    host: str
    port: int
    timeout: float  # seconds for connecting, and for each answer
    access: Access
    key: bytes  # the public key that the side channel must have; empty if it must have none
    longest: int = MAX_SHORT_REPLY_BYTES  # a longer answer ends the connection
    numeric: list[str] = field(default_factory=list)  # empty until ``host`` has been resolved
    found: str = field(default="", init=False)  # what of these has accepted a connection last

    @classmethod
    def to(cls, address: PeerKey, timeout: float, access: Access) -> Dialer:
        """Return how to reach an address of ``PeerKey.addresses``."""
        host, port, key = address.host, address.port, address.key
        return cls(host=host, port=port, timeout=timeout, access=access, key=key)

    async def find(self) -> None:
        """Find the first address of the host that accepts a TCP connection; sets ``found``.

        Raises ``AdmissionError`` if ``access`` allows none, and ``HandshakeError`` if the host does
        not resolve or none accepts a connection in time.
        """
        self.access.check_server(self.key)
        if not self.numeric:
            self.numeric = await resolved(
                self.host, self.port, self.timeout, is_command=self.access.is_command
            )
        # ZMQ is not given the name: it would use only its first address (::1 for localhost), retry
        # for ever without an error, and the name could resolve to an address that was not checked.
        deadline = time.monotonic() + self.timeout
        reasons: dict[str, None] = {}
        for numeric in self._allowed():
            try:
                async with asyncio.timeout_at(deadline):
                    _, writer = await asyncio.open_connection(numeric, self.port)
                writer.close()
            except OSError as exc:
                reasons[_why_unreachable(exc, self.timeout)] = None
            else:
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

    async def why_ended(self, event: int, value: int) -> HandshakeError:
        """Return the error for a connection's end, which the monitor reported (``ENDINGS``).

        May connect once more, to find out whether the ends differ in security mechanism or keys.
        """
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return AdmissionError(self._why_refused())
        if event in UNCLEAR:
            # Only the side that first notices that the mechanisms differ gets a reason from ZMQ;
            # the other side sees the connection end.
            until = time.monotonic() + min(self.timeout, LOOK_SECONDS)
            mechanism = await _mechanism(self.found, self.port, until)
            mismatch = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            reason = self._why_unlike(mechanism, mismatch)
            if reason:
                return AdmissionError(reason)
        error = HungUpError if event == zmq.EVENT_DISCONNECTED else HandshakeError
        text = ENDINGS.get(event, STRANGER)
        hint = f". {RIGHT_PORT}" if self.access.is_command and text.endswith(STRANGER) else ""
        return error(f"{text}{hint}")

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
        whose = "the key of --curve-secret-key" if self.access.is_command else "this engine's key"
        return (
            f"it refuses {whose}, {own.public.hex()}, or this host's address: add them "
            "to curve_peers and allowed_peers there; its log says which"
        )

    def _why_unlike(self, mechanism: bytes, mismatch: bool) -> str:
        """Say how the security of the two ends differs; nothing if no difference is known."""
        is_keyed, is_command = self.access.own is not None, self.access.is_command
        if mechanism == b"CURVE" and not is_keyed:
            remedy = "set curve_secret_key and curve_peers here"
            if is_command:
                remedy = "ask with --curve-secret-key and --curve-peer"
            return f"its side channel is encrypted: {remedy}"
        if mechanism == b"NULL" and is_keyed:
            text = "its side channel is open: set curve_secret_key and curve_peers on that engine"
            if is_command:
                text += ", or ask without --curve-secret-key and --curve-peer"
            return text
        if mechanism == b"CURVE" and not mismatch:
            return (
                "whoever listens there does not have the secret key of the public key "
                f"{self.key.hex()}, by which it is known "
                f"{'to --curve-peer' if is_command else 'here'}"
            )
        return ""


async def _mechanism(numeric: str, port: int, until: float) -> bytes:
    """Return a ZMQ socket's security mechanism (``NULL``, ``CURVE``); empty if none answers."""
    try:
        async with asyncio.timeout_at(until):
            reader, writer = await asyncio.open_connection(numeric, port)
            with closing(writer):
                writer.write(HALF_GREETING)
                heard = await reader.readexactly(GREETING_BYTES)
    except (OSError, EOFError):
        return b""
    return heard[MECHANISM].rstrip(b"\0") if heard[:1] == HALF_GREETING[:1] else b""


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
