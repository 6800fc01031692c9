"""A UCP worker, with the messages and errors that arrive at it, and its pending sends."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.drivers.ucx import ucp as statuses
from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.message_transfer import NIC_TRANSPORTS
from kvferry.drivers.ucx.messages import MAX_MESSAGE, MAX_RELAY_BYTES, Message, decode, encode
from kvferry.drivers.ucx.posting import Poster
from kvferry.drivers.ucx.ucp import Context, Endpoint, Ucp, status_of
from kvferry.drivers.ucx.ucp_structs import Code

_CLOSE_SECONDS = 0.5
_RUN_SECONDS = 0.0005
"""How long ``run_once`` lets UCP work by default before other threads can have the worker."""

_PAUSE_SECONDS = 0.0005

_POLL_TURNS = 16

_MAX_FREE_BUFFERS = 32

OnBody = Callable[[Message, int, int], None]
"""Handles a message that has a body: the message, the body's address, and its length in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageBuffer:
    """Memory for the body of a message: an array (MAX_RELAY_BYTES,), and its address."""

    array: npt.NDArray[np.uint8]
    address: int


@dataclass(slots=True, eq=False)
class MessageBufferPool:
    """A pool of buffers to reuse, since new memory is slow. Only one thread may use it at once."""

    _free: list[MessageBuffer] = field(default_factory=list)

    def take(self) -> MessageBuffer:
        """Return a buffer, which the caller owns until ``give_back``."""
        if self._free:
            return self._free.pop()
        array = np.empty(MAX_RELAY_BYTES, np.uint8)
        return MessageBuffer(array=array, address=array.ctypes.data)

    def give_back(self, buffer: MessageBuffer) -> None:
        """Put a buffer back into the pool. The caller has made sure that it is no longer in use."""
        if len(self._free) < _MAX_FREE_BUFFERS:
            self._free.append(buffer)


