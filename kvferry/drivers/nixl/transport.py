"""The NIXL transport: what ``kvferry.core.transport`` asks for, over the files beside it."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar

from kvferry.core.errors import (
    ConnectError,
    PeerLostError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.memory import Region
from kvferry.core.transport import (
    Capabilities,
    Notification,
    PeerId,
    Quiescence,
    State,
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
from kvferry.drivers.nixl import address as wire
from kvferry.drivers.nixl import agent_metadata as metadata
from kvferry.drivers.nixl import library
from kvferry.drivers.nixl.address import NixlAddress
from kvferry.drivers.nixl.agent import CUDA, PART_ROWS, Telemetry, TransferChunk, unsupported
from kvferry.drivers.nixl.agent_metadata import AgentMetadata
from kvferry.drivers.nixl.agent_pair import AgentPair
from kvferry.drivers.nixl.descriptor_lists import DescriptorLists
from kvferry.drivers.nixl.idle_peers import IdlePeers
from kvferry.drivers.nixl.options import NixlOptions
from kvferry.drivers.nixl.peer import NixlPeer, check_backend
from kvferry.drivers.nixl.registrations import Registrations
from kvferry.drivers.nixl.transfer import NixlTransfer
from kvferry.drivers.ucx_format import FormatError

MAX_NOTIFICATION = 1 << 14

_GRACE_SECONDS = 5.0
"""How long ``disconnect``, ``close`` and a ``connect`` that must start over wait for transfers."""

_TURN_SECONDS = 0.0005

_DEVICE_SECONDS = 0.02
"""Longer by far than one copy that a GPU makes; no thread of the host's shows when that ends."""


