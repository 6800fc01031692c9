"""The producer half of an endpoint: the slot table and the messages that end holds.

Called from the engine's thread (orders) and the endpoint's (everything else); a lock serialises.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import WireError
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId
from kvferry.core.lifecycle.reclamation import GONE_SECONDS, MAX_SILENT, Silence
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.worker_holds import NoteOutcome, WorkerHolds
from kvferry.core.memory import Region, region_of
from kvferry.core.messages import WORD_BYTES, Heartbeat, Note, Renewal, decode_notes
from kvferry.core.metrics import EXPIRED, IGNORED, LATE, Metrics
from kvferry.core.security.proof import FINGERPRINT_BYTES
from kvferry.core.transport import Notification

logger = logging.getLogger(__name__)

FINGERPRINT_WORDS = FINGERPRINT_BYTES // WORD_BYTES


class SlotTable:
    """One word per slot, in CPU memory that peers read one-sidedly.

    Before the words stands a header: the fingerprint of the key that proves the engine's tickets,
    or zeros. Owns its memory, which stays where it is for the table's life.

    Attributes:
        region: the words of the slots.
        header: the words of the fingerprint.
    """

    def __init__(self, slots: int) -> None:
        memory = np.zeros(FINGERPRINT_WORDS + max(slots, 1), dtype=np.uint64)
        self._header, self._words = memory[:FINGERPRINT_WORDS], memory[FINGERPRINT_WORDS:]
        self.region: Region = region_of(self._words)
        self.header: Region = region_of(self._header)

    def write_fingerprint(self, fingerprint: bytes) -> None:
        """Write a fingerprint into the header."""
        self._header[:] = np.frombuffer(fingerprint, dtype="<u8")

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, slot: int) -> int:
        return int(self._words[slot])

    def __setitem__(self, slot: int, word: int) -> None:
        self._words[slot] = word  # one aligned 8-byte store: a peer sees the old or the new word


@dataclass(slots=True, kw_only=True)
class _ComputingHold:
    """A hold that is ready once the device has passed all its work."""

    hold: Hold
    passed: Callable[[], bool]
    has_failed: bool = False

    def has_passed(self) -> bool:
        """Whether the device says so; one that fails to answer has not, and is complained of once.

        The hold stays unready then, until its lease ends it.
        """
        try:
            return self.passed()
        except Exception:  # a device library's own, of any type
            if not self.has_failed:
                logger.exception(
                    "cannot tell whether the work for %s has passed (stage held, cause device): "
                    "nobody may read its pages, and its lease ends it",
                    self.hold,
                )
            self.has_failed = True
            return False


class HoldServer:
    """Holds of one rank, and who may end them."""

    def __init__(
        self,
        table: SlotTable,
        incarnation: Incarnation,
        clock: Callable[[], float],
        figures: Metrics,
    ) -> None:
        self._holds = WorkerHolds(table, incarnation)
        self._clock = clock
        self._metrics = figures
        self._computing: list[_ComputingHold] = []
        self._listened = clock()
        """Until when all that consumers said was heard."""
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """How many holds stand."""
        with self._lock:
            return self._holds.held

    def apply(self, orders: HoldOrders, passed: Callable[[], bool] | None) -> None:
        """Words of drops and take-ons are written before this returns."""
        with self._lock:
            self._holds.apply(orders, self._clock())
            for hold, _ in orders.ready:
                if passed is None:
                    self._holds.ready(hold, self._clock())
                else:
                    self._computing.append(_ComputingHold(hold=hold, passed=passed))

    def hear(self, notifications: Iterable[Notification]) -> None:
        """Messages from consumers; what is not one is dropped."""
        for notification in notifications:
            try:
                notes = decode_notes(notification.payload)
            except WireError as exc:
                logger.warning(
                    "a message of %s was dropped (stage release, cause malformed): %s; the leases "
                    "of what it was about end, and both engines should run the same kvferry",
                    on_one_line(notification.sender, 64),
                    on_one_line(str(exc)),
                )
                continue
            with self._lock:
                for note in notes:
                    self._take(note)

    def listened(self, until: float) -> None:
        """All that had arrived until then was heard, by the endpoint's clock."""
        with self._lock:
            self._listened = until

    def tick(self) -> None:
        """Pages that became ready, leases that are over."""
        with self._lock:
            now = self._clock()
            waiting = []
            for awaited in self._computing:
                if awaited.hold not in self._holds:
                    continue
                if awaited.has_passed():
                    self._holds.ready(awaited.hold, now)
                else:
                    waiting.append(awaited)
            self._computing = waiting
            expired = self._holds.expire(now)
            self._metrics.add(EXPIRED, len(expired))
        for request in expired:
            logger.warning(
                "request %s: nobody read its pages within the lease; they are given back (stage "
                "held, cause expired; if its client did not go away, let decode take it sooner, or "
                "set a longer kv_lease_duration)",
                on_one_line(request),
            )

    def silent(self) -> list[Silence]:
        """Ticketed holds whose consumer seems to be gone, the oldest first.

        Their ages are of when this rank last listened: who could not be heard is not gone.
        """
        with self._lock:
            return self._holds.silent(self._listened, GONE_SECONDS, MAX_SILENT)

    def take_sent(self) -> list[RequestId]:
        """Requests to report sent."""
        with self._lock:
            return self._holds.take_sent()

    def close(self) -> None:
        """Clear every word: no read that ends after this is valid."""
        with self._lock:
            self._holds.end_all()

    def _take(self, note: Note) -> None:
        if isinstance(note, Renewal):
            self._holds.renew(note, self._clock())  # the slot word says how it went
            return
        if isinstance(note, Heartbeat):
            self._holds.heartbeat(note, self._clock())  # an engine may have ended its last claim
            return
        verdict = self._holds.release(note)
        if verdict is NoteOutcome.LATE:
            self._metrics.add(LATE)
        elif verdict is NoteOutcome.UNKNOWN:
            self._metrics.add(IGNORED)
