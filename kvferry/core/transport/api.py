"""What a driver implements: one-sided, polled transfers between registered memory.

A ``Transport`` moves bytes and carries small messages. It knows no model, no parallelism and no
request. Users never call it: ``kvferry.core.endpoint.Endpoint`` does.

**Threads.** Calls come from different threads, but one at a time. ``connect``, ``read``, ``write``
and ``disconnect`` may block; they release the interpreter's lock while they do. Where
``Capabilities.concurrent_connect`` says so, ``connect`` and ``disconnect`` come beside any calls
but ``close``, each other included, and hold none of them up; while one runs, no other call names
its peer, or a transfer of that peer.

**Memory** belongs to the caller, who keeps it alive from ``register`` until ``deregister`` has
returned. The arrays of ``Copies`` are the caller's too: a driver that needs them after ``read`` or
``write`` has returned makes its own copy, because the caller reuses them at once.

**Errors.** A caller's mistake raises at once (``TransportUsageError``,
``TransportUnsupportedError``), and then nothing has started. The outcome of a transfer is a value
from ``poll``, never an exception. A driver maps its library's errors in one place, with
``raise ... from exc``. Every method but ``close`` raises ``TransportUsageError`` after ``close``,
while the properties, and ``path``, go on answering; an op that the capabilities deny raises
``TransportUnsupportedError``, closed or not.

**Fork.** A transport belongs to the process that made it. In a forked child every method but
``close`` raises ``TransportUsageError``, and ``close`` does nothing.

**Quiescence.** ``DONE`` and ``FAILED`` are final, and final means quiet: the driver touches none of
the transfer's buffers again, on either side. A transfer that is known to fail while its bytes may
still land is ``FAILING`` until it is quiet. ``DONE`` also means that the bytes are visible to
device work enqueued afterwards.

**Death.** That a peer's process has died is known within a second: its transfers are FAILING or
FAILED by then, also if a fork of that process lives on and holds its sockets.

**Order.** Transfers have none. Free notifications (``notify``) of one sender to one peer keep
theirs, and so do those bound to transfers of which each began when the one before was DONE; between
the two sorts there is none.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NewType

from kvferry.core.errors import TransportError, TransportUnsupportedError
from kvferry.core.memory import Region
from kvferry.core.transport.copies import Copies

PeerId = NewType("PeerId", int)
"""Names one connection of one transport; never used again after ``disconnect``."""

TransferId = NewType("TransferId", int)
"""Names one transfer of one transport; never used again after ``forget``."""

INTERFACE_VERSION = (1, 0)
"""Major and minor version of this interface; see ``Transport.interface_version``."""


class State(enum.Enum):
    """Where a transfer stands."""

    PENDING = "pending"
    """Under way."""
    FAILING = "failing"
    """Will fail, but bytes may still land: the pages stay pinned until it is final."""
    DONE = "done"
    """Final: all bytes have arrived."""
    FAILED = "failed"
    """Final: some bytes may have arrived; none will any more."""

    @property
    def final(self) -> bool:
        """Whether the buffers are quiet."""
        return self in (State.DONE, State.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The answer of ``poll`` for one transfer; ``error`` is set if it is FAILING or FAILED."""

    state: State
    error: TransportError | None = None


