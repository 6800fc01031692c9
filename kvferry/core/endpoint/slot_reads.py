"""Reads of producers' slot words: before the pages (check), after them (fence), to renew leases.

A slot word says whether the producer still holds a request's pages. The slot words of several
requests on one producer rank are read in one batch, and the notes about these requests ("done", or
renewals) are bound to that read as one notification. The fingerprint in front of a producer's slot
table is read in the same way, once per connected peer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np

from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.endpoint.peers import Peer
from kvferry.core.endpoint.transfers import Outcome, Read, Transfers
from kvferry.core.errors import DeadlineError, HandshakeError, KVFerryError
from kvferry.core.lifecycle.holds import NOTHING
from kvferry.core.memory import Region, region_of
from kvferry.core.messages import WORD_BYTES, Note
from kvferry.core.security.proof import FINGERPRINT_BYTES, fingerprint
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport.copies import Copies, copies_between

T = TypeVar("T")

Checked = Callable[[KVFerryError | None], None]
"""Called with ``None`` if a fingerprint is right; otherwise with the error."""

MAX_BATCH = 64
"""The most slot words in one batch, and the most notes in one notification."""
SCRATCH_WORDS = 1 << 12
"""The most slot words whose reads are under way at once."""
FINGERPRINT_WORDS = FINGERPRINT_BYTES // WORD_BYTES
"""Number of 8-byte words of a fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRead:
    """A read of one 8-byte word: a slot word, a watermark, or a part of a producer's fingerprint.

    Attributes:
        tag: identifies what the word is read for, so that the read can be dropped by
            ``SlotReads.remove`` or cancelled by ``Transfers.cancel``.
        peer, rank, slot: where the word is: the producer, the index of its rank, and the index of
            the slot.
        note: the message to the producer that is bound to the read: a ``Renewal`` if the read is
            made to renew a lease; "done" if it follows the pages (the fence), unless the load
            shares its hold with other requests; otherwise ``None``.
        landed: called with the word and the seconds that the read took.
        lost: called with the error instead of ``landed`` if the read failed; no more bytes land.
        failing: called with the error before ``lost`` if the driver knows earlier that the read
            will fail, while bytes may still land.
        is_header: whether the word is part of the fingerprint; if so, ``slot`` is the word's index
            in the fingerprint.
        is_watermark: whether the word is the slot's watermark, not its slot word. The producer rank
            must publish watermarks.
    """

    tag: Hashable
    peer: Peer
    rank: int
    slot: int
    note: Note | None
    landed: Callable[[int, float], None]
    lost: Callable[[KVFerryError], None]
    failing: Callable[[KVFerryError], None]
    is_header: bool = False
    is_watermark: bool = False

    @property
    def region(self) -> Region:
        """Return the region of the producer rank's memory that contains the word."""
        payload = self.peer.payloads[self.rank]
        if self.is_watermark:
            return payload.watermarks or payload.slots
        return payload.fingerprint or payload.slots if self.is_header else payload.slots


