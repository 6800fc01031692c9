"""The loopback transport: implements the hooks of ``BaseTransport`` with this package's modules."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import msgspec

from kvferry.core.errors import TransportError
from kvferry.core.memory import CPU, Region
from kvferry.core.transport import (
    BaseTransport,
    Capabilities,
    EnterThread,
    Notification,
    Quiescence,
    State,
    Status,
    TransferRequest,
    enter_nothing,
    parse_options,
    procfs,
)
from kvferry.core.transport.addresses import decode_regions
from kvferry.core.transport.merged_copies import merge_copies
from kvferry.drivers.loopback import address as wire
from kvferry.drivers.loopback.address import (
    ExpectedRows,
    LoopbackAddress,
    LoopbackRegion,
    RegionRegistry,
    expected_rows,
)
from kvferry.drivers.loopback.notifications import MAX_NOTIFICATION, Mailbox, NotificationChannel
from kvferry.drivers.loopback.process_memory import (
    PeerMemory,
    allow_readers,
    chunk_of_one,
    open_memory,
)
from kvferry.drivers.loopback.worker_pool import (
    MOVED,
    ChunkedTransfer,
    LoopbackTransfer,
    WorkerPool,
)

_INLINE_RUNS = 1024


class LoopbackOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``driver_options`` of loopback.

    Attributes:
        inline_bytes: a transfer of at most this many bytes is moved within ``read``, unless it has
            more than 1024 copies after merging adjacent ones; threads move all others.
        chunk_bytes: the most bytes that one system call moves. A cancelled or disconnected transfer
            ends when its running chunks have ended.
        threads: how many threads move transfers.
    """

    inline_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 1 << 20
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1 << 12, le=1 << 30)] = 32 << 20
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2


@dataclass(slots=True, kw_only=True, eq=False)
class LoopbackConnection:
    """The connection to one peer; ``regions`` are those of its last address, each as a claim."""

    name: str
    identity: Hashable
    memory: PeerMemory
    regions: dict[Region, ExpectedRows]
    instance: bytes
    channel: NotificationChannel


