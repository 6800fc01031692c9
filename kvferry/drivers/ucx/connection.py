"""A connected peer and the connections to that peer, as the client sees them.

A transport that reads and writes is the *client*; the one whose memory is read and written is the
*server*. ``server.py`` has the server's view of the same connection.
"""

from __future__ import annotations

import enum
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.memory import CPU, Region, U64Array
from kvferry.drivers.ucx.address import Identity, Instance, KeyId, UcxAddress, UcxRegion
from kvferry.drivers.ucx.message_transfer import consecutive, needs_messages
from kvferry.drivers.ucx.messages import (
    Bye,
    ConnectionId,
    Fetch,
    Fetched,
    Hello,
    Message,
    Note,
    Released,
    Store,
)
from kvferry.drivers.ucx.ucp import Endpoint, RemoteKey, Ucp
from kvferry.drivers.ucx.worker import MessageBuffer, Worker


class ConnectionState(enum.Enum):
    """The states of a connection; they only change from an earlier to a later one."""

    CONNECTING = "connecting"
    """The server has not answered."""
    READY = "ready"
    """The server has answered: transfers can be posted."""
    BROKEN = "broken"
    """Nothing more is posted. UCX completes what was posted before, with an error."""


@dataclass(slots=True, kw_only=True, eq=False)
class ClientWorker:
    """A worker of the client side, with its connections.

    UCX matches the two ends of a connection by counting the connections between two workers. After
    an error the two counts may differ, so a worker connects to each server only once; the next
    connection to that server is made by another worker.

    Attributes:
        worker: the worker.
        servers: the servers that the worker has connected to, by ``UcxAddress.instance``.
        connections: the worker's connections by ``endpoint_number``; a broken one is removed when
            nothing is under way on it any more.
    """

    worker: Worker
    servers: set[Instance] = field(default_factory=set)
    connections: dict[int, UcxConnection] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScatterTarget:
    """The n local ranges of memory into which the answer to a ``Fetch`` is copied, in this order.

    Attributes:
        addresses: (n,) uint64, the address of each range.
        nbytes: (n,) uint64, the length of each range in bytes.
    """

    addresses: U64Array
    nbytes: U64Array


