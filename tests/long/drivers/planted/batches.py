"""Faults of batches: what is refused, and where bytes arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np

from kvferry.core.errors import TransportError, TransportUsageError
from kvferry.core.memory import Region
from kvferry.core.transport import (
    PagedCopies,
    PagedRequest,
    PeerId,
    PlacedStrips,
    Status,
    Strips,
    TransferId,
    TransferRequest,
)
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.transport import LoopbackConnection
from kvferry.drivers.loopback.worker_pool import LoopbackTransfer
from tests.long.drivers.planted.base import (
    AlteredTransfers,
    OtherCapabilities,
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


@caught_by("test_a_batch_moves_its_bytes_and_no_others")
class LosesTheLastByte(AlteredTransfers):
    """The last byte of every copy is not moved."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, nbytes=copies.nbytes - (copies.nbytes > 1))


@caught_by("test_a_batch_moves_its_bytes_and_no_others")
class DropsSingleBytes(AlteredTransfers):
    """Copies of single bytes are dropped."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, nbytes=copies.nbytes * (copies.nbytes >= 4))


@caught_by("test_a_batch_moves_its_bytes_and_no_others")
class AlignsAddresses(AlteredTransfers):
    """Remote addresses are rounded down to words."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, remote=copies.remote // np.uint64(4) * np.uint64(4))


@caught_by("test_a_batch_moves_its_bytes_and_no_others")
class CountsCopiesWith16Bits(AlteredTransfers):
    """The number of copies wraps around at 65,536."""

    def copies(self, copies: Copies) -> Copies:
        keep = len(copies) if len(copies) < 1 << 16 else len(copies) % (1 << 16)
        return cut(copies, slice(keep))


@caught_by("test_a_batch_moves_its_bytes_and_no_others")
class MergesCopiesAdjacentOnOneSide(AlteredTransfers):
    """Copies that are adjacent on the remote side are merged as if adjacent on both."""

    def copies(self, copies: Copies) -> Copies:
        if len(copies) < 2:
            return copies
        ends = copies.remote + copies.nbytes
        joins = np.r_[False, copies.remote[1:] == ends[:-1]]
        local = copies.local.copy()
        for index in np.flatnonzero(joins):
            local[index] = local[index - 1] + copies.nbytes[index - 1]
        return replace(copies, local=local)


@caught_by("test_a_batch_moves_its_bytes_and_no_others")
class SortsRemoteAddresses(AlteredTransfers):
    """The remote addresses are sorted, and the local ones are not."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, remote=np.sort(copies.remote))


@caught_by("test_a_batch_moves_its_bytes_and_no_others")
class SkipsRepeatedSources(AlteredTransfers):
    """A copy whose source was read before is taken for a copy that is already done."""

    def copies(self, copies: Copies) -> Copies:
        _, first = np.unique(copies.remote, return_index=True)
        fresh = np.isin(np.arange(len(copies)), first)
        return replace(copies, nbytes=copies.nbytes * fresh)


@caught_by("test_several_regions_in_one_transfer")
class MovesOnlyTheFirstSegment(AlteredTransfers):
    """Only the first segment is moved."""

    def copies(self, copies: Copies) -> Copies:
        return cut(copies, slice(copies.segments[0].stop)) if copies.segments else copies


@caught_by("test_empty_segments_between_full_ones")
class StopsAtAnEmptySegment(AlteredTransfers):
    """An empty segment is taken for the end of the batch."""

    def copies(self, copies: Copies) -> Copies:
        for segment in copies.segments:
            if segment.start == segment.stop and len(copies):
                return cut(copies, slice(segment.start))
        return copies


@caught_by("test_a_batch_moves_its_bytes_and_no_others")
class RefusesCopiesOfNoBytes(AlteredTransfers):
    """Copies of no bytes are refused."""

    def copies(self, copies: Copies) -> Copies:
        if not copies.total:
            raise TransportUsageError("nothing to move")
        return copies


@caught_by("test_arrays_of_copies_may_be_reused_after_the_call")
class KeepsArraysUntilPoll(LoopbackTransport):
    """The transfer begins at the first poll, with arrays that the caller may have reused."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._later: dict[TransferId, tuple[Callable[..., TransferId], tuple[object, ...]]] = {}
        self._real: dict[TransferId, TransferId] = {}

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        number = TransferId(1_000_000 + len(self._later))
        self._later[number] = (super().read, (peer, copies, notify))
        return number

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        for transfer in transfers:
            if transfer not in self._real:
                begin, args = self._later[transfer]
                self._real[transfer] = begin(*args)
        return super().poll([self._real[transfer] for transfer in transfers])

    def forget(self, transfer: TransferId) -> None:
        super().forget(self._real[transfer])


