"""Drivers with one fault each: loopback, and what somebody might well get wrong.

The docstring of each is the fault; ``CAUGHT_BY`` says which test of the suite has to find it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kvferry.core.copies import Copies, Segment
from kvferry.core.errors import TransportError, TransportUsageError
from kvferry.core.memory import Region
from kvferry.core.transport import (
    Capabilities,
    Notification,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
)
from kvferry.drivers.loopback import LoopbackTransport

T = TypeVar("T", bound=LoopbackTransport)

CAUGHT_BY: dict[str, str] = {}
DONE = Status(state=State.DONE)
PENDING = Status(state=State.PENDING)


def caught_by(test: str) -> Callable[[type[T]], type[T]]:
    """Say which test finds the fault."""

    def named(driver: type[T]) -> type[T]:
        CAUGHT_BY[driver.__name__] = test
        return driver

    return named


class Altered(LoopbackTransport):
    """Base: does to a transfer what a subclass says, and then the right thing."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return super().read(*self.altered(peer, copies, notify))

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return super().write(*self.altered(peer, copies, notify))

    def altered(
        self, peer: PeerId, copies: Copies, notify: bytes | None
    ) -> tuple[PeerId, Copies, bytes | None]:
        return peer, self.copies(copies), notify

    def copies(self, copies: Copies) -> Copies:
        return copies


class Watched(LoopbackTransport):
    """Base: what ``poll`` says goes through ``seen``."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        return [self.seen(*pair) for pair in zip(transfers, statuses, strict=True)]

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return status


# Bytes.


@caught_by("test_one_copy")
class LosesTheLastByte(Altered):
    """A length is taken for the offset of the last byte."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, nbytes=copies.nbytes - (copies.nbytes > 1))


@caught_by("test_one_copy")
class SwapsTheDirection(LoopbackTransport):
    """A write reads."""

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return super().read(peer, copies, notify)


@caught_by("test_one_byte")
class SkipsSingleBytes(Altered):
    """What is smaller than a word is dropped."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, nbytes=copies.nbytes * (copies.nbytes >= 4))


@caught_by("test_scattered_unaligned_copies_of_every_size")
class AlignsAddresses(Altered):
    """Remote addresses are rounded down to words."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, remote=copies.remote // np.uint64(4) * np.uint64(4))


@caught_by("test_100_000_copies")
class CountsWith16Bits(Altered):
    """More than 65,535 copies wrap around."""

    def copies(self, copies: Copies) -> Copies:
        keep = len(copies) if len(copies) < 1 << 16 else len(copies) % (1 << 16)
        return cut(copies, slice(keep))


@caught_by("test_copies_adjacent_on_one_side_only")
class MergesWhatTouchesOnOneSide(Altered):
    """Neighbours on the remote side are taken for neighbours on both."""

    def copies(self, copies: Copies) -> Copies:
        if len(copies) < 2:
            return copies
        ends = copies.remote + copies.nbytes
        joins = np.r_[False, copies.remote[1:] == ends[:-1]]
        local = copies.local.copy()
        for index in np.flatnonzero(joins):
            local[index] = local[index - 1] + copies.nbytes[index - 1]
        return replace(copies, local=local)


@caught_by("test_adjacent_copies")
class TakesCopiesForAscending(Altered):
    """The remote addresses are sorted, and the local ones are not."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, remote=np.sort(copies.remote))


@caught_by("test_overlapping_sources")
class ReadsASourceOnce(Altered):
    """A source that was seen before is taken for a copy that was done before."""

    def copies(self, copies: Copies) -> Copies:
        _, first = np.unique(copies.remote, return_index=True)
        fresh = np.isin(np.arange(len(copies)), first)
        return replace(copies, nbytes=copies.nbytes * fresh)


@caught_by("test_several_regions_in_one_transfer")
class MovesTheFirstSegment(Altered):
    """The other segments are forgotten."""

    def copies(self, copies: Copies) -> Copies:
        return cut(copies, slice(copies.segments[0].stop)) if copies.segments else copies


@caught_by("test_empty_segments_between_full_ones")
class StopsAtAnEmptySegment(Altered):
    """An empty segment is taken for the end."""

    def copies(self, copies: Copies) -> Copies:
        for segment in copies.segments:
            if segment.start == segment.stop and len(copies):
                return cut(copies, slice(segment.start))
        return copies


@caught_by("test_copies_of_no_bytes")
class RefusesCopiesOfNoBytes(Altered):
    """Nothing to do is taken for a mistake."""

    def copies(self, copies: Copies) -> Copies:
        if not copies.total:
            raise TransportUsageError("nothing to move")
        return copies


@caught_by("test_the_callers_arrays_are_free_after_the_call")
class KeepsTheCallersArrays(LoopbackTransport):
    """The work begins at the first poll, with arrays that the caller has reused."""

    def __init__(self, **options: object) -> None:
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


@caught_by("test_the_arrays_may_be_views_with_gaps_and_read_only")
class TakesArraysForContiguous(Altered):
    """Numbers are taken from where the array's memory starts, whatever its stride."""

    def copies(self, copies: Copies) -> Copies:
        def flat(name: str) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
            array = getattr(copies, name)
            return np.lib.stride_tricks.as_strided(array, array.shape, (8,), writeable=False)

        return replace(copies, local=flat("local"), remote=flat("remote"), nbytes=flat("nbytes"))


