"""The ucx transport: implements ``Transport`` with a client side and a server side."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from kvferry.core.errors import (
    ConnectError,
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUnsupportedError,
)
from kvferry.core.memory import Region
from kvferry.core.transport import (
    Capabilities,
    Notification,
    PeerId,
    Quiescence,
    Status,
    TransferId,
    Transport,
)
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.refusals import (
    TransportOwner,
    check_final,
    check_payload,
    check_registered,
    check_unused,
    find_peer,
    find_transfer,
    local_regions,
    remote_regions,
)
from kvferry.drivers.ucx import address as wire
from kvferry.drivers.ucx import library, process_identity
from kvferry.drivers.ucx.address import KeyId, UcxAddress
from kvferry.drivers.ucx.client import Client, UcxPeer
from kvferry.drivers.ucx.compiled_loops import poster
from kvferry.drivers.ucx.connection import ConnectionState
from kvferry.drivers.ucx.copy_thread import MIN_BYTES
from kvferry.drivers.ucx.devices import devices, listed
from kvferry.drivers.ucx.library import UcxLibrary
from kvferry.drivers.ucx.memory import RegisteredMemory
from kvferry.drivers.ucx.merged_copies import merge_copies
from kvferry.drivers.ucx.messages import MAX_BACKLOG, MAX_NOTIFICATION
from kvferry.drivers.ucx.options import DEFAULT_SETTINGS, parse, user_settings
from kvferry.drivers.ucx.progress import ProgressDriver, ProgressTarget, ProgressThread
from kvferry.drivers.ucx.server import Server
from kvferry.drivers.ucx.transfer import UcxTransfer
from kvferry.drivers.ucx.ucp import MAJOR, Ucp
from kvferry.drivers.ucx.worker import Worker

_GRACE_SECONDS = 3.0
"""How long transfers may take to end by themselves before their connection is broken."""

_BREAK_SECONDS = 2.0
"""How long transfers may take to end after their connection was broken."""

_ANSWER_SECONDS = 5.0
"""How long a peer may then take to confirm that it drops what still arrives; ``connect_seconds`` if
that is shorter."""

_RELEASE_SECONDS = 2.0
"""How long peers may take to stop using deregistered memory before they are disconnected."""


class UcxTransport(Transport):
    """Read and write CPU and CUDA memory, on one host or several, with UCP's one-sided operations.

    Each transport has a UCX context of its own, configured by its options, and one or two threads,
    which sleep while there is nothing to do: they drive transfers and serve peers without calls of
    the transport.

    Which memory it reaches depends on the loaded UCX and on the connection. CPU memory is reached
    over every connection: where UCX cannot access the peer's memory (over tcp, for example), the
    bytes go by messages. CUDA memory needs a UCX that was built with CUDA, and RDMA or, on one
    host, CUDA IPC: ``capabilities`` lists it only if UCX can register it, and a transfer of it over
    a connection that cannot reach it fails with ``TransportUnsupportedError``.

    **When a failed transfer is FAILED.** UCX completes every request. If the connection breaks, it
    first takes down the network connections below, then completes the requests with an error. So a
    read is FAILED as soon as its requests have completed. But bytes that a write sent before its
    connection broke may still lie in queues of a living peer. Such a write stays FAILING until the
    peer's process has ended, or the peer has closed its end of that connection and so drops what
    still arrives. The peer confirms this on a new connection, which ``disconnect`` opens.

    A transport is not usable in a forked child.

    Args:
        options: the ``driver_options``, as ``UcxOptions``.

    Raises:
        DriverError: there is no usable UCX, or it does not start; an option is unknown, of a wrong
            type, out of range, or not one of this UCX's.
    """

    interface_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, **options: object) -> None:
        self._options = parse(options)
        self._library, self._ucp = _loaded(self._options.library)
        self._owner = TransportOwner(f"ucx-{os.getpid()}-{secrets.token_hex(8)}")
        self._instance = secrets.token_bytes(16)
        settings = user_settings(self._options)
        self._context = self._ucp.create_context(self.name, settings, DEFAULT_SETTINGS)
        self._memory_kinds = self._ucp.memory_kinds(self._context)
        self._poster = poster(self._ucp)
        make_worker = partial(Worker, self._ucp, self._context, self._poster)
        self._server = Server(make_worker, self._instance)
        self._client = Client(
            self._ucp,
            make_worker,
            self.name,
            self._options.deadline_seconds,
            self._options.connect_seconds,
        )
        self._registered = RegisteredMemory(self._ucp, self._context)
        self._transfers: dict[TransferId, UcxTransfer] = {}
        self._ids = itertools.count(1)
        sides: list[ProgressTarget] = [self._server, self._client]
        shares = [sides] if self._options.threads == 1 else [[side] for side in sides]
        self._progress = ProgressDriver(
            self._client, [ProgressThread(self.name, share) for share in shares]
        )
        _open_transports.add(self)

    @property
    def name(self) -> str:
        """This transport's name, which no other transport has."""
        return self._owner.name

    @property
    def capabilities(self) -> Capabilities:
        """What this transport can do, as ``Transport.capabilities``."""
        return Capabilities(
            ops=frozenset({"read", "write"}),
            memory=self._memory_kinds,
            max_notification=MAX_NOTIFICATION,
            cancel=True,
            background_progress=True,
            quiescence=Quiescence.AFTER_DISCONNECT,
            concurrent_connect=True,
        )

    @property
    def library(self) -> str:
        """The loaded UCX as text: its version, its file, whether it can do RDMA, its devices."""
        if self._owner.closed:
            return str(self._library)
        found = devices(library.load(self._library), self._context)
        return f"{self._library}: {listed(found)}"

    def path(self, peer: PeerId) -> str:
        """Return UCX's names of the transports of a connection, such as "cma+tcp".

        Returns:
            The names, joined by "+"; an empty string if the peer is unknown or not yet ready.
        """
        connected = self._client.peers.get(peer)
        return "" if connected is None else "+".join(sorted(connected.connection.transports))

    # Memory.

    def register(self, region: Region) -> None:
        """Register a region, as ``Transport.register``."""
        self._owner.check()
        if region.kind not in self._memory_kinds:
            kinds = ", ".join(sorted(self._memory_kinds))
            raise TransportUnsupportedError(
                f"ucx reaches {kinds} here, not {region.kind}: {region}"
            )
        if region in self._registered:
            return
        key = self._registered.register(region)
        with self._server.lock:
            self._server.regions[key] = region

    def deregister(self, region: Region) -> None:
        """Deregister a region, as ``Transport.deregister``.

        Waits up to 2 s until no peer uses the region any more, then disconnects the peers that have
        not confirmed this, and waits up to 2 s for the end of their connections.
        """
        self._owner.check()
        check_registered(region, self._registered)
        with self._client.lock:
            check_unused(region, self._client.regions_in_use)
        registration = self._registered.remove(region)
        self._withdraw(registration.key)
        with self._server.lock, self._client.lock:
            self._registered.unmap(registration)

    # Peers.

    def address(self) -> bytes:
        """Return the address for peers, as ``Transport.address``."""
        self._owner.check()
        return wire.encode(
            UcxAddress(
                name=self.name,
                instance=self._instance,
                process=process_identity.this_process(),
                ucx=".".join(map(str, self._ucp.version)),
                worker=self._server.worker.address,
                withdrawn=self._server.withdrawals,
                regions=self._registered.described(),
            )
        )

    def connect(self, address: bytes) -> PeerId:
        """Connect to a peer, as ``Transport.connect``."""
        self._owner.check()
        remote = wire.decode(address)
        if remote.ucx.partition(".")[0] != str(MAJOR):
            raise ConnectError(f"{remote.name} has UCX {remote.ucx}, and this side {MAJOR}.x")
        if self._server.format_known:
            wire.check_packed(remote)
        # Compile now, since a transport that connects is about to move bytes.
        self._poster.start_compiling()
        regions = wire.regions_of(remote)
        with self._client.lock:
            peer = self._client.find_peer(remote)
            is_new = peer is None
            if peer is None:
                peer = UcxPeer(
                    id=PeerId(next(self._ids)),
                    address=remote,
                    regions=regions,
                    connection=self._client.open_connection(remote),
                )
                self._client.peers[peer.id] = peer
            peer.address, peer.regions = remote, regions
            connection = self._client.connection_to(peer)
        self._progress.wake()
        # Twice the time after which the client itself breaks a connection that is not answered.
        limit = 2 * self._options.connect_seconds
        self._progress.wait_until(lambda: connection.state is not ConnectionState.CONNECTING, limit)
        if connection.state is not ConnectionState.READY:
            if is_new:
                with self._client.lock:
                    del self._client.peers[peer.id]
            raise ConnectError(f"cannot connect to {remote.name}: {connection.error}")
        return peer.id

    def disconnect(self, peer: PeerId) -> None:
        """Disconnect from a peer, as ``Transport.disconnect``."""
        self._owner.check()
        connected = find_peer(self._client.peers, peer)
        name = connected.address.name
        if not self._end_transfers([connected], PeerLostError(f"{name} was disconnected")):
            raise TransportError(
                f"bytes of a write may still reach {name}, which does not answer: "
                "its transfers stay failing; disconnect again, later"
            )
        with self._client.lock:
            self._client.disconnect(connected)
            del self._client.peers[peer]
        self._progress.wake()

    # Transfers.

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """Start a read, as ``Transport.read``."""
        return self._start(peer, copies, notify, write=False)

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """Start a write, as ``Transport.write``."""
        return self._start(peer, copies, notify, write=True)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        """Return the status of transfers, as ``Transport.poll``."""
        self._owner.check()
        polled = [find_transfer(self._transfers, transfer) for transfer in transfers]
        self._progress.run_once()
        return [transfer.status for transfer in polled]

    def cancel(self, transfer: TransferId) -> None:
        """Cancel a transfer, as ``Transport.cancel``."""
        self._owner.check()
        cancelled = find_transfer(self._transfers, transfer)
        with self._client.lock:
            cancelled.fail(TransferCancelledError(f"transfer {transfer} was cancelled"))
        self._progress.wake()

    def forget(self, transfer: TransferId) -> None:
        """Forget a final transfer, as ``Transport.forget``."""
        self._owner.check()
        check_final(transfer, find_transfer(self._transfers, transfer).status)
        del self._transfers[transfer]

    # Notifications.

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """Send a notification, as ``Transport.notify``.

        Raises:
            TransportError: also if the peer lives but has let 64 MiB of messages pile up.
        """
        self._owner.check()
        connected = find_peer(self._client.peers, peer)
        check_payload(payload, MAX_NOTIFICATION)
        with self._client.lock:
            connection = self._client.connection_to(connected)
            if connection.backlog > MAX_BACKLOG:
                raise TransportError(
                    f"{connection.backlog} bytes of messages have piled up on the way to "
                    f"{connected.address.name}, which takes none: it may be stopped"
                )
            connection.notify(payload)
        self._progress.wake()

    def notifications(self) -> list[Notification]:
        """Return what has arrived, as ``Transport.notifications``."""
        self._owner.check()
        with self._server.lock:
            return self._server.take_notifications()

    def close(self) -> None:
        """Close the transport, as ``Transport.close``."""
        if not self._owner.end():
            return
        _open_transports.discard(self)
        quiet = self._end_transfers(
            list(self._client.peers.values()), PeerLostError(f"{self.name} was closed")
        )
        self._progress.stop()
        with self._client.lock, self._server.lock:
            self._client.close()
            self._server.close()
            self._registered.close()
            self._ucp.destroy_context(self._context)
        if not quiet:
            raise TransportError(
                "closed, but bytes of a write may still reach a peer that does not answer"
            )

    # Behind the interface.

    def _start(
        self, peer: PeerId, copies: Copies, notify: bytes | None, *, write: bool
    ) -> TransferId:
        self._owner.check()
        connected = find_peer(self._client.peers, peer)
        if notify is not None:
            check_payload(notify, MAX_NOTIFICATION)
        local = local_regions(copies, self._registered)
        remote_regions(copies, connected.regions, connected.address.name)
        runs = merge_copies(copies)
        large = len(runs) > 0 and int(runs.end_bytes[-1]) >= MIN_BYTES
        segments = [
            (self._registered.params_address(segment.local), connected.regions[segment.remote])
            for segment in copies.segments
        ]
        with self._client.lock:
            connection = self._client.connection_to(connected)
            second = self._client.second_connection_to(connected) if large and not write else None
            transfer = UcxTransfer(
                id=TransferId(next(self._ids)),
                peer=peer,
                connection=connection,
                write=write,
                runs=runs,
                segments=segments,
                local_regions=local,
                remote_keys=frozenset(KeyId(region.key) for _, region in segments),
                send_notification=None if notify is None else partial(connection.notify, notify),
                poster=self._poster,
                second_connection=second,
            )
            self._client.start(transfer)
        self._transfers[transfer.id] = transfer
        self._progress.wake()
        return transfer.id

    def _withdraw(self, key: KeyId) -> None:
        """Wait until no peer uses a registration; disconnect peers that do not confirm in time."""
        with self._server.lock:
            number = self._server.withdraw(key)
        confirmed = partial(self._server.is_confirmed, number)
        self._progress.wake()
        if self._progress.wait_until(confirmed, _RELEASE_SECONDS):
            return
        with self._server.lock:
            self._server.disconnect_unconfirmed(number)
        self._progress.wake()
        self._progress.wait_until(confirmed, _BREAK_SECONDS)

    def _end_transfers(self, peers: list[UcxPeer], error: PeerLostError) -> bool:
        """Make all transfers with these peers fail, and wait until they are final.

        First waits for the transfers to end by themselves, then breaks their connections, then
        opens new ones, on which the peers confirm that they drop what is left of writes.

        Returns:
            Whether all of the transfers are final.
        """
        with self._client.lock:
            transfers = self._client.transfers_with(peer.id for peer in peers)
            for transfer in transfers:
                transfer.fail(error)

        def all_final() -> bool:
            return all(transfer.final for transfer in transfers)

        if self._progress.wait_until(all_final, _GRACE_SECONDS if transfers else 0):
            return True
        with self._client.lock:
            for connection in [c for peer in peers for c in peer.connections]:
                if any(transfer.uses(connection) for transfer in transfers):
                    connection.close(error)
        self._progress.wait_until(
            lambda: not any(transfer.windows for transfer in transfers), _BREAK_SECONDS
        )
        with self._client.lock:
            for peer in peers:
                if any(t.unconfirmed and t.peer == peer.id for t in transfers):
                    self._client.connection_to(peer)
        limit = min(self._options.connect_seconds, _ANSWER_SECONDS)
        return self._progress.wait_until(all_final, limit)

    def _stop_threads(self) -> None:
        """End the threads at the end of the process, during which UCX must not be at work."""
        if self._owner.end():
            self._progress.stop()


@functools.cache
def _loaded(explicit: str | None) -> tuple[UcxLibrary, Ucp]:
    """Load the UCX to use, once per process, since a library cannot be unloaded.

    Args:
        explicit: the option ``library``.
    """
    found = library.find(explicit)
    return found, Ucp(library.load(found))


_open_transports: set[UcxTransport] = set()
"""The transports that have not been closed; kept alive here, because their threads run."""


@atexit.register
def _stop_all_threads() -> None:
    for transport in list(_open_transports):
        transport._stop_threads()
