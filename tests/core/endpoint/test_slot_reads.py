"""Reads of slot words: batched by rank and by what they say, within every driver's notification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.endpoint.producer import SlotTable
from kvferry.core.endpoint.slot_reads import MAX_BATCH, ScratchWords, SlotRead, SlotReads, fitting
from kvferry.core.endpoint.transfers import Outcome, Read
from kvferry.core.errors import KVFerryError, PeerLostError, TransportError
from kvferry.core.lifecycle.holds import NOTHING
from kvferry.core.memory import Region
from kvferry.core.messages import WORD_BYTES, Note, Release, Renewal, decode_notes, encode
from kvferry.core.transport import PeerId
from kvferry.drivers.loopback import notifications as loopback
from kvferry.drivers.ucx import messages as ucx

TABLE = Region(address=1 << 40, nbytes=1 << 20)
PLENTY = 1 << 20


def release(number: int, engine: str = "decode") -> Release:
    return Release(
        incarnation=number,
        slot=number,
        generation=number + 1,
        engine=engine,
        rank=0,
        expected=1,
        abandoned=False,
    )


class Peer:
    """As much of a producer as a word's read sees."""

    def __init__(self, ids: dict[int, PeerId]) -> None:
        self.ids = ids

    @property
    def payloads(self) -> Any:
        peer = self

        class Payload:
            slots = TABLE

        del peer
        return [Payload()] * 4

    def gone(self) -> PeerLostError:
        return PeerLostError("gone")


class Queue:
    """Transfers that are only collected."""

    def __init__(self) -> None:
        self.jobs: list[Read] = []

    def add(self, job: Read) -> None:
        self.jobs.append(job)

    def ends(self, index: int, error: KVFerryError | None = None, seconds: float = 0.5) -> None:
        self.jobs[index].finished(
            Outcome(error=error, copies=1, nbytes=8, begun=1.0, seconds=seconds, post_seconds=0.1)
        )


