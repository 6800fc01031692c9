"""A connected peer and the connections to that peer, as the client sees them.

A transport that reads is the *client*; the one whose memory is read is the *server*. ``server.py``
has the server's view of the same connection.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.memory import Region, U64Array
from kvferry.drivers.ucx import messages
from kvferry.drivers.ucx.address import Identity, KeyId, UcxAddress, UcxRegion
from kvferry.drivers.ucx.messages import consecutive, reaches_cpu_memory
from kvferry.drivers.ucx.ucp import Endpoint, RemoteKey
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
class Window:
    """Successive runs (contiguous copies) that were posted together, or asked for by a message."""

    connection: UcxConnection
    requests: U64Array  # (n,) of ``Poster.post``; empty if asked for by a message
    swept: int = 0  # how many of ``requests`` have completed
    code: int = 0  # UCX's status of the first error
    # The ranges into which the answer to the message (``Fetch``) is copied, in order: addresses and
    # lengths, (n,) uint64 each. ``None`` if there is no message, or its answer is not copied.
    targets: tuple[U64Array, U64Array] | None = None
    refusal: str | None = None  # once the message is answered: the reason of a refusal, or ""

    @property
    def by_message(self) -> bool:
        """Whether the runs were asked for by a message."""
        return not len(self.requests)


@dataclass(slots=True, kw_only=True, eq=False)
class UcxConnection:
    """A connection to a server. A broken connection is replaced by a new one, never repaired."""

    id: messages.ConnectionId  # random; every message names it
    server: UcxAddress
    worker: Worker
    opened: float  # by ``time.monotonic``
    endpoint: Endpoint = field(default=Endpoint(0))  # 0 if there is none
    endpoint_number: int = 0  # as ``Worker.failures`` reports it
    state: ConnectionState = ConnectionState.CONNECTING
    error: TransportError | None = None
    withdrawn: set[KeyId] = field(default_factory=set)  # ended, or announced to end
    # The announced withdrawals that this side has not confirmed: number and key.
    unconfirmed: deque[tuple[int, KeyId]] = field(default_factory=deque)
    queued_notifications: deque[bytes] = field(default_factory=deque)
    transports: frozenset[str] = frozenset()  # UCX's names; empty until ready
    native: bool = False  # once ready: UCX reaches CPU memory without messages of this driver
    _last_fetch: int = 0
    _fetches: dict[int, Window] = field(default_factory=dict)  # that are not answered, by number
    _keys: dict[KeyId, RemoteKey] = field(default_factory=dict)

    def open(self, client: str, index: int) -> None:
        """Connect, and ask the server to serve this connection (``Hello``).

        ``client`` is the name of this transport, ``index`` 0 for its first connection to the
        server, 1 for its second. Raises ``PeerLostError`` if UCX does not reach the server.
        """
        try:
            self.endpoint, self.endpoint_number = self.worker.connect(self.server.worker)
        except TransportError as exc:
            raise PeerLostError(
                f"{exc}; both sides need a way in common that notices when a peer dies: tcp or "
                "RDMA, beside which shared memory is used (driver_options: transports)"
            ) from exc
        server, address = self.server, self.worker.address
        self._send(
            messages.Hello(self.id, server.instance, client, address, server.withdrawn, index)
        )

    def on_welcome(self, withdrawn: Iterable[int]) -> None:
        """Become ready: learn which keys the server has withdrawn, and send what is queued."""
        if self.state is not ConnectionState.CONNECTING:
            return
        self.state = ConnectionState.READY
        used = self.worker.ucp.transports(self.endpoint)
        self.transports = frozenset(name.partition("/")[0] for name in used)
        self.native = reaches_cpu_memory(self.transports)
        self.withdrawn.update(map(KeyId, withdrawn))
        while self.queued_notifications:
            self._send(messages.Note(self.id, self.queued_notifications.popleft()))

    def notify(self, payload: bytes) -> None:
        """Send a notification, queue it until the connection is ready, or drop it if broken."""
        if self.state is ConnectionState.READY:
            self._send(messages.Note(self.id, payload))
        elif self.state is ConnectionState.CONNECTING:
            self.queued_notifications.append(payload)

    @property
    def backlog(self) -> int:
        """How many bytes of messages to the server are queued or being sent."""
        queued = sum(map(len, self.queued_notifications))
        return self.worker.backlog(self.endpoint) + queued

    def fetch(self, rows: bytes, window: Window) -> None:
        """Ask for bytes. The targets must be valid until an answer, or the connection is broken."""
        self._last_fetch += 1
        self._fetches[self._last_fetch] = window
        self._send(messages.Fetch(self.id, self._last_fetch, rows))

    def on_fetched(self, message: messages.Fetched, body: int, nbytes: int) -> None:
        """Record the answer to a ``Fetch``, and copy its bytes."""
        window = self._fetches.pop(message.number, None)
        if window is None:
            return
        window.refusal = message.refusal
        if window.targets is None or message.refusal:
            return
        addresses, lengths = window.targets
        wanted = int(lengths.sum())
        if wanted == nbytes:
            self.worker.poster.copy(addresses, consecutive(body, lengths), lengths)
        else:
            window.refusal = f"it has sent {nbytes} bytes of {wanted}"

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
                self.worker.ucp.destroy_key(self._keys.pop(key))
        if number and self.state is ConnectionState.READY:
            self._send(messages.Released(self.id, number))

    def remote_key(self, region: UcxRegion) -> RemoteKey:
        """Return UCP's key to a region, which the connection owns; raise if out of UCX's reach."""
        key = KeyId(region.key)
        if key not in self._keys:
            self._keys[key] = self.worker.ucp.unpack_key(self.endpoint, region.packed)
        return self._keys[key]

    def close(self, error: TransportError, *, say_bye: bool = False) -> None:
        """Make the connection BROKEN; posted operations complete later, with an error."""
        if say_bye and self.state is ConnectionState.READY:
            self._send(messages.Bye(self.id))
        if self.state is ConnectionState.BROKEN:
            return
        # Drop a ``Hello`` that is still unsent: if it arrived after the ``Hello`` of the next
        # connection, the server would close that connection.
        at_once = self.state is ConnectionState.CONNECTING
        self.state, self.error = ConnectionState.BROKEN, error
        self.queued_notifications.clear()
        self._fetches.clear()
        self.worker.close_endpoint(self.endpoint, at_once=at_once)

    def try_release(self) -> bool:
        """Destroy the keys of an unused connection, once it is closed; return whether it is."""
        worker = self.worker
        if worker.closing or self.endpoint in worker.lingering.values():
            return False
        for key in self._keys.values():
            worker.ucp.destroy_key(key)
        self._keys.clear()
        return True

    def _send(self, message: messages.Message) -> None:
        try:
            self.worker.send(self.endpoint, message)
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