class ScratchWords:
    """Keep the local memory that slot words are read into.

    Args:
        words: number of 8-byte words.

    Attributes:
        region: the memory of all words, which this object owns.
    """

    def __init__(self, words: int = SCRATCH_WORDS) -> None:
        self._words = np.full(words, NOTHING, dtype=np.uint64)
        self._free = list(range(words))
        self.region: Region = region_of(self._words)

    @property
    def free(self) -> int:
        """Return the number of words that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        """Return the index of a free word, which belongs to the caller until ``give_back``.

        The word is set to ``NOTHING``, so that a word that was never read into looks like a slot
        without a hold. At least one word must be free.
        """
        index = self._free.pop()
        self._words[index] = NOTHING
        return index

    def give_back(self, index: int) -> int:
        """Free a word whose read has ended, and return its value."""
        self._free.append(index)
        return int(self._words[index])

    def address(self, index: int) -> int:
        """Return the address of the word with this index."""
        return self.region.address + index * WORD_BYTES


class SlotReads:
    """Collect reads of slot words and post them together. Used by the endpoint's thread only.

    Args:
        scratch: the memory that the words are read into.
        containment: logs exceptions that the callbacks of a read raise, so that other reads go on.
    """

    def __init__(self, scratch: ScratchWords, containment: ErrorContainment) -> None:
        self._scratch = scratch
        self._containment = containment
        self._waiting: list[SlotRead] = []

    def __len__(self) -> int:
        """Return the number of reads that wait to be posted."""
        return len(self._waiting)

    def add(self, read: SlotRead) -> None:
        """Add a read, which the next ``post`` posts."""
        self._waiting.append(read)

    def remove(self, tag: Hashable) -> bool:
        """Drop the reads with this tag that have not been posted.

        Returns:
            Whether any read was dropped.
        """
        kept = [read for read in self._waiting if read.tag != tag]
        is_removed = len(kept) < len(self._waiting)
        self._waiting = kept
        return is_removed

    def post(self, transfers: Transfers, max_notification: int) -> None:
        """Post the waiting reads in batches.

        A batch for which the scratch memory has no room waits for the next call.

        Args:
            transfers: posts the batches.
            max_notification: the most bytes in a notification of the driver.
        """
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        groups: dict[tuple[Peer, int, type, bool, bool], list[SlotRead]] = defaultdict(list)
        for read in waiting:
            kind = type(read.note), read.is_header, read.is_watermark
            groups[read.peer, read.rank, *kind].append(read)
        for reads in groups.values():
            try:
                batches = self._batches(reads, max_notification)
            except Exception as exc:  # noqa: BLE001  it fails the reads from this rank
                error = self._containment.caught("making a notification", exc)
                for read in reads:
                    self._lose(read, error)
            else:
                for batch in batches:
                    self._post_batch(batch, transfers)

    def _batches(self, reads: list[SlotRead], max_notification: int) -> list[list[SlotRead]]:
        """Split reads into batches, so that the notes of each batch fit into one notification.

        Args:
            reads: reads from one producer rank, all with a note of the same type or without one.
            max_notification: the most bytes in a notification of the driver.
        """
        notes = [read.note for read in reads if read.note is not None]
        if not notes:
            return list(_chunks(reads, MAX_BATCH))
        sizes = [len(batch) for batch in fitting(notes, max_notification)]
        iterator = iter(reads)
        return [list(islice(iterator, size)) for size in sizes]

    def _post_batch(self, batch: list[SlotRead], transfers: Transfers) -> None:
        """Post a batch, or keep it for the next ``post`` if the scratch memory has no room for it.

        If the peer was given up, the reads fail instead.
        """
        first = batch[0]
        if first.rank not in first.peer.ids:
            for read in batch:
                self._lose(read, first.peer.gone())
        elif len(batch) > self._scratch.free:
            self._waiting.extend(batch)
        else:
            transfers.add(self._batch_read(batch))

    def _lose(self, read: SlotRead, error: KVFerryError) -> None:
        """Call a read's ``lost``; if that raises an exception, log it."""
        self._containment.run("a slot word that was not read", lambda: read.lost(error), None)

    def _land(self, read: SlotRead, value: int, seconds: float) -> None:
        """Call a read's ``landed`` with the word; if it raises, call ``lost``."""
        try:
            read.landed(value, seconds)
        except Exception as exc:  # noqa: BLE001  the others of the batch must hear of theirs
            self._lose(read, self._containment.caught("a slot word that was read", exc))

    def _batch_read(self, batch: Sequence[SlotRead]) -> Read:
        """Return one ``Read`` that reads all words of a batch and carries the batch's notes."""
        first = batch[0]
        words = [self._scratch.take() for _ in batch]
        notes = [read.note for read in batch if read.note is not None]

        def build() -> Copies:
            table = first.region
            pairs = [
                (self._scratch.address(word), table.address + read.slot * WORD_BYTES, WORD_BYTES)
                for word, read in zip(words, batch, strict=True)
            ]
            return copies_between(pairs, local=self._scratch.region, remote=table)

        def finished(outcome: Outcome) -> None:
            for word, read in zip(words, batch, strict=True):
                value = self._scratch.give_back(word)
                if outcome.error is None:
                    self._land(read, value, outcome.seconds)
                else:
                    self._lose(read, outcome.error)

        def failing(error: KVFerryError) -> None:
            for read in batch:
                self._containment.run(
                    "a slot word's read that is failing", partial(read.failing, error), None
                )

        return Read(
            peer=first.peer.ids[first.rank],
            build=build,
            finished=finished,
            failing=failing,
            notify=encode(notes) if notes else None,
            urgent=True,
            tags={read.tag for read in batch},
        )


