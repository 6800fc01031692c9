"""Registration and bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvferry.core.errors import TransportError, TransportUsageError
from kvferry.core.memory import Region
from kvferry.core.transport import (
    PeerId,
    TransferId,
)
from kvferry.core.transport.copies import Copies, Segment
from kvferry.drivers.loopback import LoopbackTransport
from tests.testing.planted.base import Altered, caught_by, connection_of, cut, first_of


@caught_by("test_a_copy_outside_its_region_is_refused")
class ClipsToTheRegion(Altered):
    """What leaves a region is shortened to it."""

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
class TakesAnyRegion(Altered):
    """Bounds are those of the largest registered region around."""

    def altered(
        self, peer: PeerId, copies: Copies, notify: bytes | None
    ) -> tuple[PeerId, Copies, bytes | None]:
        known = self._peers[peer].regions if peer in self._peers else {}

        def widest(region: Region, among: Sequence[Region]) -> Region:
            around = [one for one in among if one.contains(region)]
            return max(around, key=lambda one: one.nbytes, default=region)

        segments = tuple(
            Segment(
                start=one.start,
                stop=one.stop,
                local=widest(one.local, list(self._registered)),
                remote=widest(one.remote, list(known)),
            )
            for one in copies.segments
        )
        return peer, replace(copies, segments=segments), notify


@caught_by("test_each_copy_must_lie_in_its_own_segments_regions")
class KnowsRegionsByTheirAddress(Altered):
    """Of two local regions that begin at one address, the larger one's bounds hold for both."""

    def copies(self, copies: Copies) -> Copies:
        segments = tuple(replace(one, local=self._largest(one.local)) for one in copies.segments)
        return replace(copies, segments=segments)

    def _largest(self, region: Region) -> Region:
        same = [one for one in self._registered if one.address == region.address]
        return max(same, key=lambda one: one.nbytes, default=region)


@caught_by("test_segments_that_do_not_cover_the_copies_are_refused")
class IgnoresCopiesWithoutASegment(Altered):
    """Copies that no segment covers are left out."""

    def copies(self, copies: Copies) -> Copies:
        last = max((one.stop for one in copies.segments), default=0)
        return cut(copies, slice(last)) if last < len(copies) else copies


@caught_by("test_local_memory_that_was_deregistered_is_refused")
class KeepsWhatWasDeregistered(LoopbackTransport):
    """``deregister`` does nothing but check."""

    def deregister(self, region: Region) -> None:
        self._check_usable()
        if region not in self._registered:
            raise TransportUsageError("not registered")


@caught_by("test_a_region_in_use_is_not_deregistered")
class DeregistersWhatIsInUse(LoopbackTransport):
    """A transfer in flight loses its memory."""

    def deregister(self, region: Region) -> None:
        self._check_usable()
        if region not in self._registered:
            raise TransportUsageError("not registered")
        self._registry.remove(self._registered.pop(region))


@caught_by("test_registering_again_has_no_effect")
class CountsRegistrations(LoopbackTransport):
    """What was registered twice has to be deregistered twice."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._counts: dict[Region, int] = {}

    def register(self, region: Region) -> None:
        super().register(region)
        self._counts[region] = self._counts.get(region, 0) + 1

    def deregister(self, region: Region) -> None:
        self._counts[region] = self._counts.get(region, 1) - 1
        if self._counts[region] <= 0:
            super().deregister(region)


@caught_by("test_a_kind_that_is_not_among_the_capabilities_is_refused")
class TakesAnyKind(LoopbackTransport):
    """Device memory is registered as if it were the host's."""

    def register(self, region: Region) -> None:
        super().register(replace(region, kind="cpu"))


@caught_by("test_what_is_not_registered_is_not_deregistered")
class DeregistersAnything(LoopbackTransport):
    """What was never registered is deregistered without a word."""

    def deregister(self, region: Region) -> None:
        if region in self._registered:
            super().deregister(region)


