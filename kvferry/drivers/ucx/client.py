"""The client side of a transport, which reads: its connections and transfers."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

import numpy as np

from kvferry.core.errors import ConnectError, PeerLostError, TransportError
from kvferry.core.transport import EnterThread
from kvferry.core.transport.addresses import Instance
from kvferry.core.transport.copies import Copies
from kvferry.drivers.ucx import messages
from kvferry.drivers.ucx import ucp as statuses
from kvferry.drivers.ucx.address import KeyId, UcxAddress
from kvferry.drivers.ucx.connection import ConnectionState, UcxConnection, UcxPeer, Window
from kvferry.drivers.ucx.progress import COPY_SECONDS, CopyThread, ProgressTarget
from kvferry.drivers.ucx.transfer import UcxTransfer
from kvferry.drivers.ucx.ucp_structs import Code
from kvferry.drivers.ucx.worker import Worker

_START_SECONDS = 0.005
"""How long ``read`` drives the transfer that it starts before it returns."""

_SMALL_SECONDS = 0.0001
"""How long a small read is waited for before it returns."""

_LIVENESS_SECONDS = 0.2
"""How often to look for dead peers: UCX sees only sockets, which a forked child may hold open."""


class Client(ProgressTarget):
    """The client side of a transport, which connects to peers and reads.

    The caller of a method must hold ``lock``, except for ``stop``; properties need no lock.
    """

    def __init__(
        self,
        make_worker: Callable[[], Worker],
        name: str,
        idle_timeout: float,
        connect_timeout: float,
        enter: EnterThread,
    ) -> None:
        super().__init__()
        self._make_worker = make_worker
        self._name = name
        self._idle_timeout = idle_timeout
        self._connect_timeout = connect_timeout
        self._enter = enter
        self._copy_thread: CopyThread | None = None
        # The servers to which each worker has ever connected, at most once to each. UCX matches the
        # two ends of a connection by counting the connections between two workers. After an error
        # the counts may differ, so the next connection to a server needs another worker.
        self._workers: dict[Worker, set[Instance]] = {}
        self._connections: dict[messages.ConnectionId, UcxConnection] = {}
        self._transfers: list[UcxTransfer] = []
        self._next_liveness_check = 0.0
        self._add_worker()

    @property
    def workers(self) -> list[Worker]:
        """The workers in which UCP has to make progress."""
        return list(self._workers)

    @property
    def needs_timer(self) -> bool:
        """Whether something may time out, of which UCX has no event."""
        # A copy, since this is also read without the lock, while other threads connect.
        connections = list(self._connections.values())
        return bool(self._transfers) or any(
            connection.state is not ConnectionState.READY for connection in connections
        )

    @property
    def has_work(self) -> bool:
        """Whether a transfer, message or connection is under way, or messages were not handled."""
        return self.needs_timer or any(
            worker.needs_thread or worker.closing or worker.lingering for worker in self.workers
        )

    def run_once(self) -> bool:
        """Let UCP work, handle what came, update transfers; return whether more may be left."""
        busy = False
        driven = self._progress_transfers()
        for worker in self._workers:
            busy |= worker.run_once(0) if worker in driven else worker.run_once()
            for number, code in worker.failures():
                self._on_endpoint_failure(number, code)
            for message in worker.messages():
                self._on_message(message)
        now = time.monotonic()
        check_liveness = now > self._next_liveness_check
        if check_liveness:
            self._next_liveness_check = now + _LIVENESS_SECONDS
        for connection in list(self._connections.values()):
            self._check(connection, now, check_liveness=check_liveness)
        for transfer in self._transfers:
            transfer.advance(now, self._idle_timeout)
        self._transfers = [transfer for transfer in self._transfers if not transfer.final]
        for connection in self._connections.values():
            if connection.unconfirmed:
                used = [t.remote_keys for t in self._transfers if t.uses(connection)]
                connection.confirm_withdrawals(frozenset().union(*used))
        return busy

    def _progress_transfers(self) -> list[Worker]:
        """Let UCP move bytes, in two workers at most; return the workers."""
        moving = [
            window.connection.worker
            for transfer in self._transfers
            for window in transfer.windows
            if not window.by_message
        ]
        if not moving:
            return []
        first, *others = dict.fromkeys(moving)
        if not others:
            first.progress(COPY_SECONDS)
            return [first]
        if self._copy_thread is None:
            self._copy_thread = CopyThread(f"{self._name}-copy", self._enter)
        self._copy_thread.progress_both(first, others[0])
        return [first, others[0]]

    # Connections.

    def open_connection(self, address: UcxAddress, index: int = 0) -> UcxConnection:
        """Open a connection to a server, the first (``index`` 0) or second (1).

        It is not ready until the server has answered, and is broken if UCX cannot connect.
        """
        number, opened, worker = secrets.token_bytes(16), time.monotonic(), self.workers[0]
        connection = UcxConnection(id=number, server=address, worker=worker, opened=opened)
        try:
            connection.worker = self._worker_for(address.instance)
            connection.open(self._name, index)
        except TransportError as exc:
            connection.state, connection.error = ConnectionState.BROKEN, exc
        self._connections[connection.id] = connection
        return connection

    def _worker_for(self, server: Instance) -> Worker:
        """Return a worker that has never connected to a server; make one if there is none."""
        unused = (worker for worker, servers in self._workers.items() if server not in servers)
        worker = next(unused, None) or self._add_worker()
        self._workers[worker].add(server)
        return worker

    def _add_worker(self) -> Worker:
        worker = self._make_worker()
        worker.on_body = self._on_body
        self._workers[worker] = set()
        return worker

    def connection_to(self, peer: UcxPeer) -> UcxConnection:
        """Return the connection to a peer; open another one in place of a broken one."""
        if peer.connection.state is ConnectionState.BROKEN:
            peer.connection = self.open_connection(peer.address)
        return peer.connection

    def second_connection_to(self, peer: UcxPeer) -> UcxConnection | None:
        """Return the second connection to a peer, by which a second thread copies large reads.

        ``None`` if it would not help. It is opened when it is first needed, and may not be ready.
        """
        # Only if this process copies the bytes itself (cma), and has a second core.
        if len(os.sched_getaffinity(0)) < 2 or "cma" not in peer.connection.transports:
            return None
        old = peer.second_connection
        if old is None or (
            old.state is ConnectionState.BROKEN
            and time.monotonic() - old.opened > self._connect_timeout
        ):
            peer.second_connection = self.open_connection(peer.address, index=1)
        return peer.second_connection

    def disconnect(self, peer: UcxPeer) -> None:
        """Close the connections to a peer, and tell the peer so with ``Bye``."""
        error = PeerLostError(f"{peer.name} was disconnected")
        for connection in filter(None, (peer.connection, peer.second_connection)):
            connection.close(error, say_bye=True)

    # Transfers.

    def start(self, transfer: UcxTransfer) -> bool:
        """Start a transfer, drive it for 5 ms at most, and return whether more is left to do."""
        self._transfers.append(transfer)
        now, busy = time.monotonic(), True
        transfer.advance(now, self._idle_timeout)
        # If this process copies the bytes itself (cma), a short transfer ends here, without the
        # progress thread.
        while busy and not transfer.final and time.monotonic() - now < _START_SECONDS:
            busy = self.run_once()
        self.last_driven = time.monotonic()
        return busy or self.has_work

    def read_small(
        self, peer: UcxPeer, copies: Copies, params: int, notify: bytes | None
    ) -> UcxTransfer | None:
        """Read one range of CPU memory, such as a slot word, and drive it for 0.1 ms at most.

        It has at most ``BRIEF_BYTES``, and may overtake what is under way in the same worker. The
        result may be under way; ``None`` if it must be started by ``start``. ``params`` is the
        address of the local registration's request parameters.
        """
        connection, region = peer.connection, peer.regions.get(copies.segments[0].remote)
        ready = connection.state is ConnectionState.READY and connection.native
        if not ready or region is None or region.key in connection.withdrawn:
            return None
        try:
            key = connection.remote_key(region)
        except TransportError:
            return None
        worker, alone = connection.worker, not self._transfers
        local, remote, nbytes = int(copies.local[0]), int(copies.remote[0]), int(copies.nbytes[0])
        answer = worker.ucp.get(connection.endpoint, local, nbytes, remote, key, params)
        if statuses.status_of(answer) == Code.IN_PROGRESS:
            code = worker.complete(answer, _SMALL_SECONDS, alone=alone)
            answer = answer if code == Code.IN_PROGRESS else code % (1 << 64)
        transfer = UcxTransfer(connection=connection, segments=[(params, region)], notify=notify)
        if answer:
            requests = np.array([answer], np.uint64)
            transfer.windows.append(Window(connection=connection, requests=requests))
            self._transfers.append(transfer)
        else:
            transfer.complete()
        self.last_driven = time.monotonic()
        return transfer

    def stop(self) -> None:
        """End the copy thread, if there is one."""
        if self._copy_thread is not None:
            self._copy_thread.stop()
            self._copy_thread = None

    def close(self) -> None:
        """Begin to close all connections."""
        for connection in self._connections.values():
            connection.close(PeerLostError(f"{self._name} was closed"), say_bye=True)

    def destroy(self) -> None:
        """Destroy the workers, once ``close`` was called and they have had time to finish."""
        for transfer in self._transfers:
            transfer.advance(time.monotonic(), self._idle_timeout)
        for connection in list(self._connections.values()):
            self._release(connection)
        for worker in self._workers:
            worker.destroy()
        self._workers.clear()

    def _on_endpoint_failure(self, number: int, code: int) -> None:
        for connection in self._connections.values():
            if connection.endpoint_number == number:
                broken = f"the connection to {connection.server.name} broke"
                connection.close(PeerLostError(f"{broken}: UCX says {statuses.describe(code)}"))

    def _on_message(self, message: messages.Message) -> None:
        connection = self._connections.get(message.connection)
        if connection is None or connection.state is ConnectionState.BROKEN:
            return
        match message:
            case messages.Welcome():
                connection.on_welcome(message.withdrawn)
            case messages.Refused():
                connection.close(
                    ConnectError(f"{connection.server.name} refuses: {message.reason}")
                )
            case messages.Withdrawn():
                connection.on_withdrawn(message.number, KeyId(message.key))
            case _:  # the other messages are for a server
                return

    def _on_body(self, message: messages.Message, body: int, nbytes: int) -> None:
        if isinstance(message, messages.Fetched):
            connection = self._connections.get(message.connection)
            if connection is not None and connection.state is not ConnectionState.BROKEN:
                connection.on_fetched(message, body, nbytes)

    def _check(self, connection: UcxConnection, now: float, *, check_liveness: bool) -> None:
        """Close a connection whose server is silent or dead; forget it once it is unused."""
        server = connection.server
        broken = connection.state is ConnectionState.BROKEN
        if check_liveness and not broken and server.process.has_ended():
            connection.close(PeerLostError(f"{server.name}'s process has ended"))
        waited = now - connection.opened
        if connection.state is ConnectionState.CONNECTING and waited > self._connect_timeout:
            silence = PeerLostError(
                f"{server.name} has not answered in {self._connect_timeout:g} s: it may be "
                "stopped, or the network cut (driver_options: connect_seconds), or another is "
                "there by now: connect with a new address"
            )
            connection.close(silence)
        if connection.state is ConnectionState.BROKEN:
            self._release(connection)

    def _release(self, connection: UcxConnection) -> None:
        """Forget a broken connection, if it is closed and unused."""
        # Copies in the queues of a GPU count, too: they read memory that UCX would unmap.
        used = any(transfer.uses(connection) for transfer in self._transfers)
        if used or not connection.try_release():
            return
        del self._connections[connection.id]
        worker = connection.worker
        shared = any(other.worker is worker for other in self._connections.values())
        if not shared and len(self._workers) > 1:
            del self._workers[worker]
            worker.destroy()
