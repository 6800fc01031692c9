"""Who a peer is, and what a transport says of itself."""

from __future__ import annotations

import os
from dataclasses import replace

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import (
    Capabilities,
    PeerId,
    TransferId,
)
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback import address as wire
from tests.testing.factories import Delegating
from tests.testing.planted.base import (
    caught_by,
)


@caught_by("test_what_a_peer_registers_later_is_known_after_connecting_again")
class KeepsTheFirstAddress(LoopbackTransport):
    """Connecting again refreshes nothing."""

    def connect(self, address: bytes) -> PeerId:
        before = {peer: found.regions for peer, found in self._peers.items()}
        peer = super().connect(address)
        self._peers[peer].regions = before.get(peer, self._peers[peer].regions)
        return peer


@caught_by("test_what_a_peer_deregistered_is_refused_after_connecting_again")
class OnlyAddsRegions(LoopbackTransport):
    """What a peer has deregistered stays known."""

    def connect(self, address: bytes) -> PeerId:
        before = {peer: found.regions for peer, found in self._peers.items()}
        peer = super().connect(address)
        self._peers[peer].regions = before.get(peer, {}) | self._peers[peer].regions
        return peer


@caught_by("test_connecting_again_is_the_same_peer")
class ConnectsAgainAsSomebodyElse(LoopbackTransport):
    """Each ``connect`` gives another id."""

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        other = PeerId(next(self._ids))
        self._peers[other] = self._peers[peer]
        return other


@caught_by("test_after_disconnect_it_is_another_peer")
class UsesPeerIdsAgain(LoopbackTransport):
    """The first id that is free is given to the next peer."""

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        first = PeerId(next(one for one in range(1, 1000) if one == peer or one not in self._peers))
        self._peers[first] = self._peers.pop(peer)
        return first


@caught_by("test_bytes_that_are_no_address_are_refused")
class RaisesWhateverItsParserRaises(LoopbackTransport):
    """Bytes that are no address raise ValueError."""

    def connect(self, address: bytes) -> PeerId:
        if not address.startswith(b"\x89"):
            raise ValueError("bad magic")
        return super().connect(address)


@caught_by("test_an_address_that_was_changed_on_its_way_harms_nobody")
class RaisesWhateverAWrongValueMeans(LoopbackTransport):
    """An address with a wrong value in it raises what using the value raises."""

    def connect(self, address: bytes) -> PeerId:
        try:
            return super().connect(address)
        except ConnectError as exc:
            if "both sides must use the same driver" in str(exc):
                raise
            raise KeyError("that region") from exc


@caught_by("test_an_address_that_was_changed_on_its_way_harms_nobody")
class StartsOverAfterAWrongAddress(LoopbackTransport):
    """An address that it cannot use ends what is under way with others."""

    def connect(self, address: bytes) -> PeerId:
        try:
            return super().connect(address)
        except ConnectError:
            for _, _, job in self._transfers.values():
                self._workers.stop(job, TransportError("a wrong address"))
            raise


@caught_by("test_an_address_under_another_name_takes_no_connection_away")
class DropsWhomAnotherNameLeadsTo(LoopbackTransport):
    """A peer that is published under a second name is disconnected."""

    def connect(self, address: bytes) -> PeerId:
        theirs = wire.decode(address)
        for peer, found in list(self._peers.items()):
            if found.identity == self._identity(theirs) and found.name != theirs.name:
                self.disconnect(peer)
                raise ConnectError("two names")
        return super().connect(address)


@caught_by("test_names_are_unique")
class IsNamedAfterItsProcess(LoopbackTransport):
    """Two transports of one process have one name."""

    @property
    def name(self) -> str:
        return f"loopback-{os.getpid()}"


@caught_by("test_its_capabilities_make_sense_and_stay")
class LearnsWhatItCan(LoopbackTransport):
    """The capabilities depend on who is connected."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, cancel=not self._peers)


@caught_by("test_an_option_that_it_does_not_have_is_refused")
class IgnoresUnknownOptions(LoopbackTransport):
    """A misspelt option has no effect."""

    def __init__(self, **options: object) -> None:
        super().__init__()


@caught_by("test_one_copy")
class CanDoMoreThanItSays(LoopbackTransport):
    """What the capabilities deny works all the same."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, ops=frozenset({"read"}))


@caught_by("test_a_limit_of_unfinished_transfers_is_kept")
class HasALimitThatIsNone(LoopbackTransport):
    """More transfers than ``max_outstanding`` are taken."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_outstanding=2)


@caught_by("test_bytes_that_are_no_address_are_refused")
class CannotReadHalfAnAddress(LoopbackTransport):
    """An address that ends too early raises whatever the parser raises."""

    def connect(self, address: bytes) -> PeerId:
        if 20 < len(address) < 200 and address.startswith(LoopbackTransport.address(self)[:10]):
            raise EOFError("too short")
        return super().connect(address)


@caught_by("test_a_transport_may_connect_to_itself")
class KnowsItself(LoopbackTransport):
    """Its own address is refused."""

    def connect(self, address: bytes) -> PeerId:
        if self.name.encode() in address:
            raise ConnectError("that is me")
        return super().connect(address)


@caught_by("test_it_says_itself_for_which_version_it_was_written")
class InheritsItsVersion(Delegating):
    """It claims whatever version is installed: neither it nor its base says one."""


class Limited(LoopbackTransport):
    """Base: at most two unfinished transfers, as ``counted`` counts."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_outstanding=2)

    def counted(self) -> int:
        return sum(not job.final for _, _, job in self._transfers.values())

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if self.counted() >= 2:
            raise TransportError("too many")
        return super().read(peer, copies, notify)


@caught_by("test_a_limit_of_unfinished_transfers_is_kept")
class CountsWhatHasEnded(Limited):
    """A transfer counts as unfinished until it is forgotten."""

    def counted(self) -> int:
        return len(self._transfers)


@caught_by("test_a_limit_of_unfinished_transfers_is_kept")
class CountsWhatWasRefused(Limited):
    """A transfer that was refused is never counted off again."""

    refused = 0

    def counted(self) -> int:
        return super().counted() + self.refused

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self.refused += 1
        transfer = super().read(peer, copies, notify)
        self.refused -= 1
        return transfer


@caught_by("test_many_transfers_at_once")
class HasASecretLimit(LoopbackTransport):
    """It names no limit, and has one: 100 records of transfers."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if len(self._transfers) >= 100:
            raise TransportError("too many")
        return super().read(peer, copies, notify)


@caught_by("test_other_calls_change_nothing_for_a_transfer")
class ConnectsAnew(LoopbackTransport):
    """Connecting again ends what was under way."""

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        for owner, _, job in self._transfers.values():
            if owner == peer:
                self._workers.stop(job, TransportError("connected again"))
        return peer


@caught_by("test_other_calls_change_nothing_for_a_transfer")
class RegistersAnew(LoopbackTransport):
    """Registering ends what was under way, in the table that is written anew."""

    def register(self, region: Region) -> None:
        super().register(region)
        for _, _, job in self._transfers.values():
            self._workers.stop(job, TransportError("registered"))