class Words:
    """Word reads, the memory they land in, and what was heard of each."""

    def __init__(self, scratch: int = 256) -> None:
        self.scratch = ScratchWords(scratch)
        self.reads = SlotReads(self.scratch, ErrorContainment())
        self.queue = Queue()
        self.landed: list[tuple[Any, int, float]] = []
        self.lost: list[tuple[Any, KVFerryError]] = []
        self.failing: list[tuple[object, KVFerryError]] = []

    def add(
        self, tag: object, peer: Peer, rank: int = 0, slot: int = 0, note: Note | None = None
    ) -> None:
        read = SlotRead(
            tag=tag,
            peer=peer,  # type: ignore[arg-type]
            rank=rank,
            slot=slot,
            note=note,
            landed=lambda value, seconds: self.landed.append((tag, value, seconds)),
            lost=lambda error: self.lost.append((tag, error)),
            failing=lambda error: self.failing.append((tag, error)),
        )
        self.reads.add(read)

    def post(self, max_notification: int = PLENTY) -> list[Read]:
        known = len(self.queue.jobs)
        self.reads.post(self.queue, max_notification)  # type: ignore[arg-type]
        return self.queue.jobs[known:]

    def write(self, job: Read, values: Sequence[int]) -> None:
        """What a driver would leave in the scratch words of a job."""
        for address, value in zip(job.build().local.tolist(), values, strict=True):
            self.scratch._words[(address - self.scratch.region.address) // WORD_BYTES] = value


# Scratch words, and the slot table.


def test_a_word_is_cleared_when_it_is_taken() -> None:
    """Or one that a fence left valid would make the next fence valid that never lands."""
    scratch = ScratchWords(1)
    index = scratch.take()
    scratch._words[index] = 77
    assert scratch.give_back(index) == 77
    assert scratch.take() == index
    assert scratch.give_back(index) == NOTHING


def test_words_are_taken_once_and_lie_apart() -> None:
    scratch = ScratchWords(3)
    assert scratch.free == 3
    taken = [scratch.take() for _ in range(3)]
    assert scratch.free == 0
    addresses = sorted(map(scratch.address, taken))
    start = scratch.region.address
    assert addresses == [start, start + WORD_BYTES, start + 2 * WORD_BYTES]
    assert scratch.region.nbytes == 3 * WORD_BYTES
    scratch.give_back(taken[1])
    assert (scratch.free, scratch.take()) == (1, taken[1])
    assert ScratchWords().free == 1 << 12


def test_a_slot_table_has_a_word_per_slot_and_at_least_one() -> None:
    assert (len(SlotTable(0)), len(SlotTable(5))) == (1, 5)
    table = SlotTable(3)
    table[1] = (1 << 64) - 1
    assert [table[slot] for slot in range(3)] == [0, (1 << 64) - 1, 0]
    assert table.region.nbytes == 3 * WORD_BYTES


# Batches.


def test_words_of_one_rank_are_read_in_one_batch_with_what_is_said_of_all() -> None:
    words, peer = Words(), Peer({0: PeerId(5), 1: PeerId(6)})
    for slot in (3, 9):
        words.add(f"a{slot}", peer, slot=slot, note=release(slot))
    words.add("b", peer, rank=1, slot=4, note=release(4))
    words.add("check", peer, slot=8)
    words.add("renew", peer, slot=7, note=Renewal(incarnation=1, slot=7, generation=1))
    assert len(words.reads) == 5
    jobs = words.post()
    assert len(words.reads) == 0
    assert [job.peer for job in jobs] == [5, 6, 5, 5]
    assert [job.tags for job in jobs] == [{"a3", "a9"}, {"b"}, {"check"}, {"renew"}]
    assert all(job.urgent for job in jobs)
    assert jobs[0].notify is not None
    assert decode_notes(jobs[0].notify) == [release(3), release(9)]
    assert [job.notify is None for job in jobs] == [False, False, True, False]
    copies = jobs[0].build()
    assert [each - TABLE.address for each in copies.remote.tolist()] == [24, 72]
    assert copies.nbytes.tolist() == [8, 8]
    words.write(jobs[0], [70, 71])
    words.queue.ends(0, seconds=0.25)
    assert words.landed == [("a3", 70, 0.25), ("a9", 71, 0.25)]
    assert words.scratch.free == 256 - 3


def test_of_peers_each_has_a_batch_of_its_own() -> None:
    words = Words()
    for peer in (Peer({0: PeerId(5)}), Peer({0: PeerId(6)})):
        words.add("x", peer)
    assert [job.peer for job in words.post()] == [5, 6]


def test_a_batch_that_fails_fails_all_its_reads_and_gives_their_words_back() -> None:
    words, peer = Words(), Peer({0: PeerId(5)})
    for tag in ("a", "b"):
        words.add(tag, peer)
    [job] = words.post()
    error = TransportError("out")
    job.failing(error)
    assert words.failing == [("a", error), ("b", error)]
    assert words.scratch.free == 254, "the words may still be written"
    words.queue.ends(0, error)
    assert words.lost == [("a", error), ("b", error)]
    assert not words.landed
    assert words.scratch.free == 256


@pytest.mark.parametrize("note", [None, release(1)])
def test_batches_have_a_limit(note: Note | None) -> None:
    words, peer = Words(), Peer({0: PeerId(5)})
    for number in range(2 * MAX_BATCH + 1):
        words.add(number, peer, note=note)
    assert [len(job.tags) for job in words.post()] == [MAX_BATCH, MAX_BATCH, 1]


def test_what_there_is_no_scratch_memory_for_waits() -> None:
    words, peer = Words(scratch=2), Peer({0: PeerId(5)})
    for slot in range(3):
        words.add(f"a{slot}", peer, slot=slot)
    assert words.post() == []
    assert len(words.reads) == 3
    words.reads.remove("a0")
    [job] = words.post()
    assert job.tags == {"a1", "a2"}
    words.add("b", peer)
    assert words.post() == []
    words.queue.ends(0)
    [job] = words.post()
    assert job.tags == {"b"}
    assert words.post() == []


def test_a_read_that_was_removed_before_it_was_posted_is_not_made() -> None:
    words, peer = Words(), Peer({0: PeerId(5)})
    for tag in ("a", "b"):
        words.add(tag, peer, note=release(1))
    assert words.reads.remove("a")
    assert not words.reads.remove("a")
    assert not words.reads.remove("c")
    [job] = words.post()
    assert job.tags == {"b"}
    assert not words.reads.remove("b"), "it is posted"
    assert not words.lost


def test_of_a_rank_that_was_disconnected_nothing_is_read() -> None:
    words, peer = Words(), Peer({1: PeerId(6)})
    words.add("a", peer, rank=0)
    words.add("b", peer, rank=1)
    [job] = words.post()
    assert job.tags == {"b"}
    assert [(tag, str(error)) for tag, error in words.lost] == [("a", "gone")]


def test_a_callback_that_raises_loses_its_own_read_only() -> None:
    words, peer = Words(), Peer({0: PeerId(5)})
    lost: list[KVFerryError] = []

    def fails(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    words.add("a", peer)
    words.reads.add(
        SlotRead(
            tag="b", peer=peer, rank=0, slot=1, note=None, landed=fails, lost=lost.append,  # type: ignore[arg-type]
            failing=fails,
        )
    )  # fmt: skip
    words.add("c", peer)
    [job] = words.post()
    job.failing(TransportError("out"))
    assert [tag for tag, _ in words.failing] == ["a", "c"]
    words.queue.ends(0)
    assert [tag for tag, *_ in words.landed] == ["a", "c"]
    assert [str(error) for error in lost] == ["unexpected ZeroDivisionError: a bug"]


def test_what_cannot_be_said_fails_where_it_was_to_be_said() -> None:
    words, peer = Words(), Peer({0: PeerId(5), 1: PeerId(6)})
    words.add("a", peer, note=release(1 << 70))  # more than a message can hold
    words.add("b", peer, rank=1, note=release(1))
    [job] = words.post()
    assert job.tags == {"b"}
    assert [tag for tag, _ in words.lost] == ["a"]


# Notifications.


@pytest.mark.parametrize("limit", [200, 1000, loopback.MAX_NOTIFICATION, ucx.MAX_NOTIFICATION])
@pytest.mark.parametrize("count", [1, 40, 200])
def test_notes_are_split_so_that_each_part_fits(limit: int, count: int) -> None:
    notes = [release(number) for number in range(count)]
    parts = list(fitting(notes, limit))
    assert [note for part in parts for note in part] == notes
    assert all(0 < len(encode(part)) <= limit for part in parts)
    one = len(encode([notes[-1]]))
    assert len(parts) <= 1 + count // max(1, min(MAX_BATCH, limit // one - 1)), "as few as that"


def test_a_notification_is_filled() -> None:
    """Eight bytes are left for the list that the notes are in."""
    notes = [release(1)] * 5
    full = 5 * len(encode(notes[:1])) + 8
    assert [len(part) for part in fitting(notes, full)] == [5]
    assert [len(part) for part in fitting(notes, full - 1)] == [4, 1]


def test_no_notes_are_no_notifications() -> None:
    assert list(fitting([], 1000)) == []


def test_a_note_that_fits_no_notification_is_said_alone() -> None:
    """The driver refuses it, and the lease ends what it was about."""
    notes = [release(1, "x" * 500), release(2, "y" * 500)]
    assert list(fitting(notes, 100)) == [[note] for note in notes]


NOTES = st.builds(release, st.integers(0, 1 << 60), st.text(max_size=40))


@given(st.lists(NOTES, max_size=150), st.integers(400, 5000))
@settings(deadline=None)
def test_all_notes_are_said_once_in_their_order_and_fit(notes: list[Release], limit: int) -> None:
    parts = list(fitting(notes, limit))
    assert [note for part in parts for note in part] == notes
    assert all(len(encode(part)) <= limit and len(part) <= MAX_BATCH for part in parts)


ADDS = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 9), st.booleans())


