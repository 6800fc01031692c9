"""Faults of registration and of bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvferry.core.errors import TransportError, TransportUsageError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from tests.long.drivers.planted.base import (
    AlteredTransfers,
    caught_by,
    connection_of,
    cut,
    first_of,
)


@caught_by("test_a_copy_outside_its_region_is_refused")
class ClipsCopiesToTheRegion(AlteredTransfers):
    """A copy that leaves its region is shortened, not refused."""

    def copies(self, copies: Copies) -> Copies:
        nbytes = copies.nbytes.copy()
        for cuts in copies.segments:
            part = slice(cuts.start, cuts.stop)
            for side, region in ((copies.local, cuts.local), (copies.remote, cuts.remote)):
                left = np.uint64(region.end) - side[part]
                nbytes[part] = np.minimum(nbytes[part], np.where(left > region.nbytes, 0, left))
        inside = nbytes > 0
        return replace(
            copies,
            nbytes=nbytes,
            local=np.where(inside, copies.local, first_of(copies, "local")),
            remote=np.where(inside, copies.remote, first_of(copies, "remote")),
        )


@caught_by("test_each_copy_must_lie_in_its_own_segments_regions")
class TakesAnyRegion(LoopbackTransport):
    """A copy need only lie in the largest registered region around its own."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        known = self._peers[peer].regions if peer in self._peers else {}

        def widest(region: Region, among: Sequence[Region]) -> Region:
            around = [one for one in among if one.contains(region)]
            return max(around, key=lambda one: one.nbytes, default=region)

        segments = tuple(
            replace(
                one,
                local=widest(one.local, list(self._registered)),
                remote=widest(one.remote, list(known)),
            )
            for one in copies.segments
        )
        return super().read(peer, replace(copies, segments=segments), notify)


@caught_by("test_each_copy_must_lie_in_its_own_segments_regions")
class IdentifiesRegionsByAddress(AlteredTransfers):
    """Of two local regions at one address, the bounds of the larger hold for both."""

    def copies(self, copies: Copies) -> Copies:
        segments = tuple(replace(one, local=self._largest(one.local)) for one in copies.segments)
        return replace(copies, segments=segments)

    def _largest(self, region: Region) -> Region:
        same = [one for one in self._registered if one.address == region.address]
        return max(same, key=lambda one: one.nbytes, default=region)


@caught_by("test_segments_that_do_not_cover_the_copies_are_refused")
class IgnoresCopiesWithoutASegment(AlteredTransfers):
    """Copies that no segment covers are skipped, not refused."""

    def copies(self, copies: Copies) -> Copies:
        last = max((one.stop for one in copies.segments), default=0)
        return cut(copies, slice(last)) if last < len(copies) else copies


@caught_by("test_local_memory_that_was_deregistered_is_refused")
class DeregisterHasNoEffect(LoopbackTransport):
    """``deregister`` checks its argument and does nothing else."""

    def deregister(self, region: Region) -> None:
        self._check_usable()
        if region not in self._registered:
            raise TransportUsageError("not registered")


@caught_by("test_a_region_in_use_is_not_deregistered")
class DeregistersMemoryInUse(LoopbackTransport):
    """Memory of a transfer in flight can be deregistered."""

    def deregister(self, region: Region) -> None:
        self._check_usable()
        if region not in self._registered:
            raise TransportUsageError("not registered")
        self._registry.remove(self._registered.pop(region))


@caught_by("test_registering_again_has_no_effect")
class CountsRegistrations(LoopbackTransport):
    """A region that was registered twice must be deregistered twice."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._counts: dict[Region, int] = {}

    def register(self, region: Region) -> None:
        super().register(region)
        self._counts[region] = self._counts.get(region, 0) + 1

    def deregister(self, region: Region) -> None:
        self._counts[region] = self._counts.get(region, 1) - 1
        if self._counts[region] <= 0:
            super().deregister(region)


@caught_by("test_unsupported_memory_kind_is_refused")
class RegistersAnyMemoryKind(LoopbackTransport):
    """Device memory is registered as if it were host memory."""

    def register(self, region: Region) -> None:
        super().register(replace(region, kind="cpu"))


@caught_by("test_deregistering_unregistered_memory_is_refused")
class DeregistersUnregisteredMemory(LoopbackTransport):
    """Deregistering memory that was never registered does not raise."""

    def deregister(self, region: Region) -> None:
        if region in self._registered:
            super().deregister(region)


@caught_by("test_regions_of_another_peer_are_refused")
class MixesRegionsOfPeers(LoopbackTransport):
    """Memory that one peer registered may be read from every peer."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        found = connection_of(self, peer)
        for other in self._peers.values():
            found.regions = other.regions | found.regions
        return super().read(peer, copies, notify)


