"""Admit or refuse the clients of a side channel (ZAP, ZeroMQ RFC 27).

libzmq asks the handler about each client, before it accepts the client's first message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import zmq

from kvferry.core.handshake.sockets import Context, Socket, encrypt
from kvferry.core.security import Access

logger = logging.getLogger(__name__)

ADDRESS = "inproc://zeromq.zap.01"
"""The address to which libzmq sends its questions, within the side channel's context."""
VERSION = b"1.0"
DOMAIN = b"kvferry"
ADMITTED, REFUSED = b"200", b"400"
"""Status codes of an answer. With 400, libzmq tells the client that it is refused, but not why."""
MAX_TOLD = 256
TELL_SECONDS = 3600.0
"""At most ``MAX_TOLD`` different texts are logged per period of this length."""


class ZapHandler:
    """Tell libzmq which clients of a side channel to admit. Used by the server's thread only.

    Args:
        context: the side channel's own context. No other server may use it, because a context has
            one handler for all its sockets.
        access: which clients are admitted.
    """

    def __init__(self, context: Context, access: Access) -> None:
        self._access = access
        self._told: set[str] = set()
        self._forgets = 0.0
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ADDRESS)

    def guard(self, channel: Socket) -> None:
        """Make libzmq ask this handler about each client of a socket.

        Also encrypts the socket if the engine has keys.

        Args:
            channel: the side channel's socket, not bound yet.
        """
        channel.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        if self._access.own is not None:
            encrypt(channel, self._access.own)
            channel.setsockopt(zmq.CURVE_SERVER, 1)

    def answer(self) -> None:
        """Receive one question of libzmq, and answer whether the client is admitted.

        Logs why a client is refused.

        Raises:
            zmq.Again: there is no question.
        """
        frames = self.socket.recv_multipart(zmq.DONTWAIT)
        request = frames[1] if len(frames) > 1 else b""
        reason = self._reason_against(frames)
        if reason:
            self.tell(f"a peer was refused: {reason}")
        verdict = REFUSED if reason else ADMITTED
        user = b"" if reason or self._access.own is None else frames[6].hex().encode()
        self.socket.send_multipart([VERSION, request, verdict, b"", user, b""], zmq.DONTWAIT)

    def reason_against_user(self, user: str) -> str:
        """Return why a client that was admitted is refused by now; empty if it is not.

        Args:
            user: the client's user id, from ``answer``: its public key in hexadecimal; empty if
                this engine has no keys.
        """
        if self._access.own is None or bytes.fromhex(user) in self._access.peers:
            return ""
        self.tell(f"a connected peer was refused: its key {user} is no longer in curve_peers")
        return f"the key {user} was removed from curve_peers there"

    def tell(self, text: str) -> None:
        """Log a text as a warning, unless it was logged recently.

        At most ``MAX_TOLD`` texts are logged per ``TELL_SECONDS``; further texts are dropped.
        """
        now = time.monotonic()
        if now >= self._forgets:
            self._forgets = now + TELL_SECONDS
            self._told.clear()
        if text not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(text)
            logger.warning("side channel: %s", text)

    def _reason_against(self, frames: Sequence[bytes]) -> str:
        if len(frames) < 6 or frames[0] != VERSION:
            return "ZMQ asked in a way that is not known here"
        address, mechanism, credentials = (
            frames[3].decode("ascii", "replace"),
            frames[5],
            frames[6:],
        )
        if not self._access.allows(address):
            return (
                f"its address, {address}, is in none of the networks of allowed_peers "
                f"({self._access.networks}): list one that has it, if an engine of yours is there"
            )
        if self._access.own is None:
            return ""
        if mechanism != b"CURVE" or len(credentials) != 1:
            return f"{address} did not show a key"
        if credentials[0] not in self._access.peers:
            return (
                f"{address} has the key {credentials[0].hex()}, which is not in curve_peers; add "
                "it, if it is one of yours"
            )
        return ""
