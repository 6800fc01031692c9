"""Serve one region of memory to peers, and read peers' regions by offsets.

For integrations that know where their objects lie, and keep each in its place while it is read:
without layouts, tickets and holds. What a read reports as read was in the memory of the process
that was connected to, which still served that memory when the last byte had arrived.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import numpy as np

from kvferry.core.driver_calls.connections import BlockingCalls
from kvferry.core.driver_calls.driver_calls import DriverCalls
from kvferry.core.driver_calls.transfers import Read
from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import (
    AdmissionError,
    EndpointClosedError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    StaleError,
    TransferCancelledError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.layout import Layout
from kvferry.core.lifecycle.holds import NOTHING, Incarnation, random_incarnation
from kvferry.core.memory import Region, U64Array
from kvferry.core.messages import MAX_LEASE, WORD_BYTES, Coordinates, RankPayload
from kvferry.core.security import NEARBY, Access
from kvferry.core.side_channel.client import fetch
from kvferry.core.side_channel.compatibility import agree
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import port_at
from kvferry.core.side_channel_messages import NEWEST_PROTOCOL, OLDEST_PROTOCOL, encode
from kvferry.core.slot_words import ScratchWords, SlotTable
from kvferry.core.transport import PeerId, Transport
from kvferry.core.transport.copies import Copies, Segment, copies_between
from kvferry.core.transport.merged_copies import merge_copies

logger = logging.getLogger(__name__)

MAX_READS = 1 << 12
"""The most reads that are under way at once."""
BUSY_SECONDS = 0.0002
"""Pause of the thread while only a poll tells when reads end."""
WOKEN_SECONDS = 0.002
"""Pause while reads are under way and the driver ends the pause when one of them ends."""
IDLE_SECONDS = 0.05
JOIN_SECONDS = 10.0
"""How long ``close`` waits for reads to end, and for calls of the driver to return."""
LONGEST_COPY = 1 << 20
"""Longer copies are cut: UCX moves those in steps, each of which waits for a poll."""
AGAIN_SECONDS = 1.0
"""Least time between two tries to reach a peer whose connection was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """Options of an exchange; times are in seconds.

    Attributes:
        handshake_timeout: time within which a peer must have answered a handshake.
        read_timeout: time after which a read that is not over is cancelled. It is over only once
            no byte of it can land any more.
        stale_after: time for which offsets may be used after a peer has told them. For so long,
            reads fail after the peer has restarted: an offset may be the old process's.
        access: this process's keys, the peers' keys, and the networks that peers may be in.
    """

    handshake_timeout: float = 10.0
    read_timeout: float = 10.0
    stale_after: float = math.inf
    access: Access = NEARBY


@dataclass(slots=True, kw_only=True, eq=False)
class RemoteRegion:
    """A peer's region. Made by ``RegionExchange.connect``, and changed by the exchange only.

    Attributes:
        host: address of the peer's side channel.
        port: port of the peer's side channel.
        nbytes: length of the region.
        incarnation: the random number of the peer's exchange: a restarted one has another.
    """

    host: str
    port: int
    nbytes: int = 0
    incarnation: Incarnation | None = None
    _payload: RankPayload | None = None
    _connection: PeerId | None = None
    _is_joining: bool = False
    _next_try: float = 0.0  # infinite once ``disconnect`` was called
    _successor: tuple[int, float] | None = None  # incarnation of a restarted peer, and since when

    @property
    def payload(self) -> RankPayload:
        """What the peer publishes; ``TransportError`` if it was never reached."""
        if self._payload is None:
            raise TransportError(f"the peer at {self} was never reached")
        return self._payload

    def __str__(self) -> str:
        return port_at(self.host, self.port)

    def adopt(self, found: RankPayload, stale_after: float) -> None:
        """Use what the peer publishes; ``StaleError`` if it has restarted, and that is news."""
        now = time.monotonic()
        if self.incarnation not in (None, found.incarnation):
            if self._successor is None or self._successor[0] != found.incarnation:
                self._successor = found.incarnation, now
            if now < self._successor[1] + stale_after:
                raise StaleError(
                    f"the peer at {self} has restarted: what it had told about its region before "
                    f"means nothing now, so reads from it fail for {stale_after:g} s"
                )
        self._payload, self.incarnation = found, Incarnation(found.incarnation)
        self.nbytes, self._successor = found.layout.regions[0].nbytes, None


