"""Bytes that do not arrive where they should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvferry.core.errors import TransportUsageError
from kvferry.core.transport import (
    PeerId,
    Status,
    TransferId,
)
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from tests.testing.planted.base import (
    Altered,
    caught_by,
    cut,
)


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


@caught_by("test_large_transfers")
class IsDoneBeforeTheRest(LoopbackTransport):
    """A large transfer is cut in two, and DONE with the first part."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if copies.total <= 32 << 20 or copies.total > 1 << 30:
            return super().read(peer, copies, notify)
        half = len(copies) // 2
        nbytes = copies.nbytes.copy()
        nbytes[half:] = 0
        return super().read(peer, replace(copies, nbytes=nbytes), notify)


@caught_by("test_large_transfers")
class KeepsTheArraysOfWhatIsLarge(KeepsTheCallersArrays):
    """What is small is moved at once, and what is large with arrays that the caller has reused."""

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


@caught_by("test_the_arrays_of_a_few_copies_are_free_after_the_call")
class KeepsTheArraysOfAFew(KeepsTheArraysOfWhatIsLarge):
    """A few copies are looked at when the work begins, and only more of them within the call."""

    def kept(self, copies: Copies) -> bool:
        return 0 < len(copies) < 8
