"""The interface of a driver: one-sided, polled reads of peers' registered memory.

A ``Transport`` reads peers' memory and carries small messages. It knows no model, no parallelism
and no request. Users do not call it, ``kvferry.core.endpoint.Endpoint`` does. Drivers usually
derive from ``kvferry.core.transport.base.BaseTransport``, which implements most of it.

**Threads.** Calls come from different threads, but one at a time. ``connect``, ``read`` and
``disconnect`` may block; a driver then releases the interpreter's lock (GIL). With
``Capabilities.concurrent_connect``, calls of ``connect`` and ``disconnect`` may overlap with each
other and with any call but ``close``, and must not delay the other calls. While either runs for a
peer, no other call names this peer or its transfers; but ``connect`` may get an address of it, and
the driver lets such calls wait for each other.

**Threads of the driver.** A driver that makes threads in Python takes the keyword ``enter`` in its
constructor, a function, and calls it first in every such thread: what it does there (choosing the
thread's GPU, for example) counts for one thread only. It is passed if the constructor names the
keyword. kvferry's own threads have done the same.

**Memory** belongs to the caller, who keeps it alive from ``register`` until ``deregister`` has
returned. The arrays of ``Copies`` and the places in ``PagedCopies`` are the caller's, too, who
reuses them as soon as the call has returned: a driver that needs them longer copies them. The
``Strips`` never change.

**Errors.** A caller's mistake raises at once (``TransportUsageError``,
``TransportUnsupportedError``), and then nothing has started. The outcome of a transfer is a value
that ``poll`` returns, never an exception. A driver maps its library's errors in one place, with
``raise ... from exc``. ``PeerLostError`` says that a connection is of no use any more, and has the
caller disconnect; after any other error of a transfer, the caller calls ``connect`` again, for the
same id, unless only ``disconnect`` ends that transfer (``Quiescence.AFTER_DISCONNECT``). After
``close``, every method but ``close`` raises ``TransportUsageError``; properties and ``path`` still
answer.
``read_pages`` without the capability raises ``TransportUnsupportedError``, before and after
``close``.

**Fork.** A transport belongs to the process that made it. In a forked child every method but
``close`` raises ``TransportUsageError``, and ``close`` does nothing.

**Quiescence.** ``DONE`` and ``FAILED`` are final, and final means quiet: the driver touches none of
the transfer's buffers again, local or remote. A transfer that is known to fail while its bytes may
still land is ``FAILING`` until it is quiet. ``DONE`` also means that the bytes are visible to
device work that is enqueued afterwards.

**Death.** A driver notices the death of a peer's process within a second: unfinished transfers with
the peer are then FAILING or FAILED, even if a forked child of that process keeps its sockets open.

**Order.** Transfers are not ordered. Notifications by ``notify`` from one sender to one peer arrive
in the order of the calls. Those bound to transfers arrive in order if each transfer began when the
one before was DONE. The two sorts are not ordered among each other.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NewType

from kvferry.core.errors import TransportError, TransportUnsupportedError
from kvferry.core.memory import Region
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.paged import PagedCopies

PeerId = NewType("PeerId", int)
"""The id of a connected peer within one transport; never used again after ``disconnect``."""

TransferId = NewType("TransferId", int)
"""The id of a transfer within one transport; never used again after ``forget``."""

INTERFACE_VERSION = (2, 0)
"""Major and minor version; see ``Transport.interface_version``."""


class State(enum.Enum):
    """The state of a transfer."""

    PENDING = "pending"
    """Under way."""
    FAILING = "failing"
    """Will fail, but bytes may still land: keep the memory until the transfer is final."""
    DONE = "done"
    """Final: all bytes have arrived."""
    FAILED = "failed"
    """Final: some of the bytes may have arrived; no further byte will."""

    final: bool
    """Whether the state is DONE or FAILED: the transfer touches no memory any more."""

    def __init__(self, value: str) -> None:
        # Stored: comparing with two members takes 0.5 µs, and every poll of a transfer asks.
        self.final = value in ("done", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of one transfer; ``error`` is ``None`` unless it is FAILING or FAILED."""

    state: State
    error: TransportError | None = None


