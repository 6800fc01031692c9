"""Checks of what a caller passes to a transport, for ``BaseTransport`` and for other drivers.

Each function checks for one mistake that a method of ``Transport`` must refuse. The check that
copies stay within their regions is in ``kvferry.core.transport.bounds``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
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
    """Remembers which process made a transport, and whether the transport is closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = os.getpid()
        self.closed = False

    def check(self) -> None:
        """Refuse a call after ``close`` or in a fork.

        Raises:
            TransportUsageError: the transport is closed, or this process is a fork.
        """
        if self.closed:
            raise TransportUsageError(f"{self.name} is closed")
        if os.getpid() != self.pid:
            raise TransportUsageError(
                f"{self.name} belongs to process {self.pid}, of which this one is a fork: make "
                "transports after forking, or spawn"
            )

    def end(self) -> bool:
        """Mark the transport as closed.

        Returns:
            Whether ``close`` has anything to do: ``True`` for the first call, and never in a fork.
            A fork has none of the transport's threads, and its sockets and handles belong to the
            parent, so it must not even release them.
        """
        if self.closed or os.getpid() != self.pid:
            return False
        self.closed = True
        return True


def parse_options(driver: str, kind: type[T], options: Mapping[str, object]) -> T:
    """Convert the user's ``driver_options`` to the struct in which a driver declares them.

    Args:
        driver: the driver's name, for the error.
        kind: a struct with ``forbid_unknown_fields`` and a default for every field.
        options: the options as the user wrote them.

    Raises:
        DriverError: an option is unknown, of a wrong type or out of range; lists the options.
    """
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as exc:
        known = ", ".join(f"{name} ({getattr(kind(), name)})" for name in kind.__struct_fields__)
        raise DriverError(
            f"driver_options of {driver}: {exc}; it has, with their defaults: {known}"
        ) from exc


def find_peer(peers: Mapping[PeerId, V], peer: PeerId) -> V:
    """Return what ``peers`` has for a connected peer.

    Raises:
        TransportUsageError: the peer is not connected.
    """
    if peer not in peers:
        raise TransportUsageError(f"no peer {peer}; connected: {list(peers)[:16]}")
    return peers[peer]


def find_transfer(transfers: Mapping[TransferId, V], transfer: TransferId) -> V:
    """Return what ``transfers`` has for a transfer.

    Raises:
        TransportUsageError: there is no transfer of that id.
    """
    if transfer not in transfers:
        raise TransportUsageError(f"no transfer {transfer}: never started, or forgotten")
    return transfers[transfer]


def check_final(transfer: TransferId, status: Status) -> None:
    """Refuse to forget a transfer that is not final.

    Raises:
        TransportUsageError: the transfer is not final.
    """
    if not status.state.final:
        raise TransportUsageError(
            f"transfer {transfer} is not final: poll until it is, or disconnect its peer if it is "
            "failing; then forget it"
        )


def check_registered(region: Region, registered: Collection[Region]) -> None:
    """Refuse to deregister a region that is not registered.

    Raises:
        TransportUsageError: the region is not registered.
    """
    if region not in registered:
        raise TransportUsageError(f"{region} is not registered")


def check_unused(region: Region, used: Collection[Region]) -> None:
    """Refuse to deregister a region that an unfinished transfer of this side uses.

    Raises:
        TransportUsageError: the region is in use.
    """
    if region in used:
        raise TransportUsageError(
            f"an unfinished transfer uses {region}: cancel it, and poll until it is final"
        )


def check_payload(payload: object, limit: int) -> None:
    """Refuse a payload that is no valid notification.

    Args:
        payload: what the caller passed.
        limit: ``Capabilities.max_notification``, in bytes.

    Raises:
        TransportUnsupportedError: the limit is 0: the transport carries no notifications.
        TransportUsageError: the payload is not of type bytes, empty, or too long.
    """
    if limit == 0:
        raise TransportUnsupportedError("this transport carries no notifications")
    if not isinstance(payload, bytes) or not 0 < len(payload) <= limit:
        size = len(payload) if isinstance(payload, bytes) else type(payload).__name__
        raise TransportUsageError(f"a notification is 1 to {limit} bytes; this one: {size}")


def local_regions(copies: Copies, registered: Collection[Region]) -> frozenset[Region]:
    """Return the distinct local regions of a batch.

    Raises:
        TransportUsageError: a region is not registered.
    """
    regions = frozenset([segment.local for segment in copies.segments])
    for region in _missing(regions, registered):
        raise TransportUsageError(
            f"local {region} is not registered; {len(registered)} regions are"
        )
    return regions


def remote_regions(copies: Copies, known: Collection[Region], name: str) -> frozenset[Region]:
    """Return the distinct remote regions of a batch.

    Args:
        copies: the batch.
        known: the regions that the peer is known to have registered.
        name: the peer's name, for the error.

    Raises:
        TransportUsageError: a remote region is not in ``known``.
    """
    regions = frozenset([segment.remote for segment in copies.segments])
    for region in _missing(regions, known):
        raise TransportUsageError(
            f"remote {region} is not among the {len(known)} regions known of {name}: if it "
            "was registered after its address was made, connect again with a new one"
        )
    return regions


def _missing(regions: frozenset[Region], known: Collection[Region]) -> Iterable[Region]:
    # Hashing a region takes longer than looking it up. ``frozenset.difference`` with a set or dict
    # reuses the hashes that the frozenset has stored.
    if isinstance(known, (dict, set, frozenset)):
        return regions.difference(known)
    return [region for region in regions if region not in known]
