"""A UCP worker, with the messages and errors that arrive at it, and its pending sends."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.drivers.ucx import ucp as statuses
from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.messages import MAX_MESSAGE, NIC_TRANSPORTS, Message, decode, encode
from kvferry.drivers.ucx.posting import Poster
from kvferry.drivers.ucx.ucp import Context, Endpoint, Ucp, status_of
from kvferry.drivers.ucx.ucp_structs import Code

_CLOSE_SECONDS = 0.5
_RUN_SECONDS = 0.0005
"""How long ``run_once`` lets UCP work by default before other threads can have the worker."""

_PAUSE_SECONDS = 0.0005

_POLL_TURNS = 16

Bytes = npt.NDArray[np.uint8]

OnBody = Callable[[Message, int, int], None]
"""Handles a message that has a body: the message, the body's address, and its length in bytes.

It is called while UCP works: it must not raise or call UCP. The body is valid during the call.
"""

_endpoint_numbers = itertools.count(1)


class Worker:
    """A UCP worker. Two threads must not use it at once: the client or server side has a lock.

    Raises ``TransportError`` if UCX cannot make one, ``DriverError`` as ``Ucp.create_worker``.
    """

    def __init__(self, ucp: Ucp, context: Context, poster: Poster) -> None:
        self.ucp = ucp
        self.poster = poster
        # Without it, messages are taken without their bodies.
        self.on_body: OnBody | None = None
        self.closing: list[int] = []  # the requests of endpoints that are being closed
        # The endpoints to close when everything on them has left, by their flush requests.
        self.lingering: dict[int, Endpoint] = {}
        # By UCP's request: the endpoint, and the bytes to keep until it has completed.
        self.sending: dict[int, tuple[Endpoint, bytes | Bytes]] = {}
        self._arrived: deque[Message] = deque()
        self._message_arrived = False
        self._failed: deque[tuple[int, int]] = deque()
        # UCP keeps the addresses of these two, so they must live as long as the worker.
        self._message_callback = structs.ON_MESSAGE(self._on_message)
        self._error_callback = structs.ON_ERROR(self._on_error)
        # The descriptor is readable once the worker is armed and has work.
        self.handle, self.address, self.descriptor = ucp.create_worker(
            context, self._message_callback
        )

    def connect(self, address: bytes) -> tuple[Endpoint, int]:
        """Connect to a worker; return the endpoint, and its number in ``failures``."""
        number = next(_endpoint_numbers)
        endpoint = self.ucp.create_endpoint(self.handle, address, self._error_callback, number)
        return endpoint, number

    def send(self, endpoint: Endpoint, message: Message, body: Bytes | None = None) -> None:
        """Send a message, with a body if given; raise if the endpoint broke."""
        encoded = encode(message)
        if body is None:
            kept: bytes | Bytes = encoded
            answer = self.ucp.send(endpoint, b"", encoded, len(encoded))
        else:
            kept = body
            answer = self.ucp.send(endpoint, encoded, body.ctypes.data, len(body))
        code = status_of(answer)
        if code == Code.IN_PROGRESS:
            self.sending[answer] = endpoint, kept
        elif code:
            raise statuses.error(code, "cannot send a message")

    def close_endpoint(self, endpoint: Endpoint, *, at_once: bool = False) -> None:
        """Begin to close an endpoint, without the peer; over tcp, it *lingers* at first.

        It is ``lingering`` until everything that was sent on it has left, or it has failed; then
        ``closing`` until it is closed. An endpoint by which a NIC may still read does not linger.
        With ``at_once``, none does, and messages that are still unsent are dropped.
        """
        if not at_once and self._sends_by_tcp(endpoint):
            answer = self.ucp.flush(endpoint)
            if status_of(answer) == Code.IN_PROGRESS:
                self.lingering[answer] = endpoint
                return
        answer = self.ucp.close_endpoint(endpoint)
        if status_of(answer) == Code.IN_PROGRESS:
            self.closing.append(answer)

    def _sends_by_tcp(self, endpoint: Endpoint) -> bool:
        # UCX crashes if the peer closes a tcp connection, too, while a part of a message is unsent.
        # If there is a NIC, messages go by it, even if UCX has chosen tcp for another purpose.
        names = self.ucp.transports(endpoint)
        by_tcp = any(name.startswith("tcp/") for name in names)
        return by_tcp and not any(name.startswith(NIC_TRANSPORTS) for name in names)

    def progress(self, seconds: float) -> None:
        """Let UCP work for a time, or until it has nothing to do."""
        self.poster.progress(self.handle, seconds)

    def poll(self) -> bool:
        """Deliver what has arrived; keep the interpreter's lock, and do not arm the worker.

        Return whether there may be more to do.
        """
        turns = 0
        while turns < _POLL_TURNS and self.ucp.progress(self.handle, briefly=True):
            turns += 1
        self._sweep()
        self._message_arrived = False
        return turns == _POLL_TURNS

    def complete(self, request: int, seconds: float, *, alone: bool) -> int:
        """Let UCP work for a time; free a request if it completes, and return its status."""
        end = 0.0
        while True:
            # If nothing else is under way in the worker, each call is short.
            self.ucp.progress(self.handle, briefly=alone)
            code: int = self.ucp.check(request)
            if code != Code.IN_PROGRESS:
                self.ucp.free(request)
                return code
            now = time.monotonic()
            end = end or now + seconds
            if now > end:
                return code

    @property
    def needs_thread(self) -> bool:
        """Whether messages are being sent, or messages or failures that arrived wait."""
        return self._message_arrived or bool(self.sending) or bool(self._failed)

    def run_once(self, seconds: float = _RUN_SECONDS) -> bool:
        """Let UCP work for a time. If nothing is left to do, arm the worker and return False."""
        self.progress(seconds)
        self._sweep()
        # The caller may answer a message, and UCP has to work again to send the answer.
        arrived, self._message_arrived = self._message_arrived, False
        return arrived or bool(self._failed) or not self.ucp.arm(self.handle)

    def backlog(self, endpoint: Endpoint) -> int:
        """Return how many bytes of messages UCP has not yet sent on an endpoint."""
        return sum(len(kept) for where, kept in self.sending.values() if where == endpoint)

    def messages(self) -> Iterator[Message]:
        """Yield and remove the messages that have arrived and were not passed to ``on_body``."""
        while self._arrived:
            yield self._arrived.popleft()

    def failures(self) -> Iterator[tuple[int, int]]:
        """Yield and forget the number and error status of each endpoint that has failed."""
        while self._failed:
            yield self._failed.popleft()

    @property
    def finished(self) -> bool:
        """Whether all messages have been sent, and all closed endpoints are closed."""
        return not (self.closing or self.lingering or self.sending)

    def destroy(self) -> None:
        """Destroy the worker with its endpoints."""
        for endpoint in self.lingering.values():
            self.close_endpoint(endpoint, at_once=True)
        self.ucp.destroy_worker(self.handle)

    def _sweep(self) -> None:
        for request in [r for r in self.sending if self._has_completed(r)]:
            del self.sending[request]
        for request in [r for r in self.lingering if self._has_completed(r)]:
            self.close_endpoint(self.lingering.pop(request), at_once=True)
        self.closing = [r for r in self.closing if not self._has_completed(r)]

    def _has_completed(self, request: int) -> bool:
        if self.ucp.check(request) == Code.IN_PROGRESS:
            return False
        self.ucp.free(request)
        return True

    # UCP calls these two from within a call of this worker. They must not raise: ctypes would only
    # print the exception.

    def _on_message(
        self,
        argument: int | None,
        header: int | None,
        header_length: int,
        data: int | None,
        length: int,
        more: int | None,
    ) -> int:
        del argument, more
        self._message_arrived = True
        if length > MAX_MESSAGE:
            return Code.OK
        has_body = bool(header and header_length)
        place, nbytes = (header, header_length) if has_body else (data, length)
        message = decode(ctypes.string_at(place, nbytes)) if place else None
        if message is None:
            return Code.OK
        if has_body and self.on_body is not None:
            self.on_body(message, data or 0, length)
        else:
            self._arrived.append(message)
        return Code.OK

    def _on_error(self, number: int | None, endpoint: int | None, code: int) -> None:
        del endpoint
        self._failed.append((number or 0, code))


def finish(workers: Sequence[Worker]) -> None:
    """Let workers send their messages and close their endpoints, for 0.5 s at most."""
    # All at once: one may be connected to another.
    deadline = time.monotonic() + _CLOSE_SECONDS
    while not all(worker.finished for worker in workers) and time.monotonic() < deadline:
        if not any([worker.run_once() for worker in workers]):
            time.sleep(_PAUSE_SECONDS)
