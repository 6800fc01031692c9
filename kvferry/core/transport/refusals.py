"""What every driver refuses, in the same words: mistakes of a caller that need no library to see.

A driver calls these where ``kvferry.core.transport`` says that a method raises. Whether copies stay
within their regions is in ``kvferry.core.transport.bounds``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TypeVar

import msgspec

from kvferry.core.errors import (
    DriverError,
    TransportUnsupportedError,
    TransportUsageError,
)
from kvferry.core.memory import Region
from kvferry.core.transport.api import PeerId, Status, TransferId
from kvferry.core.transport.copies import Copies

V = TypeVar("V")
T = TypeVar("T", bound=msgspec.Struct)


class TransportOwner:
    """The one process that may use a transport, until it closes it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = os.getpid()
        self.closed = False

    def check(self) -> None:
        """Refuse a call that comes after ``close``, or from a fork.

        Raises:
            TransportUsageError: it does.
        """
        if self.closed:
            raise TransportUsageError(f"{self.name} is closed")
        if os.getpid() != self.pid:
            raise TransportUsageError(
                f"{self.name} belongs to process {self.pid}, of which this one is a fork: make "
                "transports after forking, or spawn"
            )

    def end(self) -> bool:
        """Whether ``close`` has anything to do: true once, and never in a fork.

        A fork has none of a transport's threads, and sockets and handles are its parent's: it must
        not even let go of them.
        """
        if self.closed or os.getpid() != self.pid:
            return False
        self.closed = True
        return True


def parse_options(driver: str, kind: type[T], options: Mapping[str, object]) -> T:
    """The user's ``driver_options``, as the struct in which a driver declares what it takes.

    Args:
        driver: the driver's name, for the error.
        kind: a struct with ``forbid_unknown_fields`` and a default for every field.
        options: as the user wrote them.

    Raises:
        DriverError: one is unknown, of a wrong type or out of range; names all there are.
    """
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as exc:
        known = ", ".join(f"{name} ({getattr(kind(), name)})" for name in kind.__struct_fields__)
        raise DriverError(
            f"driver_options of {driver}: {exc}; it has, with their defaults: {known}"
        ) from exc


def find_peer(peers: Mapping[PeerId, V], peer: PeerId) -> V:
    """What a driver knows of a peer.

    Raises:
        TransportUsageError: it is not connected.
    """
    if peer not in peers:
        raise TransportUsageError(f"no peer {peer}; connected: {list(peers)[:16]}")
    return peers[peer]


def find_transfer(transfers: Mapping[TransferId, V], transfer: TransferId) -> V:
    """What a driver knows of a transfer.

    Raises:
        TransportUsageError: there is none of that id.
    """
    if transfer not in transfers:
        raise TransportUsageError(f"no transfer {transfer}: never started, or forgotten")
    return transfers[transfer]


def check_final(transfer: TransferId, status: Status) -> None:
    """Refuse to forget a transfer that is not final.

    Raises:
        TransportUsageError: it is not.
    """
    if not status.state.final:
        raise TransportUsageError(
            f"transfer {transfer} is not final: poll until it is, or disconnect its peer if it is "
            "failing; then forget it"
        )


def check_registered(region: Region, registered: Collection[Region]) -> None:
    """Refuse to deregister what is not registered.

    Raises:
        TransportUsageError: it is not.
    """
    if region not in registered:
        raise TransportUsageError(f"{region} is not registered")


def check_unused(region: Region, used: Collection[Region]) -> None:
    """Refuse to deregister what an unfinished transfer of this side uses.

    Raises:
        TransportUsageError: one does.
    """
    if region in used:
        raise TransportUsageError(
            f"an unfinished transfer uses {region}: cancel it, and poll until it is final"
        )


def check_payload(payload: object, limit: int) -> None:
    """Refuse what is no notification.

    Args:
        payload: the caller's.
        limit: ``Capabilities.max_notification``, in bytes; 0: there are none.

    Raises:
        TransportUnsupportedError: there are none.
        TransportUsageError: not bytes, empty, or too long.
    """
    if limit == 0:
        raise TransportUnsupportedError("this transport carries no notifications")
    if not isinstance(payload, bytes) or not 0 < len(payload) <= limit:
        size = len(payload) if isinstance(payload, bytes) else type(payload).__name__
        raise TransportUsageError(f"a notification is 1 to {limit} bytes; this one: {size}")


def local_regions(copies: Copies, registered: Collection[Region]) -> frozenset[Region]:
    """The local regions of a batch.

    Raises:
        TransportUsageError: one is not registered.
    """
    regions = frozenset([segment.local for segment in copies.segments])
    for region in regions:
        if region not in registered:
            raise TransportUsageError(
                f"local {region} is not registered; {len(registered)} regions are"
            )
    return regions


def remote_regions(copies: Copies, known: Collection[Region], name: str) -> frozenset[Region]:
    """The remote regions of a batch.

    Args:
        copies: the batch.
        known: the regions known of the peer.
        name: the peer's.

    Raises:
        TransportUsageError: one is not known.
    """
    regions = frozenset([segment.remote for segment in copies.segments])
    for region in regions:
        if region not in known:
            raise TransportUsageError(
                f"remote {region} is not among the {len(known)} regions known of {name}: if it "
                "was registered after its address was made, connect again with a new one"
            )
    return regions