class Quiescence(enum.Enum):
    """When a failed transfer becomes FAILED."""

    ALWAYS = "always"
    """By itself, and soon."""
    AFTER_DISCONNECT = "after_disconnect"
    """It stays FAILING until ``disconnect`` of its peer has returned: nothing less proves quiet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can do here, on this machine, with its options.

    Attributes:
        ops: of ``read`` and ``write``, those that work.
        memory: the memory kinds that can be registered.
        max_notification: longest payload of a notification, in bytes.
        cancel: whether ``cancel`` can end a transfer early.
        background_progress: whether transfers go on, and peers are served, without calls. That one
            has ended may take a ``poll`` to be noticed, and its notification to be sent, and the
            rest of a long one to be begun.
        quiescence: when a failed transfer becomes FAILED.
        max_outstanding: how many transfers may be unfinished at once; ``None``: no limit.
        concurrent_connect: whether ``connect`` and ``disconnect`` may be called beside other calls.
            If not, a peer that they wait for makes all other peers of the endpoint wait.
    """

    ops: frozenset[str]
    memory: frozenset[str]
    max_notification: int
    cancel: bool
    background_progress: bool
    quiescence: Quiescence
    max_outstanding: int | None = None
    concurrent_connect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A message from a peer: the payload, and the ``Transport.name`` of who sent it."""

    sender: str
    payload: bytes = field(repr=False)


class Transport(ABC):
    """A driver's transport.

    The entry point (group ``kvferry.drivers``) names a class whose constructor takes the user's
    ``driver_options`` as keyword arguments, and raises ``DriverError`` for one that it does not
    know, with those that it does.
    """

    interface_version: ClassVar[tuple[int, int]] = INTERFACE_VERSION
    """The version that the driver was written for. Core refuses another major version. A driver
    repeats the number as a literal; inheriting this one would claim what was never tested."""

    # What every driver has.

    @property
    @abstractmethod
    def name(self) -> str:
        """This transport, unique among all transports anywhere; peers see it as ``sender``."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this transport can do; constant over its life."""

    @abstractmethod
    def register(self, region: Region) -> None:
        """Make a region reachable for local and remote use. Again for an equal one: no effect.

        Regions may overlap. Peers that connected before need ``connect`` with new bytes from
        ``address`` to see it.

        Raises:
            TransportUnsupportedError: the memory kind is not among the capabilities.
            TransportError: the library or the kernel refused; says what to do.
        """

    @abstractmethod
    def deregister(self, region: Region) -> None:
        """Make a region unreachable: transfers that name it are refused from now on.

        That is promised of this side's transfers. A peer that connected before may still know the
        region, and what it has begun or begins may be refused, fail, or be carried out: over shared
        memory nobody here takes part in it. So the owner of the memory first learns from its peers
        that they have ended.

        Raises:
            TransportUsageError: it is not registered, or a transfer of this side still uses it.
        """

    @abstractmethod
    def address(self) -> bytes:
        """What a peer needs to connect and to know this side's registered regions; opaque."""

    @abstractmethod
    def connect(self, address: bytes) -> PeerId:
        """Connect to the transport that gave these bytes (this very one is allowed too).

        For a peer that is connected already, which it is until ``disconnect``, refreshes what is
        known of it (its regions, say) and returns the same id; transfers under way go on. The bytes
        are untrusted. That the peer was connected does not mean that its address is still good: one
        that has died may be refused, or give the same id, whose transfers then fail.

        Raises:
            ConnectError: not an address of this driver, or the peer cannot be reached; says why.
        """

    @abstractmethod
    def disconnect(self, peer: PeerId) -> None:
        """End a connection. Unfinished transfers become FAILED with ``PeerLostError``.

        Returns when nothing of that peer is running, within a deadline of seconds.

        Raises:
            TransportUsageError: no such peer.
            TransportError: the deadline passed; its transfers stay FAILING.
        """

    @abstractmethod
    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        """The status of each transfer, in the order of the ids. Drives progress. Never blocks.

        An id that is named twice is answered twice.

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
        """Send a message of 1 to ``capabilities.max_notification`` bytes, bound to nothing.

        Best effort: a peer that is gone is not an error. It never waits for the peer: what is not
        taken at once is queued, and ``disconnect`` and ``close`` may drop what still is.

        Raises:
            TransportUsageError: no such peer, or the length is out of bounds.
            TransportError: a peer that lives takes nothing, and the queue for it is full.
        """

    @abstractmethod
    def notifications(self) -> list[Notification]:
        """Those that arrived since the last call, each once. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Release everything: disconnects peers, deregisters regions. Twice is fine.

        An error means that grace failed, not that closing failed: bytes of unfinished transfers may
        still land. Without one, all is quiet.
        """

    # What a driver may add.

    @property
    def library(self) -> str:
        """The library that moves the bytes and its version, for people; empty if it needs none."""
        return ""

    def path(self, peer: PeerId) -> str:
        """What carries a connected peer's bytes, in a few words that stay the same (``rc_mlx5``,
        say), for figures and people; empty if the driver cannot tell, or there is no such peer."""
        del peer
        return ""

    # What the capabilities may deny; the defaults refuse.

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """Pull remote bytes into local memory.

        ``notify`` is seen by the peer after all of the transfer's bytes have arrived, also where
        the driver had to split the transfer, and not at all if it fails. It has at least 1 byte.
        Copies of no bytes at all are allowed; the notification is still sent. A segment may have no
        copies, but has to name regions that are known, like any.

        Raises:
            TransportUsageError: no such peer; a segment's local region is not registered or its
                remote region not known of the peer; a copy leaves its segment's regions; a bad
                notification. Nothing was read.
            TransportUnsupportedError: ``read`` is not among the capabilities.
            TransportError: ``capabilities.max_outstanding`` transfers are unfinished.
        """
        del peer, copies, notify
        raise unsupported_op(self, "read")

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """Push local bytes into remote memory; otherwise as ``read``."""
        del peer, copies, notify
        raise unsupported_op(self, "write")

    def cancel(self, transfer: TransferId) -> None:
        """Ask for an early end; best effort. Poll on until the transfer is final.

        A transfer that ends this way is FAILED with ``TransferCancelledError``.

        Without the capability it does nothing else than to look at the id.

        Raises:
            TransportUsageError: the id is unknown.
        """
        # Refuses what has to be refused, and changes nothing.
        self.poll([transfer])


def unsupported_op(transport: Transport, op: str) -> TransportUnsupportedError:
    """Return the error for ``read`` or ``write`` where the capabilities deny it."""
    ops = ", ".join(sorted(transport.capabilities.ops)) or "nothing"
    return TransportUnsupportedError(f"{type(transport).__name__} cannot {op}; it can {ops}")
