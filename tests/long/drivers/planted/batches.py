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
    alters_copies,
    caught_by,
    connection_of,
    cut,
    first_of,
    replaces,
)


@alters_copies("test_a_copy_outside_its_region_is_refused")
def clips_copies_to_the_region(copies: Copies) -> Copies:
    """A copy that leaves its region is shortened, not refused."""
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


@replaces("read", "test_each_copy_must_lie_in_its_own_segments_regions")
def takes_any_region(
    driver: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
) -> TransferId:
    """A copy need only lie in the largest registered region around its own."""
    known = driver._peers[peer].regions if peer in driver._peers else {}

    def widest(region: Region, among: Sequence[Region]) -> Region:
        around = [one for one in among if one.contains(region)]
        return max(around, key=lambda one: one.nbytes, default=region)

    segments = tuple(
        replace(
            one,
            local=widest(one.local, list(driver._registered)),
            remote=widest(one.remote, list(known)),
        )
        for one in copies.segments
    )
    return LoopbackTransport.read(driver, peer, replace(copies, segments=segments), notify)


@alters_copies("test_segments_and_arrays_that_do_not_fit_the_copies_are_refused")
def ignores_copies_without_a_segment(copies: Copies) -> Copies:
    """Copies that no segment covers are skipped, not refused."""
    last = max((one.stop for one in copies.segments), default=0)
    return cut(copies, slice(last)) if last < len(copies) else copies


@replaces("deregister", "test_local_memory_that_was_deregistered_is_refused")
def deregister_has_no_effect(driver: LoopbackTransport, region: Region) -> None:
    """``deregister`` checks its argument and does nothing else."""
    driver._check_usable()
    if region not in driver._registered:
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


@replaces("register", "test_unsupported_memory_kind_is_refused")
def registers_any_memory_kind(driver: LoopbackTransport, region: Region) -> None:
    """Device memory is registered as if it were host memory."""
    LoopbackTransport.register(driver, replace(region, kind="cpu"))


@replaces("deregister", "test_registering_again_has_no_effect")
def deregisters_unregistered_memory(driver: LoopbackTransport, region: Region) -> None:
    """Deregistering memory that was never registered does not raise."""
    if region in driver._registered:
        LoopbackTransport.deregister(driver, region)


@replaces("read", "test_regions_of_another_peer_are_refused")
def mixes_regions_of_peers(
    driver: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
) -> TransferId:
    """Memory that one peer registered may be read from every peer."""
    found = connection_of(driver, peer)
    for other in driver._peers.values():
        found.regions = other.regions | found.regions
    return LoopbackTransport.read(driver, peer, copies, notify)


@replaces("read", "test_regions_of_another_peer_are_refused")
def accepts_remote_region_as_local(
    driver: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
) -> TransferId:
    """A region of a peer is accepted as a local region."""
    known = {region for one in driver._peers.values() for region in one.regions}
    for segment in copies.segments:
        if segment.local in known and segment.local not in driver._registered:
            driver.register(segment.local)
    return LoopbackTransport.read(driver, peer, copies, notify)


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


@replaces("read", "test_a_region_in_use_is_not_deregistered")
def only_first_region_is_in_use(
    driver: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
) -> TransferId:
    """Of a transfer with several regions, only the first counts as in use."""
    transfer = LoopbackTransport.read(driver, peer, copies, notify)
    first = frozenset(one.local for one in copies.segments[:1])
    driver._transfers[transfer] = driver._transfers[transfer]._replace(local=first)
    return transfer


@replaces("deregister", "test_a_region_in_use_is_not_deregistered")
def all_regions_are_in_use(driver: LoopbackTransport, region: Region) -> None:
    """While any transfer is under way, no region can be deregistered."""
    if any(not job.final for _, _, job in driver._transfers.values()):
        raise TransportUsageError("busy")
    LoopbackTransport.deregister(driver, region)


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


@alters_copies("test_one_copy_outside_among_many_is_refused")
def checks_first_and_last_copy_only(copies: Copies) -> Copies:
    """Only the first and the last copy are checked against the bounds."""
    if len(copies) < 3:
        return copies
    nbytes, cuts = copies.nbytes.copy(), copies.segments[0]
    for side in ("local", "remote"):
        ends = getattr(copies, side)[1:-1] + nbytes[1:-1]
        nbytes[1:-1] *= ends <= np.uint64(getattr(cuts, side).end)
    return replace(copies, nbytes=nbytes)


@alters_copies("test_segments_without_copies_must_name_known_regions_too")
def checks_full_segments_only(copies: Copies) -> Copies:
    """The regions of segments without copies are not checked."""
    full = tuple(one for one in copies.segments if one.stop > one.start)
    return replace(copies, segments=full)


