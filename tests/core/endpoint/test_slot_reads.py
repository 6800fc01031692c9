"""``SlotReads``: reads of slot words in batches whose notes fit into a notification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.driver_calls.error_containment import ErrorContainment
from kvferry.core.driver_calls.transfers import Read
from kvferry.core.endpoint.slot_reads import MAX_BATCH, SlotRead, SlotReads, fitting
from kvferry.core.errors import KVFerryError, PeerLostError, TransportError
from kvferry.core.lifecycle.holds import NOTHING
from kvferry.core.memory import Region
from kvferry.core.messages import WORD_BYTES, Note, Release, Renewal, decode_notes
from kvferry.core.side_channel_messages import encode
from kvferry.core.slot_words import ScratchWords
from kvferry.core.transport import PeerId
from kvferry.core.transport.copies import Copies

TABLE = Region(address=1 << 40, nbytes=1 << 20)
PLENTY = 1 << 20


def copies_of(read: Read) -> Copies:
    copies = read.build()
    assert isinstance(copies, Copies)
    return copies


def slots_of(read: Read) -> list[int]:
    return [(each - TABLE.address) // WORD_BYTES for each in copies_of(read).remote.tolist()]


def release(number: int, engine: str = "decode") -> Release:
    what: dict[str, Any] = {"incarnation": number, "slot": number, "generation": number + 1}
    return Release(**what, engine=engine, rank=0, expected=1)


class PeerStub:
    """The attributes of a ``Peer`` that slot reads use."""

    def __init__(self, ids: dict[int, PeerId]) -> None:
        self.connections, self.connected = ids, bool(ids)

    def gone(self) -> PeerLostError:
        return PeerLostError("gone")


PEER = PeerStub({0: PeerId(5), 1: PeerId(6)})


class SlotReadsHarness:
    """``SlotReads`` with their scratch memory, and what was reported of each read.

    It is the ``Transfers`` to which they are posted, too: the test ends them.
    """

    def __init__(self, scratch: int = 256) -> None:
        self.scratch = ScratchWords(scratch)
        self.reads = SlotReads(self.scratch, ErrorContainment())
        self.posted: list[Read] = []
        self.landed: list[tuple[Any, int, float]] = []
        self.lost: list[tuple[Any, KVFerryError]] = []

    def add_read(
        self, tag: object, peer: PeerStub = PEER, rank: int = 0, slot: int = 0, **how: Any
    ) -> None:
        stub: Any = peer
        calls = {
            "landed": lambda value, seconds: self.landed.append((tag, value, seconds)),
            "lost": lambda error: self.lost.append((tag, error)),
        }
        self.reads.add(
            SlotRead(tag=tag, peer=stub, rank=rank, table=TABLE, slot=slot, **calls | how)
        )

    def add(self, read: Read) -> None:
        self.posted.append(read)

    def post(self, max_notification: int = PLENTY) -> list[Read]:
        known, transfers = len(self.posted), self
        self.reads.post(transfers, max_notification)  # type: ignore[arg-type]
        return self.posted[known:]

    def land(self, read: Read, values: Sequence[int] = ()) -> None:
        """Write values into a batch's scratch words, as a driver would, and end it."""
        for address, value in zip(copies_of(read).local.tolist(), values, strict=False):
            self.scratch._words[(address - self.scratch.region.address) // WORD_BYTES] = value
        read.seconds = 0.25
        read.landed(read)


def test_a_scratch_word_is_cleared_when_it_is_taken() -> None:
    """Otherwise the word of an earlier valid fence would make a fence valid that never landed."""
    scratch = ScratchWords(1)
    index = scratch.take()
    scratch._words[index] = 77
    assert scratch.give_back(index) == 77
    assert scratch.take() == index
    assert scratch.give_back(index) == NOTHING


def test_slot_reads_with_the_same_rank_and_kind_of_note_share_a_batch() -> None:
    harness = SlotReadsHarness()
    renewal = Renewal(incarnation=1, slot=7, generation=1, engine="decode", life=5)
    for slot in (3, 9):
        harness.add_read(f"a{slot}", slot=slot, note=release(slot))
    harness.add_read("b", rank=1, slot=4, note=release(4))
    harness.add_read("check", slot=8)
    harness.add_read("renew", slot=7, note=renewal)
    reads = harness.post()
    assert len(harness.reads) == 0
    assert [read.connection for read in reads] == [5, 6, 5, 5]
    assert [read.tags for read in reads] == [{"a3", "a9"}, {"b"}, {"check"}, {"renew"}]
    assert all(read.urgent for read in reads)
    notes = [decode_notes(read.notify) if read.notify else None for read in reads]
    assert notes == [[release(3), release(9)], [release(4)], None, [renewal]]
    assert slots_of(reads[0]) == [3, 9]
    assert copies_of(reads[0]).nbytes.tolist() == [8, 8]
    harness.land(reads[0], [70, 71])
    assert harness.landed == [("a3", 70, 0.25), ("a9", 71, 0.25)]
    assert harness.scratch.free == 256 - 3


@pytest.mark.parametrize("note", [None, release(1)])
def test_batches_are_limited_and_wait_for_scratch_words(note: Note | None) -> None:
    harness = SlotReadsHarness(scratch=2 * MAX_BATCH)
    for number in range(2 * MAX_BATCH + 2):
        harness.add_read(number, note=note)
    assert [len(read.tags) for read in harness.post()] == [MAX_BATCH, MAX_BATCH]
    assert harness.post() == []
    assert len(harness.reads) == 2
    assert harness.reads.remove(2 * MAX_BATCH)
    harness.land(harness.posted[0])
    assert [read.tags for read in harness.post()] == [{2 * MAX_BATCH + 1}]


NOTES = st.builds(release, st.integers(0, 1 << 60), st.text(max_size=40))


@given(st.lists(NOTES, max_size=150), st.integers(400, 5000))
@settings(max_examples=15)
def test_every_note_is_sent_once_in_order_and_fits(notes: list[Release], limit: int) -> None:
    """Or alone, if it is too large: the driver refuses it, and the hold ends with its lease."""
    parts = list(fitting(notes, limit))
    assert [note for part in parts for note in part] == notes
    assert all(len(encode(part)) <= limit and len(part) <= MAX_BATCH for part in parts)
    assert list(fitting(notes, 50)) == [[note] for note in notes]


ADDS = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 9), st.booleans())


