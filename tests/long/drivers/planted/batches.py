"""Faults of batches: what is refused, and where bytes arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
    OtherCapabilities,
    Read,
    caught_by,
    cut,
    first_of,
    plant,
    replaces,
)

# Which copies are read.


def clipped_to_the_region(copies: Copies) -> Copies:
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


def without_copies_beyond_the_last_segment(copies: Copies) -> Copies:
    last = max((one.stop for one in copies.segments), default=0)
    return cut(copies, slice(last)) if last < len(copies) else copies


def without_what_lies_outside_in_the_middle(copies: Copies) -> Copies:
    if len(copies) < 3:
        return copies
    nbytes, cuts = copies.nbytes.copy(), copies.segments[0]
    for side in ("local", "remote"):
        ends = getattr(copies, side)[1:-1] + nbytes[1:-1]
        nbytes[1:-1] *= ends <= np.uint64(getattr(cuts, side).end)
    return replace(copies, nbytes=nbytes)


def merged_if_adjacent_remotely(copies: Copies) -> Copies:
    ends = copies.remote + copies.nbytes
    local = copies.local.copy()
    for index in 1 + np.flatnonzero(copies.remote[1:] == ends[:-1]):
        local[index] = local[index - 1] + copies.nbytes[index - 1]
    return replace(copies, local=local)


def without_repeated_sources(copies: Copies) -> Copies:
    _, first = np.unique(copies.remote, return_index=True)
    return replace(copies, nbytes=copies.nbytes * np.isin(np.arange(len(copies)), first))


def up_to_an_empty_segment(copies: Copies) -> Copies:
    empty = [one.start for one in copies.segments if one.start == one.stop and len(copies)]
    return cut(copies, slice(empty[0])) if empty else copies


def with_strides_ignored(copies: Copies) -> Copies:
    def flat(array: np.ndarray) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.lib.stride_tricks.as_strided(array, array.shape, (8,), writeable=False)

    local, remote, nbytes = map(flat, (copies.local, copies.remote, copies.nbytes))
    return replace(copies, local=local, remote=remote, nbytes=nbytes)


def refused_if_of_no_bytes(copies: Copies) -> Copies:
    if not copies.total:
        raise TransportUsageError("nothing to move")
    return copies


def on_device_0(copies: Copies, side: str) -> Copies:
    segments = (
        replace(one, **{side: replace(getattr(one, side), device=0)}) for one in copies.segments
    )
    return replace(copies, segments=tuple(segments))


plant(
    "copies",
    {
        "test_a_copy_outside_its_region_is_refused": {
            "clips_copies_to_the_region": lambda _, copies: clipped_to_the_region(copies)
        },
        "test_segments_and_arrays_that_do_not_fit_the_copies_are_refused": {
            "ignores_copies_without_a_segment": (
                lambda _, copies: without_copies_beyond_the_last_segment(copies)
            )
        },
        "test_local_memory_that_is_not_registered_is_refused": {
            "ignores_the_device_of_local_regions": lambda _, copies: on_device_0(copies, "local")
        },
        "test_remote_memory_that_the_peer_did_not_register_is_refused": {
            "ignores_the_device_of_remote_regions": lambda _, copies: on_device_0(copies, "remote")
        },
        "test_one_copy_outside_among_many_is_refused": {
            "checks_first_and_last_copy_only": (
                lambda _, copies: without_what_lies_outside_in_the_middle(copies)
            )
        },
        "test_segments_without_copies_must_name_known_regions_too": {
            "ignores_empty_segments": lambda _, copies: replace(
                copies, segments=tuple(one for one in copies.segments if one.stop > one.start)
            )
        },
        "test_a_batch_moves_its_bytes_and_no_others": {
            "loses_the_last_byte_of_every_copy": lambda _, copies: replace(
                copies, nbytes=copies.nbytes - (copies.nbytes > 1)
            ),
            "drops_copies_of_single_bytes": lambda _, copies: replace(
                copies, nbytes=copies.nbytes * (copies.nbytes >= 4)
            ),
            "rounds_remote_addresses_down_to_words": lambda _, copies: replace(
                copies, remote=copies.remote // np.uint64(4) * np.uint64(4)
            ),
            "counts_copies_with_16_bits": lambda _, copies: cut(
                copies, slice(len(copies) % (1 << 16))
            ),
            "merges_copies_adjacent_on_one_side": (
                lambda _, copies: merged_if_adjacent_remotely(copies)
            ),
            "sorts_remote_addresses_only": lambda _, copies: replace(
                copies, remote=np.sort(copies.remote)
            ),
            "skips_repeated_sources": lambda _, copies: without_repeated_sources(copies),
            "refuses_copies_of_no_bytes": lambda _, copies: refused_if_of_no_bytes(copies),
        },
        "test_several_regions_in_one_transfer": {
            "moves_only_the_first_segment": lambda _, copies: cut(
                copies, slice(copies.segments[0].stop if copies.segments else 0)
            ),
            "stops_at_an_empty_segment": lambda _, copies: up_to_an_empty_segment(copies),
        },
        "test_arrays_of_copies_may_be_strided_and_read_only": {
            "ignores_strides": lambda _, copies: with_strides_ignored(copies)
        },
    },
)


def widest(region: Region, among: Iterable[Region]) -> Region:
    around = [one for one in among if one.contains(region)]
    return max(around, key=lambda one: one.nbytes, default=region)


@replaces("altered", "test_each_copy_must_lie_in_its_own_segments_regions")
def takes_any_region(driver: LoopbackTransport, read: Read) -> Read:
    """A copy need only lie in the largest registered region around its own."""
    known = driver._peers[read.peer].regions if read.peer in driver._peers else {}
    segments = tuple(
        replace(one, local=widest(one.local, driver._registered), remote=widest(one.remote, known))
        for one in read.copies.segments
    )
    return read._replace(copies=replace(read.copies, segments=segments))


@replaces("altered", "test_regions_of_another_peer_are_refused")
def mixes_regions_of_peers(driver: LoopbackTransport, read: Read) -> Read:
    found = driver._find_peer(read.peer)
    for other in driver._peers.values():
        found.regions = other.regions | found.regions
    return read


@replaces("altered", "test_regions_of_another_peer_are_refused")
def accepts_remote_region_as_local(driver: LoopbackTransport, read: Read) -> Read:
    known = {region for one in driver._peers.values() for region in one.regions}
    for segment in read.copies.segments:
        if segment.local in known and segment.local not in driver._registered:
            driver.register(segment.local)
    return read


@replaces("altered", "test_large_transfers")
def done_after_the_first_part(_: LoopbackTransport, read: Read) -> Read:
    if not 32 << 20 < read.copies.total <= 1 << 30:
        return read
    nbytes = read.copies.nbytes.copy()
    nbytes[len(nbytes) // 2 :] = 0
    return read._replace(copies=replace(read.copies, nbytes=nbytes))


class KeepsArraysUntilPoll(LoopbackTransport):
    """Base class: transfers begin at the first poll, with arrays that may have been reused."""

    least = 0  # bytes; smaller transfers begin at once

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._later: dict[TransferId, Callable[[], TransferId]] = {}
        self._real: dict[TransferId, TransferId] = {}

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if copies.total < self.least:
            return super().read(peer, copies, notify)
        number = TransferId(1_000_000 + len(self._later))
        begin = super().read
        self._later[number] = lambda: begin(peer, copies, notify)
        return number

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        for transfer in transfers:
            if transfer in self._later and transfer not in self._real:
                self._real[transfer] = self._later[transfer]()
        return super().poll([self._real.get(transfer, transfer) for transfer in transfers])

    def forget(self, transfer: TransferId) -> None:
        super().forget(self._real.get(transfer, transfer))


@caught_by("test_arrays_of_copies_may_be_reused_after_the_call")
class KeepsArrays(KeepsArraysUntilPoll):
    """All transfers begin late."""


@caught_by("test_large_transfers")
class KeepsArraysOfLargeTransfers(KeepsArraysUntilPoll):
    """Large transfers begin late."""

    least = (32 << 20) + 1


# Regions.


def unregistered(driver: LoopbackTransport, region: Region) -> None:
    if region in driver._registered:
        LoopbackTransport.deregister(driver, region)


@replaces("deregister", "test_local_memory_that_was_deregistered_is_refused")
def deregister_has_no_effect(driver: LoopbackTransport, region: Region) -> None:
    """``deregister`` checks its argument and does nothing else."""
    driver._check_usable()
    if region not in driver._registered:
        raise TransportUsageError("not registered")


@caught_by("test_registering_again_has_no_effect")
class CountsRegistrations(LoopbackTransport):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._counts = Counter[Region]()

    def register(self, region: Region) -> None:
        super().register(region)
        self._counts[region] += 1

    def deregister(self, region: Region) -> None:
        self._counts[region] -= 1
        if self._counts[region] <= 0:
            super().deregister(region)


plant(
    "register",
    {
        "test_unsupported_memory_kind_is_refused": {
            "registers_any_memory_kind": lambda driver, region: LoopbackTransport.register(
                driver, replace(region, kind="cpu")
            )
        }
    },
)
plant(
    "deregister",
    {"test_registering_again_has_no_effect": {"deregisters_unregistered_memory": unregistered}},
)


@replaces("read", "test_a_region_in_use_is_not_deregistered")
def only_first_region_is_in_use(
    driver: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
) -> TransferId:
    transfer = LoopbackTransport.read(driver, peer, copies, notify)
    first = frozenset(one.local for one in copies.segments[:1])
    driver._transfers[transfer] = driver._transfers[transfer]._replace(local=first)
    return transfer


@replaces("deregister", "test_a_region_in_use_is_not_deregistered")
def all_regions_are_in_use(driver: LoopbackTransport, region: Region) -> None:
    if driver._unfinished():
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


@replaces("register", "test_overlapping_regions_are_separate")
def refuses_overlaps(driver: LoopbackTransport, region: Region) -> None:
    if any(one != region and one.contains(region) for one in driver._registered):
        raise TransportError("it overlaps")
    LoopbackTransport.register(driver, region)


@replaces("deregister", "test_overlapping_regions_are_separate")
def deregisters_regions_within(driver: LoopbackTransport, region: Region) -> None:
    LoopbackTransport.deregister(driver, region)
    for one in [one for one in driver._registered if region.contains(one)]:
        LoopbackTransport.deregister(driver, one)


# Reads by pages.


class ReadsPages(LoopbackTransport):
    """Base class: loopback with reads by pages, whose copies a subclass alters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._capabilities = replace(self._capabilities, paged_reads=True)

    def _start_paged(self, request: PagedRequest[LoopbackConnection]) -> LoopbackTransfer:
        connection, pages, local, remote, notify = request
        copies = PagedCopies(parts=tuple(self.parts(pages))).written_out()
        return self._start(TransferRequest(connection, copies, local, remote, notify))

    def parts(self, pages: PagedCopies) -> Iterable[PlacedStrips]:
        return pages.parts