# Outcomes.


@caught_by("test_poll_answers_in_the_order_of_the_ids")
class AnswersPollInItsOwnOrder(LoopbackTransport):
    """The statuses come in the order in which the transfers were begun, each once."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        return super().poll(sorted(transfers, reverse=True))


@caught_by("test_ids_are_not_used_again")
class UsesIdsAgain(LoopbackTransport):
    """A forgotten transfer's id is given to the next one."""

    def forget(self, transfer: TransferId) -> None:
        super().forget(transfer)
        self._ids = iter([transfer, *range(transfer + 1, transfer + 10_000)])  # type: ignore[assignment]


@caught_by("test_done_stays_until_it_is_forgotten")
class DisconnectUndoesWhatWasDone(Watched):
    """A transfer of a peer that has been disconnected is FAILED, whatever it was."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        peer = self._jobs[transfer][0]
        return status if peer in self._peers else failed("disconnected")


@caught_by("test_done_stays_until_it_is_forgotten")
class ForgetsWhatIsDone(LoopbackTransport):
    """The record of a transfer goes when its end has been seen."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        for transfer, status in zip(transfers, statuses, strict=True):
            if status.state.final and transfer in self._jobs:
                self.forget(transfer)
        return statuses


@caught_by("test_only_final_transfers_can_be_forgotten")
class ForgetsWhatRuns(LoopbackTransport):
    """``forget`` of a transfer in flight is taken."""

    def forget(self, transfer: TransferId) -> None:
        if self._job(transfer).final:
            super().forget(transfer)


@caught_by("test_poll_does_not_block")
class BlocksInPoll(LoopbackTransport):
    """``poll`` waits a little for an end."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self._workers.wait_quiet([self._job(one) for one in transfers], time.monotonic() + 0.1)
        return super().poll(transfers)


@caught_by("test_calls_may_come_from_different_threads")
class IsBoundToOneThread(LoopbackTransport):
    """Only the thread that made it may call."""

    def __init__(self, **options: object) -> None:
        self._thread = threading.get_ident()
        super().__init__(**options)

    def _guard(self) -> None:
        super()._guard()
        if self._thread != threading.get_ident():
            raise TransportError("called from another thread")


# Notifications.


@caught_by("test_a_bound_one_arrives_after_all_bytes")
class NotifiesFirst(LoopbackTransport):
    """A bound notification is sent when the transfer begins."""

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if notify is not None:
            self.notify(peer, notify)
            time.sleep(0.1)
        return super().write(peer, copies)


@caught_by("test_a_bound_one_does_not_overtake_a_long_transfer")
class NotifiesWithTheFirstPart(LoopbackTransport):
    """A transfer is split in two, and the notification goes with the first."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        first = copies.segments[0].stop if copies.segments else 0
        if notify is not None and 0 < first < len(copies):
            super().read(peer, cut(copies, slice(first)), notify)
            notify = None
        return super().read(peer, copies, notify)


@caught_by("test_a_bound_one_comes_with_every_transfer")
class SaysNothingWhereNothingMoved(Altered):
    """A transfer of no bytes loses its notification."""

    def altered(
        self, peer: PeerId, copies: Copies, notify: bytes | None
    ) -> tuple[PeerId, Copies, bytes | None]:
        return peer, copies, notify if copies.total else None


@caught_by("test_cancel_ends_a_transfer_early")
class NotifiesOfAFailure(LoopbackTransport):
    """A bound notification is sent at the end, whichever it is."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._bound: dict[TransferId, tuple[PeerId, bytes]] = {}

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if notify is not None:
            self._bound[transfer] = (peer, notify)
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        if transfer in self._bound:
            self.notify(*self._bound.pop(transfer))


@caught_by("test_only_the_peer_that_is_named_gets_it")
class NotifiesEverybody(LoopbackTransport):
    """Every peer gets every notification."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        self._peer(peer)
        for other in self._peers:
            super().notify(other, payload)