@caught_by("test_what_another_peer_registered_is_refused")
class KnowsNoPeersApart(LoopbackTransport):
    """What any peer has registered may be read from all of them."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        found = connection_of(self, peer)
        for other in self._peers.values():
            found.regions = other.regions | found.regions
        return super().read(peer, copies, notify)


@caught_by("test_what_another_peer_registered_is_refused")
class TakesRemoteForLocal(LoopbackTransport):
    """A peer's region will do as the local one."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        known = {region for one in self._peers.values() for region in one.regions}
        for segment in copies.segments:
            if segment.local in known and segment.local not in self._registered:
                self.register(segment.local)
        return super().read(peer, copies, notify)


class AnyDevice(Altered):
    """Base: a region is known by address and length, whichever device it is of."""

    side = "local"

    def copies(self, copies: Copies) -> Copies:
        segments = [
            replace(one, **{self.side: replace(getattr(one, self.side), device=0)})
            for one in copies.segments
        ]
        return replace(copies, segments=tuple(segments))


@caught_by("test_local_memory_that_is_not_registered_is_refused")
class KnowsNoLocalDevice(AnyDevice):
    """Memory of another device at the same address is taken for that which is registered."""


@caught_by("test_remote_memory_that_the_peer_did_not_register_is_refused")
class KnowsNoRemoteDevice(AnyDevice):
    """Memory of another device at the same address is taken for that which is registered."""

    side = "remote"


@caught_by("test_a_region_in_use_is_not_deregistered")
class HoldsItsFirstRegionOnly(LoopbackTransport):
    """Of a transfer with several regions, only the first counts as used."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        first = frozenset(one.local for one in copies.segments[:1])
        self._transfers[transfer] = self._transfers[transfer]._replace(local=first)
        return transfer


@caught_by("test_a_region_in_use_is_not_deregistered")
class HoldsEverything(LoopbackTransport):
    """While anything is under way, nothing may be deregistered."""

    def deregister(self, region: Region) -> None:
        if any(not job.final for _, _, job in self._transfers.values()):
            raise TransportUsageError("busy")
        super().deregister(region)


@caught_by("test_remote_memory_that_the_peer_did_not_register_is_refused")
class HoldsWhatWasRefused(LoopbackTransport):
    """The local region of a transfer that was refused counts as used for ever."""

    def __init__(self, **options: object) -> None:
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
class LooksAtTheEndsOnly(Altered):
    """Copies are taken to be in order: if the first and the last are inside, all are."""

    def copies(self, copies: Copies) -> Copies:
        if len(copies) < 3:
            return copies
        nbytes, cuts = copies.nbytes.copy(), copies.segments[0]
        for side in ("local", "remote"):
            ends = getattr(copies, side)[1:-1] + nbytes[1:-1]
            nbytes[1:-1] *= ends <= np.uint64(getattr(cuts, side).end)
        return replace(copies, nbytes=nbytes)


@caught_by("test_segments_without_copies_must_name_known_regions_too")
class LooksAtFullSegmentsOnly(Altered):
    """Segments without copies are dropped before anybody looks at their regions."""

    def copies(self, copies: Copies) -> Copies:
        full = tuple(one for one in copies.segments if one.stop > one.start)
        return replace(copies, segments=full)


@caught_by("test_overlapping_regions_are_separate")
class RefusesOverlaps(LoopbackTransport):
    """Memory that is registered already may not be registered as a part."""

    def register(self, region: Region) -> None:
        if any(one != region and one.contains(region) for one in self._registered):
            raise TransportError("it overlaps")
        super().register(region)


@caught_by("test_overlapping_regions_are_separate")
class DeregistersTheParts(LoopbackTransport):
    """What lies within a region goes with it."""

    def deregister(self, region: Region) -> None:
        super().deregister(region)
        for one in [one for one in self._registered if region.contains(one)]:
            super().deregister(one)
