"""``SlotReads``: reads of slot words in batches whose notes fit into a notification."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.driver_calls.error_containment import ErrorContainment
from kvferry.core.driver_calls.transfers import Read
from kvferry.core.endpoint.hold_server import SlotTable
from kvferry.core.endpoint.slot_reads import MAX_BATCH, ScratchWords, SlotRead, SlotReads, fitting
from kvferry.core.errors import KVFerryError, PeerLostError, TransportError
from kvferry.core.lifecycle.holds import NOTHING
from kvferry.core.memory import Region
from kvferry.core.messages import WORD_BYTES, Note, Release, Renewal, decode_notes
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import PeerId
from kvferry.core.transport.copies import Copies

TABLE = Region(address=1 << 40, nbytes=1 << 20)
PLENTY = 1 << 20


def copies_of(read: Read) -> Copies:
    """Return a read's copies, which slot reads write out."""
    copies = read.build()
    assert isinstance(copies, Copies)
    return copies


def release(number: int, engine: str = "decode") -> Release:
    what: dict[str, Any] = {"incarnation": number, "slot": number, "generation": number + 1}
    return Release(**what, engine=engine, rank=0, expected=1)


class PeerStub:
    """The attributes of a ``Peer`` that slot reads use."""

    def __init__(self, ids: dict[int, PeerId]) -> None:
        self.connections = ids
        self.connected = bool(ids)
        self.payloads: Any = [SimpleNamespace(slots=TABLE)] * 4

    def gone(self) -> PeerLostError:
        return PeerLostError("gone")


class TransfersStub:
    """``Transfers`` that collects reads; the test ends them."""

    def __init__(self) -> None:
        self.reads: list[Read] = []

    def add(self, read: Read) -> None:
        self.reads.append(read)

    def end(self, index: int, error: KVFerryError | None = None, seconds: float = 0.5) -> None:
        read = self.reads[index]
        read.seconds = seconds
        if error is None:
            read.landed(read)
        else:
            read.lost(error)


