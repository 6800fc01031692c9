"""Fingerprints in the memory of producers: whether it is theirs that their payloads name.

Whoever listens at an address may serve the payloads of another engine with a key of his own. The
engine whose memory they name bears the fingerprint of its own key there, in front of its slot
table, so it is read once per connection, before anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.core.endpoint.peers import Peer
from kvferry.core.endpoint.slot_reads import SlotRead, SlotReads
from kvferry.core.endpoint.slot_table import HEADER_WORDS
from kvferry.core.errors import DeadlineError, HandshakeError, KVFerryError
from kvferry.core.messages import WORD_BYTES
from kvferry.core.security.proof import fingerprint

Heard = Callable[[KVFerryError | None], None]


@dataclass(slots=True, kw_only=True, eq=False)
class _Check:
    peer: Peer
    heard: Heard
    deadline: float
    words: dict[tuple[int, int], int] = field(default_factory=dict)
    """By producer rank and index, as they arrive."""


class FingerprintReads:
    """Checks of fingerprints under way. Used by the endpoint's thread only.

    Args:
        words: makes the reads.
        clock: seconds, monotonic.
        patience: seconds after which a check fails.
        failing: called with peer and rank when it is known that a read will fail, and it is not yet
            quiet; the check is over then.
    """

    def __init__(
        self,
        words: SlotReads,
        *,
        clock: Callable[[], float],
        patience: float,
        failing: Callable[[Peer, int, KVFerryError], None],
    ) -> None:
        self._words = words
        self._clock = clock
        self._patience = patience
        self._failing = failing
        self._checks: set[_Check] = set()

    def check(self, peer: Peer, heard: Heard) -> None:
        """Read the fingerprint of every rank of a peer that is connected.

        Args:
            peer: all of whose ranks say where it is.
            heard: called once, with ``None`` if it is that of the peer's key everywhere. Otherwise
                the peer is to be given up, which ends the reads that go on unless others use its
                connections.
        """
        check = _Check(peer=peer, heard=heard, deadline=self._clock() + self._patience)
        self._checks.add(check)
        if not peer.ids:
            self._end(check, None)
        for rank in peer.ids:
            for index in range(HEADER_WORDS):
                self._words.add(self._read(check, rank, index))

    def progress(self, now: float) -> None:
        """End what takes too long."""
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
        if len(check.words) == len(check.peer.ids) * HEADER_WORDS:
            self._end(check, _problem(check.peer, check.words))

    def _end(self, check: _Check, error: KVFerryError | None) -> None:
        """End a check, if it is not over; what is not posted is not read any more."""
        if check in self._checks:
            self._checks.remove(check)
            self._words.remove(check)
            check.heard(error)


def _problem(peer: Peer, words: dict[tuple[int, int], int]) -> HandshakeError | None:
    """Return why a peer is refused that has these words in its memory."""
    expected = fingerprint(peer.ticket_key)
    for rank in peer.ids:
        found = b"".join(
            words[rank, index].to_bytes(WORD_BYTES, "little") for index in range(HEADER_WORDS)
        )
        if found != expected:
            return HandshakeError(
                f"engine {peer.key.engine!r} at {peer.key.host} port {peer.key.port} answers with "
                f"the payloads of another: the memory that rank {rank} names bears the fingerprint "
                f"{found.hex()}, and that of the key which it publishes is {expected.hex()}. It "
                "relays another engine, or that engine has not run its first step"
            )
    return None