@caught_by("test_arrays_of_copies_may_be_strided_and_read_only")
class IgnoresStrides(AlteredTransfers):
    """Arrays are read from their start as if contiguous, whatever their stride."""

    def copies(self, copies: Copies) -> Copies:
        def flat(name: str) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
            array = getattr(copies, name)
            return np.lib.stride_tricks.as_strided(array, array.shape, (8,), writeable=False)

        return replace(copies, local=flat("local"), remote=flat("remote"), nbytes=flat("nbytes"))


@caught_by("test_large_transfers")
class DoneAfterTheFirstPart(LoopbackTransport):
    """A large transfer is split in two, and DONE with the first part."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if copies.total <= 32 << 20 or copies.total > 1 << 30:
            return super().read(peer, copies, notify)
        half = len(copies) // 2
        nbytes = copies.nbytes.copy()
        nbytes[half:] = 0
        return super().read(peer, replace(copies, nbytes=nbytes), notify)


@caught_by("test_large_transfers")
class KeepsArraysOfLargeTransfers(KeepsArraysUntilPoll):
    """Large transfers begin later, with arrays that the caller may have reused."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if self.kept(copies):
            return super().read(peer, copies, notify)
        return LoopbackTransport.read(self, peer, copies, notify)

    def kept(self, copies: Copies) -> bool:
        return copies.total > 32 << 20

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        if set(transfers) <= set(self._later):
            return super().poll(transfers)
        return LoopbackTransport.poll(self, transfers)

    def forget(self, transfer: TransferId) -> None:
        if transfer in self._later:
            super().forget(transfer)
        else:
            LoopbackTransport.forget(self, transfer)


class ReadsPages(LoopbackTransport):
    """Base class: loopback with reads by pages, whose copies a subclass alters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._capabilities = replace(self._capabilities, paged_reads=True)

    def _start_paged(self, request: PagedRequest[LoopbackConnection]) -> LoopbackTransfer:
        connection, pages, local, remote, notify = request
        copies = self.written_out(connection, pages)
        return self._start(TransferRequest(connection, copies, local, remote, notify))

    def written_out(self, connection: LoopbackConnection, pages: PagedCopies) -> Copies:
        return pages.written_out()


@caught_by("test_paged_read_moves_the_right_bytes")
class IgnoresPlacesWithinPages(ReadsPages):
    """All places of a page are taken for its first."""

    def written_out(self, connection: LoopbackConnection, pages: PagedCopies) -> Copies:
        parts = tuple(
            replace(part, local=part.local % part.strips.local.pages) for part in pages.parts
        )
        return PagedCopies(parts=parts).written_out()


@caught_by("test_paged_read_moves_the_right_bytes")
class ExceedsCapabilities(OtherCapabilities, ReadsPages):
    """It can do what its capabilities deny."""

    can: ClassVar = {"paged_reads": False}


@caught_by("test_paged_read_moves_the_right_bytes")
class KeepsTheFirstPlaces(ReadsPages):
    """What was prepared for strips keeps the places of the first read."""

    def written_out(self, connection: LoopbackConnection, pages: PagedCopies) -> Copies:
        first: dict[Strips, PlacedStrips] = self.__dict__.setdefault("first", {})
        parts = tuple(first.setdefault(part.strips, part) for part in pages.parts)
        return PagedCopies(parts=parts).written_out()


@caught_by("test_strips_of_two_objects_in_one_read")
class ReadsOnlyTheFirstStrips(ReadsPages):
    """Of several strips in one read, only the first are read."""

    def written_out(self, connection: LoopbackConnection, pages: PagedCopies) -> Copies:
        return PagedCopies(parts=pages.parts[:1]).written_out()


@caught_by("test_places_that_do_not_exist_are_refused")
class ClipsPlaces(ReadsPages):
    """A place that does not exist is taken for the last."""

    def read_pages(
        self, peer: PeerId, pages: PagedCopies, notify: bytes | None = None
    ) -> TransferId:
        parts = tuple(
            replace(
                part,
                local=np.clip(part.local, 0, part.strips.local.places - 1),
                remote=np.clip(part.remote, 0, part.strips.remote.places - 1),
            )
            for part in pages.parts
        )
        return super().read_pages(peer, PagedCopies(parts=parts), notify)


@caught_by("test_notification_bound_to_a_paged_read")
class DropsTheBoundNotification(ReadsPages):
    """A read by pages sends no notification."""

    def _start_paged(self, request: PagedRequest[LoopbackConnection]) -> LoopbackTransfer:
        return super()._start_paged(request._replace(notify=None))


@caught_by("test_strips_outlive_what_a_driver_prepared")
class ForgetsNothing(ReadsPages):
    """Strips that were read once are read again although their memory is not registered."""

    def _checked(self, peer: PeerId, segments: Any, notify: bytes | None) -> Any:
        unknown = {segment.local: None for segment in segments} | self._registered
        with patch.object(self, "_registered", unknown):
            return super()._checked(peer, segments, notify)