@given(st.lists(ADDS, max_size=100), st.sets(st.integers(0, 99)), st.data())
@settings(deadline=None, max_examples=60)
def test_every_read_is_heard_of_once(
    adds: list[tuple[int, int, int, bool]], removed: set[int], data: st.DataObject
) -> None:
    """Landed, lost or removed; with its own word; and all scratch memory is free in the end."""
    words = Words(scratch=70)
    peers = [Peer({0: PeerId(1), 1: PeerId(2)}), Peer({0: PeerId(3), 1: PeerId(4)}), Peer({})]
    for tag, (peer, rank, slot, says) in enumerate(adds):
        words.add(tag, peers[peer], rank, slot, release(tag) if says else None)
    taken = {tag for tag in removed if words.reads.remove(tag)}
    assert taken == {tag for tag in removed if tag < len(adds)}
    ended = 0
    for _ in range(len(adds) + 1):
        words.post(data.draw(st.integers(300, 3000)))
        while ended < len(words.queue.jobs):
            job = words.queue.jobs[ended]
            slots = [(each - TABLE.address) // WORD_BYTES for each in job.build().remote.tolist()]
            words.write(job, [slot + 1 for slot in slots])
            words.queue.ends(ended, TransportError("out") if data.draw(st.booleans()) else None)
            ended += 1
    heard = [tag for tag, *_ in words.landed] + [tag for tag, _ in words.lost]
    assert sorted(heard) == sorted(set(range(len(adds))) - taken)
    assert all(value == adds[tag][2] + 1 for tag, value, _ in words.landed)
    assert words.scratch.free == 70
