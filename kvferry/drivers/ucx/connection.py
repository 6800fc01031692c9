"""A connection to a peer: the calling end of it."""

from __future__ import annotations

import enum
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.address import Instance, KeyId, UcxAddress, UcxRegion
from kvferry.drivers.ucx.message_buffers import MessageBuffer
from kvferry.drivers.ucx.message_transfer import lined_up
from kvferry.drivers.ucx.messages import (
    Bye,
    Fetch,
    Fetched,
    Hello,
    LineId,
    Message,
    Note,
    Released,
    Store,
)
from kvferry.drivers.ucx.ucp import Endpoint, RemoteKey, Ucp
from kvferry.drivers.ucx.worker import Worker


class ConnectionState(enum.Enum):
    """Where a line stands."""

    GREETING = "greeting"
    """The host has not answered."""
    READY = "ready"
    BROKEN = "broken"
    """Nothing more is posted; what was posted ends, with an error."""


@dataclass(slots=True, kw_only=True, eq=False)
class ClientWorker:
    """A worker to call from.

    Two ends of a line find each other by counting the connections between two workers. After an
    error they may have counted differently, so a worker calls each host only once; the next line
    to that host is another worker's.

    Attributes:
        called: the hosts.
        lines: by the numbers of their endpoints, until nothing of them is left.
    """

    worker: Worker
    called: set[Instance] = field(default_factory=set)
    lines: dict[int, UcxConnection] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScatterTarget:
    """Where fetched bytes go, one range's after the other's: (n,) addresses and lengths."""

    addresses: U64Array
    nbytes: U64Array