@given(st.lists(ADDS, max_size=100), st.sets(st.integers(0, 99)), st.data())
@settings(max_examples=25)
def test_every_read_is_reported_once(
    adds: list[tuple[int, int, int, bool]], removed: set[int], data: st.DataObject
) -> None:
    """It lands with its own word, is lost or was removed; all scratch words are free in the end."""
    harness = SlotReadsHarness(scratch=70)
    peers = [PEER, PeerStub({0: PeerId(3), 1: PeerId(4)}), PeerStub({})]
    for tag, (peer, rank, slot, has_note) in enumerate(adds):
        note = release(tag) if has_note else None
        harness.add_read(tag, peers[peer], rank, slot, note=note)
    taken = {tag for tag in removed if harness.reads.remove(tag)}
    assert taken == {tag for tag in removed if tag < len(adds)}
    for _ in range(len(adds) + 1):
        for read in harness.post(data.draw(st.integers(300, 3000))):
            if data.draw(st.booleans()):
                read.lost(TransportError("out"))
            else:
                harness.land(read, [slot + 1 for slot in slots_of(read)])
    reported = [tag for tag, *_ in harness.landed] + [tag for tag, _ in harness.lost]
    assert sorted(reported) == sorted(set(range(len(adds))) - taken)
    assert all(value == adds[tag][2] + 1 for tag, value, _ in harness.landed)
    assert harness.scratch.free == 70
