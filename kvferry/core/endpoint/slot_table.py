"""The memory of the fence: this rank's slot table, and scratch words for peers' slot words."""

from __future__ import annotations

import numpy as np

from kvferry.core.lifecycle.holds import NOTHING
from kvferry.core.memory import Region, region_of
from kvferry.core.messages import WORD_BYTES
from kvferry.core.security.proof import FINGERPRINT_BYTES

SCRATCH_WORDS = 1 << 12
HEADER_WORDS = FINGERPRINT_BYTES // WORD_BYTES


class SlotTable:
    """One word per slot, in CPU memory that peers read one-sidedly.

    Before the words stands a header: the fingerprint of the key that proves the engine's tickets,
    or zeros. Owns its memory, which stays where it is for the table's life.

    Attributes:
        region: the words of the slots.
        header: the words of the fingerprint.
    """

    def __init__(self, slots: int) -> None:
        memory = np.zeros(HEADER_WORDS + max(slots, 1), dtype=np.uint64)
        self._header, self._words = memory[:HEADER_WORDS], memory[HEADER_WORDS:]
        self.region: Region = region_of(self._words)
        self.header: Region = region_of(self._header)

    def bear(self, fingerprint: bytes) -> None:
        """Write a fingerprint into the header."""
        self._header[:] = np.frombuffer(fingerprint, dtype="<u8")

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, slot: int) -> int:
        return int(self._words[slot])

    def __setitem__(self, slot: int, word: int) -> None:
        self._words[slot] = word  # one aligned 8-byte store: a peer sees the old or the new word


class ScratchWords:
    """Words that reads of peers' slot words land in; taken and given back by index."""

    def __init__(self, words: int = SCRATCH_WORDS) -> None:
        self._words = np.full(words, NOTHING, dtype=np.uint64)
        self._free = list(range(words))
        self.region: Region = region_of(self._words)

    @property
    def free(self) -> int:
        """How many words can be taken now."""
        return len(self._free)

    def take(self) -> int:
        """A word of our own, cleared, so that a read that never lands never looks valid."""
        index = self._free.pop()
        self._words[index] = NOTHING
        return index

    def give_back(self, index: int) -> int:
        """The word's value; the word is free again. Only when its read is final."""
        self._free.append(index)
        return int(self._words[index])

    def address(self, index: int) -> int:
        """Where the word lies."""
        return self.region.address + index * WORD_BYTES
