"""The base class of drivers: it keeps a transport's books and refuses every mistake of a caller.

``Transport`` says what a transport has to do. Much of that is the same for every library: which
regions are registered, who is connected, which transfers there are, and what a caller must not do.
``BaseTransport`` does all of that, once. A driver derives from it and fills in hooks, whose names
begin with an underscore: register memory, connect, start a transfer, say how it stands.

The hooks work on objects of the driver's own, of four types, which it names where it derives::

    class MyTransport(BaseTransport[MyMemory, MyAddress, MyConnection, MyTransfer]): ...

- the registration: what the library gave for a registered region (``None`` will do);
- the address: a peer's address, parsed and checked;
- the connection: a peer that is connected, see ``DriverConnection``;
- the transfer: see ``DriverTransfer``.

The base keeps these objects and hands them back; it reads no more of them than the two protocols
say. Hooks are called with arguments that have been checked, and never after ``close`` or in a fork.

**Threads.** Hooks are called by the thread that called the transport, so what the interface says of
threads holds for them: one at a time, but for ``_decode_address``, ``_identity``, ``_connect``,
``_refresh`` and ``_disconnect`` where the capabilities have ``concurrent_connect``. Even then
``connect`` calls for one and the same peer come one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from kvferry.core.errors import (
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUnsupportedError,
)
from kvferry.core.memory import Region
from kvferry.core.transport.api import (
    Capabilities,
    Notification,
    PeerId,
    Status,
    TransferId,
    Transport,
    unsupported_op,
)
from kvferry.core.transport.bounds import check_copies
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

_POLL_SECONDS = 0.0005
"""The pause between two looks at transfers that ``_end_transfers`` waits for."""

_SCRATCH_COPIES = 4096


class DriverConnection(Protocol):
    """What the base reads of a driver's connection."""

    @property
    def name(self) -> str:
        """The ``Transport.name`` of the peer."""

    @property
    def identity(self) -> Hashable:
        """The value that ``_identity`` returned for the address the connection was made with."""

    @property
    def regions(self) -> Collection[Region]:
        """The regions that the peer has registered, as far as this side knows.

        A set, or a dict from regions to what the driver keeps of each, is looked up fastest.
        ``_refresh`` replaces it.
        """


class DriverTransfer(Protocol):
    """What the base reads of a driver's transfer."""

    @property
    def status(self) -> Status:
        """The transfer's status, which ``_progress`` or the driver's threads keep up to date."""


RegistrationT = TypeVar("RegistrationT")
AddressT = TypeVar("AddressT")
ConnectionT = TypeVar("ConnectionT", bound=DriverConnection)
TransferT = TypeVar("TransferT", bound=DriverTransfer)


class TransferRequest(NamedTuple, Generic[ConnectionT]):
    """A transfer to start. Everything in it has been checked.

    Attributes:
        connection: the peer.
        copies: n copies, n may be 0, each within its segment's regions. The arrays are the
            caller's, who reuses them as soon as the call returns: copy what is needed longer.
        local: the distinct local regions of the segments; all are registered.
        remote: the distinct remote regions; all are among ``connection.regions``.
        notify: the payload to send to the peer when all bytes have arrived, or ``None``.
        write: whether the local side is the source.
    """

    connection: ConnectionT
    copies: Copies
    local: frozenset[Region]
    remote: frozenset[Region]
    notify: bytes | None
    write: bool


class _Record(NamedTuple, Generic[TransferT]):
    """A transfer in the books: the peer's id and the local regions beside the driver's object."""

    peer: PeerId
    local: frozenset[Region]
    transfer: TransferT

    @property
    def final(self) -> bool:
        return self.transfer.status.state.final


