"""Faults of transfers: bytes that do not arrive where they should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvferry.core.errors import TransportUsageError
from kvferry.core.transport import PeerId, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from tests.long.drivers.planted.base import AlteredTransfers, caught_by, cut


@caught_by("test_batches_of_every_shape")
class LosesTheLastByte(AlteredTransfers):
    """The last byte of every copy is not moved."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, nbytes=copies.nbytes - (copies.nbytes > 1))


@caught_by("test_batches_of_every_shape")
class DropsSingleBytes(AlteredTransfers):
    """Copies of single bytes are dropped."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, nbytes=copies.nbytes * (copies.nbytes >= 4))


@caught_by("test_batches_of_every_shape")
class AlignsAddresses(AlteredTransfers):
    """Remote addresses are rounded down to words."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, remote=copies.remote // np.uint64(4) * np.uint64(4))


@caught_by("test_batches_of_every_shape")
class CountsCopiesWith16Bits(AlteredTransfers):
    """The number of copies wraps around at 65,536."""

    def copies(self, copies: Copies) -> Copies:
        keep = len(copies) if len(copies) < 1 << 16 else len(copies) % (1 << 16)
        return cut(copies, slice(keep))


@caught_by("test_batches_of_every_shape")
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


@caught_by("test_batches_of_every_shape")
class SortsRemoteAddresses(AlteredTransfers):
    """The remote addresses are sorted, and the local ones are not."""

    def copies(self, copies: Copies) -> Copies:
        return replace(copies, remote=np.sort(copies.remote))


@caught_by("test_batches_of_every_shape")
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


@caught_by("test_batches_of_every_shape")
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


@caught_by("test_arrays_of_few_copies_may_be_reused_after_the_call")
class KeepsArraysOfFewCopies(KeepsArraysOfLargeTransfers):
    """Batches of few copies begin later, with arrays that the caller may have reused."""

    def kept(self, copies: Copies) -> bool:
        return 0 < len(copies) < 8
