"""Faults of connections, of the identity of peers, and of capabilities."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, ClassVar

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import Capabilities, PeerId, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback import address as wire
from kvferry.testing import FaultyTransport
from tests.long.drivers.planted.base import OtherCapabilities, caught_by


@caught_by("test_connecting_again_tells_which_regions_the_peer_has")
class KeepsTheFirstAddress(LoopbackTransport):
    """Connecting again does not refresh the regions of the peer."""

    def connect(self, address: bytes) -> PeerId:
        before = {peer: found.regions for peer, found in self._peers.items()}
        peer = super().connect(address)
        self._peers[peer].regions = before.get(peer, self._peers[peer].regions)
        return peer


@caught_by("test_connecting_again_tells_which_regions_the_peer_has")
class KeepsDeregisteredRegions(LoopbackTransport):
    """Regions that a peer has deregistered stay known."""

    def connect(self, address: bytes) -> PeerId:
        before = {peer: found.regions for peer, found in self._peers.items()}
        peer = super().connect(address)
        self._peers[peer].regions = before.get(peer, {}) | self._peers[peer].regions
        return peer


@caught_by("test_connecting_again_is_the_same_peer")
class ConnectAgainGivesAnotherId(LoopbackTransport):
    """Each ``connect`` to the same peer returns another id."""

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        other = PeerId(next(self._ids))
        self._peers[other] = self._peers[peer]
        return other


@caught_by("test_after_disconnect_it_is_another_peer")
class ReusesPeerIds(LoopbackTransport):
    """The id of a disconnected peer is given to the next one."""

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        first = PeerId(next(one for one in range(1, 1000) if one == peer or one not in self._peers))
        self._peers[first] = self._peers.pop(peer)
        return first


@caught_by("test_bytes_that_are_no_address_are_refused")
class RaisesValueErrorForBadAddress(LoopbackTransport):
    """``connect`` raises ``ValueError`` for bytes that are no address."""

    def connect(self, address: bytes) -> PeerId:
        if not address.startswith(b"\x89"):
            raise ValueError("bad magic")
        return super().connect(address)


@caught_by("test_an_address_that_was_changed_on_its_way_harms_nobody")
class RaisesOtherErrorsForWrongValues(LoopbackTransport):
    """``connect`` raises other errors for an address with a wrong value."""

    def connect(self, address: bytes) -> PeerId:
        try:
            return super().connect(address)
        except ConnectError as exc:
            if "both sides must use the same driver" in str(exc):
                raise
            raise KeyError("that region") from exc


@caught_by("test_an_address_that_was_changed_on_its_way_harms_nobody")
class BadAddressEndsOtherTransfers(LoopbackTransport):
    """A refused address ends the transfers with other peers."""

    def connect(self, address: bytes) -> PeerId:
        try:
            return super().connect(address)
        except ConnectError:
            for _, _, job in self._transfers.values():
                self._workers.stop(job, TransportError("a wrong address"))
            raise


@caught_by("test_an_address_under_another_name_takes_no_connection_away")
class DisconnectsPeerWithSecondName(LoopbackTransport):
    """An address of a connected peer with another name disconnects that peer."""

    def connect(self, address: bytes) -> PeerId:
        theirs = wire.decode(address)
        for peer, found in list(self._peers.items()):
            if found.identity == self._identity(theirs) and found.name != theirs.name:
                self.disconnect(peer)
                raise ConnectError("two names")
        return super().connect(address)


@caught_by("test_names_are_unique")
class IsNamedAfterItsProcess(LoopbackTransport):
    """Two transports of one process have the same name."""

    @property
    def name(self) -> str:
        return f"loopback-{os.getpid()}"


@caught_by("test_its_capabilities_make_sense_and_stay")
class CapabilitiesChange(LoopbackTransport):
    """The capabilities depend on the connected peers."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, cancel=not self._peers)


@caught_by("test_an_option_that_it_does_not_have_is_refused")
class IgnoresUnknownOptions(LoopbackTransport):
    """An unknown option is ignored, not refused."""

    def __init__(self, **options: object) -> None:
        super().__init__()


@caught_by("test_a_limit_of_unfinished_transfers_is_kept")
class ExceedsMaxOutstanding(OtherCapabilities):
    """More transfers than ``max_outstanding`` are accepted."""

    can: ClassVar = {"max_outstanding": 2}


@caught_by("test_bytes_that_are_no_address_are_refused")
class RaisesForTruncatedAddress(LoopbackTransport):
    """``connect`` raises other errors for a truncated address."""

    def connect(self, address: bytes) -> PeerId:
        if 20 < len(address) < 200 and address.startswith(LoopbackTransport.address(self)[:10]):
            raise EOFError("too short")
        return super().connect(address)


@caught_by("test_a_transport_may_connect_to_itself")
class RefusesItsOwnAddress(LoopbackTransport):
    """A transport refuses its own address."""

    def connect(self, address: bytes) -> PeerId:
        if self.name.encode() in address:
            raise ConnectError("that is me")
        return super().connect(address)


_OWN = {"interface_version", "__dict__", "__weakref__"}
_STATES_NONE = {name: value for name, value in vars(FaultyTransport).items() if name not in _OWN}


@caught_by("test_it_says_itself_for_which_version_it_was_written")
class InheritsInterfaceVersion(type("Delegating", (Transport,), _STATES_NONE)):  # type: ignore[misc]
    """The driver does not state the interface version for which it was written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(LoopbackTransport(**options))


class AtMostTwo(OtherCapabilities):
    """Base class: at most two unfinished transfers, as ``counted`` counts them."""

    can: ClassVar = {"max_outstanding": 2}

    def counted(self) -> int:
        return sum(not job.final for _, _, job in self._transfers.values())

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if self.counted() >= 2:
            raise TransportError("too many")
        return super().read(peer, copies, notify)


@caught_by("test_a_limit_of_unfinished_transfers_is_kept")
class CountsEndedTransfers(AtMostTwo):
    """A transfer counts as unfinished until it is forgotten."""

    def counted(self) -> int:
        return len(self._transfers)


@caught_by("test_a_limit_of_unfinished_transfers_is_kept")
class CountsRefusedTransfers(AtMostTwo):
    """A refused transfer counts as unfinished for ever."""

    refused = 0

    def counted(self) -> int:
        return super().counted() + self.refused

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self.refused += 1
        transfer = super().read(peer, copies, notify)
        self.refused -= 1
        return transfer


@caught_by("test_many_transfers_at_once")
class HasUndeclaredLimit(LoopbackTransport):
    """It refuses the 101st transfer that was not forgotten, without declaring a limit."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if len(self._transfers) >= 100:
            raise TransportError("too many")
        return super().read(peer, copies, notify)


@caught_by("test_other_calls_change_nothing_for_a_transfer")
class ConnectAgainEndsTransfers(LoopbackTransport):
    """Connecting again ends the transfers of that peer."""

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        for owner, _, job in self._transfers.values():
            if owner == peer:
                self._workers.stop(job, TransportError("connected again"))
        return peer


@caught_by("test_other_calls_change_nothing_for_a_transfer")
class RegisterEndsTransfers(LoopbackTransport):
    """Registering a region ends all transfers."""

    def register(self, region: Region) -> None:
        super().register(region)
        for _, _, job in self._transfers.values():
            self._workers.stop(job, TransportError("registered"))
