"""The ucx transport: implements the hooks of ``BaseTransport`` with a client and a server side."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvferry.core.errors import ConnectError, TransportError, TransportUsageError
from kvferry.core.memory import CPU, CUDA, Region
from kvferry.core.transport import (
    BaseTransport,
    Capabilities,
    EnterThread,
    Notification,
    Quiescence,
    TransferRequest,
    enter_nothing,
    parse_options,
)
from kvferry.core.transport.addresses import decode_regions
from kvferry.core.transport.merged_copies import MergedCopies, merge_copies
from kvferry.drivers.cuda import find_cuda
from kvferry.drivers.ucx import address as wire
from kvferry.drivers.ucx import library
from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.address import KeyId, ProcessIdentity, UcxAddress, UcxRegion
from kvferry.drivers.ucx.client import Client
from kvferry.drivers.ucx.connection import ConnectionState, UcxConnection, UcxPeer
from kvferry.drivers.ucx.library import UcxLibrary
from kvferry.drivers.ucx.messages import MAX_BACKLOG, MAX_NOTIFICATION
from kvferry.drivers.ucx.options import UcxOptions, default_settings, user_settings
from kvferry.drivers.ucx.posting import Poster
from kvferry.drivers.ucx.progress import ProgressTarget, ProgressThread
from kvferry.drivers.ucx.server import Server
from kvferry.drivers.ucx.transfer import LocalDevices, UcxTransfer
from kvferry.drivers.ucx.ucp import BRIEF_BYTES, Memory, Ucp
from kvferry.drivers.ucx.worker import Worker, finish

logger = logging.getLogger(__name__)

_SECOND_THREAD_BYTES = 1 << 21
"""The smallest read that is worth a second thread."""

_END_SECONDS = 3.0
"""How long transfers may take to end by themselves before their connections are closed."""

_BREAK_SECONDS = 7.0
"""How long transfers may take to end after their connections were closed: GPUs may be busy."""

_PAUSE_SECONDS = 0.0005  # of ``_wait_until``

_RELEASE_SECONDS = 2.0
"""How long peers may take to stop using memory that is to be deregistered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A region as registered with UCX, UCX's parameters for its use, and what peers see of it."""

    memory: Memory
    params: structs.RequestParams  # UCX gets its address, so it must live
    published: UcxRegion


