"""The producer half of an endpoint: the slot table, and the messages that renew and end holds.

A hold stands for a request's pages that another engine will read; a word in the slot table says
whether the pages are still held. ``HoldServer`` passes the scheduler's decisions and the consumers'
messages to ``WorkerHolds``, which decides when each hold ends.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core.endpoint.log_messages import ExpiredHolds
from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import WireError
from kvferry.core.lifecycle.holds import EndedHold, Hold, Incarnation
from kvferry.core.lifecycle.reclamation import GONE_SECONDS, MAX_SILENT, Silence
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.worker_holds import NoteOutcome, WorkerHolds
from kvferry.core.memory import Region, region_of
from kvferry.core.messages import WORD_BYTES, Heartbeat, Note, Renewal, decode_notes
from kvferry.core.metrics import IGNORED, LATE, Metrics
from kvferry.core.security.proof import FINGERPRINT_BYTES
from kvferry.core.transport import Notification

logger = logging.getLogger(__name__)

SILENT_PART = 0.5
"""Where no consumer was heard for this part of a lease, consumers are missing, not time: one that
waits for a hold is heard at least three times in a lease."""

FINGERPRINT_WORDS = FINGERPRINT_BYTES // WORD_BYTES
"""Number of 8-byte words of a fingerprint."""


class WordArray:
    """8-byte words in CPU memory that peers read one-sidedly; the memory belongs to the caller.

    Args:
        words: the memory, (n,) uint64.

    Attributes:
        region: that memory.
    """

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._words = words
        self.region: Region = region_of(words)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, slot: int) -> int:
        return int(self._words[slot])

    def __setitem__(self, slot: int, word: int) -> None:
        self._words[slot] = word  # one aligned 8-byte store: a peer sees the old or the new word


class SlotTable(WordArray):
    """One 8-byte word per slot, in CPU memory that peers read one-sidedly.

    In front of the words is a header with the fingerprint of the key that proves the engine's
    tickets; the header is zero until ``write_fingerprint`` is called. Behind the words are as many
    watermarks, which say how far the pages of a request are computed. The table owns its memory,
    whose address never changes.

    Args:
        slots: number of slots.

    Attributes:
        region: the memory of the slot words.
        header: the memory of the fingerprint.
        watermarks: the watermarks.
    """

    def __init__(self, slots: int) -> None:
        slots = max(slots, 1)
        memory = np.zeros(FINGERPRINT_WORDS + 2 * slots, dtype=np.uint64)
        super().__init__(memory[FINGERPRINT_WORDS:-slots])
        self._header = memory[:FINGERPRINT_WORDS]
        self.header: Region = region_of(self._header)
        self.watermarks = WordArray(memory[-slots:])

    def write_fingerprint(self, fingerprint: bytes) -> None:
        """Write a fingerprint of ``FINGERPRINT_BYTES`` into the header."""
        self._header[:] = np.frombuffer(fingerprint, dtype="<u8")


@dataclass(slots=True, kw_only=True)
class _ComputingHold:
    """A hold whose pages the device has not finished computing.

    Attributes:
        hold: the hold, which becomes ready when ``passed`` returns ``True``.
        tokens: the number of first tokens whose pages are computed then; ``None`` if it is all, so
            that the hold becomes ready.
        passed: returns whether the device has finished all work that fills the pages.
        has_failed: whether ``passed`` has raised before; only the first exception is logged.
    """

    hold: Hold
    passed: Callable[[], bool]
    tokens: int | None = None
    has_failed: bool = False

    def has_passed(self) -> bool:
        """Return whether the device has finished the work; ``False`` if ``passed`` raises.

        If ``passed`` always raises, the hold never becomes ready, and ends when its lease expires.
        """
        try:
            return self.passed()
        except Exception:  # a device library may raise any type
            if not self.has_failed:
                logger.exception(
                    "cannot tell whether the work for %s has passed (stage held, cause device): "
                    "nobody may read its pages, and its lease ends it",
                    self.hold,
                )
            self.has_failed = True
            return False


class HoldServer:
    """Keep the holds of one rank, and let consumers renew and end them.

    Thread-safe: the engine's threads pass the scheduler's decisions and ask for results, and the
    endpoint's thread does everything else.

    Args:
        table: the slot table, which peers read.
        incarnation: the random number that identifies this start of the engine.
        clock: seconds, monotonic.
        metrics: counts messages that came too late or fit no hold.
    """

    def __init__(
        self,
        table: SlotTable,
        incarnation: Incarnation,
        clock: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        self._holds = WorkerHolds(table, incarnation, table.watermarks)
        self._clock = clock
        self._metrics = metrics
        self._computing: list[_ComputingHold] = []
        self._listened = clock()
        """All messages that had arrived from consumers by this time have been processed."""
        self._heard = clock()
        """When a message of a consumer was last processed; before the first, when this was made."""
        self._gap = 0.0
        """For how long no consumer was heard before the last end of a long silence, in seconds."""
        self._gap_ended = -math.inf
        """When that silence ended."""
        self._lease = 0.0
        """The lease of the latest hold with a ticket, in seconds."""
        self._lock = threading.Lock()
        self._expired = ExpiredHolds()

    @property
    def held(self) -> int:
        """Return the number of holds that have not ended."""
        with self._lock:
            return self._holds.held

    @property
    def is_awaited(self) -> bool:
        """Return whether consumers may wait for what ``tick`` does, or send messages about holds.

        That is so while a hold has a ticket, or pages wait for the device. A request that is still
        computed needs nothing: what consumers may say of it meanwhile can wait for its ticket.
        """
        with self._lock:
            return bool(self._holds.ticketed or self._computing)

    def apply(self, orders: HoldOrders, passed: Callable[[], bool] | None) -> None:
        """Begin, mark as ready, and end holds, as the engine's scheduler has decided.

        When this method returns, the slot words of all holds that begin or end are written.

        Args:
            orders: the scheduler's decisions.
            passed: returns whether the device has finished all work that fills the pages of
                ``orders.ready`` and of ``orders.watermarks``; polled by ``tick``. ``None`` if the
                device has finished already.
        """
        marks: list[tuple[Hold, int | None]] = [*orders.watermarks]
        marks += [(hold, None) for hold, _ in orders.ready]
        with self._lock:
            self._lease = max((lease for _, lease in orders.ready), default=self._lease)
            self._holds.apply(orders, self._clock())
            for hold, tokens in marks:
                if passed is None:
                    self._computed(hold, tokens)
                else:
                    one = _ComputingHold(hold=hold, passed=passed, tokens=tokens)
                    self._computing.append(one)

    def _computed(self, hold: Hold, tokens: int | None) -> None:
        """Write that a hold's pages are computed.

        Args:
            hold: the hold.
            tokens: of how many first tokens; ``None`` for all, so that the hold becomes ready.
        """
        if tokens is None:
            self._holds.ready(hold, self._clock())
        else:
            self._holds.mark(hold, tokens)

    def hear(self, notifications: Iterable[Notification]) -> None:
        """Process messages from consumers; malformed messages are logged and dropped."""
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
                self._note_gap(self._clock())
                for note in notes:
                    self._take(note)

    def listened(self, until: float) -> None:
        """Record that all consumers' messages that had arrived by some time are processed.

        ``silent`` does not count the time after that as silence.

        Args:
            until: that time, in seconds, on this object's clock.
        """
        with self._lock:
            self._listened = until

    def tick(self) -> None:
        """Mark holds as ready whose pages are computed, and end holds whose lease has expired."""
        with self._lock:
            now = self._clock()
            computing = []
            for one in self._computing:
                if one.hold not in self._holds:
                    continue
                if one.has_passed():
                    self._computed(one.hold, one.tokens)
                else:
                    computing.append(one)
            self._computing = computing
            expired = self._holds.expire(now)
            silence = self._silence(now)
        self._expired.add(expired, now, silence=silence)

    def silent(self) -> list[Silence]:
        """Return the holds whose consumers gave no sign of life for ``GONE_SECONDS``.

        Only holds with a ticket are returned. The time since this rank last processed messages is
        not counted, so that a rank that hangs does not take its consumers for gone.

        Returns:
            At most ``MAX_SILENT`` holds, the longest silent first.
        """
        with self._lock:
            return self._holds.silent(self._listened, GONE_SECONDS, MAX_SILENT)

    def take_ended(self) -> list[EndedHold]:
        """Return the holds that have ended since the last call.

        Only holds for which a ticket was made count.
        """
        with self._lock:
            return self._holds.take_ended()

    def close(self) -> None:
        """End all holds, and clear their slot words.

        A consumer that reads such a word after the pages (its fence) does not use the pages.
        """
        with self._lock:
            self._holds.end_all()
        self._expired.close()

    def _note_gap(self, now: float) -> None:
        """Record that a consumer is heard, and the silence before it if that was long."""
        silence, self._heard = now - self._heard, now
        if silence >= SILENT_PART * self._lease:
            self._gap, self._gap_ended = silence, now

    def _silence(self, now: float) -> float | None:
        """Return for how many seconds no consumer was heard during leases that expire now.

        ``None`` if consumers were heard, so that only the requests themselves were late. A silence
        counts also if it has ended, when a consumer that was gone is back; but not if it ended when
        the leases had just begun, since consumers without requests are silent.
        """
        silence = now - self._heard
        if silence >= SILENT_PART * self._lease:
            return silence
        overlaps = self._gap_ended - (now - self._lease) >= GONE_SECONDS
        return self._gap if overlaps else None

    def _take(self, note: Note) -> None:
        """Process a consumer's message.

        Metrics count "done" and "abandon" messages that come too late or fit no hold.
        """
        if isinstance(note, Renewal):
            self._holds.renew(note, self._clock())  # the consumer sees the outcome in the slot word
            return
        if isinstance(note, Heartbeat):
            # UNKNOWN is not counted: the last claim of the engine may have ended just now.
            self._holds.heartbeat(note, self._clock())
            return
        verdict = self._holds.release(note)
        if verdict is NoteOutcome.LATE:
            self._metrics.add(LATE)
        elif verdict is NoteOutcome.UNKNOWN:
            self._metrics.add(IGNORED)