class NixlTransport(Transport):
    """Reads and writes through a NIXL backend: CPU and CUDA memory, of one host or of several.

    Transfers are not prepared: each goes to NIXL as arrays. ``read`` and ``write`` return when
    NIXL has posted, which it may do by moving everything. NIXL's threads carry on what has been
    posted and serve peers; a transfer's notification is sent by the ``poll`` that finds its bytes
    landed. A transfer that failed stays FAILING until ``disconnect``: NIXL has no call that says
    that the rest of it has ended. It cannot be cancelled either: NIXL's own cancelling does not
    wait, so ``disconnect`` lets what runs run out.

    Not usable in a forked child.

    Raises:
        DriverError: NIXL is not installed or does not load; an option is unknown or of a wrong
            type; the backend is unknown, does not start, or reaches no other process.
    """

    interface_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, **options: object) -> None:
        self._options = parse_options("nixl", NixlOptions, options)
        self._name = f"nixl-{os.getpid()}-{secrets.token_hex(8)}"
        self._owner = TransportOwner(self._name)
        self._agents = AgentPair(library.load(), self._name, self._options)
        self._agent = self._agents.first
        self._spans = Registrations(self._agents)
        self._table = DescriptorLists()
        self._peers: dict[PeerId, NixlPeer] = {}
        self._parked = IdlePeers()
        self._meeting = threading.Lock()
        self._jobs: dict[TransferId, NixlTransfer] = {}
        self._ids = itertools.count(1)

    @property
    def name(self) -> str:
        return self._name

    @property
    def _max_notification(self) -> int:
        return MAX_NOTIFICATION if self._agent.notifies else 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            ops=frozenset({"read", "write"}),
            memory=self._agent.memory,
            max_notification=self._max_notification,
            cancel=False,
            background_progress=True,
            quiescence=Quiescence.AFTER_DISCONNECT,
            concurrent_connect=True,
        )

    @property
    def library(self) -> str:
        return f"{self._agent.library}, {self._options.backend}"

    def path(self, peer: PeerId) -> str:
        """The backend: which way that goes is not said."""
        return self._options.backend if peer in self._peers else ""

    # Memory.

    def register(self, region: Region) -> None:
        """As ``Transport.register``.

        Raises:
            TransportError: also if the region overlaps one that an unfinished transfer of this
                side uses, without lying within it. A peer's reads of a region that such a one
                overlaps fail until it connects again: register the largest region first.
        """
        self._guard()
        if region.kind not in self._agent.memory:
            raise unsupported(region, self._options.backend, self._agent.memory)
        if region in self._spans:
            return
        if len(self._spans.regions) >= wire.MAX_REGIONS:
            raise TransportError(
                f"{wire.MAX_REGIONS} regions are registered, and an address holds no more: "
                "deregister some, or register what they lie in"
            )
        self._spans.add(region, self._in_use())

    def deregister(self, region: Region) -> None:
        self._guard()
        check_registered(region, self._spans.regions)
        check_unused(region, self._in_use())
        self._spans.remove(region)

    # Peers.

    def address(self) -> bytes:
        self._guard()
        return wire.encode(
            name=self._name,
            backend=self._options.backend,
            metadata=self._agent.metadata(),
            spans=self._spans,
            regions=self._spans.regions,
        )

    def connect(self, address: bytes) -> PeerId:
        self._guard()
        theirs = wire.decode(address)
        check_backend(theirs, self._options.backend)
        regions = wire.regions_of(theirs)
        connections = self._connections(theirs)
        keys = frozenset(span.key for span in theirs.spans)
        known = self._known(theirs.name)
        if known is None:
            with self._meeting:  # another address of the same peer may come at the same time
                known = self._known(theirs.name)
                if known is None:
                    return self._met(theirs, regions, connections, keys)
        if connections != self._peers[known].connections:
            raise ConnectError(
                f"an address of {theirs.name}, which is connected, leads elsewhere than that one"
            )
        self._refresh(known, theirs, keys)
        self._peers[known].regions = regions
        return known

    def disconnect(self, peer: PeerId) -> None:
        self._guard()
        found = self._peer(peer)
        jobs = [job for job in list(self._jobs.values()) if job.peer == peer and not job.final]
        for job in jobs:
            job.doom(PeerLostError(f"{found.name} was disconnected"))
        if not self._drained(jobs, time.monotonic() + _GRACE_SECONDS):
            raise TransportError(
                f"NIXL is still moving bytes to or from {found.name} after {_GRACE_SECONDS} s: its "
                "transfers stay failing; disconnect again, later"
            )
        if jobs or found.lost or found.failed or found.itself:
            self._part(found, jobs)
            if not self._settled(jobs):
                raise TransportError(
                    f"NIXL's threads have not come to rest {_GRACE_SECONDS} s after they were told "
                    f"to leave {found.name}: its transfers stay failing; disconnect again, later"
                )
        else:
            self._parked.park(found)
        del self._peers[peer]

    # Transfers.

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return self._start(peer, copies, notify, write=False)

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return self._start(peer, copies, notify, write=True)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self._guard()
        jobs = [self._job(transfer) for transfer in transfers]
        for job in jobs:
            self._advance(job)
        return [job.status for job in jobs]

    def forget(self, transfer: TransferId) -> None:
        self._guard()
        check_final(transfer, self._job(transfer).status)
        del self._jobs[transfer]

    def telemetry(self, transfer: TransferId) -> list[Telemetry]:
        """What NIXL measured of each part of a transfer: one for each pair of memory kinds.

        Raises:
            TransportUsageError: the id is unknown, the transfer is not DONE, or the option
                ``telemetry`` was not set.
        """
        self._guard()
        job = self._job(transfer)
        if job.timed is None or job.status.state is not State.DONE:
            why = "set driver_options: telemetry" if job.timed is None else "it is not done"
            raise TransportUsageError(f"no telemetry of transfer {transfer}: {why}")
        return list(job.timed)

    # Notifications.

    def notify(self, peer: PeerId, payload: bytes) -> None:
        self._guard()
        found = self._peer(peer)
        check_payload(payload, self._max_notification)
        try:
            self._agent.notify(found.name, payload)
        except PeerLostError:
            found.lose()

    def notifications(self) -> list[Notification]:
        self._guard()
        if not self._agent.notifies:
            return []
        return [
            Notification(sender=sender, payload=payload)
            for sender, payloads in self._agent.notifications().items()
            for payload in payloads
        ]

    def close(self) -> None:
        if not self._owner.end():
            return
        jobs = [job for job in self._jobs.values() if not job.final]
        for job in jobs:
            job.doom(PeerLostError(f"{self._name} was closed"))
        quiet = self._drained(jobs, time.monotonic() + _GRACE_SECONDS)
        failed: list[TransportError] = []
        for peer, found in self._peers.items():
            failed += self._part(found, [job for job in jobs if job.peer == peer])
        self._parked.clear()
        quiet = self._settled(jobs) and quiet
        failed += self._spans.clear()
        self._peers.clear()
        self._agents.close(quiet=quiet)
        if not quiet:
            raise TransportError(
                f"closed, but NIXL was still moving bytes after {_GRACE_SECONDS} s: do not reuse "
                "the memory of unfinished transfers"
            )
        if failed:
            raise TransportError(f"closed, but not everything was given back: {failed[0]}")

    # What is behind the interface.

    def _guard(self) -> None:
        self._owner.check()

    def _peer(self, peer: PeerId) -> NixlPeer:
        return find_peer(self._peers, peer)

    def _job(self, transfer: TransferId) -> NixlTransfer:
        return find_transfer(self._jobs, transfer)

    def _in_use(self) -> set[Region]:
        return {region for job in self._jobs.values() if not job.final for region in job.local}

    def _connections(self, theirs: NixlAddress) -> Mapping[str, bytes]:
        """How a peer's agent is reached, from metadata that NIXL has not read yet.

        Raises:
            ConnectError: NIXL did not write it, or not for this peer.
        """
        if self._own is None:
            return {}
        try:
            found = metadata.parsed(theirs.metadata)
        except FormatError as exc:
            raise ConnectError(
                f"the address of {theirs.name} holds what NIXL did not write: {exc}"
            ) from exc
        if found.agent != theirs.name:
            raise ConnectError(
                f"an address of {theirs.name} that holds NIXL's metadata of {found.agent[:64]}"
            )
        if theirs.name == self._name and found.connections != self._own.connections:
            raise ConnectError(f"an address of {theirs.name}, which is this side, leads elsewhere")
        return found.connections

    @functools.cached_property
    def _own(self) -> AgentMetadata | None:
        """What this side's own metadata says; ``None`` if NIXL writes it in another way."""
        try:
            return metadata.parsed(self._agent.metadata())
        except FormatError:
            return None

    def _known(self, name: str) -> PeerId | None:
        # A copy, here and below: other calls may change it meanwhile.
        return next((i for i, p in list(self._peers.items()) if p.name == name), None)

    def _met(
        self,
        theirs: NixlAddress,
        regions: frozenset[Region],
        connections: Mapping[str, bytes],
        keys: frozenset[int],
    ) -> PeerId:
        met = NixlPeer(
            name=theirs.name,
            itself=theirs.name == self._name,
            regions=regions,
            metadata=theirs.metadata,
            connections=connections,
            keys=keys,
        )
        self._parked.meet(met, self._agent)
        peer = PeerId(next(self._ids))
        self._peers[peer] = met
        return peer

    def _refresh(self, known: PeerId, theirs: NixlAddress, keys: frozenset[int]) -> None:
        """Tell NIXL what a peer has registered meanwhile.

        NIXL can add to what it knows of a peer, and take nothing away: where a span is gone, or the
        connection, it must forget the peer first.
        """
        peer = self._peers[known]
        if peer.itself or (keys == peer.keys and not peer.lost):
            return
        if peer.lost or not peer.keys <= keys:
            jobs = [job for job in list(self._jobs.values()) if job.peer == known]
            if not self._drained(jobs, time.monotonic() + _GRACE_SECONDS):
                raise ConnectError(
                    f"transfers with {peer.name} run for more than {_GRACE_SECONDS} s, and its "
                    "memory has changed: disconnect first"
                )
            failed = peer.part()
            if failed:
                raise failed[0]
        peer.metadata, peer.keys = theirs.metadata, keys
        try:
            peer.tell(self._agent)
        except ConnectError:
            # NIXL drops whom it knew with metadata that it does not take.
            peer.lose()
            raise
        peer.lost = False

    def _start(
        self, peer: PeerId, copies: Copies, notify: bytes | None, *, write: bool
    ) -> TransferId:
        self._guard()
        found = self._peer(peer)
        if notify is not None:
            check_payload(notify, self._max_notification)
        job = NixlTransfer(
            id=TransferId(next(self._ids)),
            peer=peer,
            local=self._checked(found, copies),
            prepare=partial(self._agents.prepare, found),
            send=None if notify is None else partial(self._agent.notify, found.name, notify),
            timed=[] if self._options.telemetry else None,
        )
        job.post(self._parts(copies, write=write))
        self._note_loss(job)
        self._jobs[job.id] = job
        return job.id

    def _parts(self, copies: Copies, *, write: bool) -> list[TransferChunk]:
        return [
            self._agent.part(write=write, kinds=kinds, local=local, remote=remote)
            for kinds, local, remote in self._table.parts(copies, PART_ROWS)
        ]

    def _checked(self, peer: NixlPeer, copies: Copies) -> frozenset[Region]:
        """The local regions of a batch, all of whose regions are known."""
        local = local_regions(copies, self._spans.regions)
        known = self._spans.regions if peer.itself else peer.regions
        remote_regions(copies, known, peer.name)
        return local

    def _advance(self, job: NixlTransfer) -> None:
        if not job.over:
            job.advance()
            self._note_loss(job)

    def _note_loss(self, job: NixlTransfer) -> None:
        peer = self._peers.get(job.peer)
        if peer is not None and job.status.error is not None:
            peer.failed = True
            if isinstance(job.status.error, PeerLostError):
                peer.lose()

    def _drained(self, jobs: Iterable[NixlTransfer], deadline: float) -> bool:
        """Wait until NIXL calls every part of some transfers ended; whether that was in time."""
        left = list(jobs)
        while True:
            for job in left:
                self._advance(job)
            left = [job for job in left if not job.over]
            if not left or time.monotonic() > deadline:
                return not left
            time.sleep(_TURN_SECONDS)

    def _part(self, peer: NixlPeer, jobs: Sequence[NixlTransfer]) -> list[TransportError]:
        """Close a connection, of which these transfers are unfinished; what went wrong."""
        # In this order: a handle keeps its connection open.
        failed = [error for job in jobs for error in job.release()]
        return failed + peer.part()

    def _settled(self, jobs: Sequence[NixlTransfer]) -> bool:
        """Let transfers whose connection was closed be FAILED; whether they are quiet in time."""
        if not jobs:
            return True
        if not self._agents.rest(time.monotonic() + _GRACE_SECONDS):
            return False
        if CUDA in self._agent.memory:
            time.sleep(_DEVICE_SECONDS)
        for job in jobs:
            job.settle()
        return True
