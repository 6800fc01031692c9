"""The loopback transport: what ``kvferry.core.transport`` asks for, over the files beside it."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from kvferry.core.errors import (
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUnsupportedError,
    TransportUsageError,
)
from kvferry.core.memory import CPU, Region
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
    parse_options,
    remote_regions,
)
from kvferry.drivers.loopback import address as wire
from kvferry.drivers.loopback import procfs as process
from kvferry.drivers.loopback.address import LoopbackAddress, LoopbackRegion
from kvferry.drivers.loopback.chunked_copy import CopyRunsPool
from kvferry.drivers.loopback.notifications import MAX_NOTIFICATION, Mailbox, NotificationChannel
from kvferry.drivers.loopback.peer_memory import PeerMemory, reach
from kvferry.drivers.loopback.registry import Entry, RegionRegistry, claims_of
from kvferry.drivers.loopback.worker_pool import LoopbackTransfer, WorkerPool

_GRACE_SECONDS = 10.0
"""How long ``disconnect`` and ``close`` wait for the kernel to finish what it is copying."""


class LoopbackOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``driver_options`` of loopback.

    Attributes:
        inline_bytes: a transfer of at most so many bytes runs within ``read`` or ``write``.
        chunk_bytes: the most that one system call moves; ``cancel`` and ``disconnect`` wait for
            one chunk.
        threads: how many move the larger transfers.
    """

    inline_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 1 << 20
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1 << 12, le=1 << 30)] = 32 << 20
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2


@dataclass(slots=True, kw_only=True, eq=False)
class _Peer:
    name: str
    place: tuple[bytes, int, int, int, str]
    reach: PeerMemory
    regions: dict[Region, Entry]
    channel: NotificationChannel


