"""The side that reads and writes: lines to peers, and the transfers on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferry.core.errors import ConnectError, PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId
from kvferry.drivers.ucx import ucp
from kvferry.drivers.ucx.address import KeyId, UcxAddress, UcxRegion
from kvferry.drivers.ucx.connection import ClientWorker, ConnectionState, UcxConnection
from kvferry.drivers.ucx.copy_thread import MOVING_SECONDS, CopyThread, cores
from kvferry.drivers.ucx.fair_lock import FairLock
from kvferry.drivers.ucx.message_transfer import copied
from kvferry.drivers.ucx.messages import (
    Ended,
    Fetched,
    LineId,
    Message,
    Refused,
    Stored,
    Welcome,
    Withdrawn,
)
from kvferry.drivers.ucx.process_identity import has_ended
from kvferry.drivers.ucx.transfer import UcxTransfer
from kvferry.drivers.ucx.ucp import Ucp
from kvferry.drivers.ucx.worker import Worker, wait_closed

_TAKEN_SECONDS = 0.0003
"""Who polls more often than that needs no thread beside it: they would only pass the interpreter's
lock to and fro, at up to 5 ms a time."""

_BEGIN_SECONDS = 0.005

_LOOK_SECONDS = 0.2
"""How often to see whether processes of this host live. UCX sees it by their connections, which a
fork of a dead process may hold open."""


@dataclass(slots=True, kw_only=True, eq=False)
class UcxPeer:
    """A peer: what is known of it, and the line to it, which may be broken; and perhaps another
    beside it, for reads only."""

    id: PeerId
    address: UcxAddress
    regions: dict[Region, UcxRegion]
    line: UcxConnection
    beside: UcxConnection | None = None

    @property
    def lines(self) -> list[UcxConnection]:
        """The one or two."""
        return [self.line] if self.beside is None else [self.line, self.beside]


class Client:
    """Reads and writes. Every method but the constructor needs ``lock``.

    Args:
        library: UCX.
        make: makes a worker.
        name: this transport's.
        deadline: seconds until a transfer in which nothing moves fails.
        patience: seconds until a host that does not answer is given up.

    Attributes:
        lock: for the workers, and for everything here, lines and jobs included.
        peers: by their ids.
        driven: when somebody who waits for it last made a turn, by ``time.monotonic``.
    """

    def __init__(
        self,
        library: Ucp,
        make: Callable[[], Worker],
        name: str,
        deadline: float,
        patience: float,
    ) -> None:
        self.lock = FairLock()
        self.peers: dict[PeerId, UcxPeer] = {}
        self._ucp = library
        self._make = make
        self._name = name
        self._deadline = deadline
        self._patience = patience
        self._companion: CopyThread | None = None
        self._outlets: list[ClientWorker] = []
        self._lines: dict[LineId, UcxConnection] = {}
        self._jobs: list[UcxTransfer] = []
        self._next_look = 0.0
        self.driven = 0.0
        self._open()

    @property
    def workers(self) -> list[Worker]:
        """Those that have to be driven."""
        return [outlet.worker for outlet in self._outlets]

    @property
    def taken(self) -> bool:
        """Whether somebody else drives it just now, again and again."""
        return time.monotonic() - self.driven < _TAKEN_SECONDS

    @property
    def waits(self) -> bool:
        """Whether something has to be looked after even if nothing happens."""
        # A copy: this is also asked without the lock, while others connect.
        lines = list(self._lines.values())
        return bool(self._jobs) or any(line.stage is not ConnectionState.READY for line in lines)

    def turn(self) -> bool:
        """Do what there is to do; whether there may be more."""
        busy = False
        driven = self._drive()
        for outlet in self._outlets:
            busy |= outlet.worker.turn(0) if outlet in driven else outlet.worker.turn()
            for number, code in outlet.worker.failures():
                if number in outlet.lines:
                    self._broke(outlet.lines[number], code)
            for message in outlet.worker.messages():
                self._hear(message)
        now = time.monotonic()
        look = now > self._next_look
        if look:
            self._next_look = now + _LOOK_SECONDS
        for line in list(self._lines.values()):
            self._look_after(line, now, look=look)
        for job in self._jobs:
            job.advance(now, self._deadline)
            if job.unconfirmed and self._dropped(job):
                job.settle()
        self._jobs = [job for job in self._jobs if not job.final]
        self._answer()
        return busy

    def _drive(self) -> list[ClientWorker]:
        """Let UCP move bytes, where that may take a while."""
        moving = [w.line.outlet for job in self._jobs for w in job.windows if not w.asked]
        if not moving:
            return []
        first, second = moving[0], next((o for o in moving if o is not moving[0]), None)
        if second is None:
            first.worker.drive(MOVING_SECONDS)
            return [first]
        if self._companion is None:
            self._companion = CopyThread(f"{self._name}-beside")
        self._companion.together(first.worker, second.worker)
        return [first, second]

    # Lines.

    def line_to(self, address: UcxAddress, lane: int = 0) -> UcxConnection:
        """A new line, which greets; broken already if there is nothing to call with."""
        now = time.monotonic()
        try:
            line = UcxConnection.to(
                address, self._outlet_to(address), self._ucp, self._name, now, lane
            )
        except TransportError as exc:
            line = UcxConnection.broken(address, self._outlets[0], self._ucp, now, exc)
        self._lines[line.id] = line
        return line

    def _outlet_to(self, address: UcxAddress) -> ClientWorker:
        """One that has not called this host.

        Raises:
            TransportError: another one cannot be made: a network device may be down.
        """
        outlet = next((o for o in self._outlets if address.instance not in o.called), None)
        if outlet is None:
            outlet = self._open()
        return outlet

    def _open(self) -> ClientWorker:
        outlet = ClientWorker(worker=self._make())
        outlet.worker.carried = self._take
        self._outlets.append(outlet)
        return outlet

    def met(self, address: UcxAddress) -> UcxPeer | None:
        """The peer of an address, if it is known: an address that leads to another worker is not
        that of a peer with the same instance, whatever else it says."""
        found = (
            p
            for p in self.peers.values()
            if (p.address.instance, p.address.worker) == (address.instance, address.worker)
        )
        return next(found, None)

    def revive(self, peer: UcxPeer) -> UcxConnection:
        """The line to a peer; another one if it is broken."""
        if peer.line.stage is ConnectionState.BROKEN:
            peer.line = self.line_to(peer.address)
        return peer.line

    def beside(self, peer: UcxPeer) -> UcxConnection | None:
        """A second line to a peer, where UCX copies by itself; it may not be ready yet."""
        compiled = self._outlets[0].worker.poster.compiled
        if cores() < 2 or not compiled or not copied(peer.line.transports):
            return None
        old = peer.beside
        if old is None or (
            old.stage is ConnectionState.BROKEN and time.monotonic() - old.born > self._patience
        ):
            peer.beside = self.line_to(peer.address, lane=1)
        return peer.beside

    def part(self, peer: UcxPeer) -> None:
        """Say good-bye, and break the lines."""
        for line in peer.lines:
            line.part(PeerLostError(f"{peer.address.name} was disconnected"), bye=True)

    # Transfers.

    def add(self, job: UcxTransfer) -> None:
        """Begin one, and go on with it for a moment: where this side moves the bytes itself, that
        saves passing it on to the thread."""
        self._jobs.append(job)
        now = time.monotonic()
        job.advance(now, self._deadline)
        while not job.final and self.turn() and time.monotonic() - now < _BEGIN_SECONDS:
            pass
        self.driven = time.monotonic()

    def of(self, peers: Iterable[PeerId]) -> list[UcxTransfer]:
        """The unfinished transfers of some peers."""
        wanted = set(peers)
        return [job for job in self._jobs if job.peer in wanted]

    @property
    def in_use(self) -> set[Region]:
        """The local regions of unfinished transfers."""
        return {region for job in self._jobs for region in job.local}

    def stop(self) -> None:
        """End the companion thread, if there is one."""
        if self._companion is not None:
            self._companion.stop()
            self._companion = None

    def close(self) -> None:
        """Break all lines, and let the workers go."""
        self.stop()
        for line in self._lines.values():
            line.part(PeerLostError(f"{self._name} was closed"), bye=True)
        for outlet in self._outlets:
            wait_closed(outlet.worker)
        for job in self._jobs:
            job.advance(time.monotonic(), self._deadline)
        for line in self._lines.values():
            line.buried()
        for outlet in self._outlets:
            outlet.worker.destroy()
        self._outlets.clear()

    def _broke(self, line: UcxConnection, code: int) -> None:
        line.part(
            PeerLostError(f"the connection to {line.host.name} broke: UCX says {ucp.said(code)}")
        )

    def _hear(self, message: Message) -> None:
        if isinstance(message, Ended):
            for job in self._jobs:
                job.line.ended |= job.line.id == message.line
            return
        line = self._lines.get(message.line)
        if line is None or line.stage is ConnectionState.BROKEN:
            return
        match message:
            case Welcome():
                line.welcomed(message.withdrawn)
            case Refused():
                line.part(ConnectError(f"{line.host.name} refuses: {message.reason}"))
            case Stored():
                line.answers[message.number] = message.refusal
            case Withdrawn():
                line.withdraw(message.number, KeyId(message.key))
            case _:  # what a caller says
                return

    def _take(self, message: Message, body: int, nbytes: int) -> None:
        if isinstance(message, Fetched):
            line = self._lines.get(message.line)
            if line is not None and line.stage is not ConnectionState.BROKEN:
                line.fetched(message, body, nbytes)

    def _look_after(self, line: UcxConnection, now: float, *, look: bool) -> None:
        if look and line.stage is not ConnectionState.BROKEN and has_ended(line.host.place):
            line.part(PeerLostError(f"{line.host.name}'s process has ended"))
        if line.stage is ConnectionState.GREETING and now - line.born > self._patience:
            line.part(
                PeerLostError(
                    f"{line.host.name} has not answered in {self._patience:g} s: it may be "
                    "stopped, or the network cut (driver_options: connect_seconds), or another "
                    "is there by now: connect with a new address"
                )
            )
        if line.buried():
            self._bury(line)

    def _bury(self, line: UcxConnection) -> None:
        del self._lines[line.id]
        line.outlet.lines.pop(line.number, None)
        if not line.outlet.lines and len(self._outlets) > 1:
            self._outlets.remove(line.outlet)
            line.outlet.worker.destroy()

    def _dropped(self, job: UcxTransfer) -> bool:
        """Whether what UCX has not confirmed of a write is proven to be gone."""
        if job.windows:
            return False
        line = job.line
        if line.ended or has_ended(line.host.place):
            return True
        peer = self.peers.get(job.peer)
        # A host closes a caller's earlier line before it welcomes the next.
        return (
            peer is not None and peer.line is not line and peer.line.stage is ConnectionState.READY
        )

    def _answer(self) -> None:
        for line in self._lines.values():
            if line.unanswered:
                used = [job.keys for job in self._jobs if job.uses(line)]
                line.answer(frozenset().union(*used))