class UcxTransport(BaseTransport[Registration, UcxAddress, UcxPeer, UcxTransfer]):
    """Read CPU and CUDA memory, on one host or several, with UCP's one-sided reads.

    Each transport has a UCX context of its own, and one or two threads, which drive transfers and
    serve peers without calls of the transport, and else sleep. It is not usable in a forked child.

    CPU memory is reached over every connection: where UCX cannot access it (over tcp, for example),
    the bytes go by messages. CUDA memory needs a UCX that was built with CUDA, and RDMA or, on one
    host, CUDA IPC: ``capabilities`` lists it only if UCX can register it and CUDA's driver can be
    called. If a connection does not reach the peer's, each transfer of it fails with
    ``TransportUnsupportedError``, which says what to look at.

    **When a failed transfer is FAILED.** A read into CPU memory: as soon as UCX has completed its
    requests, which it does after it has taken down the network connections below. A read into CUDA
    memory: when the GPU, too, has done all work that was enqueued until then, the engine's as well;
    if it never does, the read stays FAILING, and ``disconnect`` raises.

    **When a read is DONE.** Its bytes are visible to work that starts on the GPU from then on: the
    driver flushes what a NIC writes, where the GPU needs that.

    Raises:
        DriverError: there is no usable UCX or no llvmlite, or UCX does not start; an option is
            unknown, of a wrong type or out of range, or UCX does not take its value.
    """

    interface_version: ClassVar[tuple[int, int]] = (2, 0)
    grace_seconds: ClassVar[float] = _END_SECONDS + _BREAK_SECONDS
    max_regions: ClassVar[int] = wire.MAX_REGIONS

    def __init__(self, *, enter: EnterThread = enter_nothing, **options: object) -> None:
        self._enter = enter
        self._options = parse_options("ucx", UcxOptions, options)
        self._library, self._ucp, self._poster = _loaded(self._options.library)
        name = f"ucx-{os.getpid()}-{secrets.token_hex(8)}"
        self._context = self._ucp.create_context(
            name, user_settings(self._options), default_settings(os.environ)
        )
        memory = self._ucp.memory_kinds(self._context)
        if CUDA in memory and self._ucp.version < library.LOWEST_FOR_CUDA:
            logger.warning(
                "%s is not used for GPU memory, which it may crash with: install %s or later",
                self._library,
                library.dotted(library.LOWEST_FOR_CUDA),
            )
            memory -= {CUDA}
        self._cuda = find_cuda() if CUDA in memory else None
        super().__init__(
            name,
            Capabilities(
                memory=memory if self._cuda else memory - {CUDA},
                max_notification=MAX_NOTIFICATION,
                cancel=True,
                background_progress=True,
                quiescence=Quiescence.AFTER_DISCONNECT,
                concurrent_connect=True,
            ),
        )
        self._instance = secrets.token_bytes(16)
        self._keys = map(KeyId, itertools.count(1))
        make_worker = partial(Worker, self._ucp, self._context, self._poster)
        self._server = Server(make_worker, self._instance)
        timeouts = self._options.deadline_seconds, self._options.connect_seconds
        self._client = Client(make_worker, name, *timeouts, enter)
        sides: list[ProgressTarget] = [self._server, self._client]
        shares = [sides] if self._options.threads == 1 else [[side] for side in sides]
        self._threads = [ProgressThread(name, share, enter) for share in shares]
        _open_transports.add(self)

    @property
    def library(self) -> str:
        """The loaded UCX as text: its version, its file, whether it can do RDMA, its devices."""
        if self not in _open_transports:
            return str(self._library)
        devices = library.devices(library.load(self._library), self._context)
        return f"{self._library}: {library.listed(devices)}"

    # Memory.

    def _register(self, region: Region) -> Registration:
        memory, packed = self._ucp.register(self._context, region)
        key = next(self._keys)
        registration = Registration(
            memory=memory,
            params=structs.RequestParams.of(memh=memory),
            published=UcxRegion(
                region.address, region.nbytes, region.kind, region.device, key, packed
            ),
        )
        with self._server.lock:
            self._server.regions[key] = region
        return registration

    def _deregister(self, region: Region, registration: Registration) -> None:
        # First ask all peers to stop using it, and disconnect those that do not in 2 s.
        with self._server.lock:
            number = self._server.withdraw(KeyId(registration.published.key))
        confirmed = partial(self._server.is_confirmed, number)
        self._wake()
        if not self._wait_until(confirmed, _RELEASE_SECONDS):
            with self._server.lock:
                self._server.disconnect_unconfirmed(number)
            self._wake()
            self._wait_until(confirmed, _RELEASE_SECONDS)
        with self._server.lock, self._client.lock:
            self._ucp.unmap(self._context, registration.memory)

    # Connections.

    def _address(self) -> bytes:
        return wire.encode(
            UcxAddress(
                name=self.name,
                instance=self._instance,
                process=ProcessIdentity.of_this_process(),
                ucx=library.dotted(self._ucp.version),
                worker=self._server.worker.address,
                withdrawn=self._server.withdrawals,
                regions=[made.published for made in self._registered.values()],
            )
        )

    def _decode_address(self, address: bytes) -> UcxAddress:
        theirs = wire.decode(address)
        major = self._ucp.version[0]
        if theirs.ucx.partition(".")[0] != str(major):
            raise ConnectError(f"{theirs.name} has UCX {theirs.ucx}, and this side {major}.x")
        if self._server.format_known:
            wire.check_packed(theirs)
        return theirs

    def _identity(self, address: UcxAddress) -> Hashable:
        return address.identity

    def _connect(self, address: UcxAddress) -> UcxPeer:
        regions = decode_regions(address.name, address.regions)
        with self._client.lock:
            connection = self._client.open_connection(address)
        self._wait_ready(connection)
        return UcxPeer(address=address, regions=regions, connection=connection)

    def _refresh(self, peer: UcxPeer, address: UcxAddress) -> None:
        """Connect anew to a peer at a newer address, or go on with the old one if that fails."""
        regions = decode_regions(address.name, address.regions)
        with self._client.lock:
            before = peer.address, peer.regions
            if address.constants != peer.address.constants:
                raise ConnectError(
                    f"an address of {address.name[:64]} that leads to {peer.name}, which is "
                    "connected, says that its name, process or UCX is another"
                )
            peer.address, peer.regions = address, regions
            revived = self._client.connection_to(peer)
        try:
            self._wait_ready(revived)
        except ConnectError:
            with self._client.lock:
                # Another thread may have opened one more, with the new address.
                if peer.connection is revived:
                    peer.address, peer.regions = before
            raise

    def _wait_ready(self, connection: UcxConnection) -> None:
        """Wait until a connection is ready; raise ``ConnectError`` if it will not be."""
        self._wake()
        # Twice the time after which the client itself breaks a connection that is not answered.
        self._wait_until(
            lambda: connection.state is not ConnectionState.CONNECTING,
            2 * self._options.connect_seconds,
        )
        if connection.state is not ConnectionState.READY:
            raise ConnectError(f"cannot connect to {connection.server.name}: {connection.error}")

    def _disconnect(self, connection: UcxPeer, transfers: Sequence[UcxTransfer]) -> None:
        with self._client.lock:
            self._client.disconnect(connection)
        self._wake()

    def _path(self, connection: UcxPeer) -> str:
        return "+".join(sorted(connection.connection.transports))

    # Transfers.

    def _start(self, request: TransferRequest[UcxPeer]) -> UcxTransfer:
        transfer = self._read_small(request)
        if transfer is not None:
            busy = not transfer.final or self._client.has_work
        else:
            runs = merge_copies(request.copies)
            with self._client.lock:
                transfer = self._make_transfer(request, runs)
                busy = self._client.start(transfer)
        if busy:
            self._wake()
        return transfer

    def _read_small(self, request: TransferRequest[UcxPeer]) -> UcxTransfer | None:
        """Read at once, if it is one short range of CPU memory; else return ``None``."""
        copies, peer = request.copies, request.connection
        if len(copies) != 1 or len(copies.segments) != 1:
            return None
        [segment] = copies.segments
        in_cpu_memory = segment.local.kind == segment.remote.kind == CPU
        if not in_cpu_memory or not 0 < int(copies.nbytes[0]) <= BRIEF_BYTES:
            return None
        params = ctypes.addressof(self._registered[segment.local].params)
        with self._client.lock:
            return self._client.read_small(peer, copies, params, request.notify)

    def _make_transfer(self, request: TransferRequest[UcxPeer], runs: MergedCopies) -> UcxTransfer:
        """Return a transfer that has not been started. The caller holds the client's lock."""
        # ``_refresh`` must not replace regions and connection meanwhile: a key of an older address
        # must not be used on a connection that was opened with a newer one, where the server does
        # not repeat which keys are invalid.
        peer = request.connection
        try:
            segments = [
                (ctypes.addressof(self._registered[one.local].params), peer.regions[one.remote])
                for one in request.copies.segments
            ]
        except KeyError as exc:
            # The base class found the region; ``_refresh`` has replaced the regions since.
            raise TransportUsageError(
                f"remote {exc.args[0]} is no longer among the regions of {peer.name}"
            ) from exc
        connection, second = self._client.connection_to(peer), None
        kinds = frozenset(one.kind for one in request.local | request.remote)
        gpus = [region.device for region in request.local if region.kind == CUDA]
        if runs.total >= _SECOND_THREAD_BYTES and kinds == {CPU}:
            second = self._client.second_connection_to(peer)
        return UcxTransfer(
            connection=connection,
            segments=segments,
            notify=request.notify,
            runs=runs,
            memory_kinds=kinds,
            second_connection=second,
            devices=LocalDevices(self._cuda, gpus, self._enter) if self._cuda and gpus else None,
        )

    def _progress(self, transfers: Sequence[UcxTransfer]) -> None:
        # A caller that has news to handle need not wait while others move.
        if not any(one.final and not one.reported for one in transfers):
            self._poll(self._client)
        for one in transfers:
            one.reported = one.final

    def _fail(self, transfer: UcxTransfer, error: TransportError) -> None:
        with self._client.lock:
            transfer.fail(error)
        self._wake()

    def _end_transfers(self, transfers: Sequence[UcxTransfer], error: TransportError) -> bool:
        with self._client.lock:
            for transfer in transfers:
                transfer.fail(error)

        def all_final() -> bool:
            return all(transfer.final for transfer in transfers)

        # Transfers get some time to end by themselves. Then their connections are closed.
        if self._wait_until(all_final, _END_SECONDS):
            return True
        with self._client.lock:
            for window in [window for transfer in transfers for window in transfer.windows]:
                window.connection.close(error)
        return self._wait_until(all_final, _BREAK_SECONDS)

    # Notifications.

    def _notify(self, connection: UcxPeer, payload: bytes) -> None:
        with self._client.lock:
            latest = self._client.connection_to(connection)
            if latest.backlog > MAX_BACKLOG:
                raise TransportError(
                    f"{latest.backlog} bytes of messages have piled up on the way to "
                    f"{connection.name}, which takes none: it may be stopped"
                )
            latest.notify(payload)
            sent = latest.state is ConnectionState.READY and not latest.worker.needs_thread
        if not sent:
            self._wake()

    def _receive(self) -> list[Notification]:
        self._poll(self._server)
        with self._server.lock:
            return self._server.take_notifications()

    # Progress.

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Drive the client side until a condition, checked without lock, holds; return whether."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            if not self._poll(self._client):
                time.sleep(_PAUSE_SECONDS)
        return True

    def _poll(self, target: ProgressTarget) -> bool:
        """Drive a side, unless another thread does; the progress threads go on if more is left."""
        busy = target.try_poll()
        if busy:
            self._wake()
        return busy

    def _wake(self) -> None:
        for thread in self._threads:
            thread.wake()

    # The end.

    def _stop_threads(self) -> None:
        for thread in self._threads:
            thread.stop()
        self._client.stop()

    def _close(self, transfers: Sequence[UcxTransfer]) -> None:
        _open_transports.discard(self)
        self._stop_threads()
        with self._client.lock, self._server.lock:
            self._client.close()
            self._server.close()
            finish([*self._client.workers, self._server.worker])
            self._client.destroy()
            self._server.worker.destroy()
            for registration in self._registered.values():
                with suppress(TransportError):
                    self._ucp.unmap(self._context, registration.memory)
            self._ucp.destroy_context(self._context)


@functools.cache
def _loaded(explicit: str | None) -> tuple[UcxLibrary, Ucp, Poster]:
    """Find and load a UCX; once per process and option, since libraries cannot be unloaded."""
    found = library.find(explicit)
    ucp = Ucp(library.load(found))
    return found, ucp, Poster(ucp)


_open_transports: set[UcxTransport] = set()
"""The transports that have not been closed; kept alive here, because their threads run."""


@atexit.register
def _stop_all_threads() -> None:
    # UCX must not run while the process ends.
    for transport in list(_open_transports):
        if transport._end():
            transport._stop_threads()
