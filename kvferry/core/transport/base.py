"""The base class of drivers: it keeps a transport's records and refuses callers' mistakes.

A driver derives from ``BaseTransport`` and fills in hooks, whose names begin with an underscore:
register memory, connect, start a transfer, update its status. They work on objects of the driver's
own, of four types, which the subclass names::

    class MyTransport(BaseTransport[MyMemory, MyAddress, MyConnection, MyTransfer]): ...

- the registration: what the library gave for a registered region (may be ``None``);
- the address: a peer's address, parsed and checked;
- the connection: a connected peer, see ``DriverConnection``;
- the transfer: see ``DriverTransfer``.

The base class keeps these objects and passes them to the hooks; it reads only the attributes in
``DriverConnection`` and ``DriverTransfer``. Hooks get checked arguments, and are never called after
``close`` or in a forked child.

**Threads.** Hooks run on the thread that called the transport, one at a time. Only with
``concurrent_connect`` may hooks within ``connect`` (``_decode_address``, ``_identity``,
``_connect``, ``_refresh``) or ``disconnect`` (``_end_transfers`` and what it calls,
``_disconnect``) overlap with others; even then, those for the same peer come one after the other.
So a hook must not call ``connect`` or ``disconnect``.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from kvferry.core.errors import (
    DriverError,
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUnsupportedError,
    TransportUsageError,
)
from kvferry.core.memory import Region
from kvferry.core.transport.api import (
    Capabilities,
    Notification,
    PeerId,
    Status,
    TransferId,
    Transport,
)
from kvferry.core.transport.copies import Copies, Segment, check_copies
from kvferry.core.transport.paged import PagedCopies, check_places

_POLL_SECONDS = 0.0005
"""The pause between two polls of the transfers that ``_end_transfers`` waits for."""

_SCRATCH_COPIES = 4096

_local: Callable[[Segment], Region] = operator.attrgetter("local")
_remote: Callable[[Segment], Region] = operator.attrgetter("remote")


class DriverConnection(Protocol):
    """The attributes of a driver's connection that ``BaseTransport`` reads."""

    @property
    def name(self) -> str:
        """The ``Transport.name`` of the peer."""

    @property
    def identity(self) -> Hashable:
        """What ``BaseTransport._identity`` returned for the address that was connected to."""

    @property
    def regions(self) -> Collection[Region]:
        """The peer's regions that this side knows; best a set or dict. ``_refresh`` replaces it."""


class DriverTransfer(Protocol):
    """The attributes of a driver's transfer that ``BaseTransport`` reads."""

    @property
    def status(self) -> Status:
        """The status, kept up to date by ``_progress`` or by threads of the driver."""


RegistrationT = TypeVar("RegistrationT")
AddressT = TypeVar("AddressT")
ConnectionT = TypeVar("ConnectionT", bound=DriverConnection)
TransferT = TypeVar("TransferT", bound=DriverTransfer)
OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


class TransferRequest(NamedTuple, Generic[ConnectionT]):
    """A read to start, of any number of copies. Everything in it has been checked.

    The caller reuses the arrays of ``copies`` as soon as ``_start`` has returned. ``local`` and
    ``remote`` are the regions of all segments; ``notify`` is to be sent when all bytes have
    arrived.
    """

    connection: ConnectionT
    copies: Copies
    local: frozenset[Region]
    remote: frozenset[Region]
    notify: bytes | None


class PagedRequest(NamedTuple, Generic[ConnectionT]):
    """A read by pages to start, as in ``TransferRequest``; the ``Strips`` never change."""

    connection: ConnectionT
    pages: PagedCopies
    local: frozenset[Region]
    remote: frozenset[Region]
    notify: bytes | None


class _Record(NamedTuple, Generic[TransferT]):
    """A transfer's peer, its local regions, and the driver's object."""

    peer: PeerId
    local: frozenset[Region]
    transfer: TransferT

    @property
    def final(self) -> bool:
        return self.transfer.status.state.final