@dataclass(slots=True, eq=False)
class RegionRead:
    """A read that ``RegionExchange.read`` has begun.

    Attributes:
        remote: the region that is read from.
        error: why it has failed; ``None`` if it is not over, or has succeeded.
    """

    remote: RemoteRegion
    error: KVFerryError | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        """Whether it has succeeded or failed: no byte of it lands any more."""
        return self._over.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for its end; return whether it is over."""
        return self._over.wait(timeout)

    def end(self, error: KVFerryError | None) -> None:
        """End it. Called by the exchange."""
        self.error = error
        self._over.set()


class RegionExchange:
    """Serve a region of this process to peers, and read from their regions. Thread-safe.

    Args:
        name: what all exchanges that read from each other are called; it is no address.
        region: the memory. The caller keeps it alive until ``close`` has returned.
        driver: name of the transport's driver; peers must use the same one.
        transport: the exchange owns it from now on: it is closed with it, or if it cannot be made.
        host: address of the side channel, at which peers find this exchange.
        port: port of the side channel; 0 takes a free one.
        agreement: name to value, what must be equal on two exchanges that read from each other.
        options: times and access.

    Attributes:
        region: the memory that is served.
        port: the port of the side channel.
        incarnation: a random number that identifies this exchange.

    Raises ``TransportError`` if the region cannot be registered, and ``HandshakeError`` if the side
    channel cannot be bound to its address.
    """

    def __init__(
        self,
        name: str,
        region: Region,
        *,
        driver: str,
        transport: Transport,
        host: str = "127.0.0.1",
        port: int = 0,
        agreement: Mapping[str, str] | None = None,
        options: ExchangeOptions = ExchangeOptions(),
    ) -> None:
        self.region, self.incarnation = region, random_incarnation()
        self._name, self._options = name, options
        self._served = SlotTable(1)  # its one word says whether the region is served
        self._served.words[0] = self.incarnation
        self._scratch = ScratchWords(MAX_READS)
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._lock = threading.RLock()
        self._closing = False
        self._polled = 0.0  # when ``poll`` was last called
        self._reads: dict[RegionRead, float] = {}
        """Reads that are not over, in their order, each to when it is cancelled."""
        with ExitStack() as stack:
            self._transport = transport
            stack.callback(transport.close)
            self._payload = self._publish(driver, agreement or {})
            self._is_woken = self._transport.wake_when_ended(self._wake.set)
            self._calls = DriverCalls(
                self._transport,
                post=self._post,
                clock=time.monotonic,
                threads=self._transport.capabilities.concurrent_connect,
            )
            # Not the driver's: a handshake that takes long delays no read.
            self._handshakes = BlockingCalls(
                threads=True, post=self._post, clock=time.monotonic, name="kvferry-exchange-peer"
            )
            # A driver may know only by closing the connection when a failing read is quiet.
            self._calls.transfers.failing = self._calls.transfers.failed = self._drop
            self._server = HandshakeServer(
                [encode(self._payload)],
                engine=name,
                incarnation=self.incarnation,
                host=host,
                port=port,
                access=options.access,
                problems=lambda: self._calls.problems,
            )
            stack.pop_all()
        self.port = self._server.port
        self._thread = threading.Thread(target=self._run, name="kvferry-exchange", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def problems(self) -> list[str]:
        """Return the problems to report in a health check; empty if all is well."""
        return self._calls.problems

    def connect(self, host: str, port: int) -> RemoteRegion:
        """Connect to the exchange whose side channel is at an address. Blocks.

        Raises ``HandshakeError`` if it cannot be reached or does not admit this one, or this one
        does not admit it; ``IncompatibleError`` if the two differ in driver or ``agreement``;
        ``ConnectError`` if the driver cannot connect.
        """
        remote, over = RemoteRegion(host=host, port=port), threading.Event()
        errors: list[KVFerryError] = []

        def joined(error: KVFerryError | None) -> None:
            errors.extend([error] if error else [])
            over.set()

        with self._lock:
            self._check_open()
            self._join(remote, joined)
        while not over.wait(IDLE_SECONDS):
            self._check_open()
        for error in errors:
            raise error
        return remote

    def read(
        self, remote: RemoteRegion, local: U64Array, there: U64Array, nbytes: U64Array
    ) -> RegionRead:
        """Begin to read from ``there`` in a peer's region to ``local`` in this one's.

        The three arrays are (n,) uint64: offsets in both regions, and lengths. A read fails as a
        whole: use nothing of it then. One from a peer whose connection was lost fails, and the
        connection is made again for later ones; not to a peer that has restarted, before
        ``ExchangeOptions.stale_after`` is over.
        """
        task = RegionRead(remote)
        theirs = remote.payload.layout.regions[0]
        segment = Segment(start=0, stop=len(nbytes), local=self.region, remote=theirs)
        runs = merge_copies(
            Copies(
                local=local + np.uint64(self.region.address),
                remote=there + np.uint64(theirs.address),
                nbytes=nbytes,
                segments=(segment,),
            ),
            sort=True,
        ).split(LONGEST_COPY)
        copies = Copies(
            local=runs.local,
            remote=runs.remote,
            nbytes=runs.nbytes,
            segments=(replace(segment, stop=len(runs)),),
        )
        with self._lock:
            self._check_open()
            self._begin(task, remote, copies)
            self._progress()
        return task

    def poll(self, task: RegionRead) -> bool:
        """Return whether a read is over. Lets threads of the driver run, for 0.2 ms at most."""
        self._polled = time.monotonic()
        if not (self._advance(task) or self._closing) and self._is_woken:
            # Who asks in a loop keeps the interpreter's lock from the threads that move the bytes.
            self._wake.wait(BUSY_SECONDS)
            self._wake.clear()
            self._advance(task)
        return task.is_over

    def wait(self, task: RegionRead, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a read; return whether it is over."""
        return self.poll(task) or task.wait(timeout)

    def disconnect(self, remote: RemoteRegion) -> None:
        """End the reads from a peer's region, and give up the connection. Does not wait."""
        with self._lock:
            remote._next_try = math.inf
            for task in [each for each in self._reads if each.remote is remote]:
                self._calls.transfers.cancel(task)
            self._release(remote)

    def close(self) -> None:
        """End all reads, and serve the region no longer. A second call does nothing.

        Raises ``TransportError`` if bytes may still land: the memory must stay allocated.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            # First: from now on, no peer takes what it reads for this exchange's.
            self._served.words[0] = NOTHING
            for task in list(self._reads):  # one that was not posted ends at once
                self._calls.transfers.cancel(task)
        self._server.close()
        until = time.monotonic() + JOIN_SECONDS
        while self._reads and time.monotonic() < until:
            time.sleep(BUSY_SECONDS)
            with self._lock:
                self._progress()
        self._wake.set()
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive() or not self._calls.blocking.wait(until):
            raise TransportError(
                "a call of the driver does not return, and it may still touch the region: keep "
                "its memory until the process ends"
            )
        self._transport.close()
        for task in list(self._reads):
            self._end(task, EndpointClosedError("the exchange was closed"))

    def _advance(self, task: RegionRead) -> bool:
        """Do what is due, unless another thread does; return whether a read is over."""
        # Not without a pause: the thread that has the lock may need the interpreter's.
        if not (task.is_over or self._closing) and self._lock.acquire(timeout=BUSY_SECONDS):
            try:
                while self._progress() and not task.is_over:
                    pass
            finally:
                self._lock.release()
        return task.is_over

    # Under the lock.

    def _publish(self, driver: str, agreement: Mapping[str, str]) -> RankPayload:
        words, header, watermarks = self._served.regions
        for region in (self.region, words, header, watermarks, self._scratch.region):
            self._transport.register(region)
        return RankPayload(
            oldest=OLDEST_PROTOCOL,
            newest=NEWEST_PROTOCOL,
            engine=self._name,
            incarnation=self.incarnation,
            rank=0,
            coordinates=Coordinates(),
            agreement=dict(agreement),
            layout=Layout(regions=(self.region,), groups=(), fields=()),
            driver=driver,
            address=self._transport.address(),
            slots=words,
            lease=MAX_LEASE,
            fingerprint=header,
            watermarks=watermarks,
        )

    def _check_open(self) -> None:
        if self._closing:
            raise EndpointClosedError("the exchange is closed")

    def _post(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _join(self, remote: RemoteRegion, joined: Callable[[KVFerryError | None], None]) -> None:
        """Shake hands with a peer and connect to it, on another thread."""
        remote._is_joining = True

        def over(error: KVFerryError | None) -> None:
            remote._is_joining = False
            remote._next_try = max(remote._next_try, time.monotonic() + AGAIN_SECONDS)
            joined(error)

        def shaken(found: RankPayload | KVFerryError) -> None:
            if isinstance(found, KVFerryError):
                over(found)
                return
            try:
                remote.adopt(found, self._options.stale_after)
            except StaleError as exc:
                over(exc)
                return
            self._calls.connections.acquire({0: found.address}, str(remote), connected)

        def connected(made: Mapping[int, PeerId] | KVFerryError) -> None:
            if isinstance(made, KVFerryError):
                over(made)
                return
            remote._connection = made[0]
            if remote._next_try == math.inf:  # disconnected meanwhile
                self._release(remote)
            over(None)

        self._handshakes.run(partial(self._shake, remote), shaken)

    def _release(self, remote: RemoteRegion) -> None:
        if remote._connection is not None:
            self._calls.connections.release(remote._connection)
            remote._connection = None

    def _begin(self, task: RegionRead, remote: RemoteRegion, copies: Copies) -> None:
        connection = remote._connection
        if connection is None or not self._calls.connections.is_open(connection):
            self._again(remote)
            task.end(PeerLostError("the connection to the peer was lost"))
        elif len(self._reads) >= MAX_READS:
            task.end(TransportError(f"{MAX_READS} reads are under way"))
        else:
            self._reads[task] = time.monotonic() + self._options.read_timeout
            self._calls.transfers.add(
                Read(
                    connection=connection,
                    build=lambda: copies,
                    landed=lambda _: self._fence(task, remote, connection),
                    lost=partial(self._end, task),
                    tags={task},
                )
            )

    def _fence(self, task: RegionRead, remote: RemoteRegion, connection: PeerId) -> None:
        """Read the peer's word, which says whether it still serves its region."""
        index = self._scratch.take()

        def landed(_: Read) -> None:
            stands = self._scratch.give_back(index) == remote.incarnation
            self._end(task, None if stands else StaleError("the peer has closed its region"))

        def lost(error: KVFerryError) -> None:
            self._scratch.give_back(index)
            self._end(task, error)

        word = remote.payload.slots
        here = self._scratch.region
        pair = here.address + index * WORD_BYTES, word.address, WORD_BYTES
        self._calls.transfers.add(
            Read(
                connection=connection,
                build=lambda: copies_between([pair], local=here, remote=word),
                landed=landed,
                lost=lost,
                urgent=True,
                tags={task},
            )
        )

    def _end(self, task: RegionRead, error: KVFerryError | None) -> None:
        if self._reads.pop(task, None) is not None:
            task.end(error)

    def _drop(self, read: Read, error: KVFerryError) -> None:
        if not isinstance(error, TransferCancelledError | TransportUsageError):
            self._calls.connections.close(read.connection)

    def _again(self, remote: RemoteRegion) -> None:
        """Connect again to a peer whose connection was lost, in the background."""

        def joined(error: KVFerryError | None) -> None:
            if error is not None:
                logger.warning("a peer was lost: %s", on_one_line(str(error)))

        if not remote._is_joining and time.monotonic() >= remote._next_try:
            self._join(remote, joined)

    def _progress(self) -> bool:
        """Do all that is due; return whether there was anything to do."""
        has_run = bool(self._commands)
        while self._commands:
            self._calls.contain("a command", self._commands.popleft())
        now = time.monotonic()
        for task, due in list(self._reads.items()):
            if now < due:
                break
            self._calls.transfers.cancel(task)
        for read in self._calls.transfers.lingering(now):
            self._calls.connections.close(read.connection)
        self._calls.connections.progress(now)
        return self._calls.transfers.progress() or has_run

    # On the threads of the exchange.

    def _run(self) -> None:
        while not self._closing:
            if time.monotonic() - self._polled < WOKEN_SECONDS:
                time.sleep(WOKEN_SECONDS)  # a thread that polls does this one's work
                continue
            with self._lock:
                busy = self._progress()
                # Peers have nothing to say here; what they send is dropped.
                self._calls.contain("the driver's notifications", self._transport.notifications)
            reading = WOKEN_SECONDS if self._is_woken else BUSY_SECONDS
            self._wake.wait(0.0 if busy else reading if self._reads else IDLE_SECONDS)
            self._wake.clear()

    def _shake(self, remote: RemoteRegion) -> RankPayload:
        """Return what a peer publishes, if the two may read from each other. Blocks."""
        options, reasons = self._options, list[str]()
        # An address does not say which of the admitted keys is that of the peer.
        for key in sorted(options.access.peers) or [b""]:
            try:
                info = fetch(
                    remote.host,
                    remote.port,
                    self._name,
                    timeout=options.handshake_timeout,
                    access=options.access,
                    key=key,
                )
            except AdmissionError as exc:
                reasons.append(str(exc))
                continue
            theirs = info.ranks[0]
            agree(self._payload, theirs)
            if len(theirs.layout.regions) != 1:
                raise HandshakeError(f"the peer at {remote} serves no single region")
            return theirs
        raise AdmissionError("; ".join(reasons))