class SlotReadsHarness:
    """``SlotReads`` with their scratch memory, and what was reported of each read."""

    def __init__(self, scratch: int = 256) -> None:
        self.scratch = ScratchWords(scratch)
        self.reads = SlotReads(self.scratch, ErrorContainment())
        self.queue = TransfersStub()
        self.landed: list[tuple[Any, int, float]] = []
        self.lost: list[tuple[Any, KVFerryError]] = []

    def add(
        self, tag: object, peer: PeerStub, rank: int = 0, slot: int = 0, note: Note | None = None
    ) -> None:
        read = SlotRead(
            tag=tag,
            peer=peer,  # type: ignore[arg-type]
            rank=rank,
            table=TABLE,
            slot=slot,
            note=note,
            landed=lambda value, seconds: self.landed.append((tag, value, seconds)),
            lost=lambda error: self.lost.append((tag, error)),
        )
        self.reads.add(read)

    def post(self, max_notification: int = PLENTY) -> list[Read]:
        known = len(self.queue.reads)
        self.reads.post(self.queue, max_notification)  # type: ignore[arg-type]
        return self.queue.reads[known:]

    def write(self, read: Read, values: Sequence[int]) -> None:
        """Write values into a batch's scratch words, as a driver would."""
        for address, value in zip(copies_of(read).local.tolist(), values, strict=True):
            self.scratch._words[(address - self.scratch.region.address) // WORD_BYTES] = value


# Scratch words and the slot table.


def test_a_scratch_word_is_cleared_when_it_is_taken() -> None:
    """Otherwise the word of an earlier valid fence would make a fence valid that never landed."""
    scratch = ScratchWords(1)
    index = scratch.take()
    scratch._words[index] = 77
    assert scratch.give_back(index) == 77
    assert scratch.take() == index
    assert scratch.give_back(index) == NOTHING


def test_a_slot_table_has_a_word_per_slot_and_at_least_one() -> None:
    assert (len(SlotTable(0).words), len(SlotTable(5).words)) == (1, 5)
    table = SlotTable(3)
    table.words[1] = (1 << 64) - 1
    assert table.words.tolist() == [0, (1 << 64) - 1, 0]
    assert table.watermarks.tolist() == [0, 0, 0]


RENEWAL = Renewal(incarnation=1, slot=7, generation=1, engine="decode", life=5)


# Batches.


def test_slot_reads_with_the_same_rank_and_kind_of_note_share_a_batch() -> None:
    harness, peer = SlotReadsHarness(), PeerStub({0: PeerId(5), 1: PeerId(6)})
    for slot in (3, 9):
        harness.add(f"a{slot}", peer, slot=slot, note=release(slot))
    harness.add("b", peer, rank=1, slot=4, note=release(4))
    harness.add("check", peer, slot=8)
    harness.add("renew", peer, slot=7, note=RENEWAL)
    assert len(harness.reads) == 5
    reads = harness.post()
    assert len(harness.reads) == 0
    assert [read.connection for read in reads] == [5, 6, 5, 5]
    assert [read.tags for read in reads] == [{"a3", "a9"}, {"b"}, {"check"}, {"renew"}]
    assert all(read.urgent for read in reads)
    assert reads[0].notify is not None
    assert decode_notes(reads[0].notify) == [release(3), release(9)]
    assert [read.notify is None for read in reads] == [False, False, True, False]
    copies = copies_of(reads[0])
    assert [each - TABLE.address for each in copies.remote.tolist()] == [24, 72]
    assert copies.nbytes.tolist() == [8, 8]
    harness.write(reads[0], [70, 71])
    harness.queue.end(0, seconds=0.25)
    assert harness.landed == [("a3", 70, 0.25), ("a9", 71, 0.25)]
    assert harness.scratch.free == 256 - 3


def test_a_failed_batch_fails_all_its_reads_and_frees_their_scratch_words() -> None:
    harness, peer = SlotReadsHarness(), PeerStub({0: PeerId(5)})
    for tag in ("a", "b"):
        harness.add(tag, peer)
    harness.post()
    error = TransportError("out")
    assert harness.scratch.free == 254, "the words may still be written"
    harness.queue.end(0, error)
    assert harness.lost == [("a", error), ("b", error)]
    assert not harness.landed
    assert harness.scratch.free == 256


@pytest.mark.parametrize("note", [None, release(1)])
def test_the_size_of_a_batch_is_limited(note: Note | None) -> None:
    harness, peer = SlotReadsHarness(), PeerStub({0: PeerId(5)})
    for number in range(2 * MAX_BATCH + 1):
        harness.add(number, peer, note=note)
    assert [len(read.tags) for read in harness.post()] == [MAX_BATCH, MAX_BATCH, 1]


def test_reads_wait_until_there_are_enough_scratch_words() -> None:
    harness, peer = SlotReadsHarness(scratch=2), PeerStub({0: PeerId(5)})
    for slot in range(3):
        harness.add(f"a{slot}", peer, slot=slot)
    assert harness.post() == []
    assert len(harness.reads) == 3
    harness.reads.remove("a0")
    [read] = harness.post()
    assert read.tags == {"a1", "a2"}
    harness.add("b", peer)
    assert harness.post() == []
    harness.queue.end(0)
    [read] = harness.post()
    assert read.tags == {"b"}
    assert harness.post() == []


def test_a_callback_that_raises_loses_only_its_own_read() -> None:
    harness, peer = SlotReadsHarness(), PeerStub({0: PeerId(5)})
    lost: list[KVFerryError] = []

    def fails(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    harness.add("a", peer)
    harness.reads.add(
        SlotRead(
            tag="b", peer=peer, rank=0, table=TABLE, slot=1, note=None,  # type: ignore[arg-type]
            landed=fails, lost=lost.append,
        )
    )  # fmt: skip
    harness.add("c", peer)
    harness.post()
    harness.queue.end(0)
    assert [tag for tag, *_ in harness.landed] == ["a", "c"]
    assert [str(error) for error in lost] == ["unexpected ZeroDivisionError: a bug"]


def test_a_batch_whose_notes_cannot_be_encoded_is_lost_alone() -> None:
    harness, peer = SlotReadsHarness(), PeerStub({0: PeerId(5), 1: PeerId(6)})
    harness.add("a", peer, note=release(1 << 70))  # too large an integer to encode
    harness.add("b", peer, rank=1, note=release(1))
    [read] = harness.post()
    assert read.tags == {"b"}
    assert [tag for tag, _ in harness.lost] == ["a"]


# Notifications.


def test_a_note_too_large_for_a_notification_is_sent_alone() -> None:
    """The driver refuses it, and the hold ends with its lease."""
    notes = [release(1, "x" * 500), release(2, "y" * 500)]
    assert list(fitting(notes, 100)) == [[note] for note in notes]


NOTES = st.builds(release, st.integers(0, 1 << 60), st.text(max_size=40))


@given(st.lists(NOTES, max_size=150), st.integers(400, 5000))
@settings(deadline=None, max_examples=25)
def test_every_note_is_sent_once_in_order_and_fits(notes: list[Release], limit: int) -> None:
    parts = list(fitting(notes, limit))
    assert [note for part in parts for note in part] == notes
    assert all(len(encode(part)) <= limit and len(part) <= MAX_BATCH for part in parts)


ADDS = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 9), st.booleans())


@given(st.lists(ADDS, max_size=100), st.sets(st.integers(0, 99)), st.data())
@settings(deadline=None, max_examples=25)
def test_every_read_is_reported_once(
    adds: list[tuple[int, int, int, bool]], removed: set[int], data: st.DataObject
) -> None:
    """It lands with its own word, is lost or was removed; all scratch words are free in the end."""
    harness = SlotReadsHarness(scratch=70)
    peers = [
        PeerStub({0: PeerId(1), 1: PeerId(2)}),
        PeerStub({0: PeerId(3), 1: PeerId(4)}),
        PeerStub({}),
    ]
    for tag, (peer, rank, slot, has_note) in enumerate(adds):
        harness.add(tag, peers[peer], rank, slot, release(tag) if has_note else None)
    taken = {tag for tag in removed if harness.reads.remove(tag)}
    assert taken == {tag for tag in removed if tag < len(adds)}
    ended = 0
    for _ in range(len(adds) + 1):
        harness.post(data.draw(st.integers(300, 3000)))
        while ended < len(harness.queue.reads):
            read = harness.queue.reads[ended]
            slots = [
                (each - TABLE.address) // WORD_BYTES for each in copies_of(read).remote.tolist()
            ]
            harness.write(read, [slot + 1 for slot in slots])
            harness.queue.end(ended, TransportError("out") if data.draw(st.booleans()) else None)
            ended += 1
    reported = [tag for tag, *_ in harness.landed] + [tag for tag, _ in harness.lost]
    assert sorted(reported) == sorted(set(range(len(adds))) - taken)
    assert all(value == adds[tag][2] + 1 for tag, value, _ in harness.landed)
    assert harness.scratch.free == 70