@dataclass(slots=True, kw_only=True, eq=False)
class UcxConnection:
    """One line. It breaks once, and is then replaced by another.

    Attributes:
        host: whom it was made to call.
        born: when, by ``time.monotonic``.
        error: why it is broken.
        withdrawn: registrations of the host's that are undone, or will be.
        unanswered: numbers and keys of withdrawals that have not been answered.
        ended: whether the host has said that it drops what arrives.
        notes: what is to be said once it is ready.
        windows: how many windows of transfers are under way on it.
        transports: UCX's names of what carries it; known once it is ready.
        answers: to stores and fetches, by their numbers: a refusal, or an empty string.
        sinks: of fetches that have not been answered, by their numbers.
    """

    id: LineId
    host: UcxAddress
    outlet: ClientWorker
    library: Ucp
    born: float
    endpoint: Endpoint = field(default=Endpoint(0))
    number: int = 0
    stage: ConnectionState = ConnectionState.GREETING
    error: TransportError | None = None
    ended: bool = False
    withdrawn: set[KeyId] = field(default_factory=set)
    unanswered: deque[tuple[int, KeyId]] = field(default_factory=deque)
    notes: deque[bytes] = field(default_factory=deque)
    windows: int = 0
    transports: frozenset[str] = frozenset()
    answers: dict[int, str] = field(default_factory=dict)
    sinks: dict[int, ScatterTarget] = field(default_factory=dict)
    _asked: int = 0
    _keys: dict[KeyId, RemoteKey] = field(default_factory=dict)

    @classmethod
    def to(
        cls,
        host: UcxAddress,
        outlet: ClientWorker,
        library: Ucp,
        caller: str,
        now: float,
        lane: int = 0,
    ) -> UcxConnection:
        """A line that greets; broken already if the host cannot be reached at all."""
        line = cls(id=secrets.token_bytes(16), host=host, outlet=outlet, library=library, born=now)
        outlet.called.add(host.instance)
        try:
            line.endpoint, line.number = outlet.worker.connect(host.worker)
        except TransportError as exc:
            line.stage, line.error = ConnectionState.BROKEN, _advised(exc)
            return line
        outlet.lines[line.number] = line
        line._say(
            Hello(line.id, host.instance, caller, outlet.worker.address, host.withdrawn, lane),
        )
        return line

    @classmethod
    def broken(
        cls, host: UcxAddress, outlet: ClientWorker, library: Ucp, now: float, error: TransportError
    ) -> UcxConnection:
        """A line that never was."""
        return cls(
            id=secrets.token_bytes(16),
            host=host,
            outlet=outlet,
            library=library,
            born=now,
            stage=ConnectionState.BROKEN,
            error=error,
        )

    def welcomed(self, withdrawn: Iterable[int]) -> None:
        """The host has answered."""
        if self.stage is not ConnectionState.GREETING:
            return
        self.stage = ConnectionState.READY
        used = self.library.transports(self.endpoint)
        self.transports = frozenset(name.partition("/")[0] for name in used)
        self.withdrawn.update(map(KeyId, withdrawn))
        while self.notes:
            self._say(Note(self.id, self.notes.popleft()))

    def note(self, payload: bytes) -> None:
        """Send a notification, or keep it until the line is ready."""
        if self.stage is ConnectionState.READY:
            self._say(Note(self.id, payload))
        elif self.stage is ConnectionState.GREETING:
            self.notes.append(payload)

    @property
    def backlog(self) -> int:
        """Bytes of messages that have not left."""
        return self.outlet.worker.backlog(self.endpoint) + sum(map(len, self.notes))

    def fetch(self, rows: bytes, sink: ScatterTarget) -> int:
        """Ask the host for bytes; the number under which the answer will be."""
        self._asked += 1
        self.sinks[self._asked] = sink
        self._say(Fetch(self.id, self._asked, rows))
        return self._asked

    def store(self, rows: int, body: MessageBuffer, nbytes: int) -> int:
        """Let the host write bytes, from ``worker.buffers``; likewise."""
        self._asked += 1
        self._say(Store(self.id, self._asked, rows), body, nbytes)
        return self._asked

    def fetched(self, message: Fetched, body: int, nbytes: int) -> None:
        """Put what has come where it belongs, if that is still wanted."""
        sink = self.sinks.pop(message.number, None)
        self.answers[message.number] = message.refusal
        if sink is None or message.refusal:
            return
        wanted = int(sink.nbytes.sum())
        if wanted == nbytes:
            move = self.outlet.worker.poster.move
            move(sink.addresses, lined_up(body, sink.nbytes), sink.nbytes)
        else:
            self.answers[message.number] = f"it has sent {nbytes} bytes of {wanted}"

    def withdraw(self, number: int, key: KeyId) -> None:
        """The host is about to undo a registration, and waits for an answer."""
        self.withdrawn.add(key)
        self.unanswered.append((number, key))

    def answer(self, used: frozenset[KeyId]) -> None:
        """Answer for what is not used any more, in order."""
        number = 0
        while self.unanswered and self.unanswered[0][1] not in used:
            number, key = self.unanswered.popleft()
            if key in self._keys:
                self.library.destroy_key(self._keys.pop(key))
        if number and self.stage is ConnectionState.READY:
            self._say(Released(self.id, number))

    def key(self, region: UcxRegion) -> RemoteKey:
        """The key to a region of the host's, unpacked when first needed.

        Raises:
            TransportError: UCX cannot reach that memory over this line.
        """
        key = KeyId(region.key)
        if key not in self._keys:
            self._keys[key] = self.library.unpack(self.endpoint, region.packed)
        return self._keys[key]

    def part(self, error: TransportError, *, bye: bool = False) -> None:
        """Break it. What is posted on it ends, as the worker is driven."""
        if bye and self.stage is ConnectionState.READY:
            self._say(Bye(self.id))
        if self.stage is ConnectionState.BROKEN:
            return
        worker = self.outlet.worker
        # A greeting that lingers might arrive after that of the next line, and end it.
        end = worker.end if self.stage is ConnectionState.READY else worker.drop
        self.stage, self.error = ConnectionState.BROKEN, error
        self.notes.clear()
        self.sinks.clear()
        end(self.endpoint)

    def buried(self) -> bool:
        """Whether it is broken and nothing is left of it; lets the keys go."""
        worker = self.outlet.worker
        if self.stage is not ConnectionState.BROKEN or self.windows or worker.closing:
            return False
        if worker.lingers(self.endpoint):
            return False
        for key in self._keys.values():
            self.library.destroy_key(key)
        self._keys.clear()
        return True

    def _say(self, message: Message, body: MessageBuffer | None = None, nbytes: int = 0) -> None:
        try:
            self.outlet.worker.send(self.endpoint, message, body, nbytes)
        except TransportError as exc:
            self.part(exc)


def _advised(error: TransportError) -> TransportError:
    """With what to do, for want of a way to the host at all."""
    return PeerLostError(
        f"{error}; both sides need a way in common that notices when a peer dies: tcp or RDMA, "
        "beside which shared memory is used (driver_options: transports)"
    )
