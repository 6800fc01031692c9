"""A UCP worker with what arrives at it: messages, errors of endpoints, ends of requests.

Not for two threads at once: whoever owns it has a lock.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

from kvferry.drivers.ucx import ucp
from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.message_buffers import MessageBuffer, MessageBuffers
from kvferry.drivers.ucx.messages import MAX_MESSAGE, Message, decode, encode
from kvferry.drivers.ucx.posting import Poster
from kvferry.drivers.ucx.ucp import Context, Endpoint, Ucp, status_of
from kvferry.drivers.ucx.ucp_structs import Code

_CLOSE_SECONDS = 0.5
_TURN_SECONDS = 0.0005
"""How long ``turn`` lets UCP work, unless it is told, before it lets others have the worker."""

_PAUSE_SECONDS = 0.0005


Carried = Callable[[Message, int, int], None]
"""What to do with a message that has a body: the body's address, and its bytes."""


class Worker:
    """One worker.

    Attributes:
        poster: moves bytes for whoever has the worker.
        buffers: for bodies that are to be sent.
        carried: called while the worker has its turn; the body lies there only until it returns.
            It must not raise, and uses no UCP. Other messages are ``messages``.

    Raises:
        TransportError: UCX cannot make one.
    """

    def __init__(self, library: Ucp, context: Context, poster: Poster) -> None:
        self._ucp = library
        self.poster = poster
        self.buffers = MessageBuffers()
        self.carried: Carried = _ignored
        self.handle = library.create_worker(context)
        self._arrived: deque[Message] = deque()
        self._heard = False
        self._failed: deque[tuple[int, int]] = deque()
        self._numbers = itertools.count(1)
        # What UCP still needs of messages that are on their way, and where to, by their requests.
        self._sending: dict[int, tuple[Endpoint, bytes | MessageBuffer, int]] = {}
        self._closing: list[int] = []
        # Endpoints that are to be closed, by the requests that end when nothing is on the way out.
        self._lingering: dict[int, Endpoint] = {}
        # UCP keeps their addresses.
        self._on_message = structs.ON_MESSAGE(self._note_message)
        self._on_error = structs.ON_ERROR(self._note_error)
        library.receive(self.handle, self._on_message)
        self.address = library.worker_address(self.handle)
        self.descriptor = library.descriptor(self.handle)

    def connect(self, address: bytes) -> tuple[Endpoint, int]:
        """Connect to a worker: the endpoint, and the number under which its error is reported.

        Raises:
            TransportError: it is known already that this cannot be.
        """
        number = next(self._numbers)
        made = self._ucp.create_endpoint(self.handle, address, self._on_error, number)
        return made, number

    def send(
        self,
        endpoint: Endpoint,
        message: Message,
        body: MessageBuffer | None = None,
        nbytes: int = 0,
    ) -> None:
        """Send a message.

        Args:
            endpoint: to its peer.
            message: what to say.
            body: what goes with it, from ``buffers``, and ``nbytes``: so much of it.

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
        where: bytes | int,
        nbytes: int,
    ) -> None:
        answer = self._ucp.send(endpoint, head, where, nbytes)
        code = status_of(answer)
        if code == Code.IN_PROGRESS:
            self._sending[answer] = endpoint, kept, nbytes
            return
        self._let_go(kept)
        if code:
            raise ucp.error(code, "cannot send a message")

    def _let_go(self, kept: bytes | MessageBuffer) -> None:
        if isinstance(kept, MessageBuffer):
            self.buffers.give(kept)

    def end(self, endpoint: Endpoint) -> None:
        """Close an endpoint without its peer; ``closing`` says when it is.

        Over tcp it lingers until all that was sent on it has left, or it has failed: UCX crashes
        if its peer closes it, too, while a part of a message is still to be sent on it.
        """
        if any(name.startswith("tcp/") for name in self._ucp.transports(endpoint)):
            answer = self._ucp.flush(endpoint)
            if status_of(answer) == Code.IN_PROGRESS:
                self._lingering[answer] = endpoint
                return
        self.drop(endpoint)

    def drop(self, endpoint: Endpoint) -> None:
        """Close one at once: for one on which next to nothing was sent."""
        answer = self._ucp.close_endpoint(endpoint)
        if status_of(answer) == Code.IN_PROGRESS:
            self._closing.append(answer)

    def drive(self, seconds: float) -> None:
        """Let UCP work. Beside it another thread may use another worker."""
        self.poster.drive(self.handle, seconds)

    def turn(self, seconds: float = _TURN_SECONDS) -> bool:
        """Let UCP work for a while; whether there may be more to do."""
        self.drive(seconds)
        self._sweep()
        # What is heard is answered, and then UCP has to work again.
        heard, self._heard = self._heard, False
        return heard or bool(self._failed) or not self._ucp.arm(self.handle)

    def backlog(self, endpoint: Endpoint) -> int:
        """Bytes of messages that are still on their way out there."""
        return sum(nbytes for where, _, nbytes in self._sending.values() if where == endpoint)

    @property
    def sending(self) -> bool:
        """Whether a message is still on its way out."""
        return bool(self._sending)

    @property
    def closing(self) -> bool:
        """Whether an endpoint is still being closed."""
        return bool(self._closing)

    @property
    def lingering(self) -> bool:
        """Whether an endpoint is not closed yet because something is on its way out."""
        return bool(self._lingering)

    def lingers(self, endpoint: Endpoint) -> bool:
        """Whether this one is not."""
        return endpoint in self._lingering.values()

    def messages(self) -> Iterator[Message]:
        """Those that have arrived, in order."""
        while self._arrived:
            yield self._arrived.popleft()

    def failures(self) -> Iterator[tuple[int, int]]:
        """Endpoints that have failed: number and status."""
        while self._failed:
            yield self._failed.popleft()

    def destroy(self) -> None:
        """Let it go, with everything on it."""
        for endpoint in self._lingering.values():
            self.drop(endpoint)
        self._ucp.destroy_worker(self.handle)

    def _sweep(self) -> None:
        for request in [r for r in self._sending if self._ended(r)]:
            _, kept, _ = self._sending.pop(request)
            self._let_go(kept)
        for request in [r for r in self._lingering if self._ended(r)]:
            self.drop(self._lingering.pop(request))
        self._closing = [r for r in self._closing if not self._ended(r)]

    def _ended(self, request: int) -> bool:
        if self._ucp.check(request) == Code.IN_PROGRESS:
            return False
        self._ucp.free(request)
        return True

    # UCP calls these, from within a call of this worker. What they raised would be lost.

    def _note_message(
        self,
        argument: int | None,
        header: int | None,
        header_length: int,
        data: int | None,
        length: int,
        more: int | None,
    ) -> int:
        del argument, more
        self._heard = True
        if length > MAX_MESSAGE:
            return Code.OK
        if header and header_length:
            message = decode(ctypes.string_at(header, header_length))
            if message is not None:
                self.carried(message, data or 0, length)
        elif data:
            message = decode(ctypes.string_at(data, length))
            if message is not None:
                self._arrived.append(message)
        return Code.OK

    def _note_error(self, number: int | None, endpoint: int | None, code: int) -> None:
        del endpoint
        self._failed.append((number or 0, code))


def _ignored(message: Message, body: int, nbytes: int) -> None:
    """For whom no messages with bodies are meant."""
    del message, body, nbytes


def wait_closed(worker: Worker) -> None:
    """Let a worker finish what it is sending and closing, within reason."""
    deadline = time.monotonic() + _CLOSE_SECONDS
    while worker.closing or worker.lingering or worker.sending:
        if time.monotonic() > deadline:
            return
        if not worker.turn():
            time.sleep(_PAUSE_SECONDS)