class LoopbackTransport(
    BaseTransport[LoopbackRegion, LoopbackAddress, LoopbackConnection, LoopbackTransfer]
):
    """Read CPU memory of this process and of other processes of this host.

    All of it is read with ``process_vm_readv``, also that of this process. To make a transport
    allows every process of the same user to read this process's memory
    (``prctl(PR_SET_PTRACER)``), which Yama otherwise allows to ancestors only.

    A transfer is DONE only if the peer lived and had the regions registered after the last byte
    moved. So if it fails, bytes may have arrived, even of memory that was deregistered before. Not
    usable in a forked child.

    Raises:
        DriverError: an option is unknown or out of range, or this is not Linux.
    """

    interface_version: ClassVar[tuple[int, int]] = (2, 0)
    grace_seconds: ClassVar[float] = 10.0
    max_regions: ClassVar[int] = wire.MAX_REGIONS

    def __init__(self, *, enter: EnterThread = enter_nothing, **options: object) -> None:
        self._options = parse_options("loopback", LoopbackOptions, options)
        super().__init__(
            f"loopback-{os.getpid()}-{secrets.token_hex(8)}",
            Capabilities(
                memory=frozenset({CPU}),
                max_notification=MAX_NOTIFICATION,
                cancel=True,
                background_progress=True,
                quiescence=Quiescence.ALWAYS,
                concurrent_connect=True,
            ),
        )
        allow_readers()
        self._start_time = procfs.start_time(os.getpid()) or 0
        self._registry = RegionRegistry()
        self._mailbox = Mailbox(self._registry.instance, self.name, enter)
        self._workers = WorkerPool(self.name, self._options.threads, enter)
        self._most_at_once = min(self._options.inline_bytes, self._options.chunk_bytes)

    # Memory.

    def _register(self, region: Region) -> LoopbackRegion:
        return self._registry.add(region)

    def _deregister(self, region: Region, registration: LoopbackRegion) -> None:
        self._registry.remove(registration)

    # Connections.

    def _address(self) -> bytes:
        return wire.encode(
            LoopbackAddress(
                name=self.name,
                boot=procfs.boot_id(),
                pid_namespace=procfs.pid_namespace(),
                pid=os.getpid(),
                start_time=self._start_time,
                instance=self._registry.instance,
                socket=self._mailbox.socket_name,
                board=self._registry.address,
                regions=list(self._registered.values()),
            )
        )

    def _decode_address(self, address: bytes) -> LoopbackAddress:
        return wire.decode(address)

    def _identity(self, address: LoopbackAddress) -> Hashable:
        # An address with the instance of a known peer, but with another process, registry or
        # socket, counts as another peer.
        return (
            address.instance, address.pid, address.start_time, address.board, address.socket
        )  # fmt: skip

    def _connect(self, address: LoopbackAddress) -> LoopbackConnection:
        regions = _regions(address)
        memory = open_memory(address)
        return LoopbackConnection(
            name=address.name,
            identity=self._identity(address),
            memory=memory,
            regions=regions,
            instance=address.instance,
            channel=self._open_channel(address),
        )

    def _refresh(self, connection: LoopbackConnection, address: LoopbackAddress) -> None:
        regions = _regions(address)
        memory = open_memory(address)
        if connection.channel.lost:
            channel = self._open_channel(address)
            self._mailbox.close_channel(connection.channel)
            connection.name, connection.memory, connection.channel = address.name, memory, channel
        connection.regions = regions

    def _disconnect(
        self, connection: LoopbackConnection, transfers: Sequence[LoopbackTransfer]
    ) -> None:
        self._mailbox.close_channel(connection.channel)

    def _open_channel(self, address: LoopbackAddress) -> NotificationChannel:
        return self._mailbox.open_channel(address.name, address.instance, address.socket)

    def _path(self, connection: LoopbackConnection) -> str:
        return "process_vm"

    # Transfers.

    def wake_when_ended(self, wake: Callable[[], None]) -> bool:
        """Implement ``Transport.wake_when_ended``: the threads that move bytes call ``wake``."""
        self._workers.ended = wake
        return True

    def _start(self, request: TransferRequest[LoopbackConnection]) -> LoopbackTransfer:
        nbytes = request.copies.nbytes
        if len(nbytes) == len(request.remote) == 1 and nbytes.item() <= self._most_at_once:
            return self._move_one(request)
        transfer = self._make_transfer(request)
        runs = transfer.runs
        if runs.total <= self._options.inline_bytes and len(runs) <= _INLINE_RUNS:
            self._workers.run_here(transfer)
        else:
            self._workers.submit(transfer)
        return transfer

    def _fail(self, transfer: LoopbackTransfer, error: TransportError) -> None:
        self._workers.stop(transfer, error)

    def _move_one(self, request: TransferRequest[LoopbackConnection]) -> LoopbackTransfer:
        peer, copies, (region,) = request.connection, request.copies, request.remote
        chunk = chunk_of_one(copies.local.item(), copies.remote.item(), copies.nbytes.item())
        try:
            peer.memory.move(chunk, peer.regions[region])
            if request.notify is not None:
                peer.channel.send(request.notify)
        except TransportError as exc:
            return LoopbackTransfer(status=Status(state=State.FAILED, error=exc))
        return MOVED

    def _make_transfer(self, request: TransferRequest[LoopbackConnection]) -> ChunkedTransfer:
        peer, notify = request.connection, request.notify
        rows = [row for region in request.remote for row in peer.regions[region].rows]
        # Copies of 4 KiB take 0.7 times as long in the order of their sources as in random order.
        runs = merge_copies(request.copies, sort=True)
        return ChunkedTransfer(
            memory=peer.memory,
            runs=runs.split(self._options.chunk_bytes),
            expected=expected_rows(peer.instance, rows),
            # Bound now, since ``_refresh`` may replace the peer's channel.
            send=None if notify is None else partial(peer.channel.send, notify),
            limit=self._options.chunk_bytes,
        )

    # Notifications.

    def _notify(self, connection: LoopbackConnection, payload: bytes) -> None:
        connection.channel.send(payload)

    def _receive(self) -> list[Notification]:
        return self._mailbox.take()

    def _close(self, transfers: Sequence[LoopbackTransfer]) -> None:
        # The base class has already waited for a thread that is still in a system call.
        held = any(not transfer.final for transfer in transfers)
        self._workers.close(time.monotonic() + (0.0 if held else self.grace_seconds))
        self._registry.close()
        self._mailbox.close(self.grace_seconds)


def _regions(address: LoopbackAddress) -> dict[Region, ExpectedRows]:
    """Return a peer's regions; made for one each, as a read of one copy has no time for that."""
    regions = decode_regions(address.name, address.regions)
    return {region: expected_rows(address.instance, [row]) for region, row in regions.items()}
