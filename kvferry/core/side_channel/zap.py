"""Admit or refuse the clients of a side channel before their first message (ZAP, ZeroMQ RFC 27)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import zmq

from kvferry.core.security import Access
from kvferry.core.side_channel.sockets import Context, Socket, encrypt

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

    No other server may use the ``context``: it has one handler for all its sockets.
    """

    def __init__(self, context: Context, access: Access) -> None:
        self._access = access
        self._told: set[str] = set()
        self._forgets = 0.0
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ADDRESS)

    def guard(self, channel: Socket) -> None:
        """Have libzmq ask about each client of a socket not bound yet; encrypt it if keyed."""
        channel.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        if self._access.own is not None:
            encrypt(channel, self._access.own)
            channel.setsockopt(zmq.CURVE_SERVER, 1)

    def answer(self) -> None:
        """Answer one question of libzmq on admission; raise ``zmq.Again`` without one."""
        frames = self.socket.recv_multipart(zmq.DONTWAIT)
        request = frames[1] if len(frames) > 1 else b""
        reason = self._reason_against(frames)
        if reason:
            self.tell(f"a peer was refused: {reason}")
        verdict = REFUSED if reason else ADMITTED
        user = b"" if reason or self._access.own is None else frames[6].hex().encode()
        self.socket.send_multipart([VERSION, request, verdict, b"", user, b""], zmq.DONTWAIT)

    def reason_against_user(self, user: str) -> str:
        """Return why a client, once admitted by this key (hex), is refused by now; or nothing."""
        if self._access.own is None or bytes.fromhex(user) in self._access.peers:
            return ""
        self.tell(f"a connected peer was refused: its key {user} is no longer in curve_peers")
        return f"the key {user} was removed from curve_peers there"

    def tell(self, text: str) -> None:
        """Log a warning once per ``TELL_SECONDS``, and at most ``MAX_TOLD`` of them."""
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
        address, (mechanism, *credentials) = frames[3].decode("ascii", "replace"), frames[5:]
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
