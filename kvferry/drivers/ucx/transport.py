"""The ucx transport: what ``kvferry.core.transport`` asks for, over the files beside it."""

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
from kvferry.drivers.ucx import library
from kvferry.drivers.ucx import process_identity as place
from kvferry.drivers.ucx.address import KeyId, UcxAddress
from kvferry.drivers.ucx.client import Client, UcxPeer
from kvferry.drivers.ucx.compiled_loops import poster
from kvferry.drivers.ucx.connection import ConnectionState
from kvferry.drivers.ucx.copy_thread import WORTH_BYTES
from kvferry.drivers.ucx.devices import devices, listed
from kvferry.drivers.ucx.library import UcxLibrary
from kvferry.drivers.ucx.memory import RegisteredMemory
from kvferry.drivers.ucx.merged_copies import runs_of
from kvferry.drivers.ucx.messages import MAX_BACKLOG, MAX_NOTIFICATION
from kvferry.drivers.ucx.options import WISHES, parsed, settings_of
from kvferry.drivers.ucx.progress_driver import ProgressDriver
from kvferry.drivers.ucx.progress_thread import DrivenWorker, ProgressThread
from kvferry.drivers.ucx.server import Server
from kvferry.drivers.ucx.transfer import UcxTransfer
from kvferry.drivers.ucx.ucp import MAJOR, Ucp
from kvferry.drivers.ucx.worker import Worker

_GRACE_SECONDS = 3.0
"""How long what is under way may take to end by itself before its connection is broken."""

_BREAK_SECONDS = 2.0
"""How long it may take then."""

_ANSWER_SECONDS = 5.0
"""How long a peer may then take to say that it drops what arrives; or ``connect_seconds``."""

_RELEASE_SECONDS = 2.0
"""How long peers may take to stop using memory that is deregistered, before they are cut off."""