class BaseTransport(Transport, Generic[RegistrationT, AddressT, ConnectionT, TransferT]):
    """Implement ``Transport`` by hooks, which a driver overrides.

    It sets ``interface_version``, overrides the property ``library`` if a library moves its
    bytes, and calls ``super().__init__`` as soon as it knows its capabilities, which never change.
    """

    grace_seconds: ClassVar[float] = 5.0
    """How long ``disconnect`` and ``close`` wait for transfers to end."""

    max_regions: ClassVar[int] = 1 << 16
    """How many regions can be registered at once, which bounds the length of an address."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self._name = name
        self._pid = os.getpid()
        self._closed = False
        self._capabilities = capabilities
        self._ids = itertools.count(1)
        self._registered: dict[Region, RegistrationT] = {}
        self._peers: dict[PeerId, ConnectionT] = {}
        self._transfers: dict[TransferId, _Record[TransferT]] = {}
        self._identity_locks = _IdentityLocks()
        # Scratch memory of the bounds check. One array is enough: transfers are started one at a
        # time.
        self._ends = np.empty(_SCRATCH_COPIES, np.uint64)

    # Hooks: memory.

    @abstractmethod
    def _register(self, region: Region) -> RegistrationT:
        """Register a region with the library; return what ``_deregister`` needs.

        Its kind is among the capabilities, and no equal region is registered; regions may overlap.
        Raises ``TransportError``, which says what to do, if the library or the kernel refuses.
        """

    @abstractmethod
    def _deregister(self, region: Region, registration: RegistrationT) -> None:
        """Deregister a region with the library. ``self._registered`` does not have it any more.

        No unfinished transfer of this side uses it.
        """

    # Hooks: connections.

    @abstractmethod
    def _address(self) -> bytes:
        """Return the bytes for ``connect``: how to reach this side, and ``self._registered``."""

    @abstractmethod
    def _decode_address(self, address: bytes) -> AddressT:
        """Parse the untrusted bytes of an address, or raise ``ConnectError``."""

    @abstractmethod
    def _identity(self, address: AddressT) -> Hashable:
        """Return the identity of the peer at an address: equal values mean the same peer.

        A forged address must not pass for a newer address of a connected peer. So the identity
        includes everything by which the peer is reached, or ``_refresh`` compares the rest.
        """

    @abstractmethod
    def _connect(self, address: AddressT) -> ConnectionT:
        """Connect to a peer that is not connected. May block for some seconds.

        Raises ``ConnectError`` if it cannot be reached, having released everything that it opened.
        """

    @abstractmethod
    def _refresh(self, connection: ConnectionT, address: AddressT) -> None:
        """Update a connection, above all its regions, from a newer address. Transfers go on.

        Raises ``ConnectError``, and leaves the connection as it was, if the address does not lead
        to this peer or the peer is gone.
        """

    @abstractmethod
    def _disconnect(self, connection: ConnectionT, transfers: Sequence[TransferT]) -> None:
        """Release a connection, after ``_end_transfers`` with the same transfers returned ``True``.

        If only closing the connection shows that no further byte lands, the transfers become FAILED
        here. If some are not final then, the peer stays connected, and the hook may be called
        again.
        """

    def _path(self, connection: ConnectionT) -> str:
        """Return the name of the low-level transport to the peer, for ``Transport.path``."""
        del connection
        return ""

    # Hooks: transfers.

    @abstractmethod
    def _start(self, request: TransferRequest[ConnectionT]) -> TransferT:
        """Start a read and return it. May block; the transfer may be final when it returns.

        If the peer is gone, do not raise: return a transfer that is FAILED.
        """

    def _start_paged(self, request: PagedRequest[ConnectionT]) -> TransferT:
        """Start a read by pages, as ``_start`` does. Called only with the capability."""
        raise NotImplementedError(f"{type(self).__name__} has paged_reads, and no _start_paged")

    def _progress(self, transfers: Sequence[TransferT]) -> None:
        """Update statuses of the ``transfers`` polled (maybe none, or one twice). Never block.

        A driver without threads drives all of its transfers here.
        """
        del transfers

    @abstractmethod
    def _fail(self, transfer: TransferT, error: TransportError) -> None:
        """Make a transfer fail with ``error``, without waiting for its end.

        It is FAILING until its bytes can no longer land, then FAILED. One that is FAILING already
        keeps its first error; one that is final, or cannot be stopped any more, is left as it is.
        """

    def _end_transfers(self, transfers: Sequence[TransferT], error: TransportError) -> bool:
        """Make transfers fail and wait for their end; return whether connections may be released.

        The default waits up to ``grace_seconds`` until all are final, which suits transfers that
        end by themselves after ``_fail``. Override it to wait without polling, or if transfers
        become final only in ``_disconnect``: it then waits only until the connection may be
        released.
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

        Raises ``PeerLostError`` (ignored) if the peer is gone, ``TransportError`` if its queue is
        full.
        """
        raise NotImplementedError(f"{type(self).__name__} has max_notification, and no _notify")

    def _receive(self) -> list[Notification]:
        """Return the notifications that arrived since the last call. Never block."""
        raise NotImplementedError(f"{type(self).__name__} has max_notification, and no _receive")

    # Hooks: the end.

    @abstractmethod
    def _close(self, transfers: Sequence[TransferT]) -> None:
        """Release everything: connections, registered memory, threads.

        Called once, after ``_end_transfers`` with the same transfers; if one is not final after
        this, ``close`` raises. ``_disconnect`` is not called for the peers still connected. The
        base class clears its records of peers and regions afterwards.
        """

    # What the base gives to hooks.

    def _unfinished(self, peer: PeerId | None = None) -> list[TransferT]:
        """Return the transfers with ``peer`` (``None``: with any peer) that are not final."""
        # A copy: with ``concurrent_connect``, other threads may start transfers meanwhile.
        return [
            record.transfer
            for record in list(self._transfers.values())
            if (peer is None or record.peer == peer) and not record.final
        ]

    def _check_usable(self) -> None:
        """Refuse a call after ``close`` or in a forked child."""
        if self._closed:
            raise TransportUsageError(f"{self.name} is closed")
        if os.getpid() != self._pid:
            raise TransportUsageError(
                f"{self.name} belongs to process {self._pid}, of which this one is a fork: make "
                "transports after forking, or spawn"
            )

    def _end(self) -> bool:
        """Mark the transport as closed; return whether ``close`` has to release anything."""
        # A forked child has none of the threads, and must not release its parent's handles.
        if self._closed or os.getpid() != self._pid:
            return False
        self._closed = True
        return True

    def _find_peer(self, peer: PeerId) -> ConnectionT:
        """Return the connection to a peer; ``TransportUsageError`` if there is none."""
        connection = self._peers.get(peer)
        if connection is None:
            raise TransportUsageError(f"no peer {peer}; connected: {list(self._peers)[:16]}")
        return connection

    def _find_transfer(self, transfer: TransferId) -> TransferT:
        """Return the driver's object of a transfer; ``TransportUsageError`` if there is none."""
        record = self._transfers.get(transfer)
        if record is None:
            raise TransportUsageError(f"no transfer {transfer}: never started, or forgotten")
        return record.transfer

    # The interface.

    @property
    def name(self) -> str:
        """The name that was given to the constructor."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that were given to the constructor."""
        return self._capabilities

    def path(self, peer: PeerId) -> str:
        """Implement ``Transport.path`` by ``_path``."""
        connection = self._peers.get(peer)
        return "" if connection is None else self._path(connection)

    def register(self, region: Region) -> None:
        """Implement ``Transport.register`` by ``_register``."""
        self._check_usable()
        kinds = self._capabilities.memory
        if region.kind not in kinds:
            raise TransportUnsupportedError(
                f"{self.name} reaches {', '.join(sorted(kinds)) or 'no'} memory, not "
                f"{region.kind}: {region}; choose a driver that has it (kvferry drivers)"
            )
        if region in self._registered:
            return
        if len(self._registered) >= self.max_regions:
            raise TransportError(
                f"{self.max_regions} regions are registered, and an address holds no more: "
                "deregister some, or register what they lie in"
            )
        self._registered[region] = self._register(region)

    def deregister(self, region: Region) -> None:
        """Implement ``Transport.deregister`` by ``_deregister``."""
        self._check_usable()
        if region not in self._registered:
            raise TransportUsageError(f"{region} is not registered")
        if any(region in record.local and not record.final for record in self._transfers.values()):
            raise TransportUsageError(
                f"an unfinished transfer uses {region}: cancel it, and poll until it is final"
            )
        self._deregister(region, self._registered.pop(region))

    def address(self) -> bytes:
        """Implement ``Transport.address`` by ``_address``."""
        self._check_usable()
        return self._address()

    def connect(self, address: bytes) -> PeerId:
        """Implement ``Transport.connect`` by ``_connect``, or ``_refresh`` for a connected peer."""
        self._check_usable()
        theirs = self._decode_address(address)
        identity = self._identity(theirs)
        with self._identity_locks.locked(identity):
            for peer, connection in list(self._peers.items()):
                if connection.identity == identity:
                    self._refresh(connection, theirs)
                    return peer
            connection = self._connect(theirs)
            peer = PeerId(next(self._ids))
            self._peers[peer] = connection
            return peer

    def disconnect(self, peer: PeerId) -> None:
        """Implement ``Transport.disconnect`` by ``_end_transfers`` and ``_disconnect``."""
        self._check_usable()
        with self._identity_locks.locked(self._find_peer(peer).identity):
            connection = self._find_peer(peer)  # another call may have disconnected it meanwhile
            transfers = self._unfinished(peer)
            error = PeerLostError(f"{connection.name} was disconnected")
            ended = self._end_transfers(transfers, error)
            if ended:
                self._disconnect(connection, transfers)
            if not ended or not _all_final(transfers):
                raise TransportError(
                    f"bytes may still arrive from {connection.name}, {self.grace_seconds} s "
                    "after its transfers were told to end: they stay failing; disconnect again, "
                    "later"
                )
            del self._peers[peer]

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """Implement ``Transport.read`` by ``_start``."""
        connection, local, remote = self._checked(peer, copies.segments, notify)
        if len(copies.nbytes) > len(self._ends):
            self._ends = np.empty(1 << (len(copies) - 1).bit_length(), np.uint64)
        check_copies(copies, self._ends)
        self._check_outstanding()
        request = TransferRequest(connection, copies, local, remote, notify)
        return self._record(peer, local, self._start(request))

    def read_pages(
        self, peer: PeerId, pages: PagedCopies, notify: bytes | None = None
    ) -> TransferId:
        """Implement ``Transport.read_pages`` by ``_start_paged``."""
        if not self._capabilities.paged_reads:
            return super().read_pages(peer, pages, notify)
        segments = [segment for part in pages.parts for segment in part.strips.segments]
        connection, local, remote = self._checked(peer, segments, notify)
        check_places(pages)
        self._check_outstanding()
        request = PagedRequest(connection, pages, local, remote, notify)
        return self._record(peer, local, self._start_paged(request))

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        """Implement ``Transport.poll`` by ``_progress`` and the transfers' ``status``."""
        self._check_usable()
        books = self._transfers
        try:
            found = [books[transfer].transfer for transfer in transfers]
        except KeyError:
            found = [self._find_transfer(transfer) for transfer in transfers]
        self._progress(found)
        return [transfer.status for transfer in found]

    def cancel(self, transfer: TransferId) -> None:
        """Implement ``Transport.cancel`` by ``_fail`` if the capabilities have ``cancel``."""
        self._check_usable()
        cancelled = self._find_transfer(transfer)
        if self._capabilities.cancel and not cancelled.status.state.final:
            self._fail(cancelled, TransferCancelledError(f"transfer {transfer} was cancelled"))

    def forget(self, transfer: TransferId) -> None:
        """Implement ``Transport.forget``."""
        self._check_usable()
        if not self._find_transfer(transfer).status.state.final:
            raise TransportUsageError(
                f"transfer {transfer} is not final: poll until it is, or disconnect its peer if it "
                "is failing; then forget it"
            )
        del self._transfers[transfer]

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """Implement ``Transport.notify`` by ``_notify``."""
        self._check_usable()
        connection = self._find_peer(peer)
        self._check_payload(payload)
        with contextlib.suppress(PeerLostError):
            self._notify(connection, payload)

    def notifications(self) -> list[Notification]:
        """Implement ``Transport.notifications`` by ``_receive``."""
        self._check_usable()
        return self._receive() if self._capabilities.max_notification else []

    def close(self) -> None:
        """Implement ``Transport.close`` by ``_end_transfers`` and ``_close``."""
        if not self._end():
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

    def _record(self, peer: PeerId, local: frozenset[Region], transfer: TransferT) -> TransferId:
        transfer_id = TransferId(next(self._ids))
        self._transfers[transfer_id] = _Record(peer, local, transfer)
        return transfer_id

    def _check_payload(self, payload: object) -> None:
        limit = self._capabilities.max_notification
        if limit == 0:
            raise TransportUnsupportedError("this transport carries no notifications")
        if not isinstance(payload, bytes) or not 0 < len(payload) <= limit:
            size = len(payload) if isinstance(payload, bytes) else type(payload).__name__
            raise TransportUsageError(f"a notification is 1 to {limit} bytes; this one: {size}")

    def _checked(
        self, peer: PeerId, segments: Sequence[Segment], notify: bytes | None
    ) -> tuple[ConnectionT, frozenset[Region], frozenset[Region]]:
        """Return a peer's connection and a batch's local and remote regions, or refuse a read."""
        self._check_usable()
        connection = self._find_peer(peer)
        if notify is not None:
            self._check_payload(notify)
        local, remote = frozenset(map(_local, segments)), frozenset(map(_remote, segments))
        for region in local.difference(self._registered):
            raise TransportUsageError(
                f"local {region} is not registered; {len(self._registered)} regions are"
            )
        known = connection.regions
        for region in remote.difference(known):
            raise TransportUsageError(
                f"remote {region} is not among the {len(known)} regions known of "
                f"{connection.name}: if it was registered after its address was made, connect "
                "again with a new one"
            )
        return connection, local, remote

    def _check_outstanding(self) -> None:
        limit = self._capabilities.max_outstanding
        if limit is None or len(self._transfers) < limit:
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
    """A lock for each peer's identity, which ``connect`` and ``disconnect`` of the peer hold."""

    def __init__(self) -> None:
        # So concurrent calls of ``connect`` make one connection, and return none that ends. A
        # thread takes an identity's lock before any lock of the driver, and holds only one.
        self._held: set[Hashable] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def locked(self, identity: Hashable) -> Iterator[None]:
        """Within the context, hold the lock of one identity."""
        with self._changed:
            self._changed.wait_for(lambda: identity not in self._held)
            self._held.add(identity)
        try:
            yield
        finally:
            with self._changed:
                self._held.discard(identity)
                self._changed.notify_all()


def parse_options(driver: str, kind: type[OptionsT], options: Mapping[str, object]) -> OptionsT:
    """Return a user's options as a driver's struct, or raise ``DriverError``, which lists them.

    ``kind`` is a struct with ``forbid_unknown_fields`` and a default for every field.
    """
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as exc:
        known = ", ".join(f"{name} ({getattr(kind(), name)})" for name in kind.__struct_fields__)
        raise DriverError(
            f"driver_options of {driver}: {exc}; it has, with their defaults: {known}"
        ) from exc