@replaces("register", "test_overlapping_regions_are_separate")
def refuses_overlaps(driver: LoopbackTransport, region: Region) -> None:
    """A part of a registered region cannot be registered."""
    if any(one != region and one.contains(region) for one in driver._registered):
        raise TransportError("it overlaps")
    LoopbackTransport.register(driver, region)


@replaces("deregister", "test_overlapping_regions_are_separate")
def deregisters_regions_within(driver: LoopbackTransport, region: Region) -> None:
    """Deregistering a region also deregisters the regions within it."""
    LoopbackTransport.deregister(driver, region)
    for one in [one for one in driver._registered if region.contains(one)]:
        LoopbackTransport.deregister(driver, one)


@alters_copies("test_a_batch_moves_its_bytes_and_no_others")
def loses_the_last_byte(copies: Copies) -> Copies:
    """The last byte of every copy is not moved."""
    return replace(copies, nbytes=copies.nbytes - (copies.nbytes > 1))


@alters_copies("test_a_batch_moves_its_bytes_and_no_others")
def drops_single_bytes(copies: Copies) -> Copies:
    """Copies of single bytes are dropped."""
    return replace(copies, nbytes=copies.nbytes * (copies.nbytes >= 4))


@alters_copies("test_a_batch_moves_its_bytes_and_no_others")
def aligns_addresses(copies: Copies) -> Copies:
    """Remote addresses are rounded down to words."""
    return replace(copies, remote=copies.remote // np.uint64(4) * np.uint64(4))


@alters_copies("test_a_batch_moves_its_bytes_and_no_others")
def counts_copies_with_16_bits(copies: Copies) -> Copies:
    """The number of copies wraps around at 65,536."""
    keep = len(copies) if len(copies) < 1 << 16 else len(copies) % (1 << 16)
    return cut(copies, slice(keep))


@alters_copies("test_a_batch_moves_its_bytes_and_no_others")
def merges_copies_adjacent_on_one_side(copies: Copies) -> Copies:
    """Copies that are adjacent on the remote side are merged as if adjacent on both."""
    if len(copies) < 2:
        return copies
    ends = copies.remote + copies.nbytes
    joins = np.r_[False, copies.remote[1:] == ends[:-1]]
    local = copies.local.copy()
    for index in np.flatnonzero(joins):
        local[index] = local[index - 1] + copies.nbytes[index - 1]
    return replace(copies, local=local)


@alters_copies("test_a_batch_moves_its_bytes_and_no_others")
def sorts_remote_addresses(copies: Copies) -> Copies:
    """The remote addresses are sorted, and the local ones are not."""
    return replace(copies, remote=np.sort(copies.remote))


@alters_copies("test_a_batch_moves_its_bytes_and_no_others")
def skips_repeated_sources(copies: Copies) -> Copies:
    """A copy whose source was read before is taken for a copy that is already done."""
    _, first = np.unique(copies.remote, return_index=True)
    fresh = np.isin(np.arange(len(copies)), first)
    return replace(copies, nbytes=copies.nbytes * fresh)


@alters_copies("test_several_regions_in_one_transfer")
def moves_only_the_first_segment(copies: Copies) -> Copies:
    """Only the first segment is moved."""
    return cut(copies, slice(copies.segments[0].stop)) if copies.segments else copies


@alters_copies("test_several_regions_in_one_transfer")
def stops_at_an_empty_segment(copies: Copies) -> Copies:
    """An empty segment is taken for the end of the batch."""
    for segment in copies.segments:
        if segment.start == segment.stop and len(copies):
            return cut(copies, slice(segment.start))
    return copies


@alters_copies("test_a_batch_moves_its_bytes_and_no_others")
def refuses_copies_of_no_bytes(copies: Copies) -> Copies:
    """Copies of no bytes are refused."""
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


@alters_copies("test_arrays_of_copies_may_be_strided_and_read_only")
def ignores_strides(copies: Copies) -> Copies:
    """Arrays are read from their start as if contiguous, whatever their stride."""

    def flat(name: str) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        array = getattr(copies, name)
        return np.lib.stride_tricks.as_strided(array, array.shape, (8,), writeable=False)

    return replace(copies, local=flat("local"), remote=flat("remote"), nbytes=flat("nbytes"))


@replaces("read", "test_large_transfers")
def done_after_the_first_part(
    driver: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
) -> TransferId:
    """A large transfer is split in two, and DONE with the first part."""
    if copies.total <= 32 << 20 or copies.total > 1 << 30:
        return LoopbackTransport.read(driver, peer, copies, notify)
    half = len(copies) // 2
    nbytes = copies.nbytes.copy()
    nbytes[half:] = 0
    return LoopbackTransport.read(driver, peer, replace(copies, nbytes=nbytes), notify)


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


@caught_by("test_read_pages_is_refused_without_the_capability")
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
