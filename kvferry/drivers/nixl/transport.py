"""The NIXL transport: implements the hooks of ``BaseTransport`` with this package's modules."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar

from kvferry.core.errors import ConnectError, PeerLostError, TransportError
from kvferry.core.memory import CPU, CUDA, Region
from kvferry.core.transport import (
    BaseTransport,
    Capabilities,
    Copies,
    EnterThread,
    Notification,
    PagedRequest,
    Quiescence,
    TransferRequest,
    enter_nothing,
    parse_options,
)
from kvferry.core.transport.addresses import decode_regions
from kvferry.drivers.cuda import DeviceWait, find_cuda
from kvferry.drivers.nixl import address as wire
from kvferry.drivers.nixl import library
from kvferry.drivers.nixl.address import NixlAddress
from kvferry.drivers.nixl.agent import TransferChunk
from kvferry.drivers.nixl.agents import Agents, RegisteredSpan
from kvferry.drivers.nixl.descriptor_lists import (
    DescriptorLists,
    PagedChunk,
    can_prepare,
    paged_chunks,
)
from kvferry.drivers.nixl.options import NixlOptions
from kvferry.drivers.nixl.peer import IdlePeers, NixlPeer
from kvferry.drivers.nixl.transfer import NixlTransfer
from kvferry.drivers.ucx_format import FormatError

MAX_NOTIFICATION = 1 << 14

_POLL_SECONDS = 0.0005

logger = logging.getLogger(__name__)


class NixlTransport(BaseTransport[RegisteredSpan, NixlPeer, NixlPeer, NixlTransfer]):
    """Read through a NIXL backend: CPU and CUDA memory, of one host or of several.

    ``read`` returns when NIXL has posted the first chunks, whose bytes may then have moved. NIXL's
    threads go on with these and serve peers; ``poll`` posts the other chunks, and sends the
    notification when it finds that all bytes have landed.

    A transfer of which a chunk failed stays FAILING until ``disconnect``, and none can be
    cancelled, as NIXL does not report the end of such copies. ``disconnect`` waits until posted
    chunks have ended, and then until the GPUs have done the copies that were enqueued on them.

    A read into CUDA memory is DONE after the GPU was told to flush, where it needs that. Not usable
    in a forked child.

    Raises:
        DriverError: NIXL is not installed or does not load; an option is unknown or of a wrong
            type; the backend is unknown, does not start, or reaches no other process.
    """

    interface_version: ClassVar[tuple[int, int]] = (2, 0)
    max_regions: ClassVar[int] = wire.MAX_REGIONS

    def __init__(self, *, enter: EnterThread = enter_nothing, **options: object) -> None:
        self._enter = enter
        self._options = parse_options("nixl", NixlOptions, options)
        name = f"nixl-{os.getpid()}-{secrets.token_hex(8)}"
        self._agents = Agents(library.load(), name, self._options)
        self._agent = self._agents.first
        super().__init__(
            name,
            Capabilities(
                memory=self._agent.memory,
                max_notification=MAX_NOTIFICATION if self._agent.notifies else 0,
                cancel=False,
                background_progress=self._options.progress_thread,
                quiescence=Quiescence.AFTER_DISCONNECT,
                concurrent_connect=True,
                paged_reads=True,
            ),
        )
        self._arrived: list[Notification] = []
        # Held because ``disconnect`` may poll at the same time as other calls.
        self._looking = threading.Lock()
        self._lists = DescriptorLists()
        self._idle = IdlePeers()

    @property
    def library(self) -> str:
        """The name and version of NIXL's package, and the backend, as text."""
        return f"{self._agent.library}, {self._options.backend}"

    # Memory.

    def _register(self, region: Region) -> RegisteredSpan:
        return self._agents.register(region)

    def _deregister(self, region: Region, registration: RegisteredSpan) -> None:
        # NIXL has prepared descriptors of this side's memory.
        for connection in list(self._peers.values()):
            connection.prepared.release()
        self._agents.deregister(registration)

    # Connections.

    def _address(self) -> bytes:
        return wire.encode(
            name=self.name,
            backend=self._options.backend,
            metadata=self._agent.metadata(),
            spans=self._agents.spans,
            regions=self._registered,
        )

    def _decode_address(self, address: bytes) -> NixlPeer:
        theirs = wire.decode(address)
        backend = self._options.backend
        if theirs.backend != backend:
            raise ConnectError(
                f"{theirs.name} has NIXL backend {theirs.backend}, and this side {backend}: both "
                "need the same (driver_options: backend)"
            )
        regions = frozenset(decode_regions(theirs.name, theirs.regions))
        itself = theirs.name == self.name
        return NixlPeer(
            name=theirs.name,
            itself=itself,
            regions=self._registered if itself else regions,
            metadata=theirs.metadata,
            connection=self._checked_connection(theirs),
            keys=frozenset(span.key for span in theirs.spans),
        )

    def _identity(self, address: NixlPeer) -> Hashable:
        # NIXL knows agents by their names. ``_refresh`` refuses an address with the name of a
        # connected peer that leads to another place.
        return address.name

    def _connect(self, address: NixlPeer) -> NixlPeer:
        self._idle.connect(address, self._agent)
        return address

    def _refresh(self, connection: NixlPeer, address: NixlPeer) -> None:
        if address.connection != connection.connection:
            raise ConnectError(
                f"an address of {address.name}, which is connected, leads elsewhere than that one"
            )
        if not connection.itself and (address.keys != connection.keys or connection.lost):
            self._reload(connection, address)
        connection.regions = address.regions

    def _disconnect(self, connection: NixlPeer, transfers: Sequence[NixlTransfer]) -> None:
        if transfers or connection.lost or connection.failed or connection.itself:
            # In this order: a handle keeps its connection open.
            for transfer in transfers:
                transfer.release()
            connection.remove_remote()
            self._settle(transfers)
        else:
            connection.prepared.release()
            self._idle.add(connection)

    def _path(self, connection: NixlPeer) -> str:
        return f"{self._options.backend} (transport not reported)"

    # Transfers.

    def _start(self, request: TransferRequest[NixlPeer]) -> NixlTransfer:
        return self._post(request, self._chunks(request.copies))

    def _start_paged(self, request: PagedRequest[NixlPeer]) -> NixlTransfer:
        pages = request.pages
        if can_prepare(pages):
            return self._post(request, paged_chunks(pages))
        return self._post(request, self._chunks(pages.written_out()))

    def _chunks(self, copies: Copies) -> Iterator[TransferChunk]:
        for kinds, local, remote in self._lists.chunks(copies):
            yield self._agent.make_chunk(kinds=kinds, local=local, remote=remote)

    def _post(
        self,
        request: TransferRequest[NixlPeer] | PagedRequest[NixlPeer],
        chunks: Iterator[TransferChunk | PagedChunk],
    ) -> NixlTransfer:
        if not self._options.progress_thread:
            # So that UCX notices before it reads that a peer has closed.
            self._fetch_notifications()
        peer, notify, devices = request.connection, request.notify, _devices(request.local)
        transfer = NixlTransfer(
            peer=peer,
            prepare=partial(self._agents.prepare, peer),
            flush=partial(_flush, devices) if devices else None,
            send=None if notify is None else partial(self._agent.notify, peer.name, notify),
        )
        transfer.post(chunks)
        return transfer

    def _progress(self, transfers: Sequence[NixlTransfer]) -> None:
        if not self._options.progress_thread:
            self._fetch_notifications()
        for transfer in transfers:
            if not transfer.drained:
                transfer.advance()

    def _fail(self, transfer: NixlTransfer, error: TransportError) -> None:
        transfer.fail(error)

    def _end_transfers(self, transfers: Sequence[NixlTransfer], error: TransportError) -> bool:
        """Wait until posted chunks end; ``_disconnect`` or ``_close`` makes transfers FAILED."""
        for transfer in transfers:
            transfer.fail(error)
        return self._drained(transfers)

    # Notifications.

    def _notify(self, connection: NixlPeer, payload: bytes) -> None:
        try:
            self._agent.notify(connection.name, payload)
        except PeerLostError:
            connection.mark_lost()
            raise

    def _receive(self) -> list[Notification]:
        self._fetch_notifications()
        with self._looking:
            arrived, self._arrived = self._arrived, []
        return arrived

    def _fetch_notifications(self) -> None:
        """Keep notifications for ``_receive``; without a progress thread, this serves peers."""
        with self._looking:
            arrived = self._agent.notifications()
            if arrived:
                self._arrived += [
                    Notification(sender=sender, payload=payload)
                    for sender, payloads in arrived.items()
                    for payload in payloads
                ]

    def _close(self, transfers: Sequence[NixlTransfer]) -> None:
        # Before the handles are released: afterwards all of them look drained.
        drained = [transfer for transfer in transfers if transfer.drained]
        for transfer in transfers:
            transfer.release()
        for connection in self._peers.values():
            connection.remove_remote()
        self._idle.clear()
        self._settle(drained)
        self._agents.close(quiet=all(transfer.final for transfer in transfers))

    # How transfers and connections end.

    def _drained(self, transfers: Sequence[NixlTransfer]) -> bool:
        """Make progress until all chunks have ended; return whether within ``grace_seconds``."""
        deadline = time.monotonic() + self.grace_seconds
        while True:
            self._progress(transfers)
            drained = all(transfer.drained for transfer in transfers)
            if drained or time.monotonic() > deadline:
                return drained
            time.sleep(_POLL_SECONDS)

    def _settle(self, transfers: Sequence[NixlTransfer]) -> None:
        """Wait until no byte of closed connections' transfers can land, then make them FAILED."""
        if not transfers:
            return
        deadline = time.monotonic() + self.grace_seconds
        # In this order: until they are idle, NIXL's threads may enqueue copies on a GPU. Twice: the
        # end of such a copy wakes a thread, which may enqueue one more.
        for _ in range(2):
            if not (self._agents.wait_idle(deadline) and self._wait_for_devices(deadline)):
                return
        for transfer in transfers:
            transfer.settle()

    def _wait_for_devices(self, deadline: float) -> bool:
        """Return whether the accelerators, by the deadline, have done what was enqueued on them."""
        kinds = {region.kind for region in list(self._registered)} - {CPU}
        if not kinds:
            return True
        cuda = find_cuda()
        # Accelerators other than NVIDIA's cannot be asked.
        if cuda is None or kinds != {CUDA}:
            logger.error(
                "cannot tell whether an accelerator (%s) has ended the copies of a failed "
                "transfer: its pages stay in use; restart the engine",
                ", ".join(sorted(kinds)),
            )
            return False
        devices = _devices(list(self._registered))
        return DeviceWait(cuda, devices, self._enter).until(deadline)

    # What NIXL knows of peers.

    def _reload(self, connection: NixlPeer, address: NixlPeer) -> None:
        """Have NIXL load a connected peer's new metadata; raise as ``_refresh``."""
        if connection.lost or not connection.keys <= address.keys:
            # NIXL can add spans to a known peer, but not remove any: it has to forget the peer
            # first.
            own = [one for one in self._unfinished() if one.peer is connection]
            if not self._drained(own):
                raise ConnectError(
                    f"transfers with {connection.name} run for more than {self.grace_seconds} s, "
                    "and its memory has changed: disconnect first"
                )
            connection.remove_remote()
        connection.metadata, connection.keys = address.metadata, address.keys
        try:
            connection.load_metadata(self._agent)
        except ConnectError:
            # NIXL drops a known peer if it refuses new metadata of it.
            connection.mark_lost()
            raise
        connection.lost = False

    def _checked_connection(self, theirs: NixlAddress) -> bytes:
        """Check a peer's metadata before NIXL reads it, and return how its agent is reached."""
        # This side's NIXL has an unknown format: peers' metadata cannot be checked.
        if self._own_connection is None:
            return b""
        try:
            agent, connection = wire.parsed(theirs.metadata)
        except FormatError as exc:
            raise ConnectError(
                f"the address of {theirs.name} holds what NIXL did not write: {exc}"
            ) from exc
        if agent != theirs.name:
            raise ConnectError(
                f"an address of {theirs.name} that holds NIXL's metadata of {agent[:64]}"
            )
        if theirs.name == self.name and connection != self._own_connection:
            raise ConnectError(f"an address of {theirs.name}, which is this side, leads elsewhere")
        return connection

    @functools.cached_property
    def _own_connection(self) -> bytes | None:
        """How this side is reached; ``None`` if the format of its metadata is not known."""
        try:
            return wire.parsed(self._agent.metadata())[1]
        except FormatError:
            return None


def _devices(regions: Iterable[Region]) -> set[int]:
    return {region.device for region in regions if region.kind == CUDA}


def _flush(devices: Iterable[int]) -> None:
    """Make what NICs have written visible to new work on these CUDA devices, where need be."""
    cuda = find_cuda()
    if cuda is None:  # a GPU of AMD's
        return
    for device in devices:
        cuda.flush(device)
