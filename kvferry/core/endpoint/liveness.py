"""Whether a producer lives, asked over its side channel on a thread for each."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.endpoint.shaking import PeerKey
from kvferry.core.errors import HandshakeError, KVFerryError, PeerLostError
from kvferry.core.handshake.call import Call
from kvferry.core.handshake.line import Line
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.wire import Ping, Pong, Refusal

QUICK_SECONDS = 0.1
"""Between misses that are known at once: the connection was closed, or nobody listens any more. A
process that ended is given up after some of these, and not only after as many intervals."""


class Watch:
    """Asks a producer again and again, until it is lost or the watch is stopped.

    Args:
        key: where its side channel is.
        incarnation: the start of it that is meant; another one is not it.
        options: how often, and how many misses mean that it is dead.
        lost: called once, on the watch's thread, when it is dead or another one.

    Raises:
        OSError, RuntimeError: no file descriptor, or no thread, is to be had.
    """

    def __init__(
        self,
        key: PeerKey,
        incarnation: Incarnation,
        *,
        options: EndpointOptions,
        lost: Callable[[KVFerryError], None],
    ) -> None:
        self._key = key
        self._incarnation = incarnation
        self._options = options
        self._lost = lost
        self._waker, self._wake = socket.socketpair()
        self._stopped = False
        name = f"kvferry-watch-{key.engine[:16]}"
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:
            self._waker.close()
            self._wake.close()
            raise

    def stop(self) -> None:
        """Watch no more; returns at once."""
        self._stopped = True
        self._waker.close()  # which the other end can read

    def _run(self) -> None:
        line: Line | None = None
        misses, why = 0, ""
        while not self._stopped:
            try:
                line = line or self._open()
                self._check(line)
                misses = 0
                line.rest(self._options.liveness_interval)
            except PeerLostError as exc:
                self._lost(exc)
                break
            except HandshakeError as exc:
                misses, why = misses + 1, str(exc)
                if line is not None:
                    line.close()
                line = None
                if misses >= self._options.liveness_misses:
                    self._lost(self._dead(misses, why))
                    break
                self._pause()
        if line is not None:
            line.close()
        self._waker.close()
        self._wake.close()

    def _open(self) -> Line:
        call = Call(
            host=self._key.host,
            port=self._key.port,
            timeout=self._options.liveness_interval,
            context=None,
            access=self._options.access,
            key=self._key.key,
        )
        return Line(call, self._wake)

    def _check(self, line: Line) -> None:
        """Raises ``HandshakeError`` for a miss, ``PeerLostError`` for the end."""
        reply = line.ask(Ping(engine=self._key.engine))
        if isinstance(reply, Refusal):
            raise PeerLostError(f"{self._name} is not at its address any more: {reply.reason}")
        if isinstance(reply, Pong) and reply.incarnation != self._incarnation:
            raise PeerLostError(f"{self._name} was restarted: what it held is gone")
        if reply is not None and not isinstance(reply, Pong):
            raise HandshakeError(f"it answered a ping with a {type(reply).__name__}")

    def _pause(self) -> None:
        if not self._stopped:
            self._wake.settimeout(QUICK_SECONDS)
            try:
                self._wake.recv(1)
            except TimeoutError:
                return

    @property
    def _name(self) -> str:
        return f"engine {self._key.engine}"

    def _dead(self, misses: int, why: str) -> PeerLostError:
        return PeerLostError(
            f"{self._name} missed {misses} of {self._options.liveness_misses} pings: {why}"
        )