class UcxTransport(Transport):
    """Reads and writes with UCP's one-sided calls: CPU and CUDA memory, of one host or of several.

    Every transport has a UCX context of its own, configured by its options, and threads that sleep
    until there is something to do: transfers go on, and peers are served, without calls.

    Where UCX has no way of its own into the peer's memory (over tcp, say), bytes go by messages,
    for CPU memory only; a transfer of device memory fails there, with
    ``TransportUnsupportedError``.

    **When a failed transfer is quiet.** UCX completes every request, with an error if its
    connection breaks, and not before what carries the connection has been taken down; so a read is
    FAILED as soon as nothing of it is under way. What a write has sent before its connection broke
    may lie in queues of a peer that lives. It stays FAILING until the peer has ended, or has
    closed its end of that connection, after which it drops what arrives: it says so when it
    is called again, which ``disconnect`` does.

    Not usable in a forked child.

    Raises:
        DriverError: there is no UCX that can be used, or it does not start; an option is unknown,
            of a wrong type, out of range, or not one of this UCX's.
    """

    interface_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, **options: object) -> None:
        self._options = parsed(options)
        self._library, self._ucp = _loaded(self._options.library)
        self._owner = TransportOwner(f"ucx-{os.getpid()}-{secrets.token_hex(8)}")
        self._instance = secrets.token_bytes(16)
        self._context = self._ucp.open(self.name, settings_of(self._options), WISHES)
        self._memory = self._ucp.memory_kinds(self._context)
        self._poster = poster(self._ucp)
        make = partial(Worker, self._ucp, self._context, self._poster)
        self._host = Server(make, self._instance)
        self._caller = Client(
            self._ucp,
            make,
            self.name,
            self._options.deadline_seconds,
            self._options.connect_seconds,
        )
        self._registered = RegisteredMemory(self._ucp, self._context)
        self._jobs: dict[TransferId, UcxTransfer] = {}
        self._ids = itertools.count(1)
        sides: list[DrivenWorker] = [self._host, self._caller]
        shares = [sides] if self._options.threads == 1 else [[side] for side in sides]
        self._turns = ProgressDriver(
            self._caller, [ProgressThread(self.name, share) for share in shares]
        )
        _alive.add(self)

    @property
    def name(self) -> str:
        return self._owner.name

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            ops=frozenset({"read", "write"}),
            memory=self._memory,
            max_notification=MAX_NOTIFICATION,
            cancel=True,
            background_progress=True,
            quiescence=Quiescence.AFTER_DISCONNECT,
            concurrent_connect=True,
        )

    @property
    def library(self) -> str:
        """Which UCX it is, whether it can do RDMA, and the devices that it may use here."""
        if self._owner.closed:
            return str(self._library)
        found = devices(library.load(self._library), self._context)
        return f"{self._library}: {listed(found)}"

    def path(self, peer: PeerId) -> str:
        """UCX's names of what carries a line to the peer, once it is ready."""
        found = self._caller.peers.get(peer)
        return "+".join(sorted(found.line.transports)) if found is not None else ""

    # Memory.

    def register(self, region: Region) -> None:
        self._owner.check()
        if region.kind not in self._memory:
            kinds = ", ".join(sorted(self._memory))
            raise TransportUnsupportedError(
                f"ucx reaches {kinds} here, not {region.kind}: {region}"
            )
        if region in self._registered:
            return
        key = self._registered.add(region)
        with self._host.lock:
            self._host.regions[key] = region

    def deregister(self, region: Region) -> None:
        """As ``Transport.deregister``. Waits until peers do not use the region any more: two
        seconds at most, after which those that still might are cut off."""
        self._owner.check()
        check_registered(region, self._registered)
        with self._caller.lock:
            check_unused(region, self._caller.in_use)
        registration = self._registered.take(region)
        self._withdraw(registration.key)
        with self._host.lock, self._caller.lock:
            self._registered.release(registration)

    # Peers.

    def address(self) -> bytes:
        self._owner.check()
        return wire.encode(
            UcxAddress(
                name=self.name,
                instance=self._instance,
                place=place.here(),
                ucx=".".join(map(str, self._ucp.version)),
                worker=self._host.worker.address,
                withdrawn=self._host.withdrawals,
                regions=self._registered.told(),
            )
        )

    def connect(self, address: bytes) -> PeerId:
        self._owner.check()
        theirs = wire.decode(address)
        if theirs.ucx.partition(".")[0] != str(MAJOR):
            raise ConnectError(f"{theirs.name} has UCX {theirs.ucx}, and this side {MAJOR}.x")
        if self._host.format_known:
            wire.check_packed(theirs)
        # A transport that connects is about to move bytes.
        self._poster.start_compiling()
        regions = wire.regions_of(theirs)
        with self._caller.lock:
            peer = self._caller.met(theirs)
            fresh = peer is None
            if peer is None:
                peer = UcxPeer(
                    id=PeerId(next(self._ids)),
                    address=theirs,
                    regions=regions,
                    line=self._caller.line_to(theirs),
                )
                self._caller.peers[peer.id] = peer
            peer.address, peer.regions = theirs, regions
            line = self._caller.revive(peer)
        self._turns.wake()
        limit = 2 * self._options.connect_seconds
        self._turns.until(lambda: line.stage is not ConnectionState.GREETING, limit)
        if line.stage is not ConnectionState.READY:
            if fresh:
                with self._caller.lock:
                    del self._caller.peers[peer.id]
            raise ConnectError(f"cannot connect to {theirs.name}: {line.error}")
        return peer.id

    def disconnect(self, peer: PeerId) -> None:
        self._owner.check()
        found = find_peer(self._caller.peers, peer)
        if not self._ended([found], PeerLostError(f"{found.address.name} was disconnected")):
            raise TransportError(
                f"bytes of a write may still reach {found.address.name}, which does not answer: "
                "its transfers stay failing; disconnect again, later"
            )
        with self._caller.lock:
            self._caller.part(found)
            del self._caller.peers[peer]
        self._turns.wake()

    # Transfers.

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return self._start(peer, copies, notify, write=False)

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return self._start(peer, copies, notify, write=True)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self._owner.check()
        jobs = [find_transfer(self._jobs, transfer) for transfer in transfers]
        self._turns.turn()
        return [job.status for job in jobs]

    def cancel(self, transfer: TransferId) -> None:
        self._owner.check()
        job = find_transfer(self._jobs, transfer)
        with self._caller.lock:
            job.fail(TransferCancelledError(f"transfer {transfer} was cancelled"))
        self._turns.wake()

    def forget(self, transfer: TransferId) -> None:
        self._owner.check()
        check_final(transfer, find_transfer(self._jobs, transfer).status)
        del self._jobs[transfer]

    # Notifications.

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """As ``Transport.notify``.

        Raises:
            TransportError: also if the peer lives but has let 64 MiB of messages pile up.
        """
        self._owner.check()
        found = find_peer(self._caller.peers, peer)
        check_payload(payload, MAX_NOTIFICATION)
        with self._caller.lock:
            line = self._caller.revive(found)
            if line.backlog > MAX_BACKLOG:
                raise TransportError(
                    f"{line.backlog} bytes of messages have piled up on the way to "
                    f"{found.address.name}, which takes none: it may be stopped"
                )
            line.note(payload)
        self._turns.wake()

    def notifications(self) -> list[Notification]:
        self._owner.check()
        with self._host.lock:
            return self._host.take()

    def close(self) -> None:
        if not self._owner.end():
            return
        _alive.discard(self)
        quiet = self._ended(
            list(self._caller.peers.values()), PeerLostError(f"{self.name} was closed")
        )
        self._turns.stop()
        with self._caller.lock, self._host.lock:
            self._caller.close()
            self._host.close()
            self._registered.close()
            self._ucp.shut(self._context)
        if not quiet:
            raise TransportError(
                "closed, but bytes of a write may still reach a peer that does not answer"
            )

    # What is behind the interface.

    def _start(
        self, peer: PeerId, copies: Copies, notify: bytes | None, *, write: bool
    ) -> TransferId:
        self._owner.check()
        found = find_peer(self._caller.peers, peer)
        if notify is not None:
            check_payload(notify, MAX_NOTIFICATION)
        local = local_regions(copies, self._registered)
        remote_regions(copies, found.regions, found.address.name)
        runs = runs_of(copies)
        large = len(runs) > 0 and int(runs.ends[-1]) >= WORTH_BYTES
        segments = [
            (self._registered.params(segment.local), found.regions[segment.remote])
            for segment in copies.segments
        ]
        with self._caller.lock:
            line = self._caller.revive(found)
            job = UcxTransfer(
                id=TransferId(next(self._ids)),
                peer=peer,
                line=line,
                write=write,
                runs=runs,
                segments=segments,
                local=local,
                keys=frozenset(KeyId(region.key) for _, region in segments),
                send=None if notify is None else partial(line.note, notify),
                poster=self._poster,
                beside=self._caller.beside(found) if large and not write else None,
            )
            self._caller.add(job)
        self._jobs[job.id] = job
        self._turns.wake()
        return job.id

    def _withdraw(self, key: KeyId) -> None:
        """Wait until no peer uses a registration; cut off those who do not say so in time."""
        with self._host.lock:
            number = self._host.withdraw(key)
        self._turns.wake()
        if self._turns.until(partial(self._host.released, number), _RELEASE_SECONDS):
            return
        with self._host.lock:
            self._host.cut_off(number)
        self._turns.wake()
        self._turns.until(partial(self._host.released, number), _BREAK_SECONDS)

    def _ended(self, peers: list[UcxPeer], error: PeerLostError) -> bool:
        """End all transfers of some peers, and wait until they are final; whether they are."""
        with self._caller.lock:
            jobs = self._caller.of(peer.id for peer in peers)
            for job in jobs:
                job.fail(error)
        if self._turns.until(lambda: all(job.final for job in jobs), _GRACE_SECONDS if jobs else 0):
            return True
        with self._caller.lock:
            for line in [line for peer in peers for line in peer.lines]:
                if any(job.uses(line) for job in jobs):
                    line.part(error)
        self._turns.until(lambda: not any(job.windows for job in jobs), _BREAK_SECONDS)
        with self._caller.lock:
            for peer in peers:
                if any(job.unconfirmed and job.peer == peer.id for job in jobs):
                    self._caller.revive(peer)
        patience = min(self._options.connect_seconds, _ANSWER_SECONDS)
        return self._turns.until(lambda: all(job.final for job in jobs), patience)

    def _quit(self) -> None:
        """The process ends: UCX must not be at work while it does."""
        if self._owner.end():
            self._turns.stop()


@functools.cache
def _loaded(explicit: str | None) -> tuple[UcxLibrary, Ucp]:
    """Which UCX, loaded once: a library stays in its process."""
    found = library.find(explicit)
    return found, Ucp(library.load(found))


_alive: set[UcxTransport] = set()
"""Those that have not been closed: their threads run, so they are kept until the process ends."""


@atexit.register
def _quit_all() -> None:
    for transport in list(_alive):
        transport._quit()
