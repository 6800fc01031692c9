"""The interface of a driver: one-sided, polled transfers between registered memory.

A ``Transport`` moves bytes and carries small messages. It knows no model, no parallelism and no
request. Users do not call it: ``kvferry.core.endpoint.Endpoint`` does. A driver usually derives
from ``kvferry.core.transport.base.BaseTransport``, which implements most of it.

**Threads.** Calls come from different threads, but one at a time. ``connect``, ``read``, ``write``
and ``disconnect`` may block; a driver then releases the interpreter's lock (GIL). If
``Capabilities.concurrent_connect`` is set, calls of ``connect`` and ``disconnect`` may also overlap
with each other and with any other call but ``close``, and must not delay the other calls. While
``connect`` or ``disconnect`` of a peer runs, no other call names this peer or a transfer with it.
But ``connect`` may be called with an address of a peer while the peer is being connected or
disconnected: the driver lets these calls wait for each other.

**Threads of the driver.** A driver that makes threads in Python takes the keyword ``enter`` in its
constructor, a function, and calls it first in every such thread: what the caller does there
(choosing the thread's GPU, for example) counts for one thread only. kvferry passes ``enter`` to a
driver whose constructor names this keyword and whose ``interface_version`` is 1.1 or later. The
threads on which kvferry calls a transport have done the same.

**Memory** belongs to the caller, who keeps it alive from ``register`` until ``deregister`` has
returned. The arrays of ``Copies`` belong to the caller, too, who reuses them as soon as ``read`` or
``write`` has returned: a driver that needs them longer makes its own copy. The same holds for the
places in ``PagedCopies``, but not for its ``Strips``, which never change.

**Errors.** A caller's mistake raises at once (``TransportUsageError``,
``TransportUnsupportedError``), and then nothing has started. The outcome of a transfer is a value
returned by ``poll``, never an exception. A driver maps its library's errors in one place, with
``raise ... from exc``. After ``close``, every method but ``close`` raises ``TransportUsageError``;
the properties and ``path`` still answer. ``read`` or ``write`` raises ``TransportUnsupportedError``
if the capabilities deny it, before and after ``close``.

**Fork.** A transport belongs to the process that made it. In a forked child every method but
``close`` raises ``TransportUsageError``, and ``close`` does nothing.

**Quiescence.** ``DONE`` and ``FAILED`` are final, and final means quiet: the driver touches none of
the transfer's buffers again, neither local nor remote ones. A transfer that is known to fail while
its bytes may still land is ``FAILING`` until it is quiet. ``DONE`` also means that the bytes are
visible to device work that is enqueued afterwards.

**Death.** A driver notices the death of a peer's process within a second: this side's unfinished
transfers with the peer are FAILING or FAILED by then, even if a forked child of that process lives
on and keeps its sockets open.

**Order.** Transfers are not ordered. Notifications sent with ``notify`` from one sender to one peer
arrive in the order of the calls. Notifications bound to transfers arrive in order if each transfer
began when the one before was DONE. Notifications of these two sorts are not ordered among each
other.
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

INTERFACE_VERSION = (1, 2)
"""Major and minor version of this interface; see ``Transport.interface_version``."""


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
    """The status of one transfer, as ``Transport.poll`` returns it.

    Attributes:
        state: the state of the transfer.
        error: why the transfer fails or has failed; ``None`` unless it is FAILING or FAILED.
    """

    state: State
    error: TransportError | None = None


class Quiescence(enum.Enum):
    """When a FAILING transfer becomes FAILED: from then on, no further byte lands."""

    ALWAYS = "always"
    """Soon and by itself: no ``disconnect`` is needed."""
    AFTER_DISCONNECT = "after_disconnect"
    """Once ``disconnect`` of the peer has returned. Before that, the driver cannot know that no
    further byte lands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can do on this machine, with the options that it was made with.

    Attributes:
        ops: which of ``"read"`` and ``"write"`` the transport has.
        memory: the memory kinds that can be registered, such as ``cpu`` and ``cuda``.
        max_notification: the longest payload of a notification, in bytes; 0 if the transport
            carries no notifications.
        cancel: whether ``cancel`` can end a transfer early.
        background_progress: whether transfers go on, and peers are served, without calls of this
            transport. Even then, a ``poll`` may be needed to notice that a transfer has ended, to
            send the transfer's notification, or to begin the rest of a long transfer.
        quiescence: when a transfer that is FAILING becomes FAILED.
        max_outstanding: the most transfers that may be unfinished at once; ``None`` for no limit.
        concurrent_connect: whether ``connect`` and ``disconnect`` may be called while other calls
            run. If not, a slow call of either delays the transfers with all other peers.
        paged_reads: whether the transport has ``read_pages``, and takes less time for it than for
            ``read`` with the same copies. (Interface 1.2.)
    """

    ops: frozenset[str]
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
    """A message from a peer.

    Attributes:
        sender: the ``Transport.name`` of the peer.
        payload: the bytes that the peer sent.
    """

    sender: str
    payload: bytes = field(repr=False)


class Transport(ABC):
    """Moves bytes between this process's memory and its peers': the interface of every driver.

    A driver's entry point (group ``kvferry.drivers``) names a subclass. The subclass's constructor
    takes the user's ``driver_options`` as keyword arguments, and may take ``enter`` (see above).
    For an unknown option it raises ``DriverError``, which lists the options that exist.
    """

    interface_version: ClassVar[tuple[int, int]] = INTERFACE_VERSION
    """Major and minor version of the interface that the driver was written for. A driver with
    another major version than ``INTERFACE_VERSION`` is refused. A driver states the version as a
    literal: an inherited one would change with kvferry, although the driver was never tested with
    the new interface."""

    # What every driver has.

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of this transport, unique among the transports of all hosts.

        Peers see the name as ``Notification.sender``.
        """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this transport can do. The value does not change while the transport lives."""

    @abstractmethod
    def register(self, region: Region) -> None:
        """Register a region, so that transfers of this side and of its peers can use it.

        Does nothing if an equal region is registered already. Regions may overlap. A peer that has
        connected before knows the region only after it calls ``connect`` again, with bytes that
        ``address`` has returned since.

        Args:
            region: the memory, which the caller keeps alive until ``deregister`` has returned.

        Raises:
            TransportUnsupportedError: the memory kind is not among the capabilities.
            TransportError: the library or the kernel refused; the message says what to do.
        """

    @abstractmethod
    def deregister(self, region: Region) -> None:
        """End a region's registration: this side refuses later transfers that name the region.

        A connected peer may still know the region. Transfers that the peer starts may then be
        refused, fail, or be carried out: over shared memory this side takes no part in them.
        So before this call, the caller makes sure that no peer accesses the region any more.

        Args:
            region: a region equal to the registered one.

        Raises:
            TransportUsageError: the region is not registered, or an unfinished transfer of this
                side uses it.
        """

    @abstractmethod
    def address(self) -> bytes:
        """Return the bytes that a peer passes to ``connect``, to reach this transport.

        The bytes name this side's registered regions. Only transports of the same driver can parse
        them.
        """

    @abstractmethod
    def connect(self, address: bytes) -> PeerId:
        """Connect to a peer, which may be this transport itself.

        A peer stays connected until ``disconnect``. Until then, a further ``connect`` updates what
        this side knows of the peer (its regions, for example) and returns the same id; transfers
        under way go on. If the peer has died meanwhile, a further ``connect`` either raises, or
        returns the same id and transfers fail. A ``connect`` that begins while ``disconnect`` of
        the peer runs waits for its end, and never returns the id that it ends.

        Args:
            address: the bytes that the peer's ``address`` returned; untrusted.

        Returns:
            The id of the peer.

        Raises:
            ConnectError: the bytes are no address of this driver, or the peer cannot be reached;
                the message says why.
        """

    @abstractmethod
    def disconnect(self, peer: PeerId) -> None:
        """End the connection to a peer.

        This side's unfinished transfers with the peer become FAILED with ``PeerLostError``. The
        call waits until all of them are FAILED, for some seconds at most.

        Raises:
            TransportUsageError: no such peer.
            TransportError: some transfers have not ended in time. They stay FAILING, and the peer
                stays connected: ``disconnect`` may be called again.
        """

    @abstractmethod
    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        """Return the status of each transfer, in the order of the ids. Never block.

        A driver without threads of its own makes progress with its transfers in this call. An id
        may occur twice.

        Raises:
            TransportUsageError: an id is unknown or was forgotten.
        """

    @abstractmethod
    def forget(self, transfer: TransferId) -> None:
        """Drop the record of a final transfer.

        Raises:
            TransportUsageError: the id is unknown, or its transfer is not final.
        """

    @abstractmethod
    def notify(self, peer: PeerId, payload: bytes) -> None:
        """Send a message to a peer, not bound to a transfer.

        Best effort: if the peer is gone, the message is dropped without an error. Does not wait for
        the peer: a message that the peer does not take at once is queued, and ``disconnect`` and
        ``close`` may drop the queue.

        Args:
            peer: a connected peer.
            payload: the message, 1 to ``capabilities.max_notification`` bytes.

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
        """Disconnect all peers, deregister all regions, and release all other resources.

        A second call does nothing.

        Raises:
            TransportError: everything has been released, but some transfers did not end in time:
                their bytes may still land. If this error is not raised, no further byte lands.
        """

    # What a driver may add.

    @property
    def library(self) -> str:
        """Name and version of the library that moves the bytes; empty if the driver uses none."""
        return ""

    def path(self, peer: PeerId) -> str:
        """Return the name of the low-level transport to a peer, for metrics and for people.

        Returns:
            The name, such as ``rc_mlx5``, which stays the same while the peer is connected; empty
            if the driver cannot tell, or if there is no such peer.
        """
        del peer
        return ""

    def wake_when_ended(self, wake: Callable[[], None]) -> bool:
        """Have ``wake`` called when transfers end, so that the caller may poll them less often.

        Called at most once, before the first transfer.

        Args:
            wake: takes no arguments, returns at once and raises nothing. A driver calls it, from
                any thread, each time a transfer has become final outside of a call of this
                transport: ``poll`` then returns the final status. It may call it more often.

        Returns:
            Whether the driver calls ``wake``. If not, which is the default, only ``poll`` tells.
        """
        del wake
        return False

    # What the capabilities may deny; by default, all of it is refused.

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """Pull remote bytes into local memory.

        Args:
            peer: a connected peer.
            copies: what to read; the batch may be empty, and a copy may have 0 bytes. The regions
                of a segment must be registered even if the segment has no copies.
            notify: a message that is bound to the transfer, 1 to ``max_notification`` bytes;
                ``None`` for no message. The peer gets it once, after all bytes of the transfer have
                arrived, even if the driver has split the transfer. If the transfer fails, the
                peer never gets the message.

        Returns:
            The id of the transfer, for ``poll``, ``cancel`` and ``forget``.

        Raises:
            TransportUsageError: there is no such peer; a segment's local region is not registered,
                or its remote region is not among the peer's; a copy is not within its segment's
                regions; the notification is empty or too long. Nothing was read.
            TransportUnsupportedError: ``read`` is not among the capabilities, or ``notify`` is
                given to a transport that carries no notifications. For the latter, a driver may
                raise ``TransportUsageError`` instead.
            TransportError: ``capabilities.max_outstanding`` transfers are unfinished already.
        """
        del peer, copies, notify
        raise unsupported_op(self, "read")

    def read_pages(
        self, peer: PeerId, pages: PagedCopies, notify: bytes | None = None
    ) -> TransferId:
        """Pull remote bytes into local memory, as ``read`` does, with copies named by pages.

        The same objects ``Strips`` occur in many calls for a peer: the driver may prepare something
        for them once, and keep it until the peer is disconnected.

        Args:
            peer: a connected peer.
            pages: what to read; the batch may be empty.
            notify: as for ``read``.

        Returns:
            The id of the transfer, for ``poll``, ``cancel`` and ``forget``.

        Raises:
            TransportUsageError: as for ``read``; or a place does not exist. Nothing was read.
            TransportUnsupportedError: as for ``read``; or ``paged_reads`` is not among the
                capabilities.
            TransportError: as for ``read``.
        """
        del peer, pages, notify
        raise unsupported_op(self, "read by pages")

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """Push local bytes into remote memory.

        Arguments, result and errors are those of ``read``, with writing in place of reading.
        """
        del peer, copies, notify
        raise unsupported_op(self, "write")

    def cancel(self, transfer: TransferId) -> None:
        """Ask the driver to end a transfer early; best effort.

        The caller continues to ``poll`` until the transfer is final. A transfer that ends early is
        FAILED with ``TransferCancelledError``. Without the capability ``cancel``, the call only
        checks the id.

        Raises:
            TransportUsageError: the id is unknown.
        """
        # ``poll`` refuses an unknown id; the transfer goes on.
        self.poll([transfer])


def unsupported_op(transport: Transport, op: str) -> TransportUnsupportedError:
    """Return the error to raise for an operation that the capabilities deny.

    Args:
        transport: the transport whose operation was called.
        op: the operation, such as ``"read"``.
    """
    ops = ", ".join(sorted(transport.capabilities.ops)) or "nothing"
    return TransportUnsupportedError(f"{type(transport).__name__} cannot {op}; it can {ops}")