class Worker:
    """A UCP worker. Two threads must not use it at once: the client or server side has a lock.

    Raises:
        TransportError: UCX cannot make a worker.
        DriverError: UCX's structures differ from those in ``ucp_structs``.
    """

    def __init__(self, ucp: Ucp, context: Context, poster: Poster) -> None:
        self._ucp = ucp
        self.poster = poster
        self.buffer_pool = MessageBufferPool()
        # Called while UCP works. It must not raise or call UCP; the body is valid only during the
        # call.
        self.on_body: OnBody = self._without_body
        self.handle = ucp.create_worker(context)
        self._arrived: deque[Message] = deque()
        self._message_arrived = False
        self._failed: deque[tuple[int, int]] = deque()
        self._numbers = itertools.count(1)
        # The messages that are being sent, by UCP's requests: the endpoint, the bytes to keep until
        # the request has completed, and how many bytes they are.
        self._sending: dict[int, tuple[Endpoint, bytes | MessageBuffer, int]] = {}
        self._closing: list[int] = []
        # Endpoints that are closed as soon as everything on them has left, by their flush requests.
        self._lingering: dict[int, Endpoint] = {}
        # UCP keeps the addresses of these two, so they must live as long as the worker.
        self._message_callback = structs.ON_MESSAGE(self._on_message)
        self._error_callback = structs.ON_ERROR(self._on_error)
        ucp.set_message_handler(self.handle, self._message_callback)
        self.address = ucp.worker_address(self.handle)
        self.descriptor = ucp.descriptor(self.handle)  # readable once it is armed and has work

    def connect(self, address: bytes) -> tuple[Endpoint, int]:
        """Connect to a worker; return the endpoint, and its number in ``failures``."""
        number = next(self._numbers)
        endpoint = self._ucp.create_endpoint(self.handle, address, self._error_callback, number)
        return endpoint, number

    def send(
        self,
        endpoint: Endpoint,
        message: Message,
        body: MessageBuffer | None = None,
        nbytes: int = 0,
    ) -> None:
        """Send a message; its body goes back to ``buffer_pool``. Raise if the endpoint broke."""
        head = encode(message)
        if body is None:
            self._send(endpoint, b"", head, head, len(head))
        else:
            self._send(endpoint, head, body, body.address, nbytes)

    def _send(
        self,
        endpoint: Endpoint,
        head: bytes,
        kept: bytes | MessageBuffer,
        data: bytes | int,
        nbytes: int,
    ) -> None:
        answer = self._ucp.send(endpoint, head, data, nbytes)
        code = status_of(answer)
        if code == Code.IN_PROGRESS:
            self._sending[answer] = endpoint, kept, nbytes
            return
        self._release(kept)
        if code:
            raise statuses.error(code, "cannot send a message")

    def _release(self, kept: bytes | MessageBuffer) -> None:
        if isinstance(kept, MessageBuffer):
            self.buffer_pool.give_back(kept)

    def close_endpoint(self, endpoint: Endpoint) -> None:
        """Begin to close an endpoint, without the peer; over tcp, it *lingers* at first.

        It is ``lingering`` until everything that was sent on it has left, or it has failed; then
        ``closing`` until it is closed. An endpoint by which a NIC may still read does not linger.
        """
        names = self._ucp.transports(endpoint)
        # UCX crashes if the peer closes a tcp connection, too, while a part of a message is unsent.
        # If there is a NIC, messages go by it, even if UCX has chosen tcp for another purpose.
        by_tcp = any(name.startswith("tcp/") for name in names)
        if by_tcp and not any(name.startswith(NIC_TRANSPORTS) for name in names):
            answer = self._ucp.flush(endpoint)
            if status_of(answer) == Code.IN_PROGRESS:
                self._lingering[answer] = endpoint
                return
        self.close_endpoint_at_once(endpoint)

    def close_endpoint_at_once(self, endpoint: Endpoint) -> None:
        """Begin to close an endpoint at once; messages that are still unsent are dropped."""
        answer = self._ucp.close_endpoint(endpoint)
        if status_of(answer) == Code.IN_PROGRESS:
            self._closing.append(answer)

    def progress(self, seconds: float) -> None:
        """Let UCP work for a time, or until it has nothing to do."""
        self.poster.progress(self.handle, seconds)

    def poll(self) -> bool:
        """Deliver what has arrived; keep the interpreter's lock, and do not arm the worker.

        Return whether there may be more to do.
        """
        turns = 0
        while turns < _POLL_TURNS and self._ucp.progress_briefly(self.handle):
            turns += 1
        self._sweep()
        self._message_arrived = False
        return turns == _POLL_TURNS

    def complete(self, request: int, seconds: float, *, alone: bool) -> int:
        """Let UCP work for a time; free a request if it completes, and return its status."""
        # If nothing else is under way in the worker, each call is short.
        progress = self._ucp.progress_briefly if alone else self._ucp.progress
        end = 0.0
        while True:
            progress(self.handle)
            code: int = self._ucp.check(request)
            if code != Code.IN_PROGRESS:
                self._ucp.free(request)
                return code
            now = time.monotonic()
            end = end or now + seconds
            if now > end:
                return code

    @property
    def needs_thread(self) -> bool:
        """Whether messages are being sent, or messages or failures that arrived wait."""
        return self._message_arrived or bool(self._sending) or bool(self._failed)

    def run_once(self, seconds: float = _RUN_SECONDS) -> bool:
        """Let UCP work for a time. If nothing is left to do, arm the worker and return False."""
        self.progress(seconds)
        self._sweep()
        # The caller may answer a message, and UCP has to work again to send the answer.
        arrived, self._message_arrived = self._message_arrived, False
        return arrived or bool(self._failed) or not self._ucp.arm(self.handle)

    def backlog(self, endpoint: Endpoint) -> int:
        """Return how many bytes of messages UCP has not yet sent on an endpoint."""
        return sum(nbytes for where, _, nbytes in self._sending.values() if where == endpoint)

    @property
    def sending(self) -> bool:
        """Whether messages are still being sent."""
        return bool(self._sending)

    @property
    def closing(self) -> bool:
        """Whether an endpoint is being closed."""
        return bool(self._closing)

    @property
    def lingering(self) -> bool:
        """Whether an endpoint waits for unsent messages before it is closed."""
        return bool(self._lingering)

    def is_lingering(self, endpoint: Endpoint) -> bool:
        """Return whether this endpoint waits for unsent messages before it is closed."""
        return endpoint in self._lingering.values()

    def messages(self) -> Iterator[Message]:
        """Yield and remove the messages that have arrived and were not passed to ``on_body``."""
        while self._arrived:
            yield self._arrived.popleft()

    def failures(self) -> Iterator[tuple[int, int]]:
        """Yield and forget the number and error status of each endpoint that has failed."""
        while self._failed:
            yield self._failed.popleft()

    def destroy(self) -> None:
        """Destroy the worker with its endpoints."""
        for endpoint in self._lingering.values():
            self.close_endpoint_at_once(endpoint)
        self._ucp.destroy_worker(self.handle)

    def _sweep(self) -> None:
        for request in [r for r in self._sending if self._has_completed(r)]:
            _, kept, _ = self._sending.pop(request)
            self._release(kept)
        for request in [r for r in self._lingering if self._has_completed(r)]:
            self.close_endpoint_at_once(self._lingering.pop(request))
        self._closing = [r for r in self._closing if not self._has_completed(r)]

    def _has_completed(self, request: int) -> bool:
        if self._ucp.check(request) == Code.IN_PROGRESS:
            return False
        self._ucp.free(request)
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
        if header and header_length:
            message = decode(ctypes.string_at(header, header_length))
            if message is not None:
                self.on_body(message, data or 0, length)
        elif data:
            message = decode(ctypes.string_at(data, length))
            if message is not None:
                self._arrived.append(message)
        return Code.OK

    def _without_body(self, message: Message, body: int, nbytes: int) -> None:
        del body, nbytes
        self._arrived.append(message)

    def _on_error(self, number: int | None, endpoint: int | None, code: int) -> None:
        del endpoint
        self._failed.append((number or 0, code))


def wait_closed(worker: Worker) -> None:
    """Let a worker finish sending messages and closing endpoints, for 0.5 s at most."""
    deadline = time.monotonic() + _CLOSE_SECONDS
    while worker.closing or worker.lingering or worker.sending:
        if time.monotonic() > deadline:
            return
        if not worker.run_once():
            time.sleep(_PAUSE_SECONDS)