@caught_by("test_each_arrives_once_in_order_and_says_from_whom")
class HandsThemOutBackwards(LoopbackTransport):
    """The newest notification comes first."""

    def notifications(self) -> list[Notification]:
        return super().notifications()[::-1]


@caught_by("test_each_arrives_once_in_order_and_says_from_whom")
class HandsThemOutTwice(LoopbackTransport):
    """What was handed out once is handed out again."""

    def notifications(self) -> list[Notification]:
        fresh = super().notifications()
        again, self._again = getattr(self, "_again", []), fresh
        return again + fresh


@caught_by("test_each_arrives_once_in_order_and_says_from_whom")
class NamesTheReceiver(LoopbackTransport):
    """The sender of a notification is given as the transport that got it."""

    def notifications(self) -> list[Notification]:
        return [replace(one, sender=self.name) for one in super().notifications()]


@caught_by("test_from_1_byte_to_the_limit")
class EndsThemAtAZero(LoopbackTransport):
    """A payload is taken for a C string."""

    def notifications(self) -> list[Notification]:
        return [
            replace(one, payload=one.payload.split(b"\0")[0]) for one in super().notifications()
        ]


@caught_by("test_other_lengths_are_refused_and_nothing_has_moved")
class DropsEmptyOnes(Altered):
    """An empty notification is taken, and not sent."""

    def altered(
        self, peer: PeerId, copies: Copies, notify: bytes | None
    ) -> tuple[PeerId, Copies, bytes | None]:
        return peer, copies, notify or None


# Memory.


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
        self._guard()
        if region not in self._registered:
            raise TransportUsageError("not registered")


@caught_by("test_a_region_in_use_is_not_deregistered")
class DeregistersWhatIsInUse(LoopbackTransport):
    """A transfer in flight loses its memory."""

    def deregister(self, region: Region) -> None:
        self._guard()
        if region not in self._registered:
            raise TransportUsageError("not registered")
        self._board.erase(self._registered.pop(region))


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


# Peers.


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


# In flight.


@caught_by("test_cancel_ends_a_transfer_early")
class CannotCancelAndSaysItCan(LoopbackTransport):
    """``cancel`` has no effect."""

    def cancel(self, transfer: TransferId) -> None:
        self._job(transfer)


@caught_by("test_it_is_quiet_once_it_is_final")
class IsFinalBeforeItIsQuiet(Watched):
    """A cancelled transfer is FAILED at once, and goes on."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._cancelled: set[TransferId] = set()

    def cancel(self, transfer: TransferId) -> None:
        self._job(transfer)
        self._cancelled.add(transfer)

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return failed("cancelled") if transfer in self._cancelled else status


@caught_by("test_disconnect_fails_what_is_in_flight_and_returns_when_it_is_quiet")
class DisconnectDoesNotWait(Watched):
    """``disconnect`` forgets the peer, and its transfers go on."""

    def disconnect(self, peer: PeerId) -> None:
        self._guard()
        self._peer(peer)
        del self._peers[peer]

    def seen(self, transfer: TransferId, status: Status) -> Status:
        peer = self._jobs[transfer][0]
        return status if peer in self._peers or status.state.final else failed("disconnected")


@caught_by("test_disconnect_leaves_other_peers_alone")
class DisconnectsEverybody(LoopbackTransport):
    """Whoever is disconnected takes the other peers along."""

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        for other in list(self._peers):
            super().disconnect(other)


@caught_by("test_cancel_leaves_other_transfers_alone")
class CancelsEverything(LoopbackTransport):
    """``cancel`` ends what was begun later, too."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        self._jobs[transfer][1].limit = 1 << 12
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        return [
            failed("cancelled") if getattr(self, "_any", False) else status
            for status in super().poll(transfers)
        ]

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        self._any = True


@caught_by("test_close_with_work_in_flight")
class CloseDoesNotWait(LoopbackTransport):
    """``close`` leaves work running. (The second one ends it, or memory would go under it.)"""

    def close(self) -> None:
        if self._owner.closed:
            self._owner.closed = False
            super().close()
        self._owner.closed = True


# The end.


@caught_by("test_close_twice")
class ClosesOnce(LoopbackTransport):
    """The second ``close`` is a mistake."""

    def close(self) -> None:
        self._guard()
        super().close()


@caught_by("test_after_close_every_method_but_close_refuses")
class AnswersAfterClose(LoopbackTransport):
    """After ``close`` there are no notifications, which is said without an error."""

    def notifications(self) -> list[Notification]:
        return [] if self._owner.closed else super().notifications()


@caught_by("test_closing_one_leaves_others_alone")
class ClosesWhatIsShared(LoopbackTransport):
    """Closing the last one that was made ends what all of them share."""

    made: list[LoopbackTransport] = []  # noqa: RUF012 - the fault

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.made.append(self)

    def close(self) -> None:
        for one in self.made:
            LoopbackTransport.close(one)


