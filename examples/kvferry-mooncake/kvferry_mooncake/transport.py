"""The transport: what ``kvferry.core.transport`` asks for, over the files beside it."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import ClassVar

from kvferry.core.errors import (
    ConnectError,
    DriverError,
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUnsupportedError,
)
from kvferry.core.memory import CPU, Region
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
    remote_regions,
)
from kvferry_mooncake import address as wire
from kvferry_mooncake.engine import shared
from kvferry_mooncake.job import Job
from kvferry_mooncake.mail import MAX_NOTIFICATION, Channel, Mailbox
from kvferry_mooncake.pieces import pieces_of

_LIBRARY = "mooncake-transfer-engine-non-cuda"

_GRACE_SECONDS = 5.0
"""How long ``disconnect`` and ``close`` wait for what is under way."""

_PARTING_SECONDS = 0.02
"""How long ``close`` leaves peers to end what they have under way, once they know. What they find
deregistered ends too, but the engine then opens its connections anew, one in a second."""

_TURN_SECONDS = 0.0005


@dataclass(slots=True, kw_only=True, eq=False)
class _Peer:
    name: str
    segment: str
    regions: frozenset[Region]
    channel: Channel


class MooncakeTransport(Transport):
    """Reads through Mooncake's Transfer Engine, over tcp, from and to CPU memory.

    What it cannot do, and why:

    - ``write``: when a write fails, what the peer's kernel has received may still be stored, and
      the engine has no call that waits for that. A failed write would never be known to be quiet.
    - ``background_progress``: the engine's threads serve peers by themselves, but tell the end of
      a piece only when asked, so ``poll`` asks, and begins the next pieces.
    - Memory other than ``cpu``: this build of the engine has none.

    A failed read is quiet by itself, because the engine tells the end of each piece. Of a peer that
    is stopped it does so after 30 s.

    Args:
        host: an address of this machine at which peers reach it. Everybody who reaches it can read
            what is registered: the engine has no secret.

    Raises:
        DriverError: mooncake is not installed, or the host is not this machine's.
    """

    interface_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self._name = f"mooncake-{os.getpid()}-{secrets.token_hex(8)}"
        self._owner = TransportOwner(self._name)
        self._secret = secrets.token_bytes(16)
        self._host = host
        self._engine = shared(host)
        try:
            self._mailbox = Mailbox(host, self._secret)
        except OSError as exc:
            raise DriverError(
                f"driver_options: host={host!r} cannot be listened at: {exc}"
            ) from exc
        self._regions: set[Region] = set()
        self._peers: dict[PeerId, _Peer] = {}
        self._jobs: dict[TransferId, Job] = {}
        self._ids = itertools.count(1)

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            ops=frozenset({"read"}),
            memory=frozenset({CPU}),
            max_notification=MAX_NOTIFICATION,
            cancel=True,
            background_progress=False,
            quiescence=Quiescence.ALWAYS,
        )

    @property
    def library(self) -> str:
        return f"{_LIBRARY} {version(_LIBRARY)}"

    # Memory.

    def register(self, region: Region) -> None:
        self._guard()
        if region.kind != CPU:
            raise TransportUnsupportedError(f"{region} is not {CPU} memory, which is all there is")
        if region not in self._regions:
            self._engine.register(region)
            self._regions.add(region)

    def deregister(self, region: Region) -> None:
        self._guard()
        check_registered(region, self._regions)
        for job in self._jobs.values():
            if not job.final:
                check_unused(region, job.local)
        self._regions.remove(region)
        self._engine.deregister(region)

    # Peers.

    def address(self) -> bytes:
        self._guard()
        return wire.encode(
            wire.Address(
                name=self._name,
                segment=self._engine.segment,
                host=self._host,
                port=self._mailbox.port,
                secret=self._secret,
                regions=[(region.address, region.nbytes) for region in self._regions],
            )
        )

    def connect(self, address: bytes) -> PeerId:
        self._guard()
        theirs, regions = wire.decode(address)
        for peer, known in self._peers.items():
            if known.name == theirs.name:
                known.regions = regions
                return peer
        channel = Channel(theirs, self._name)
        if not self._engine.meet(theirs.segment):
            channel.close()
            raise ConnectError(f"{theirs.name} answers, but mooncake at {theirs.segment} does not")
        peer = PeerId(next(self._ids))
        self._peers[peer] = _Peer(
            name=theirs.name, segment=theirs.segment, regions=regions, channel=channel
        )
        return peer

    def disconnect(self, peer: PeerId) -> None:
        self._guard()
        found = self._peer(peer)
        jobs = [job for job in self._jobs.values() if job.peer == peer]
        if not self._ended(jobs, PeerLostError(f"{found.name} was disconnected")):
            raise TransportError(
                f"{found.name} has not answered for {_GRACE_SECONDS} s: its transfers stay "
                "failing; disconnect again, later"
            )
        found.channel.close()
        del self._peers[peer]

    # Transfers.

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self._guard()
        found = self._peer(peer)
        remote_regions(copies, found.regions, found.name)
        if notify is not None:
            check_payload(notify, MAX_NOTIFICATION)
        job = Job(
            peer=peer,
            segment=found.segment,
            channel=found.channel,
            local=local_regions(copies, self._regions),
            pieces=pieces_of(copies),
            notify=notify,
        )
        transfer = TransferId(next(self._ids))
        self._jobs[transfer] = job
        job.advance(self._engine)
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self._guard()
        asked = [self._job(transfer) for transfer in transfers]
        self._turn()
        return [job.status for job in asked]

    def cancel(self, transfer: TransferId) -> None:
        self._guard()
        self._job(transfer).doom(TransferCancelledError(f"transfer {transfer} was cancelled"))

    def forget(self, transfer: TransferId) -> None:
        self._guard()
        check_final(transfer, self._job(transfer).status)
        del self._jobs[transfer]

    # Notifications.

    def notify(self, peer: PeerId, payload: bytes) -> None:
        self._guard()
        found = self._peer(peer)
        check_payload(payload, MAX_NOTIFICATION)
        found.channel.send(payload)

    def notifications(self) -> list[Notification]:
        self._guard()
        return self._mailbox.take()

    def close(self) -> None:
        if not self._owner.end():
            return
        quiet = self._ended(self._jobs.values(), PeerLostError(f"{self._name} was closed"))
        for peer in self._peers.values():
            peer.channel.close()
        if self._mailbox.close():
            time.sleep(_PARTING_SECONDS)
        for region in self._regions:
            self._engine.deregister(region)
        if not quiet:
            raise TransportError(
                f"closed, but a peer has not answered for {_GRACE_SECONDS} s: do not use "
                "the memory of unfinished transfers again"
            )

    # What is behind the interface.

    def _guard(self) -> None:
        self._owner.check()

    def _peer(self, peer: PeerId) -> _Peer:
        return find_peer(self._peers, peer)

    def _job(self, transfer: TransferId) -> Job:
        return find_transfer(self._jobs, transfer)

    def _turn(self) -> None:
        self._mailbox.turn()
        for peer in self._peers.values():
            peer.channel.turn()
        for job in self._jobs.values():
            job.advance(self._engine)

    def _ended(self, jobs: Iterable[Job], error: TransportError) -> bool:
        """Let transfers fail and wait until they are quiet; whether that was in time."""
        left = [job for job in jobs if not job.final]
        deadline = time.monotonic() + _GRACE_SECONDS
        for job in left:
            job.doom(error)
        while left:
            for job in left:
                job.advance(self._engine)
            left = [job for job in left if job.status.state is State.FAILING]
            if time.monotonic() > deadline:
                break
            time.sleep(_TURN_SECONDS)
        return not left