@caught_by("test_paged_read_moves_the_right_bytes")
class IgnoresPlacesWithinPages(ReadsPages):
    def parts(self, pages: PagedCopies) -> Iterable[PlacedStrips]:
        return (replace(one, local=one.local % one.strips.local.pages) for one in pages.parts)


@caught_by("test_read_pages_is_refused_without_the_capability")
class ExceedsCapabilities(OtherCapabilities, ReadsPages):
    can: ClassVar = {"paged_reads": False}


@caught_by("test_paged_read_moves_the_right_bytes")
class KeepsTheFirstPlaces(ReadsPages):
    """What was prepared for strips keeps the places of the first read."""

    def parts(self, pages: PagedCopies) -> Iterable[PlacedStrips]:
        first: dict[Strips, PlacedStrips] = self.__dict__.setdefault("first", {})
        return (first.setdefault(part.strips, part) for part in pages.parts)


@caught_by("test_strips_of_two_objects_in_one_read")
class ReadsOnlyTheFirstStrips(ReadsPages):
    def parts(self, pages: PagedCopies) -> Iterable[PlacedStrips]:
        return pages.parts[:1]


@caught_by("test_places_that_do_not_exist_are_refused")
class ClipsPlaces(ReadsPages):
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
    def _start_paged(self, request: PagedRequest[LoopbackConnection]) -> LoopbackTransfer:
        return super()._start_paged(request._replace(notify=None))


@caught_by("test_strips_outlive_what_a_driver_prepared")
class ForgetsNothing(ReadsPages):
    """Strips that were read once are read again although their memory is not registered."""

    def _checked(self, peer: PeerId, segments: Any, notify: bytes | None) -> Any:
        unknown = {segment.local: None for segment in segments} | self._registered
        with patch.object(self, "_registered", unknown):
            return super()._checked(peer, segments, notify)
