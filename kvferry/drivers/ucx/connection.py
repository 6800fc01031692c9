"""A connected peer and the connections to that peer, as the client sees them.

A transport that reads is the *client*; the one whose memory is read is the *server*. ``server.py``
has the server's view of the same connection.
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
)
from kvferry.drivers.ucx.ucp import Endpoint, RemoteKey, Ucp
from kvferry.drivers.ucx.worker import Worker


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
    """A worker of the client side, with its connections, at most one to each server ever."""

    # UCX matches the two ends of a connection by counting the connections between two workers.
    # After an error the counts may differ, so the next connection to a server needs another worker.
    worker: Worker
    servers: set[Instance] = field(default_factory=set)  # that it has ever connected to
    # By ``endpoint_number``; a broken one is removed when nothing is under way on it any more.
    connections: dict[int, UcxConnection] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScatterTarget:
    """The n ranges, as (n,) uint64, into which the answer to a ``Fetch`` is copied in order."""

    addresses: U64Array
    nbytes: U64Array


@dataclass(slots=True, kw_only=True, eq=False)
class UcxConnection:
    """A connection to a server. A broken connection is replaced by a new one, never repaired."""

    id: ConnectionId  # random; every message names it
    server: UcxAddress
    client_worker: ClientWorker
    ucp: Ucp
    opened: float  # by ``time.monotonic``
    endpoint: Endpoint = field(default=Endpoint(0))  # 0 if there is none
    endpoint_number: int = 0  # as ``Worker.failures`` reports it
    state: ConnectionState = ConnectionState.CONNECTING
    error: TransportError | None = None
    withdrawn: set[KeyId] = field(default_factory=set)  # ended, or announced to end
    # The announced withdrawals that this side has not confirmed: number and key.
    unconfirmed: deque[tuple[int, KeyId]] = field(default_factory=deque)
    queued_notifications: deque[bytes] = field(default_factory=deque)
    open_windows: int = 0  # groups of runs that are under way (``Window``)
    transports: frozenset[str] = frozenset()  # UCX's names; empty until ready
    has_native: bool = False  # once ready: UCX reaches CPU memory without messages of this driver
    # Answers to ``Fetch``, by their numbers: the reason of a refusal, or "".
    refusals: dict[int, str] = field(default_factory=dict)
    fetch_targets: dict[int, ScatterTarget] = field(default_factory=dict)  # by unanswered number
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
        """Open a connection, and ask the server to serve it (``Hello``); it may be broken already.

        ``client_worker`` has not connected to this server; ``client`` is the name of this
        transport, ``index`` 0 for its first connection to the server, 1 for its second.
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
        """Return a broken connection, for when no worker can be made for a working one."""
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
        """Become ready: learn which keys the server has withdrawn, and send what is queued."""
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
        """Ask for bytes (``Fetch``); return the number under which ``refusals`` gets the answer.

        The target must be valid until the answer has arrived or the connection is broken.
        """
        self._last_request += 1
        self.fetch_targets[self._last_request] = target
        self._send(Fetch(self.id, self._last_request, rows))
        return self._last_request

    def on_fetched(self, message: Fetched, body: int, nbytes: int) -> None:
        """Record the answer to a ``Fetch``; copy its bytes unless the transfer has failed since."""
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
        """Record that the server waits for a confirmation before it ends a registration."""
        self.withdrawn.add(key)
        self.unconfirmed.append((number, key))

    def confirm_withdrawals(self, used: frozenset[KeyId]) -> None:
        """Confirm the announced withdrawals, in their order, up to the first key in use."""
        number = 0
        while self.unconfirmed and self.unconfirmed[0][1] not in used:
            number, key = self.unconfirmed.popleft()
            if key in self._keys:
                self.ucp.destroy_key(self._keys.pop(key))
        if number and self.state is ConnectionState.READY:
            self._send(Released(self.id, number))

    def remote_key(self, region: UcxRegion) -> RemoteKey:
        """Return UCP's key to a region, which the connection owns; raise if out of UCX's reach."""
        key = KeyId(region.key)
        if key not in self._keys:
            self._keys[key] = self.ucp.unpack_key(self.endpoint, region.packed)
        return self._keys[key]

    def close(self, error: TransportError, *, say_bye: bool = False) -> None:
        """Make the connection BROKEN; posted operations complete later, with an error."""
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
        """Destroy the keys of a broken, unused connection, to be forgotten; return whether done."""
        worker = self.client_worker.worker
        if self.state is not ConnectionState.BROKEN or self.open_windows or worker.closing:
            return False
        if worker.is_lingering(self.endpoint):
            return False
        for key in self._keys.values():
            self.ucp.destroy_key(key)
        self._keys.clear()
        return True

    def _send(self, message: Message) -> None:
        try:
            self.client_worker.worker.send(self.endpoint, message)
        except TransportError as exc:
            self.close(exc)


@dataclass(slots=True, kw_only=True, eq=False)
class UcxPeer:
    """A connected peer, which this side's reads name."""

    address: UcxAddress  # the last with which the user connected
    regions: dict[Region, UcxRegion]  # of ``address``
    connection: UcxConnection
    second_connection: UcxConnection | None = None  # for large reads only

    @property
    def name(self) -> str:
        """The name of the peer's transport."""
        return self.address.name

    @property
    def identity(self) -> Identity:
        """The identity of the peer's transport."""
        return self.address.identity


def _unreachable(error: TransportError) -> PeerLostError:
    return PeerLostError(
        f"{error}; both sides need a way in common that notices when a peer dies: tcp or RDMA, "
        "beside which shared memory is used (driver_options: transports)"
    )