def fitting(notes: Sequence[Note], max_notification: int) -> Iterator[list[Note]]:
    """Split messages (notes) into lists, each of which fits into one notification.

    Args:
        notes: the messages to send, in order.
        max_notification: the most bytes in a notification of the driver.

    Yields:
        A list of 1 to ``MAX_BATCH`` messages.
    """
    if notes:
        one = max(len(encode([note])) for note in notes)
        yield from _chunks(notes, max(1, min(MAX_BATCH, (max_notification - 8) // one)))


def _chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of ``size`` items; the last list may be shorter."""
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part


@dataclass(slots=True, kw_only=True, eq=False)
class _Check:
    """A check of a producer's fingerprint that is not over.

    At ``deadline``, on the clock of ``FingerprintReads``, a check that is not over fails.
    """

    peer: Peer
    checked: Checked
    deadline: float
    words: dict[tuple[int, int], int] = field(default_factory=dict)
    """(producer rank index, index in the fingerprint) to the word, for words that have arrived."""


class FingerprintReads:
    """Check that the memory which a producer's payloads name belongs to that producer.

    A hostile process may serve the payloads of another engine together with a ticket key of its
    own. But every engine writes the fingerprint (a hash) of its ticket key in front of its slot
    table. So the fingerprint is read once per connected peer, before any other read, and compared
    with the key that the handshake returned. Used by the endpoint's thread only.

    Args:
        slot_reads: makes the reads.
        clock: seconds, monotonic.
        patience: seconds after which a check fails.
        failing: called with the producer, the index of its rank and the error when the driver knows
            that one of a check's reads will fail, but bytes may still land. The check has failed
            before this call.
    """

    def __init__(
        self,
        slot_reads: SlotReads,
        *,
        clock: Callable[[], float],
        patience: float,
        failing: Callable[[Peer, int, KVFerryError], None],
    ) -> None:
        self._slot_reads = slot_reads
        self._clock = clock
        self._patience = patience
        self._failing = failing
        self._checks: set[_Check] = set()

    def check(self, peer: Peer, checked: Checked) -> None:
        """Compare the fingerprints in a connected producer's memory with its ticket key.

        Args:
            peer: the producer. Its handshake has ensured that every rank publishes where its
                fingerprint is.
            checked: called once, with ``None`` if every connected rank has the fingerprint of the
                ticket key, otherwise with the error. After an error, the caller must give the peer
                up, and reads of the check may still be under way.
        """
        check = _Check(peer=peer, checked=checked, deadline=self._clock() + self._patience)
        self._checks.add(check)
        if not peer.ids:
            self._end(check, None)
        for rank in peer.ids:
            for index in range(FINGERPRINT_WORDS):
                self._slot_reads.add(self._read(check, rank, index))

    def progress(self, now: float) -> None:
        """Fail the checks that have taken longer than ``patience``.

        Args:
            now: seconds, on this object's clock.
        """
        for check in [each for each in self._checks if each.deadline <= now]:
            engine = check.peer.key.engine
            self._end(
                check,
                DeadlineError(
                    f"the fingerprint of engine {engine!r} was not read within {self._patience:g} "
                    "s: its host is down, or nothing passes between the two drivers"
                ),
            )

    def _read(self, check: _Check, rank: int, index: int) -> SlotRead:
        """Return the read of one word of a fingerprint.

        Args:
            check: the check that the word is for.
            rank: index of the producer rank.
            index: index of the word in the fingerprint.
        """

        def failing(error: KVFerryError) -> None:
            self._end(check, error)
            self._failing(check.peer, rank, error)

        return SlotRead(
            tag=check,
            peer=check.peer,
            rank=rank,
            slot=index,
            note=None,
            landed=lambda word, _: self._landed(check, rank, index, word),
            lost=lambda error: self._end(check, error),
            failing=failing,
            is_header=True,
        )

    def _landed(self, check: _Check, rank: int, index: int, word: int) -> None:
        """Store a word of a fingerprint, and end the check if this was the last word.

        Args:
            check: the check that the word is for.
            rank: index of the producer rank.
            index: index of the word in the fingerprint.
            word: the word.
        """
        check.words[rank, index] = word
        if len(check.words) == len(check.peer.ids) * FINGERPRINT_WORDS:
            self._end(check, _problem(check.peer, check.words))

    def _end(self, check: _Check, error: KVFerryError | None) -> None:
        """End a check: drop those of its reads that have not been posted, and call ``checked``.

        Args:
            check: the check; nothing happens if it has ended before.
            error: why it has failed; ``None`` if the fingerprint is right.
        """
        if check in self._checks:
            self._checks.remove(check)
            self._slot_reads.remove(check)
            check.checked(error)


def _problem(peer: Peer, words: dict[tuple[int, int], int]) -> HandshakeError | None:
    """Compare the fingerprints that were read with the producer's ticket key.

    Args:
        peer: the producer.
        words: (producer rank index, index in the fingerprint) to the word, for all words of all
            connected ranks.

    Returns:
        ``None`` if all ranks have the fingerprint of the key; otherwise the error, about the
        first rank that has not.
    """
    expected = fingerprint(peer.ticket_key)
    for rank in peer.ids:
        actual = b"".join(
            words[rank, index].to_bytes(WORD_BYTES, "little") for index in range(FINGERPRINT_WORDS)
        )
        if actual != expected:
            return HandshakeError(
                f"engine {peer.key.engine!r} at {peer.key.host} port {peer.key.port} answers with "
                f"the payloads of another: the memory that rank {rank} names bears the fingerprint "
                f"{actual.hex()}, and that of the key which it publishes is {expected.hex()}. It "
                "relays another engine, or that engine has not run its first step"
            )
    return None