class BaseTransport(Transport, Generic[RegistrationT, AddressT, ConnectionT, TransferT]):
    """Implements ``Transport`` over the hooks that a driver fills in.

    A driver says ``interface_version`` itself, overrides ``library`` if it has one, and calls
    ``super().__init__`` as soon as it knows its capabilities.

    Args:
        name: the transport's name, unique among all transports anywhere.
        capabilities: what the transport can do; constant over its life.
    """

    grace_seconds: ClassVar[float] = 5.0
    """How long ``disconnect`` and ``close`` wait for transfers to end."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self._owner = TransportOwner(name)
        self._capabilities = capabilities
        self._ids = itertools.count(1)
        self._registered: dict[Region, RegistrationT] = {}
        self._peers: dict[PeerId, ConnectionT] = {}
        self._transfers: dict[TransferId, _Record[TransferT]] = {}
        self._connecting = _IdentityLocks()
        # Scratch of the bounds check. One is enough: transfers are started one at a time.
        self._ends = np.empty(_SCRATCH_COPIES, np.uint64)

    # Hooks: memory.

    @abstractmethod
    def _register(self, region: Region) -> RegistrationT:
        """Make a region reachable and return what the driver needs to undo that.

        The region is of a kind among the capabilities and is not registered yet; it may overlap
        others that are.

        Raises:
            TransportError: the library or the kernel refused; says what to do.
        """

    @abstractmethod
    def _deregister(self, region: Region, registration: RegistrationT) -> None:
        """Make a region unreachable. No unfinished transfer of this side uses it.

        Args:
            region: no longer in ``self._registered``.
            registration: what ``_register`` returned.
        """

    # Hooks: connections.

    @abstractmethod
    def _address(self) -> bytes:
        """Return what a peer needs to connect, with the regions in ``self._registered``."""

    @abstractmethod
    def _decode_address(self, address: bytes) -> AddressT:
        """Parse the untrusted bytes of an address.

        Raises:
            ConnectError: they are no address of this driver.
        """

    @abstractmethod
    def _identity(self, address: AddressT) -> Hashable:
        """Return what tells the peer at an address from every other.

        Two addresses of equal identity are taken for the same peer. Whoever changes an address on
        its way must not be taken for a peer that is connected, so all that leads to the peer
        belongs to the identity, or ``_refresh`` compares it.
        """

    @abstractmethod
    def _connect(self, address: AddressT) -> ConnectionT:
        """Connect to a peer that is not connected. May block for some seconds.

        Raises:
            ConnectError: the peer cannot be reached; says why. Nothing of the attempt is left.
        """

    @abstractmethod
    def _refresh(self, connection: ConnectionT, address: AddressT) -> None:
        """Take over a newer address of a connected peer, its regions above all.

        Transfers under way go on.

        Raises:
            ConnectError: the address does not lead to this peer, or the peer is gone. The
                connection stays as it was.
        """

    @abstractmethod
    def _disconnect(self, connection: ConnectionT, transfers: Sequence[TransferT]) -> None:
        """Release a connection, of which ``_end_transfers`` has ended the transfers.

        Args:
            connection: the peer; the base forgets it when this returns.
            transfers: those that ``_end_transfers`` had to end. Where only taking the connection
                down proves them quiet, they become FAILED here; if one does not, the connection
                stays and ``disconnect`` can be called again.
        """

    def _path(self, connection: ConnectionT) -> str:
        """Return what carries the peer's bytes, in a few words; see ``Transport.path``."""
        del connection
        return ""

    # Hooks: transfers.

    @abstractmethod
    def _start(self, request: TransferRequest[ConnectionT]) -> TransferT:
        """Start a transfer and return it. May block, may move all of it, may even have failed.

        That the peer is gone is no exception: the transfer that is returned is FAILED then.
        """

    def _progress(self, transfers: Sequence[TransferT]) -> None:
        """Do what there is to do within ``poll``, and bring statuses up to date. Never block.

        Args:
            transfers: those that the caller asks about; one may be among them twice, and there may
                be none. A driver that has no threads drives all of its transfers here.
        """
        del transfers

    @abstractmethod
    def _fail(self, transfer: TransferT, error: TransportError) -> None:
        """Let a transfer end early, as FAILED with ``error``, and do not wait for it.

        It is FAILING until it is quiet. The first error stays; a transfer that is final, or that
        can no longer be stopped, is left alone.
        """

    def _end_transfers(self, transfers: Sequence[TransferT], error: TransportError) -> bool:
        """Let transfers fail, and wait until they are final; ``grace_seconds`` at most.

        That is for transfers that become final by themselves after ``_fail``. A driver overrides it
        if it can wait without polling, or if its transfers become final with ``_disconnect`` only:
        then it waits for as much as must have ended before the connection may be released.

        Args:
            transfers: any of this transport's.
            error: what they fail with.

        Returns:
            Whether all have ended as far as they do.
        """
        unfinished = list(transfers)
        deadline = time.monotonic() + self.grace_seconds
        for transfer in unfinished:
            self._fail(transfer, error)
        while True:
            self._progress(unfinished)
            unfinished = [one for one in unfinished if not one.status.state.final]
            if not unfinished or time.monotonic() > deadline:
                return not unfinished
            time.sleep(_POLL_SECONDS)

    # Hooks: notifications. They are called only if ``max_notification`` is not 0.

    def _notify(self, connection: ConnectionT, payload: bytes) -> None:
        """Send or queue a notification; do not wait for the peer.

        Raises:
            PeerLostError: the peer is gone. The base drops it: to the caller that is no error.
            TransportError: the peer lives, and the queue for it is full.
        """
        raise NotImplementedError(f"{type(self).__name__} has max_notification, and no _notify")

    def _receive(self) -> list[Notification]:
        """Return the notifications that arrived since the last call. Never block."""
        raise NotImplementedError(f"{type(self).__name__} has max_notification, and no _receive")

    # Hooks: the end.

    @abstractmethod
    def _close(self, transfers: Sequence[TransferT]) -> None:
        """Release everything: connections, registered memory, threads.

        Called once, when ``_end_transfers`` has done what it could. ``_disconnect`` is not called
        for the peers that are still connected. The books are as they were; they are cleared
        afterwards.

        Args:
            transfers: those that ``_end_transfers`` had to end. One that is not final in spite of
                that never will be; ``close`` then raises.
        """

    # What the base gives to hooks.

    def _unfinished(self, peer: PeerId | None = None) -> list[TransferT]:
        """Return the transfers that are not final, of one peer or of all."""
        # A copy: where connects are concurrent, others start transfers meanwhile.
        return [
            record.transfer
            for record in list(self._transfers.values())
            if (peer is None or record.peer == peer) and not record.final
        ]

    def _check_usable(self) -> None:
        """Refuse a call after ``close`` or in a fork.

        Raises:
            TransportUsageError: it is one.
        """
        self._owner.check()

    # The interface.

    @property
    def name(self) -> str:
        """The name that was given to the constructor."""
        return self._owner.name

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that were given to the constructor."""
        return self._capabilities

    def path(self, peer: PeerId) -> str:
        """As ``Transport.path``, by ``_path``."""
        connection = self._peers.get(peer)
        return "" if connection is None else self._path(connection)

    def register(self, region: Region) -> None:
        """As ``Transport.register``, by ``_register``."""
        self._check_usable()
        kinds = self._capabilities.memory
        if region.kind not in kinds:
            raise TransportUnsupportedError(
                f"{self.name} reaches {', '.join(sorted(kinds)) or 'no'} memory, not "
                f"{region.kind}: {region}; choose a driver that has it (kvferry drivers)"
            )
        if region not in self._registered:
            self._registered[region] = self._register(region)

    def deregister(self, region: Region) -> None:
        """As ``Transport.deregister``, by ``_deregister``."""
        self._check_usable()
        check_registered(region, self._registered)
        for record in self._transfers.values():
            if not record.final:
                check_unused(region, record.local)
        self._deregister(region, self._registered.pop(region))

    def address(self) -> bytes:
        """As ``Transport.address``, by ``_address``."""
        self._check_usable()
        return self._address()

    def connect(self, address: bytes) -> PeerId:
        """As ``Transport.connect``, by ``_connect`` or, for a connected peer, ``_refresh``."""
        self._check_usable()
        theirs = self._decode_address(address)
        identity = self._identity(theirs)
        with self._connecting.locked(identity):
            for peer, connection in list(self._peers.items()):
                if connection.identity == identity:
                    self._refresh(connection, theirs)
                    return peer
            connection = self._connect(theirs)
            peer = PeerId(next(self._ids))
            self._peers[peer] = connection
            return peer

    def disconnect(self, peer: PeerId) -> None:
        """As ``Transport.disconnect``, by ``_disconnect``."""
        self._check_usable()
        connection = find_peer(self._peers, peer)
        transfers = self._unfinished(peer)
        error = PeerLostError(f"{connection.name} was disconnected")
        ended = self._end_transfers(transfers, error)
        if ended:
            self._disconnect(connection, transfers)
        if not ended or not _all_final(transfers):
            raise TransportError(
                f"bytes may still move to or from {connection.name}, {self.grace_seconds} s after "
                "its transfers were told to end: they stay failing; disconnect again, later"
            )
        del self._peers[peer]

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """As ``Transport.read``, by ``_start``."""
        return self._start_checked("read", peer, copies, notify)

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """As ``Transport.write``, by ``_start``."""
        return self._start_checked("write", peer, copies, notify)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        """As ``Transport.poll``, by ``_progress`` and the transfers' ``status``."""
        self._check_usable()
        books = self._transfers
        try:
            found = [books[transfer].transfer for transfer in transfers]
        except KeyError:
            found = [find_transfer(books, transfer).transfer for transfer in transfers]
        self._progress(found)
        return [transfer.status for transfer in found]

    def cancel(self, transfer: TransferId) -> None:
        """As ``Transport.cancel``, by ``_fail`` if the capabilities have ``cancel``."""
        self._check_usable()
        record = find_transfer(self._transfers, transfer)
        if self._capabilities.cancel and not record.final:
            self._fail(
                record.transfer, TransferCancelledError(f"transfer {transfer} was cancelled")
            )

    def forget(self, transfer: TransferId) -> None:
        """As ``Transport.forget``."""
        self._check_usable()
        check_final(transfer, find_transfer(self._transfers, transfer).transfer.status)
        del self._transfers[transfer]

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """As ``Transport.notify``, by ``_notify``."""
        self._check_usable()
        connection = find_peer(self._peers, peer)
        check_payload(payload, self._capabilities.max_notification)
        with contextlib.suppress(PeerLostError):
            self._notify(connection, payload)

    def notifications(self) -> list[Notification]:
        """As ``Transport.notifications``, by ``_receive``."""
        self._check_usable()
        return self._receive() if self._capabilities.max_notification else []

    def close(self) -> None:
        """As ``Transport.close``, by ``_close``."""
        if not self._owner.end():
            return
        transfers = self._unfinished()
        self._end_transfers(transfers, PeerLostError(f"{self.name} was closed"))
        try:
            self._close(transfers)
        finally:
            self._peers.clear()
            self._registered.clear()
        if not _all_final(transfers):
            raise TransportError(
                f"closed, but bytes may still land, {self.grace_seconds} s after all transfers "
                "were told to end: do not reuse the memory of those that were unfinished"
            )

    def _start_checked(
        self, op: str, peer: PeerId, copies: Copies, notify: bytes | None
    ) -> TransferId:
        """Check all that a caller can get wrong, start the transfer, and enter it in the books."""
        capabilities = self._capabilities
        if op not in capabilities.ops:
            raise unsupported_op(self, op)
        self._check_usable()
        connection = find_peer(self._peers, peer)
        if notify is not None:
            check_payload(notify, capabilities.max_notification)
        local = local_regions(copies, self._registered)
        remote = remote_regions(copies, connection.regions, connection.name)
        if len(copies.nbytes) > len(self._ends):
            self._ends = np.empty(1 << (len(copies) - 1).bit_length(), np.uint64)
        check_copies(copies, self._ends)
        if capabilities.max_outstanding is not None:
            self._check_outstanding(capabilities.max_outstanding)
        transfer = self._start(
            TransferRequest(connection, copies, local, remote, notify, op == "write")
        )
        transfer_id = TransferId(next(self._ids))
        self._transfers[transfer_id] = _Record(peer, local, transfer)
        return transfer_id

    def _check_outstanding(self, limit: int) -> None:
        if len(self._transfers) < limit:
            return
        # Some may have ended since they were last polled.
        self._progress(self._unfinished())
        unfinished = len(self._unfinished())
        if unfinished >= limit:
            raise TransportError(
                f"{unfinished} transfers are unfinished, and {self.name} takes {limit} at once "
                "(capabilities: max_outstanding): poll until one has ended"
            )


def _all_final(transfers: Sequence[DriverTransfer]) -> bool:
    return all(transfer.status.state.final for transfer in transfers)


class _IdentityLocks:
    """A lock for each peer that somebody is connecting to, so that one peer is connected once."""

    def __init__(self) -> None:
        self._held: set[Hashable] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def locked(self, identity: Hashable) -> Iterator[None]:
        """Hold the lock of one peer; others are not held up."""
        with self._changed:
            self._changed.wait_for(lambda: identity not in self._held)
            self._held.add(identity)
        try:
            yield
        finally:
            with self._changed:
                self._held.discard(identity)
                self._changed.notify_all()