@caught_by("test_regions_of_another_peer_are_refused")
class AcceptsRemoteRegionAsLocal(LoopbackTransport):
    """A region of a peer is accepted as a local region."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        known = {region for one in self._peers.values() for region in one.regions}
        for segment in copies.segments:
            if segment.local in known and segment.local not in self._registered:
                self.register(segment.local)
        return super().read(peer, copies, notify)


class IgnoresDevice(AlteredTransfers):
    """Base class: regions are compared by address and length, without their device."""

    side = "local"

    def copies(self, copies: Copies) -> Copies:
        segments = [
            replace(one, **{self.side: replace(getattr(one, self.side), device=0)})
            for one in copies.segments
        ]
        return replace(copies, segments=tuple(segments))


@caught_by("test_local_memory_that_is_not_registered_is_refused")
class IgnoresLocalDevice(IgnoresDevice):
    """A local region of another device at a registered address is accepted."""


@caught_by("test_remote_memory_that_the_peer_did_not_register_is_refused")
class IgnoresRemoteDevice(IgnoresDevice):
    """A remote region of another device at a registered address is accepted."""

    side = "remote"


@caught_by("test_a_region_in_use_is_not_deregistered")
class OnlyFirstRegionIsInUse(LoopbackTransport):
    """Of a transfer with several regions, only the first counts as in use."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        first = frozenset(one.local for one in copies.segments[:1])
        self._transfers[transfer] = self._transfers[transfer]._replace(local=first)
        return transfer


@caught_by("test_a_region_in_use_is_not_deregistered")
class AllRegionsAreInUse(LoopbackTransport):
    """While any transfer is under way, no region can be deregistered."""

    def deregister(self, region: Region) -> None:
        if any(not job.final for _, _, job in self._transfers.values()):
            raise TransportUsageError("busy")
        super().deregister(region)


@caught_by("test_remote_memory_that_the_peer_did_not_register_is_refused")
class RefusedTransferKeepsRegionInUse(LoopbackTransport):
    """The local region of a refused transfer counts as in use for ever."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._held: Counter[Region] = Counter()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self._held.update(one.local for one in copies.segments)
        transfer = super().read(peer, copies, notify)
        self._held.subtract(one.local for one in copies.segments)
        return transfer

    def deregister(self, region: Region) -> None:
        if self._held[region]:
            raise TransportUsageError("in use")
        super().deregister(region)


@caught_by("test_one_copy_outside_among_many_is_refused")
class ChecksFirstAndLastCopyOnly(AlteredTransfers):
    """Only the first and the last copy are checked against the bounds."""

    def copies(self, copies: Copies) -> Copies:
        if len(copies) < 3:
            return copies
        nbytes, cuts = copies.nbytes.copy(), copies.segments[0]
        for side in ("local", "remote"):
            ends = getattr(copies, side)[1:-1] + nbytes[1:-1]
            nbytes[1:-1] *= ends <= np.uint64(getattr(cuts, side).end)
        return replace(copies, nbytes=nbytes)


@caught_by("test_segments_without_copies_must_name_known_regions_too")
class ChecksFullSegmentsOnly(AlteredTransfers):
    """The regions of segments without copies are not checked."""

    def copies(self, copies: Copies) -> Copies:
        full = tuple(one for one in copies.segments if one.stop > one.start)
        return replace(copies, segments=full)


@caught_by("test_overlapping_regions_are_separate")
class RefusesOverlaps(LoopbackTransport):
    """A part of a registered region cannot be registered."""

    def register(self, region: Region) -> None:
        if any(one != region and one.contains(region) for one in self._registered):
            raise TransportError("it overlaps")
        super().register(region)


@caught_by("test_overlapping_regions_are_separate")
class DeregistersRegionsWithin(LoopbackTransport):
    """Deregistering a region also deregisters the regions within it."""

    def deregister(self, region: Region) -> None:
        super().deregister(region)
        for one in [one for one in self._registered if region.contains(one)]:
            super().deregister(one)