@caught_by("test_a_forked_child_is_refused_and_harms_nothing")
class DoesNotNoticeAFork(LoopbackTransport):
    """A forked child goes on as if it were its parent."""

    def _guard(self) -> None:
        if self._owner.closed:
            raise TransportUsageError("closed")


# Processes.


@caught_by("test_killed_before_a_transfer")
class RaisesFromPoll(LoopbackTransport):
    """A failure is an exception."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        for status in statuses:
            if status.error is not None:
                raise status.error
        return statuses


@caught_by("test_killed_before_a_transfer")
class RaisesWhereTheTransferBegins(LoopbackTransport):
    """That the peer is gone is an exception of ``read``."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        (status,) = super().poll([transfer])
        if status.error is not None:
            raise status.error
        return transfer


@caught_by("test_killed_before_a_transfer")
class ExpectsToBeHeard(LoopbackTransport):
    """A free notification to a peer that is gone is an error."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        super().notify(peer, payload)
        if self._peers[peer].channel.lost:
            raise TransportError("nobody hears this")


@caught_by("test_killed_before_a_transfer")
class WillNotNotifyTheDead(LoopbackTransport):
    """A free notification is refused once it is known that the peer is gone."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        jobs = [job for owner, job in self._jobs.values() if owner == peer]
        if any(job.status.state is State.FAILED for job in jobs):
            raise TransportError("the peer is gone")
        super().notify(peer, payload)


@caught_by("test_killed_before_a_transfer")
class FailsWithoutAnError(Watched):
    """A failure does not say why."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return replace(status, error=None)


@caught_by("test_killed_during_a_transfer")
class NeverLearnsOfADeath(Watched):
    """A transfer of a dead peer is PENDING for ever."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return PENDING if status.state is State.FAILED else status


@caught_by("test_killed_during_a_transfer")
class TakesDeathForTheEnd(Watched):
    """A transfer of which nothing more comes is DONE."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return DONE if status.state is State.FAILED else status


@caught_by("test_killed_with_many_transfers_in_flight")
class LearnsOfOneDeathAtATime(Watched):
    """Only the first transfer of a dead peer fails."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        others = [one for one, (_, job) in self._jobs.items() if job.stop and one < transfer]
        return PENDING if others else status


@caught_by("test_killed_during_a_transfer")
class IsDoomedForEver(Watched):
    """It promises to become quiet by itself, and never says that it is."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return replace(status, state=State.DOOMED) if status.error is not None else status


@caught_by("test_killed_during_a_transfer")
class IsDoomedAfterDisconnect(IsDoomedForEver):
    """It promises to be quiet after ``disconnect``, and does not say so either."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, quiescence=Quiescence.AFTER_DISCONNECT)


@caught_by("test_gone_and_back_is_another_peer")
class KnowsPeersByTheirPlace(LoopbackTransport):
    """Whoever comes back is taken for who was there before."""

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        first = min(self._peers)
        self._peers[first] = self._peers[peer]
        return first


# Rare ones, that take an odd sequence of calls.


@caught_by("test_any_order_of_calls_does_what_the_model_does")
class ForgetsThatItWasDeregisteredOnce(LoopbackTransport):
    """A region that was deregistered and registered again cannot be deregistered again."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._once: set[Region] = set()

    def deregister(self, region: Region) -> None:
        if region in self._once:
            return
        super().deregister(region)
        self._once.add(region)


@caught_by("test_any_order_of_calls_does_what_the_model_does")
class LosesANotificationAfterReconnecting(LoopbackTransport):
    """The first free notification on a second connection is lost."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._ended = 0

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self._ended = 1

    def notify(self, peer: PeerId, payload: bytes) -> None:
        self._peer(peer)
        if self._ended == 1:
            self._ended = 2
            return
        super().notify(peer, payload)


# What they are made with.


def cut(copies: Copies, part: slice) -> Copies:
    """Some copies of a batch from its start, and segments that still cover them."""
    local = copies.local[part]
    n = len(local)
    segments = (
        Segment(start=min(one.start, n), stop=min(one.stop, n), local=one.local, remote=one.remote)
        for one in copies.segments
    )
    return Copies(
        local=local,
        remote=copies.remote[part],
        nbytes=copies.nbytes[part],
        segments=tuple(segments),
    )


def first_of(copies: Copies, side: str) -> np.uint64:
    """The first address of the first segment's region of this side."""
    region: Region = getattr(copies.segments[0], side)
    return np.uint64(region.address)


def failed(why: str) -> Status:
    """FAILED, with a reason."""
    return Status(state=State.FAILED, error=TransportError(why))
