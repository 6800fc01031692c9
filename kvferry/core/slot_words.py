"""The 8-byte words of a rank that say whether pages stand, and those that peers' are read into."""

from __future__ import annotations

import numpy as np

from kvferry.core.lifecycle.holds import NOTHING
from kvferry.core.memory import Region, region_of
from kvferry.core.messages import FINGERPRINT_WORDS

SCRATCH_WORDS = 1 << 12
"""The most slot words whose reads are under way at once."""


class SlotTable:
    """8-byte words in CPU memory that peers read one-sidedly; it is never moved.

    A word is written by one aligned store, so that a peer sees the old or the new word.
    """

    def __init__(self, slots: int) -> None:
        slots = max(slots, 1)
        memory = np.zeros(FINGERPRINT_WORDS + 2 * slots, dtype=np.uint64)
        self.header = memory[:FINGERPRINT_WORDS]
        """The fingerprint of the key that proves tickets; 0 until written."""
        self.words = memory[FINGERPRINT_WORDS:-slots]
        """For each slot, whether its hold stands."""
        self.watermarks = memory[-slots:]
        """For each slot, how far the request's pages are computed."""

    @property
    def regions(self) -> tuple[Region, Region, Region]:
        """Return the memory of words, header and watermarks."""
        return region_of(self.words), region_of(self.header), region_of(self.watermarks)

    def write_fingerprint(self, fingerprint: bytes) -> None:
        """Write a fingerprint of ``FINGERPRINT_BYTES`` into the header."""
        self.header[:] = np.frombuffer(fingerprint, dtype="<u8")


class ScratchWords:
    """Own the local 8-byte words that slot words are read into; ``region`` is their memory."""

    def __init__(self, words: int = SCRATCH_WORDS) -> None:
        self._words = np.full(words, NOTHING, dtype=np.uint64)
        self._free = list(range(words))
        self.region: Region = region_of(self._words)

    @property
    def free(self) -> int:
        """Return the number of words that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        """Return the index of a free word, of which there must be one, until ``give_back``."""
        # A word that is never read into must look like a slot without a hold.
        index = self._free.pop()
        self._words[index] = NOTHING
        return index

    def give_back(self, index: int) -> int:
        """Free a word whose read has ended, and return its value."""
        self._free.append(index)
        return int(self._words[index])