class LoopbackTransport(Transport):
    """Reads and writes CPU memory of this process and of other processes of this host.

    Other processes' memory is reached with ``process_vm_readv`` and ``process_vm_writev``, this
    process's without system calls. Making one lets every process of the same user read this
    process (``prctl(PR_SET_PTRACER)``), where a kernel with Yama would refuse it to siblings.

    Small transfers run within ``read`` and ``write``, larger ones on threads. Both ends see that a
    peer has closed, died, restarted or deregistered memory at the next chunk: a transfer is DONE
    only if the peer still had everything registered when the last byte had been moved.

    Not usable in a forked child.

    Raises:
        DriverError: an option is unknown or out of range, or this is not Linux.
    """

    interface_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, **options: object) -> None:
        self._options = parse_options("loopback", LoopbackOptions, options)
        process.allow_readers()
        self._name = f"loopback-{os.getpid()}-{secrets.token_hex(8)}"
        self._owner = TransportOwner(self._name)
        self._start_time = process.start_time(self._owner.pid) or 0
        self._board = RegionRegistry()
        self._mail = Mailbox(self._board.instance, self._name)
        self._workers = WorkerPool(self._name, self._options.threads)
        self._pool = CopyRunsPool()
        self._registered: dict[Region, Entry] = {}
        self._peers: dict[PeerId, _Peer] = {}
        self._jobs: dict[TransferId, tuple[PeerId, LoopbackTransfer]] = {}
        self._ids = itertools.count(1)

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            ops=frozenset({"read", "write"}),
            memory=frozenset({CPU}),
            max_notification=MAX_NOTIFICATION,
            cancel=True,
            background_progress=True,
            quiescence=Quiescence.ALWAYS,
            concurrent_connect=True,
        )

    def path(self, peer: PeerId) -> str:
        found = self._peers.get(peer)
        return found.reach.path if found is not None else ""

    # Memory.

    def register(self, region: Region) -> None:
        self._guard()
        if region.kind != CPU:
            raise TransportUnsupportedError(
                f"loopback reaches {CPU} memory, not {region.kind}: {region}; for device memory "
                "choose a driver that has it"
            )
        if region in self._registered:
            return
        if not process.is_mapped(region.address, region.nbytes):
            raise TransportError(
                f"{region} is not, or not all, mapped in this process: register memory that "
                "exists, and keep it until it is deregistered"
            )
        self._registered[region] = self._board.enter(region)

    def deregister(self, region: Region) -> None:
        self._guard()
        check_registered(region, self._registered)
        for _, job in self._jobs.values():
            if not job.final:
                check_unused(region, job.local)
        self._board.erase(self._registered.pop(region))

    # Peers.

    def address(self) -> bytes:
        self._guard()
        return wire.encode(
            LoopbackAddress(
                name=self._name,
                boot=process.boot_id(),
                pid_namespace=process.pid_namespace(),
                pid=self._owner.pid,
                start_time=self._start_time,
                instance=self._board.instance,
                socket=self._mail.socket_name,
                board=self._board.address,
                regions=[
                    LoopbackRegion(
                        region.address, region.nbytes, region.device, entry.slot, entry.key
                    )
                    for region, entry in self._registered.items()
                ],
            )
        )

    def connect(self, address: bytes) -> PeerId:
        self._guard()
        theirs = wire.decode(address)
        regions = wire.entries(theirs)
        way = reach(theirs)
        # A copy, here and below: other calls may change it meanwhile.
        peers = list(self._peers.items())
        # An address that leads elsewhere is another peer's, whatever instance it says.
        place = (theirs.instance, theirs.pid, theirs.start_time, theirs.board, theirs.socket)
        known = next((i for i, p in peers if p.place == place), None)
        if known is not None and not self._peers[known].channel.lost:
            self._peers[known].regions = regions
            return known
        channel = self._mail.open_channel(theirs.name, theirs.instance, theirs.socket)
        if known is not None:
            self._mail.close_channel(self._peers[known].channel)
        peer = PeerId(next(self._ids)) if known is None else known
        self._peers[peer] = _Peer(
            name=theirs.name,
            place=place,
            reach=way,
            regions=regions,
            channel=channel,
        )
        return peer

    def disconnect(self, peer: PeerId) -> None:
        self._guard()
        found = self._peer(peer)
        jobs = [job for owner, job in list(self._jobs.values()) if owner == peer]
        for job in jobs:
            self._workers.stop(job, PeerLostError(f"{found.name} was disconnected"))
        if not self._workers.wait_quiet(jobs, time.monotonic() + _GRACE_SECONDS):
            raise TransportError(
                f"the kernel is still copying to or from {found.name} after {_GRACE_SECONDS} s; "
                "its transfers stay failing: poll them, and disconnect again"
            )
        del self._peers[peer]
        self._mail.close_channel(found.channel)

    # Transfers.

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return self._start(peer, copies, notify, write=False)

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return self._start(peer, copies, notify, write=True)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self._guard()
        return [self._job(transfer).status for transfer in transfers]

    def cancel(self, transfer: TransferId) -> None:
        self._guard()
        self._workers.stop(
            self._job(transfer), TransferCancelledError(f"transfer {transfer} was cancelled")
        )

    def forget(self, transfer: TransferId) -> None:
        self._guard()
        check_final(transfer, self._job(transfer).status)
        del self._jobs[transfer]

    # Notifications.

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """As ``Transport.notify``.

        Raises:
            TransportError: also if the peer lives but has let 16 MiB of notifications pile up.
        """
        self._guard()
        channel = self._peer(peer).channel
        check_payload(payload, MAX_NOTIFICATION)
        try:
            channel.send(payload)
        except PeerLostError:
            return

    def notifications(self) -> list[Notification]:
        self._guard()
        return self._mail.take()

    def close(self) -> None:
        if not self._owner.end():
            return
        deadline = time.monotonic() + _GRACE_SECONDS
        jobs = [job for _, job in self._jobs.values()]
        for job in jobs:
            self._workers.stop(job, PeerLostError(f"{self._name} was closed"))
        quiet = self._workers.wait_quiet(jobs, deadline)
        self._workers.close(deadline)
        self._board.wipe()
        self._mail.close(_GRACE_SECONDS)
        self._peers.clear()
        self._registered.clear()
        if not quiet:
            raise TransportError(
                f"closed, but the kernel was still copying after {_GRACE_SECONDS} s: do not reuse "
                "the memory of unfinished transfers"
            )

    def _guard(self) -> None:
        self._owner.check()

    def _peer(self, peer: PeerId) -> _Peer:
        return find_peer(self._peers, peer)

    def _job(self, transfer: TransferId) -> LoopbackTransfer:
        return find_transfer(self._jobs, transfer)[1]

    def _start(
        self, peer: PeerId, copies: Copies, notify: bytes | None, *, write: bool
    ) -> TransferId:
        self._guard()
        job = self._make_job(self._peer(peer), copies, notify, write=write)
        if job.runs.small(self._options.inline_bytes):
            self._workers.run_here(job)
        else:
            self._workers.submit(job)
        self._jobs[job.id] = (peer, job)
        return job.id

    def _make_job(
        self, peer: _Peer, copies: Copies, notify: bytes | None, *, write: bool
    ) -> LoopbackTransfer:
        if notify is not None:
            check_payload(notify, MAX_NOTIFICATION)
        local = local_regions(copies, self._registered)
        remote = remote_regions(copies, peer.regions, peer.name)
        runs = self._pool.take(len(copies))
        try:
            runs.fill(copies, write=write)
        except TransportUsageError:
            self._pool.give(runs)
            raise
        channel = peer.channel
        return LoopbackTransfer(
            id=TransferId(next(self._ids)),
            reach=peer.reach,
            write=write,
            runs=runs,
            claims=claims_of((region, peer.regions[region]) for region in remote),
            local=local,
            send=None if notify is None else lambda: channel.send(notify),
            release=self._pool.give,
            limit=self._options.chunk_bytes,
        )