class Quiescence(enum.Enum):
    """When a FAILING transfer becomes FAILED: from then on, no further byte lands."""

    ALWAYS = "always"
    """Soon and by itself: no ``disconnect`` is needed."""
    AFTER_DISCONNECT = "after_disconnect"
    """Once ``disconnect`` of the peer has returned; before, the driver cannot know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can do on this machine, with the options that it was made with.

    Attributes:
        memory: the memory kinds that can be registered, such as ``cpu`` and ``cuda``.
        max_notification: the longest payload in bytes; 0 if notifications are not carried.
        cancel: whether ``cancel`` can end a transfer early.
        background_progress: whether transfers go on, and peers are served, without calls of this
            transport. Even then, a ``poll`` may be needed to notice a transfer's end, to send its
            notification, or to begin the rest of a long transfer.
        quiescence: when a transfer that is FAILING becomes FAILED.
        max_outstanding: the most unfinished transfers; ``None`` for no limit.
        concurrent_connect: whether ``connect`` and ``disconnect`` may overlap with other calls. If
            not, a slow one delays the transfers with all other peers.
        paged_reads: whether there is ``read_pages``, and it takes less time than ``read`` with the
            same copies.
    """

    memory: frozenset[str]
    max_notification: int
    cancel: bool
    background_progress: bool
    quiescence: Quiescence
    max_outstanding: int | None = None
    concurrent_connect: bool = False
    paged_reads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A message from a peer, whose ``Transport.name`` is ``sender``."""

    sender: str
    payload: bytes = field(repr=False)


class Transport(ABC):
    """Reads peers' memory into this process's: the interface of every driver.

    A driver's entry point (group ``kvferry.drivers``) names a subclass. Its constructor takes the
    user's ``driver_options`` as keyword arguments, and may take ``enter`` (see above). For an
    unknown option it raises ``DriverError``, which lists the options that exist.
    """

    interface_version: ClassVar[tuple[int, int]] = INTERFACE_VERSION
    """Version of the interface that the driver was written for; refused if its major is another.

    State it as a literal: an inherited one would change with kvferry, and be untested.
    """

    # What every driver has.

    @property
    @abstractmethod
    def name(self) -> str:
        """The name, unique among the transports of all hosts; peers see it as ``sender``."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this transport can do, which does not change while it lives."""

    @abstractmethod
    def register(self, region: Region) -> None:
        """Register a region, so that transfers of this side and of its peers can use it.

        Does nothing if an equal region is registered. A region may lie within another; a driver may
        refuse one that overlaps another otherwise. A connected peer knows the region only after
        ``connect`` with bytes that ``address`` has returned since.

        Raises ``TransportUnsupportedError`` for a memory kind that is not among the capabilities,
        and ``TransportError``, which says what to do, if the library or the kernel refuses.
        """

    @abstractmethod
    def deregister(self, region: Region) -> None:
        """End the registration of an equal region: later transfers here that name it are refused.

        Those that a connected peer starts may be refused, fail, or be carried out (over shared
        memory this side takes no part in them): the caller first makes sure that no peer accesses
        the region. Raises ``TransportUsageError`` if the region is not registered, or an unfinished
        transfer of this side uses it.
        """

    @abstractmethod
    def address(self) -> bytes:
        """Return the bytes with which a peer connects; they name the registered regions."""

    @abstractmethod
    def connect(self, address: bytes) -> PeerId:
        """Connect to a peer, which may be this transport itself, by its untrusted ``address``.

        A further ``connect`` before ``disconnect`` updates what this side knows of the peer (its
        regions, for example) and returns the same id; transfers go on. If the peer has died, it
        either raises, or returns the same id and transfers fail. A ``connect`` that begins while
        ``disconnect`` of the peer runs waits for its end, and never returns the id that it ends.

        Raises ``ConnectError``, which says why, if the bytes are no address of this driver, or the
        peer cannot be reached.
        """

    @abstractmethod
    def disconnect(self, peer: PeerId) -> None:
        """End the connection to a peer.

        This side's unfinished transfers with the peer become FAILED with ``PeerLostError``. The
        call waits for that, for some seconds at most.

        Raises:
            TransportUsageError: no such peer.
            TransportError: some transfers have not ended in time. They stay FAILING, and the peer
                stays connected: ``disconnect`` may be called again.
        """

    @abstractmethod
    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """Pull remote bytes into local memory; return the id of the transfer.

        There may be no copies, and a copy may have 0 bytes. The regions of a segment must be
        registered even if it has no copies. The peer gets the message ``notify``, of 1 to
        ``max_notification`` bytes, once, after all bytes have arrived, even if the driver has split
        the transfer; never if the transfer fails.

        Raises:
            TransportUsageError: no such peer; a segment's local region is not registered, or its
                remote one is not among the peer's; a copy is not within its segment's regions; the
                notification is empty or too long. Nothing was read.
            TransportUnsupportedError: ``notify`` without notifications, where a driver may raise
                ``TransportUsageError`` instead.
            TransportError: ``max_outstanding`` transfers are unfinished already.
        """

    @abstractmethod
    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        """Return the status of each transfer, in the order of the ids. Never block.

        A driver without threads of its own makes progress here. An id may occur twice; one that is
        unknown or was forgotten raises ``TransportUsageError``.
        """

    @abstractmethod
    def forget(self, transfer: TransferId) -> None:
        """Drop the record of a transfer; ``TransportUsageError`` if it is unknown or not final."""

    @abstractmethod
    def notify(self, peer: PeerId, payload: bytes) -> None:
        """Send a message, 1 to ``max_notification`` bytes, that is not bound to a transfer.

        Best effort: dropped without an error if the peer is gone. Does not wait for the peer: what
        it does not take at once is queued, and ``disconnect`` and ``close`` may drop the queue.

        Raises:
            TransportUsageError: no such peer, or the length is out of bounds.
            TransportUnsupportedError: the transport carries no notifications. A driver may raise
                ``TransportUsageError`` instead.
            TransportError: the peer lives but takes no messages, and its queue is full.
        """

    @abstractmethod
    def notifications(self) -> list[Notification]:
        """Return the notifications that arrived since the last call. Never block."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect all peers, deregister all regions, release all else; twice is fine.

        If it raises ``TransportError``, all is released, but some transfers did not end in time:
        their bytes may still land. Otherwise, no further byte lands.
        """

    # What a driver may add.

    @property
    def library(self) -> str:
        """Name and version of the library that moves the bytes; empty if the driver uses none."""
        return ""

    def path(self, peer: PeerId) -> str:
        """Return the name of the low-level transport to a peer, for metrics and for people.

        Such as ``rc_mlx5``; stays the same while the peer is connected. Empty if the driver cannot
        tell, or if there is no such peer.
        """
        del peer
        return ""

    def wake_when_ended(self, wake: Callable[[], None]) -> bool:
        """Have ``wake`` called when transfers end, so that the caller may poll them less often.

        Called at most once, before the first transfer. A driver calls ``wake``, from any thread,
        each time a transfer has become final (for ``poll``, too) outside of a call of this
        transport, or more often. ``wake`` returns at once and raises nothing. Returns whether the
        driver does so; if not, the default, only ``poll`` tells.
        """
        del wake
        return False

    # What the capabilities may deny; by default, all of it is refused.

    def read_pages(
        self, peer: PeerId, pages: PagedCopies, notify: bytes | None = None
    ) -> TransferId:
        """Pull remote bytes into local memory, as ``read`` does, with copies named by pages.

        The same ``Strips`` occur in many calls: a driver may prepare something once and keep it
        until the peer is disconnected. Also refused (``TransportUsageError``): a place that does
        not exist.
        """
        del peer, pages, notify
        raise TransportUnsupportedError(f"{type(self).__name__} cannot read by pages")

    def cancel(self, transfer: TransferId) -> None:
        """Ask the driver to end a transfer early; best effort. An unknown id is refused.

        The caller polls on until the transfer is final; one that ends early is FAILED with
        ``TransferCancelledError``. Without the capability ``cancel``, only the id is checked.
        """
        # ``poll`` refuses an unknown id; the transfer goes on.
        self.poll([transfer])
