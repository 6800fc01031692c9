"""The server side of a transport: connections of clients, their messages, and withdrawals.

A client's reads may be carried out by the server's UCX, which checks nothing. So before memory is
deregistered, the server tells every client that its registration is *withdrawn*, and each client
confirms that once no transfer uses it any more. A client that does not in time is disconnected;
then the server drops what still arrives from it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import Notification
from kvferry.core.transport.addresses import Instance
from kvferry.drivers.ucx import messages
from kvferry.drivers.ucx.address import KeyId
from kvferry.drivers.ucx.messages import MAX_BACKLOG, MAX_WITHDRAWN, check_rows, consecutive
from kvferry.drivers.ucx.progress import ProgressTarget
from kvferry.drivers.ucx.ucp import Endpoint
from kvferry.drivers.ucx.worker import Worker
from kvferry.drivers.ucx_format import is_known

_NOTIFICATION_BYTES = 256
"""About how many bytes a kept notification takes besides its payload."""

MAX_CONNECTIONS = 4096
"""The most that are served; each takes a UCX endpoint and, over tcp, file descriptors."""
MAX_WAITING_HELLOS = 256
"""The most ``Hello`` messages that wait for an answer while connections are being closed."""
MAX_REFUSED = 64
"""The most refused connections that stay open, so that the refusals can arrive."""


Place = tuple[str, int]


@dataclass(slots=True, kw_only=True, eq=False)
class ClientConnection:
    """A client's connection, as the server sees it."""

    hello: messages.Hello  # with which the client asked for it
    endpoint: Endpoint
    endpoint_number: int  # as ``Worker.failures`` reports it
    confirmed: int  # the last withdrawal that the client has confirmed, or need not


