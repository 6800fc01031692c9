"""Reads of peers' slot words: checks before the data, fences after it, renewals meanwhile.

The words of several requests on one producer rank are read in one batch, and the notes about them
("done", or renewals) are bound to that read. The fingerprint in front of a producer's slot table is
read in the same way, once per connection.
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
from kvferry.core.messages import WORD_BYTES, Note, encode
from kvferry.core.security.proof import FINGERPRINT_BYTES, fingerprint
from kvferry.core.transport.copies import Copies, copies_between

T = TypeVar("T")

Checked = Callable[[KVFerryError | None], None]

MAX_BATCH = 64
"""Slot words that are read in one batch, and messages in one notification."""
SCRATCH_WORDS = 1 << 12
"""Slot words that can be under way at once."""
FINGERPRINT_WORDS = FINGERPRINT_BYTES // WORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRead:
    """One slot word to be read.

    Attributes:
        tag: who wants it; see ``SlotReads.remove`` and ``Transfers.cancel``.
        peer, rank, slot: where the word is.
        is_header: whether the word is one of the fingerprint's, of which ``slot`` is the index.
        note: bound to the read: "done" to a fence, a renewal to itself, nothing to a check.
        landed: called with the word and the seconds that the read took.
        lost: called instead if the read failed.
        failing: called before that if the failure is known earlier.
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

    @property
    def region(self) -> Region:
        """Return the memory of the producer rank that the word is in."""
        payload = self.peer.payloads[self.rank]
        return payload.fingerprint or payload.slots if self.is_header else payload.slots


class ScratchWords:
    """Memory that peers' slot words land in, one word each. Owns it.

    Args:
        words: how many there are.

    Attributes:
        region: all of them.
    """

    def __init__(self, words: int = SCRATCH_WORDS) -> None:
        self._words = np.full(words, NOTHING, dtype=np.uint64)
        self._free = list(range(words))
        self.region: Region = region_of(self._words)

    @property
    def free(self) -> int:
        """Return how many words can be taken now."""
        return len(self._free)

    def take(self) -> int:
        """Return the index of a free word, which is the caller's until ``give_back``.

        It is cleared, so that a read that never lands never looks valid.
        """
        index = self._free.pop()
        self._words[index] = NOTHING
        return index

    def give_back(self, index: int) -> int:
        """Free a word, once its read has ended. Returns its value."""
        self._free.append(index)
        return int(self._words[index])

    def address(self, index: int) -> int:
        """Return the address of a word."""
        return self.region.address + index * WORD_BYTES


