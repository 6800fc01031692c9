"""Reads of producers' slot words: before the pages (check), after them (fence), to renew leases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from kvferry.core.driver_calls.error_containment import ErrorContainment
from kvferry.core.driver_calls.transfers import Read, Transfers
from kvferry.core.endpoint.peers import Peer
from kvferry.core.errors import DeadlineError, HandshakeError, KVFerryError
from kvferry.core.memory import Region
from kvferry.core.messages import WORD_BYTES, Note
from kvferry.core.security.ticket_proof import fingerprint
from kvferry.core.side_channel_messages import encode
from kvferry.core.slot_words import ScratchWords
from kvferry.core.transport.copies import Copies, copies_between

T = TypeVar("T")

Checked = Callable[[KVFerryError | None], None]
"""Called with ``None`` if a fingerprint is right; otherwise with the error."""

MAX_BATCH = 64
"""The most slot words in one batch, and the most notes in one notification."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRead:
    """A read of one 8-byte word of a producer rank."""

    tag: Hashable  # for ``SlotReads.remove`` and ``Transfers.cancel``
    peer: Peer
    rank: int
    table: Region  # the rank's memory with the word: slot words, watermarks, or its fingerprint
    slot: int  # the index of the word in ``table``
    note: Note | None = None  # bound to the read: a ``Renewal``, or "done" of a fence
    landed: Callable[[int, float], None]  # called with the word and the seconds that the read took
    lost: Callable[[KVFerryError], None]  # called instead if it failed; no more bytes land