@dataclass(slots=True, kw_only=True, eq=False)
class UcxConnection:
    """A connection to a server. A broken connection is replaced by a new one, never repaired.

    Attributes:
        id: the random id of the connection, which every message names.
        server: the address of the server.
        client_worker: the worker that the endpoint belongs to.
        ucp: the loaded libucp.
        opened: when the connection was opened, by ``time.monotonic``.
        endpoint: UCP's endpoint; 0 if there is none.
        endpoint_number: the number under which ``Worker.failures`` reports the endpoint's error.
        state: the state of the connection.
        error: why the connection is broken; ``None`` if it is not.
        closed_by_server: whether the server has said (``Ended``) that it has closed the connection
            and drops what still arrives on it.
        withdrawn: the registrations, by their keys, that the server has ended or has announced to
            end (withdrawn).
        unconfirmed: the announced ends (withdrawals) that this side has not confirmed: the number
            of each, and the registration's key.
        queued_notifications: notifications to send once the connection is ready.
        open_windows: how many groups of runs that were posted together (``Window``) are under way.
        transports: UCX's names of the transports that the connection uses, such as ``tcp``; empty
            until it is ready.
        has_native: whether UCX reaches the server's CPU memory without messages of this driver;
            False until it is ready.
        refusals: the server's answers to ``Store`` and ``Fetch`` messages, by the messages'
            numbers: the reason for a refusal, or an empty string if there was none.
        fetch_targets: where the bytes of each unanswered ``Fetch`` go, by the message's number.
    """

    id: ConnectionId
    server: UcxAddress
    client_worker: ClientWorker
    ucp: Ucp
    opened: float
    endpoint: Endpoint = field(default=Endpoint(0))
    endpoint_number: int = 0
    state: ConnectionState = ConnectionState.CONNECTING
    error: TransportError | None = None
    closed_by_server: bool = False
    withdrawn: set[KeyId] = field(default_factory=set)
    unconfirmed: deque[tuple[int, KeyId]] = field(default_factory=deque)
    queued_notifications: deque[bytes] = field(default_factory=deque)
    open_windows: int = 0
    transports: frozenset[str] = frozenset()
    has_native: bool = False
    refusals: dict[int, str] = field(default_factory=dict)
    fetch_targets: dict[int, ScatterTarget] = field(default_factory=dict)
    _last_request: int = 0
    _keys: dict[KeyId, RemoteKey] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        server: UcxAddress,
        client_worker: ClientWorker,
        ucp: Ucp,
        client: str,
        now: float,
        index: int = 0,
    ) -> UcxConnection:
        """Open a connection, and ask the server to serve it (``Hello``).

        Args:
            server: the address of the server.
            client_worker: a worker that has not connected to this server.
            ucp: the loaded libucp.
            client: the name of this transport.
            now: the time, by ``time.monotonic``.
            index: 0 for the client's first connection to the server, 1 for its second.

        Returns:
            The connection, which is broken already if the server cannot be reached at all.
        """
        connection = cls(
            id=secrets.token_bytes(16),
            server=server,
            client_worker=client_worker,
            ucp=ucp,
            opened=now,
        )
        client_worker.servers.add(server.instance)
        worker = client_worker.worker
        try:
            connection.endpoint, connection.endpoint_number = worker.connect(server.worker)
        except TransportError as exc:
            connection.state, connection.error = ConnectionState.BROKEN, _unreachable(exc)
            return connection
        client_worker.connections[connection.endpoint_number] = connection
        connection._send(
            Hello(connection.id, server.instance, client, worker.address, server.withdrawn, index),
        )
        return connection

    @classmethod
    def failed(
        cls,
        server: UcxAddress,
        client_worker: ClientWorker,
        ucp: Ucp,
        now: float,
        error: TransportError,
    ) -> UcxConnection:
        """Return a broken connection, for when no worker can be made for a working one.

        Args:
            server: the address of the server.
            client_worker: any worker; nothing is sent by it.
            ucp: the loaded libucp.
            now: the time, by ``time.monotonic``.
            error: why no worker can be made.
        """
        return cls(
            id=secrets.token_bytes(16),
            server=server,
            client_worker=client_worker,
            ucp=ucp,
            opened=now,
            state=ConnectionState.BROKEN,
            error=error,
        )

    def on_welcome(self, withdrawn: Iterable[int]) -> None:
        """Become ready, and send queued notifications. Called when the server has answered.

        Args:
            withdrawn: the registrations, by their keys, that the server has ended or announced to
                end since it made its address (``self.server``).
        """
        if self.state is not ConnectionState.CONNECTING:
            return
        self.state = ConnectionState.READY
        used = self.ucp.transports(self.endpoint)
        self.transports = frozenset(name.partition("/")[0] for name in used)
        self.has_native = not needs_messages(self.transports, frozenset({CPU}))
        self.withdrawn.update(map(KeyId, withdrawn))
        while self.queued_notifications:
            self._send(Note(self.id, self.queued_notifications.popleft()))

    @property
    def reads_directly(self) -> bool:
        """Whether reads of CPU memory can be posted now, without messages of this driver."""
        return self.has_native and self.state is ConnectionState.READY

    def notify(self, payload: bytes) -> None:
        """Send a notification, queue it until the connection is ready, or drop it if broken."""
        if self.state is ConnectionState.READY:
            self._send(Note(self.id, payload))
        elif self.state is ConnectionState.CONNECTING:
            self.queued_notifications.append(payload)

    @property
    def backlog(self) -> int:
        """How many bytes of messages to the server are queued or being sent."""
        queued = sum(map(len, self.queued_notifications))
        return self.client_worker.worker.backlog(self.endpoint) + queued

    def fetch(self, rows: bytes, target: ScatterTarget) -> int:
        """Ask the server to send bytes of its memory (``Fetch``).

        Args:
            rows: the ranges of the server's memory, as ``Fetch.rows``.
            target: where the bytes go. The memory must stay valid until the answer has arrived or
                the connection is broken.

        Returns:
            The number of the request; ``refusals`` gets the answer under this number.
        """
        self._last_request += 1
        self.fetch_targets[self._last_request] = target
        self._send(Fetch(self.id, self._last_request, rows))
        return self._last_request

    def store(self, rows: int, body: MessageBuffer, nbytes: int) -> int:
        """Ask the server to write bytes into its memory (``Store``).

        Args:
            rows: how many rows the body begins with (see ``Store``).
            body: a buffer of the worker's pool; it goes back to the pool once it has been sent.
            nbytes: how many bytes of the buffer to send.

        Returns:
            The number of the request; ``refusals`` gets the answer under this number.
        """
        self._last_request += 1
        self._send(Store(self.id, self._last_request, rows), body, nbytes)
        return self._last_request

    def on_fetched(self, message: Fetched, body: int, nbytes: int) -> None:
        """Record the answer to a ``Fetch``; copy its bytes unless the transfer has failed since.

        Args:
            message: the server's answer.
            body: the address of the fetched bytes.
            nbytes: the number of the fetched bytes.
        """
        target = self.fetch_targets.pop(message.number, None)
        self.refusals[message.number] = message.refusal
        if target is None or message.refusal:
            return
        wanted = int(target.nbytes.sum())
        if wanted == nbytes:
            copy = self.client_worker.worker.poster.copy
            copy(target.addresses, consecutive(body, target.nbytes), target.nbytes)
        else:
            self.refusals[message.number] = f"it has sent {nbytes} bytes of {wanted}"

    def on_withdrawn(self, number: int, key: KeyId) -> None:
        """Record that the server is about to end a registration, and waits for a confirmation.

        Args:
            number: the number of this announcement (a withdrawal).
            key: the key of the registration.
        """
        self.withdrawn.add(key)
        self.unconfirmed.append((number, key))

    def confirm_withdrawals(self, used: frozenset[KeyId]) -> None:
        """Tell the server that registrations which it is about to end are not used here any more.

        These withdrawals are confirmed in the order of their numbers, up to the first whose
        registration is still used.

        Args:
            used: the keys of the registrations that transfers under way on this connection use.
        """
        number = 0
        while self.unconfirmed and self.unconfirmed[0][1] not in used:
            number, key = self.unconfirmed.popleft()
            if key in self._keys:
                self.ucp.destroy_key(self._keys.pop(key))
        if number and self.state is ConnectionState.READY:
            self._send(Released(self.id, number))

    def remote_key(self, region: UcxRegion) -> RemoteKey:
        """Return UCP's key to a region of the server, for posting on this connection only.

        The connection unpacks the key when it is first needed, and destroys it.

        Raises:
            TransportError: UCX cannot reach the region over this connection.
        """
        key = KeyId(region.key)
        if key not in self._keys:
            self._keys[key] = self.ucp.unpack_key(self.endpoint, region.packed)
        return self._keys[key]

    def close(self, error: TransportError, *, say_bye: bool = False) -> None:
        """Close the connection, which is then BROKEN.

        Reads and writes that are posted on the connection complete later, with an error, while the
        worker makes progress.

        Args:
            error: the reason, which the transfers on the connection report.
            say_bye: whether to tell the server with ``Bye``.
        """
        if say_bye and self.state is ConnectionState.READY:
            self._send(Bye(self.id))
        if self.state is ConnectionState.BROKEN:
            return
        worker = self.client_worker.worker
        # Drop a ``Hello`` that is still unsent: if it arrived after the ``Hello`` of the next
        # connection, the server would close that connection.
        ready = self.state is ConnectionState.READY
        close_endpoint = worker.close_endpoint if ready else worker.close_endpoint_at_once
        self.state, self.error = ConnectionState.BROKEN, error
        self.queued_notifications.clear()
        self.fetch_targets.clear()
        close_endpoint(self.endpoint)

    def try_release(self) -> bool:
        """Destroy the remote keys if the connection is broken and nothing is under way on it.

        Returns:
            Whether the keys have been destroyed, so that the connection can be forgotten.
        """
        worker = self.client_worker.worker
        if self.state is not ConnectionState.BROKEN or self.open_windows or worker.closing:
            return False
        if worker.is_lingering(self.endpoint):
            return False
        for key in self._keys.values():
            self.ucp.destroy_key(key)
        self._keys.clear()
        return True

    def _send(self, message: Message, body: MessageBuffer | None = None, nbytes: int = 0) -> None:
        try:
            self.client_worker.worker.send(self.endpoint, message, body, nbytes)
        except TransportError as exc:
            self.close(exc)


@dataclass(slots=True, kw_only=True, eq=False)
class UcxPeer:
    """A connected peer, which this side's reads and writes name.

    Attributes:
        address: the last address with which the user connected to the peer.
        regions: the regions that ``address`` names.
        connection: the connection to the peer, which may be broken.
        second_connection: a second connection, for large reads only; ``None`` until one is opened.
    """

    address: UcxAddress
    regions: dict[Region, UcxRegion]
    connection: UcxConnection
    second_connection: UcxConnection | None = None

    @property
    def name(self) -> str:
        """The name of the peer's transport."""
        return self.address.name

    @property
    def identity(self) -> Identity:
        """The identity of the peer's transport."""
        return self.address.identity


def _unreachable(error: TransportError) -> PeerLostError:
    """Return the error for a server that UCX cannot connect to; it says what to do."""
    return PeerLostError(
        f"{error}; both sides need a way in common that notices when a peer dies: tcp or RDMA, "
        "beside which shared memory is used (driver_options: transports)"
    )