class Server(ProgressTarget):
    """The server side of a transport, whose memory peers read.

    The caller of a method must hold ``lock``, except for ``is_confirmed``; properties need no lock.
    """

    def __init__(self, make_worker: Callable[[], Worker], instance: Instance) -> None:
        super().__init__()
        self.worker = make_worker()
        self.format_known = is_known(self.worker.address)  # else addresses are not checked
        self._instance = instance
        # All connections that have an endpoint (refused ones, too), by the endpoint's number; then
        # those that are served, by connection id.
        self._by_endpoint: dict[int, ClientConnection] = {}
        self._connections: dict[messages.ConnectionId, ClientConnection] = {}
        self._refused: deque[ClientConnection] = deque()
        # Hellos wait here until the connections that they replace are closed; one for each.
        self._waiting_hellos: dict[Place, messages.Hello] = {}
        self._withdrawn: deque[KeyId] = deque(maxlen=MAX_WITHDRAWN)
        # Notifications that were not taken yet, by the names of the clients; about their bytes.
        self._kept: dict[str, list[Notification]] = {}
        self._kept_bytes = 0
        self.withdrawals = 0  # announced so far
        self.regions: dict[KeyId, Region] = {}

    @property
    def workers(self) -> list[Worker]:
        """The workers in which UCP has to make progress."""
        return [self.worker]

    @property
    def needs_timer(self) -> bool:
        """Whether clients wait for an answer to ``Hello``: UCX may have no event when it is due."""
        # Calls of the transport that drive this side may end, and do not arm the worker.
        return bool(self._waiting_hellos) or self.driven_elsewhere

    def run_once(self) -> bool:
        """Let UCP work, and handle what has arrived; return whether more may be left."""
        return self._handle(busy=self.worker.run_once())

    def poll(self) -> bool:
        """As ``run_once``, within a call of the transport: for a short time."""
        busy = self._handle(busy=self.worker.poll())
        return busy or bool(self.worker.sending or self.worker.closing or self._waiting_hellos)

    def _handle(self, *, busy: bool) -> bool:
        for number, _ in self.worker.failures():
            if number in self._by_endpoint:
                self._close(self._by_endpoint[number])
        for message in self.worker.messages():
            self._on_message(message)
            # After each message, since more hellos may have arrived than may be queued.
            busy |= self._answer_hellos()
        return self._answer_hellos() or busy

    def take_notifications(self) -> list[Notification]:
        """Return the notifications since the last call; those of one client in their order."""
        taken, self._kept, self._kept_bytes = self._kept, {}, 0
        return [note for notes in taken.values() for note in notes]

    def withdraw(self, key: KeyId) -> int:
        """Tell every client that a registration ends; return a number for ``is_confirmed``."""
        self.withdrawals += 1
        self.regions.pop(key, None)
        self._withdrawn.append(key)
        for connection in list(self._connections.values()):
            self._send(
                connection, messages.Withdrawn(connection.hello.connection, self.withdrawals, key)
            )
        return self.withdrawals

    def is_confirmed(self, number: int) -> bool:
        """Return whether all clients have confirmed a withdrawal or are disconnected."""
        # A NIC may still read over an endpoint that is being closed. One that lingers before that
        # has no NIC: only messages arrive on it, which are dropped.
        return not (self._unconfirmed(number) or self.worker.closing)

    def disconnect_unconfirmed(self, number: int) -> None:
        """Close the connections of clients that have not confirmed the end of a registration."""
        for connection in self._unconfirmed(number):
            self._close(connection)

    def close(self) -> None:
        """Begin to close all connections."""
        for connection in list(self._by_endpoint.values()):
            self._close(connection)

    def _unconfirmed(self, number: int) -> list[ClientConnection]:
        # A copy, since ``is_confirmed`` is called without the lock.
        return [one for one in list(self._connections.values()) if one.confirmed < number]

    def _on_message(self, message: messages.Message) -> None:
        if isinstance(message, messages.Hello):
            self._on_hello(message)
            return
        connection = self._connections.get(message.connection)
        if connection is None:
            return
        match message:
            case messages.Note():
                self._on_notification(connection, message.payload)
            case messages.Released():
                number = min(message.number, self.withdrawals)
                connection.confirmed = max(connection.confirmed, number)
            case messages.Fetch():
                self._on_fetch(connection, message)
            case messages.Bye():
                self._close(connection)
            case _:  # the other messages are for a client
                return

    def _on_fetch(self, connection: ClientConnection, message: messages.Fetch) -> None:
        refusal, addresses, lengths = check_rows(message.rows, self.regions)
        body = np.empty(int(lengths.sum()), np.uint8)
        self.worker.poster.copy(consecutive(body.ctypes.data, lengths), addresses, lengths)
        answer = messages.Fetched(message.connection, message.number, refusal)
        with contextlib.suppress(TransportError):
            self.worker.send(connection.endpoint, answer, body)

    def _on_notification(self, connection: ClientConnection, payload: bytes) -> None:
        client = connection.hello.client
        self._kept.setdefault(client, []).append(Notification(sender=client, payload=payload))
        self._kept_bytes += len(payload) + _NOTIFICATION_BYTES
        if self._kept_bytes > MAX_BACKLOG:
            self._cut_largest()

    def _cut_largest(self) -> None:
        """Disconnect the client whose kept notifications take most bytes, and drop these."""
        sizes = {
            client: sum(len(note.payload) + _NOTIFICATION_BYTES for note in notes)
            for client, notes in self._kept.items()
        }
        client = max(sizes, key=sizes.__getitem__)
        self._kept_bytes -= sizes[client]
        del self._kept[client]
        for connection in list(self._connections.values()):
            if connection.hello.client == client:
                self._close(connection)

    def _on_hello(self, hello: messages.Hello) -> None:
        """Close the client's earlier connection with the same index, and queue the ``Hello``."""
        place, known = _place(hello), self._connections.get(hello.connection)
        if (
            # Only clients that were admitted to a handshake know the instance.
            hello.server != self._instance
            or len(self._waiting_hellos) >= MAX_WAITING_HELLOS
            or (self.format_known and not is_known(hello.worker))
            # Another client, or a queued ``Hello``, has the same connection id.
            or (known is not None and _place(known.hello) != place)
            or any(one.connection == hello.connection for one in self._waiting_hellos.values())
        ):
            return
        for connection in list(self._connections.values()):
            if _place(connection.hello) == place:
                self._close(connection)
        self._waiting_hellos.pop(place, None)
        self._waiting_hellos[place] = hello

    def _answer_hellos(self) -> bool:
        """Answer queued ``Hello`` messages unless an endpoint closes; return whether any."""
        # So a client that opens one connection after the other does not pile up endpoints. Those
        # that linger may take long, and no answer waits for them.
        before = len(self._waiting_hellos)
        while self._waiting_hellos and not self.worker.closing:
            self._answer(self._waiting_hellos.pop(next(iter(self._waiting_hellos))))
        return len(self._waiting_hellos) < before

    def _answer(self, hello: messages.Hello) -> None:
        missed = self.withdrawals - hello.known_withdrawals
        reason = ""
        if len(self._connections) >= MAX_CONNECTIONS:
            reason = f"it serves {MAX_CONNECTIONS} connections, and no more: disconnect some"
        elif not 0 <= missed <= len(self._withdrawn):
            reason = "the address is too old: connect again with a new one"
        try:
            endpoint, number = self.worker.connect(hello.worker)
        except TransportError:
            return  # the client is gone again
        connection = ClientConnection(
            hello=hello, endpoint=endpoint, endpoint_number=number, confirmed=self.withdrawals
        )
        self._by_endpoint[number] = connection
        if reason:
            self._send(connection, messages.Refused(hello.connection, reason))
            self._refused.append(connection)
            if len(self._refused) > MAX_REFUSED:
                self._close(self._refused[0])
            return
        self._connections[hello.connection] = connection
        keys = list(self._withdrawn)[len(self._withdrawn) - missed :]
        self._send(connection, messages.Welcome(hello.connection, [*keys]))

    def _send(self, connection: ClientConnection, message: messages.Message) -> None:
        # UCP reports the failure of an endpoint by itself, which closes the connection.
        with contextlib.suppress(TransportError):
            self.worker.send(connection.endpoint, message)

    def _close(self, connection: ClientConnection) -> None:
        self.worker.close_endpoint(connection.endpoint)
        del self._by_endpoint[connection.endpoint_number]
        if connection in self._refused:
            self._refused.remove(connection)
        if self._connections.get(connection.hello.connection) is connection:
            del self._connections[connection.hello.connection]


def _place(hello: messages.Hello) -> Place:
    """Return what has one connection: a client, by its name, and whether it is its second."""
    return hello.client, hello.index