class SlotReads:
    """Collect reads of slot words and post them together. Used by the endpoint's thread only.

    Args:
        scratch: where the words land.
        containment: told of what a read's callback raises; only that read is lost then.
    """

    def __init__(self, scratch: ScratchWords, containment: ErrorContainment) -> None:
        self._scratch = scratch
        self._containment = containment
        self._waiting: list[SlotRead] = []

    def __len__(self) -> int:
        """Return how many reads wait to be posted."""
        return len(self._waiting)

    def add(self, read: SlotRead) -> None:
        """Add a read, which the next ``post`` posts."""
        self._waiting.append(read)

    def remove(self, tag: Hashable) -> bool:
        """Drop the reads with a tag that have not been posted.

        Returns:
            Whether there were any.
        """
        kept = [read for read in self._waiting if read.tag != tag]
        is_removed = len(kept) < len(self._waiting)
        self._waiting = kept
        return is_removed

    def post(self, transfers: Transfers, max_notification: int) -> None:
        """Post what waits, in batches; what there is no scratch memory for waits on.

        Args:
            transfers: to post with.
            max_notification: bytes that a notification of the driver may have.
        """
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        groups: dict[tuple[Peer, int, type, bool], list[SlotRead]] = defaultdict(list)
        for read in waiting:
            groups[read.peer, read.rank, type(read.note), read.is_header].append(read)
        for reads in groups.values():
            try:
                batches = self._batches(reads, max_notification)
            except Exception as exc:  # noqa: BLE001  what cannot be said to one rank fails there
                error = self._containment.caught("making a notification", exc)
                for read in reads:
                    self._lose(read, error)
            else:
                for batch in batches:
                    self._post_batch(batch, transfers)

    def _batches(self, reads: list[SlotRead], max_notification: int) -> list[list[SlotRead]]:
        """Split reads of one kind so that the notes of each batch fit into one notification."""
        notes = [read.note for read in reads if read.note is not None]
        if not notes:
            return list(_chunks(reads, MAX_BATCH))
        sizes = [len(batch) for batch in fitting(notes, max_notification)]
        iterator = iter(reads)
        return [list(islice(iterator, size)) for size in sizes]

    def _post_batch(self, batch: list[SlotRead], transfers: Transfers) -> None:
        first = batch[0]
        if first.rank not in first.peer.ids:
            for read in batch:
                self._lose(read, first.peer.gone())
        elif len(batch) > self._scratch.free:
            self._waiting.extend(batch)
        else:
            transfers.add(self._batch_read(batch))

    def _lose(self, read: SlotRead, error: KVFerryError) -> None:
        self._containment.run("a slot word that was not read", lambda: read.lost(error), None)

    def _land(self, read: SlotRead, value: int, seconds: float) -> None:
        try:
            read.landed(value, seconds)
        except Exception as exc:  # noqa: BLE001  the others of the batch must hear of theirs
            self._lose(read, self._containment.caught("a slot word that was read", exc))

    def _batch_read(self, batch: Sequence[SlotRead]) -> Read:
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
    """Yield the notes in lists, each of which fits into one notification.

    Args:
        notes: in the order in which they are sent.
        max_notification: bytes that a notification of the driver may have.
    """
    if notes:
        one = max(len(encode([note])) for note in notes)
        yield from _chunks(notes, max(1, min(MAX_BATCH, (max_notification - 8) // one)))


def _chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part


@dataclass(slots=True, kw_only=True, eq=False)
class _Check:
    peer: Peer
    checked: Checked
    deadline: float
    words: dict[tuple[int, int], int] = field(default_factory=dict)
    """By producer rank and index, as they arrive."""


class FingerprintReads:
    """Check that the memory which a producer's payloads name is the producer's.

    Whoever listens at an address may serve the payloads of another engine with a key of his own.
    The engine whose memory they name has the fingerprint of its own key there, in front of its slot
    table, so it is read once per connection, before anything else. Used by the endpoint's thread
    only.

    Args:
        slot_reads: makes the reads.
        clock: seconds, monotonic.
        patience: seconds after which a check fails.
        failing: called with peer and rank when it is known that a read will fail, and it is not yet
            quiet; the check is over then.
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
        """Read the fingerprint of every rank of a peer that is connected.

        Args:
            peer: all of whose ranks say where it is.
            checked: called once, with ``None`` if it is that of the peer's key everywhere.
                Otherwise the peer is to be given up, which ends the reads that go on unless others
                use its connections.
        """
        check = _Check(peer=peer, checked=checked, deadline=self._clock() + self._patience)
        self._checks.add(check)
        if not peer.ids:
            self._end(check, None)
        for rank in peer.ids:
            for index in range(FINGERPRINT_WORDS):
                self._slot_reads.add(self._read(check, rank, index))

    def progress(self, now: float) -> None:
        """End the checks that take too long."""
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
        check.words[rank, index] = word
        if len(check.words) == len(check.peer.ids) * FINGERPRINT_WORDS:
            self._end(check, _problem(check.peer, check.words))

    def _end(self, check: _Check, error: KVFerryError | None) -> None:
        """End a check, if it is not over; words that are not posted are not read any more."""
        if check in self._checks:
            self._checks.remove(check)
            self._slot_reads.remove(check)
            check.checked(error)


def _problem(peer: Peer, words: dict[tuple[int, int], int]) -> HandshakeError | None:
    """Return why a peer is refused whose memory has these words, or ``None``."""
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
