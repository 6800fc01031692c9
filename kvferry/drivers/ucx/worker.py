"""A UCP worker with what arrives at it: messages, errors of endpoints, completed requests."""

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
from kvferry.drivers.ucx.messages import MAX_BODY, MAX_MESSAGE, Message, decode, encode
from kvferry.drivers.ucx.posting import Poster
from kvferry.drivers.ucx.ucp import Context, Endpoint, Ucp, status_of
from kvferry.drivers.ucx.ucp_structs import Code

_CLOSE_SECONDS = 0.5
_RUN_SECONDS = 0.0005
"""How long ``run_once`` lets UCP work by default before it lets others have the worker."""

_PAUSE_SECONDS = 0.0005

_MAX_FREE_BUFFERS = 32
"""How many unused buffers a pool keeps."""

OnBody = Callable[[Message, int, int], None]
"""Handles a message that has a body: the message, the body's address, and its length in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageBuffer:
    """Memory for the body of a message.

    Attributes:
        array: (MAX_BODY,) its bytes.
        address: where they lie.
    """

    array: npt.NDArray[np.uint8]
    address: int


@dataclass(slots=True, eq=False)
class MessageBufferPool:
    """Buffers that are used again, since fresh memory is slow. Not for two threads at once."""

    _free: list[MessageBuffer] = field(default_factory=list)

    def take(self) -> MessageBuffer:
        """Return a buffer, which is the caller's until it is given back."""
        if self._free:
            return self._free.pop()
        array = np.empty(MAX_BODY, np.uint8)
        return MessageBuffer(array=array, address=array.ctypes.data)

    def give_back(self, buffer: MessageBuffer) -> None:
        """Take back a buffer that nothing uses any more."""
        if len(self._free) < _MAX_FREE_BUFFERS:
            self._free.append(buffer)


class Worker:
    """A worker. Not for use by two threads at once: its owner has a lock.

    Args:
        ucp: the library.
        context: the transport's context.
        poster: the loops that post operations.

    Attributes:
        poster: the loops that post operations.
        buffer_pool: buffers for bodies that are to be sent.
        on_body: called from ``run_once`` for each message that has a body, which lies there only
            until the call returns. It must not raise, and must not use UCP. ``messages`` has the
            messages without a body.
        handle: UCP's handle.
        address: UCX's address of the worker, for peers.
        descriptor: becomes readable when the worker, once armed, has something to do.

    Raises:
        TransportError: UCX cannot make a worker.
    """

    def __init__(self, ucp: Ucp, context: Context, poster: Poster) -> None:
        self._ucp = ucp
        self.poster = poster
        self.buffer_pool = MessageBufferPool()
        self.on_body: OnBody = _ignore_body
        self.handle = ucp.create_worker(context)
        self._arrived: deque[Message] = deque()
        self._message_arrived = False
        self._failed: deque[tuple[int, int]] = deque()
        self._numbers = itertools.count(1)
        # By requests of messages that are being sent: the endpoint, what UCP still needs of the
        # message, and its length.
        self._sending: dict[int, tuple[Endpoint, bytes | MessageBuffer, int]] = {}
        self._closing: list[int] = []
        # Endpoints that are closed as soon as everything on them has left, by their flush requests.
        self._lingering: dict[int, Endpoint] = {}
        # UCP keeps the addresses of these two, so they must live as long as the worker.
        self._message_callback = structs.ON_MESSAGE(self._on_message)
        self._error_callback = structs.ON_ERROR(self._on_error)
        ucp.set_message_handler(self.handle, self._message_callback)
        self.address = ucp.worker_address(self.handle)
        self.descriptor = ucp.descriptor(self.handle)

    def connect(self, address: bytes) -> tuple[Endpoint, int]:
        """Connect to a worker.

        Args:
            address: UCX's address of the worker.

        Returns:
            The endpoint, and the number under which ``failures`` reports its error.

        Raises:
            TransportError: it is known already that it cannot be reached.
        """
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
        """Send a message.

        Args:
            endpoint: to its receiver.
            message: the message.
            body: its body, from ``buffer_pool``; goes back there when it has been sent.
            nbytes: how many bytes of the body to send.

        Raises:
            TransportError: the endpoint is broken.
        """
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
        """Close an endpoint without its peer's help. ``closing`` is true until it is closed.

        Over tcp it lingers until all that was sent on it has left, or it has failed: UCX crashes
        if its peer closes it, too, while a part of a message is still to be sent on it.
        """
        if any(name.startswith("tcp/") for name in self._ucp.transports(endpoint)):
            answer = self._ucp.flush(endpoint)
            if status_of(answer) == Code.IN_PROGRESS:
                self._lingering[answer] = endpoint
                return
        self.close_endpoint_at_once(endpoint)

    def close_endpoint_at_once(self, endpoint: Endpoint) -> None:
        """Close an endpoint without waiting, which is for one on which next to nothing was sent."""
        answer = self._ucp.close_endpoint(endpoint)
        if status_of(answer) == Code.IN_PROGRESS:
            self._closing.append(answer)

    def progress(self, seconds: float) -> None:
        """Let UCP work for a time. Another thread may use another worker meanwhile."""
        self.poster.progress(self.handle, seconds)

    def run_once(self, seconds: float = _RUN_SECONDS) -> bool:
        """Let UCP work for a time, and free what has completed.

        Returns:
            Whether there may be more to do at once; if not, ``descriptor`` is armed.
        """
        self.progress(seconds)
        self._sweep()
        # A message is about to be answered, after which UCP has to work again.
        arrived, self._message_arrived = self._message_arrived, False
        return arrived or bool(self._failed) or not self._ucp.arm(self.handle)

    def backlog(self, endpoint: Endpoint) -> int:
        """Return how many bytes of messages are still to leave on an endpoint."""
        return sum(nbytes for where, _, nbytes in self._sending.values() if where == endpoint)

    @property
    def sending(self) -> bool:
        """Whether a message is still to leave."""
        return bool(self._sending)

    @property
    def closing(self) -> bool:
        """Whether an endpoint is being closed."""
        return bool(self._closing)

    @property
    def lingering(self) -> bool:
        """Whether an endpoint is not closed yet because something is still to leave on it."""
        return bool(self._lingering)

    def is_lingering(self, endpoint: Endpoint) -> bool:
        """Return whether this endpoint is not closed yet, as ``lingering``."""
        return endpoint in self._lingering.values()

    def messages(self) -> Iterator[Message]:
        """Yield the messages that have arrived, in order, and remove them."""
        while self._arrived:
            yield self._arrived.popleft()

    def failures(self) -> Iterator[tuple[int, int]]:
        """Yield the number and the status of each endpoint that has failed, and remove it."""
        while self._failed:
            yield self._failed.popleft()

    def destroy(self) -> None:
        """Destroy the worker, with everything on it."""
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

    # UCP calls these, from within a call of this worker. ctypes would swallow what they raise.

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

    def _on_error(self, number: int | None, endpoint: int | None, code: int) -> None:
        del endpoint
        self._failed.append((number or 0, code))


def _ignore_body(message: Message, body: int, nbytes: int) -> None:
    """Drop a message with a body, of which the worker's owner expects none."""
    del message, body, nbytes


def wait_closed(worker: Worker) -> None:
    """Let a worker finish what it is sending and closing, for half a second at most."""
    deadline = time.monotonic() + _CLOSE_SECONDS
    while worker.closing or worker.lingering or worker.sending:
        if time.monotonic() > deadline:
            return
        if not worker.run_once():
            time.sleep(_PAUSE_SECONDS)