class SlotReads:
    """Collect reads of slot words and post them together. Used by the endpoint's thread only.

    Those on one producer rank are read in one batch, which carries their notes as one notification.
    """

    def __init__(self, scratch: ScratchWords, containment: ErrorContainment) -> None:
        self._scratch = scratch
        self._contain = containment.run
        self._waiting: list[SlotRead] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, read: SlotRead) -> None:
        """Add a read, which the next ``post`` posts."""
        self._waiting.append(read)

    def remove(self, tag: Hashable) -> bool:
        """Drop the reads with this tag that have not been posted; return whether there were any."""
        kept = [read for read in self._waiting if read.tag != tag]
        is_removed = len(kept) < len(self._waiting)
        self._waiting = kept
        return is_removed

    def post(self, transfers: Transfers, max_notification: int) -> None:
        """Post the waiting reads in batches; those without room in the scratch memory wait on."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        groups: dict[tuple[Peer, int, Region, type], list[SlotRead]] = defaultdict(list)
        for read in waiting:
            groups[read.peer, read.rank, read.table, type(read.note)].append(read)
        for (peer, *_), reads in groups.items():
            if not peer.connected:
                self._lose(reads, peer.gone())
                continue
            notes = [read.note for read in reads if read.note is not None]
            size = self._contain(
                "making a notification",
                partial(_batch_size, notes, max_notification),
                partial(self._lose, reads),
            )
            for batch in _chunks(reads, size) if size else ():
                if len(batch) > self._scratch.free:
                    self._waiting.extend(batch)
                else:
                    transfers.add(self._batch_read(batch))

    def _lose(self, reads: Iterable[SlotRead], error: KVFerryError) -> None:
        for read in reads:
            self._contain("a slot word that was not read", partial(read.lost, error))

    def _batch_read(self, batch: Sequence[SlotRead]) -> Read:
        first = batch[0]
        words = [self._scratch.take() for _ in batch]
        notes = [read.note for read in batch if read.note is not None]

        def build() -> Copies:
            near, far = self._scratch.region, first.table
            pairs = [
                (near.address + word * WORD_BYTES, far.address + read.slot * WORD_BYTES, WORD_BYTES)
                for word, read in zip(words, batch, strict=True)
            ]
            return copies_between(pairs, local=near, remote=far)

        def landed(whole: Read) -> None:
            values = list(map(self._scratch.give_back, words))
            for read, value in zip(batch, values, strict=True):
                tell, lose = partial(read.landed, value, whole.seconds), partial(self._lose, [read])
                self._contain("a slot word that was read", tell, lose)

        def lost(error: KVFerryError) -> None:
            for word in words:
                self._scratch.give_back(word)
            self._lose(batch, error)

        return Read(
            connection=first.peer.connections[first.rank],
            build=build,
            landed=landed,
            lost=lost,
            notify=encode(notes) if notes else None,
            urgent=True,
            tags={read.tag for read in batch},
        )


def fitting(notes: Sequence[Note], max_notification: int) -> Iterator[list[Note]]:
    """Yield lists of at most ``MAX_BATCH`` messages, each of which fits into a notification."""
    return _chunks(notes, _batch_size(notes, max_notification))


def _batch_size(notes: Sequence[Note], max_notification: int) -> int:
    longest = max((len(encode([note])) for note in notes), default=0)
    fit = (max_notification - 8) // longest if longest else MAX_BATCH
    return max(1, min(MAX_BATCH, fit))


def _chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    return (list(items[start : start + size]) for start in range(0, len(items), size))


class FingerprintReads:
    """Check that the memory which a producer's payloads name belongs to that producer.

    A hostile process may serve another engine's payloads with a ticket key of its own. So the
    fingerprint in front of the slot table is compared with the handshake's key, once per connected
    peer, before any other read. A check fails after ``patience`` seconds. Endpoint's thread only.
    """

    def __init__(
        self, slot_reads: SlotReads, *, clock: Callable[[], float], patience: float
    ) -> None:
        self._slot_reads = slot_reads
        self._clock = clock
        self._patience = patience
        self._checks: dict[Peer, tuple[float, Checked]] = {}
        """Peer to the deadline of its check, and whom to tell."""

    def check(self, peer: Peer, checked: Checked) -> None:
        """Compare the fingerprints in a connected producer's memory with its ticket key.

        ``checked`` is called once, at once if the producer publishes no key. After an error, the
        caller must give the peer up, and reads of the check may still be under way.
        """
        if not (peer.connections and peer.ticket_key):
            checked(None)
            return
        self._checks[peer] = self._clock() + self._patience, checked
        words = np.frombuffer(fingerprint(peer.ticket_key), dtype="<u8").tolist()
        left = {(rank, index) for rank in peer.connections for index in range(len(words))}

        def landed(rank: int, index: int, word: int, _: float) -> None:
            left.discard((rank, index))
            if word != words[index]:
                self._end(peer, self._relayed(peer, rank))
            elif not left:
                self._end(peer, None)

        for rank, index in sorted(left):
            read = SlotRead(
                tag=peer,
                peer=peer,
                rank=rank,
                table=peer.payloads[rank].fingerprint,
                slot=index,
                landed=partial(landed, rank, index),
                lost=partial(self._end, peer),
            )
            self._slot_reads.add(read)

    def progress(self, now: float) -> None:
        """Fail the checks that have taken longer than ``patience``."""
        for peer in [each for each, (deadline, _) in self._checks.items() if deadline <= now]:
            error = DeadlineError(
                f"the fingerprint of engine {peer.key.engine!r} was not read within "
                f"{self._patience:g} s: its host is down, or nothing passes between the two drivers"
            )
            self._end(peer, error)

    def _relayed(self, peer: Peer, rank: int) -> HandshakeError:
        key = peer.key
        return HandshakeError(
            f"engine {key.engine!r} at {key.host} port {key.port} answers with the payloads "
            f"of another: the memory that rank {rank} names does not bear the fingerprint of "
            f"the key which it publishes, {fingerprint(peer.ticket_key).hex()}. It "
            "relays another engine, or that engine has not run its first step"
        )

    def _end(self, peer: Peer, error: KVFerryError | None) -> None:
        """End a check, if it is not over: drop the reads that were not posted, and report."""
        if peer in self._checks:
            _, checked = self._checks.pop(peer)
            self._slot_reads.remove(peer)
            checked(error)
