"""A connection to a peer, as its client sees it.

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
from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.address import Instance, KeyId, UcxAddress, UcxRegion
from kvferry.drivers.ucx.message_transfer import consecutive
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
    """The states of a connection, in their order."""

    CONNECTING = "connecting"
    """The server has not answered."""
    READY = "ready"
    BROKEN = "broken"
    """Nothing more is posted. What was posted ends, with an error."""


@dataclass(slots=True, kw_only=True, eq=False)
class ClientWorker:
    """A worker of the client side.

    The two ends of a connection find each other by counting the connections between two workers.
    After an error they may have counted differently, so a worker connects to each server only
    once; the next connection to that server is made by another worker.

    Attributes:
        worker: itself.
        servers: the servers that it has connected to, by their instances.
        connections: by the numbers of their endpoints, until they are released.
    """

    worker: Worker
    servers: set[Instance] = field(default_factory=set)
    connections: dict[int, UcxConnection] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScatterTarget:
    """The local ranges that fetched bytes fill, one after the other.

    Attributes:
        addresses: (n,) where the ranges begin.
        nbytes: (n,) their lengths.
    """

    addresses: U64Array
    nbytes: U64Array


@dataclass(slots=True, kw_only=True, eq=False)
class UcxConnection:
    """A connection. It breaks once, and is then replaced by another.

    Attributes:
        id: random; every message names it.
        server: the address of the peer that it leads to.
        client_worker: whose endpoint it is.
        ucp: the library.
        opened: when it was made, by ``time.monotonic``.
        endpoint: UCP's endpoint.
        endpoint_number: the number under which the worker reports the endpoint's error.
        state: what it can be used for.
        error: why it is broken.
        closed_by_server: whether the server has said that it drops what arrives.
        withdrawn: registrations of the server that are undone, or about to be.
        unconfirmed: numbers and keys of withdrawals that have not been confirmed.
        queued_notifications: to be sent once it is ready.
        open_windows: how many windows of transfers are under way on it.
        transports: UCX's names of what carries it; known once it is ready.
        refusals: the server's answers to stores and fetches, by their numbers: a refusal, or an
            empty string.
        fetch_targets: where the bytes of unanswered fetches go, by their numbers.
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
        """Open a connection, and say hello.

        Args:
            server: the address of the peer.
            client_worker: a worker that has not connected to this server.
            ucp: the library.
            client: the name of this transport.
            now: by ``time.monotonic``.
            index: which of the client's connections to the server it is.

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
        """Return a broken connection, for one that could not even be tried."""
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
        """Become ready, since the server has answered.

        Args:
            withdrawn: keys of the server's registrations that were undone after it made the
                address.
        """
        if self.state is not ConnectionState.CONNECTING:
            return
        self.state = ConnectionState.READY
        used = self.ucp.transports(self.endpoint)
        self.transports = frozenset(name.partition("/")[0] for name in used)
        self.withdrawn.update(map(KeyId, withdrawn))
        while self.queued_notifications:
            self._send(Note(self.id, self.queued_notifications.popleft()))

    def notify(self, payload: bytes) -> None:
        """Send a notification, or keep it until the connection is ready."""
        if self.state is ConnectionState.READY:
            self._send(Note(self.id, payload))
        elif self.state is ConnectionState.CONNECTING:
            self.queued_notifications.append(payload)

    @property
    def backlog(self) -> int:
        """How many bytes of messages have not left."""
        queued = sum(map(len, self.queued_notifications))
        return self.client_worker.worker.backlog(self.endpoint) + queued

    def fetch(self, rows: bytes, target: ScatterTarget) -> int:
        """Ask the server for bytes of its memory.

        Args:
            rows: the ranges of the server's memory, as ``Fetch.rows``.
            target: where the bytes go; the memory must stay until the answer is there, or the
                connection is broken.

        Returns:
            The number of the request, under which ``refusals`` will have the answer.
        """
        self._last_request += 1
        self.fetch_targets[self._last_request] = target
        self._send(Fetch(self.id, self._last_request, rows))
        return self._last_request

    def store(self, rows: int, body: MessageBuffer, nbytes: int) -> int:
        """Have the server write bytes into its memory.

        Args:
            rows: how many rows the body begins with.
            body: a buffer of the worker's pool, which goes back to the pool when it has been sent.
            nbytes: how many bytes of the buffer to send.

        Returns:
            The number of the request, under which ``refusals`` will have the answer.
        """
        self._last_request += 1
        self._send(Store(self.id, self._last_request, rows), body, nbytes)
        return self._last_request

    def on_fetched(self, message: Fetched, body: int, nbytes: int) -> None:
        """Copy fetched bytes to their target, if they are still wanted.

        Args:
            message: the server's answer.
            body: the address of the bytes.
            nbytes: how many there are.
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
        """Note that the server is about to undo a registration, and waits for a confirmation."""
        self.withdrawn.add(key)
        self.unconfirmed.append((number, key))

    def confirm_withdrawals(self, used: frozenset[KeyId]) -> None:
        """Confirm withdrawals of registrations that are not used any more, in their order.

        Args:
            used: the keys that transfers under way on this connection use.
        """
        number = 0
        while self.unconfirmed and self.unconfirmed[0][1] not in used:
            number, key = self.unconfirmed.popleft()
            if key in self._keys:
                self.ucp.destroy_key(self._keys.pop(key))
        if number and self.state is ConnectionState.READY:
            self._send(Released(self.id, number))

    def remote_key(self, region: UcxRegion) -> RemoteKey:
        """Return the key to a region of the server, unpacked when it is first needed.

        Raises:
            TransportError: UCX cannot reach that memory over this connection.
        """
        key = KeyId(region.key)
        if key not in self._keys:
            self._keys[key] = self.ucp.unpack_key(self.endpoint, region.packed)
        return self._keys[key]

    def close(self, error: TransportError, *, say_bye: bool = False) -> None:
        """Break the connection. What is posted on it ends as the worker makes progress.

        Args:
            error: the reason, which transfers on it report.
            say_bye: whether to tell the server.
        """
        if say_bye and self.state is ConnectionState.READY:
            self._send(Bye(self.id))
        if self.state is ConnectionState.BROKEN:
            return
        worker = self.client_worker.worker
        # A hello that lingers might arrive after that of the next connection, and end it.
        ready = self.state is ConnectionState.READY
        close_endpoint = worker.close_endpoint if ready else worker.close_endpoint_at_once
        self.state, self.error = ConnectionState.BROKEN, error
        self.queued_notifications.clear()
        self.fetch_targets.clear()
        close_endpoint(self.endpoint)

    def try_release(self) -> bool:
        """Free the remote keys of a broken connection once nothing is under way on it.

        Returns:
            Whether they are free, so that the connection can be forgotten.
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


def _unreachable(error: TransportError) -> PeerLostError:
    """Return the error for a server to which UCX finds no way, with the remedy."""
    return PeerLostError(
        f"{error}; both sides need a way in common that notices when a peer dies: tcp or RDMA, "
        "beside which shared memory is used (driver_options: transports)"
    )
