"""The producer half of an endpoint: the slot table, and the messages that renew and end holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kvferry.core.endpoint.staging_copies import Passed, RunningCopies
from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import KVFerryError, WireError
from kvferry.core.lifecycle.holds import EndedHold, Hold, Incarnation, RequestId
from kvferry.core.lifecycle.leased_holds import LeasedHolds, ReleaseOutcome
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS, MAX_SILENT, Silence
from kvferry.core.messages import Heartbeat, Note, Renewal, decode_notes
from kvferry.core.metrics import IGNORED, LATE, CopyDirection, Metrics
from kvferry.core.slot_words import SlotTable
from kvferry.core.transport import Notification

logger = logging.getLogger(__name__)

NAMED_REQUESTS = 3
"""The most requests that a warning of expired leases names."""


@dataclass(slots=True, kw_only=True, eq=False)
class _DeviceWork:
    """Work of a step that fills holds' first tokens, or all, when ``passed`` returns ``True``."""

    passed: Passed
    marks: list[tuple[Hold, int | None]]
    has_failed: bool = False


class HoldServer:
    """Keep the holds of one rank, and let consumers renew and end them. Thread-safe."""

    def __init__(
        self,
        table: SlotTable,
        incarnation: Incarnation,
        clock: Callable[[], float],
        metrics: Metrics,
        copies: RunningCopies,
    ) -> None:
        self._holds = LeasedHolds(table.words, incarnation, table.watermarks)
        self._clock = clock
        self._metrics = metrics
        self._copies = copies
        self._device_works: list[_DeviceWork] = []
        self._listened = clock()
        """All messages that had arrived from consumers by this time have been processed."""
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Return the number of holds that have not ended."""
        with self._lock:
            return self._holds.held

    @property
    def is_awaited(self) -> bool:
        """Return whether consumers may wait: a hold has a ticket, or pages wait for the device."""
        with self._lock:
            return bool(self._device_works) or self._holds.has_tickets

    @property
    def waits_for_device(self) -> bool:
        """Return whether pages wait for the device's work of earlier steps."""
        return bool(self._device_works)

    def apply(self, orders: HoldOrders, passed: Passed | None) -> None:
        """Begin, mark as ready, and end holds; ``passed`` is as for ``Endpoint.apply``."""
        marks: list[tuple[Hold, int | None]] = [(ticket.hold, None) for ticket in orders.tickets]
        if not self._copies.is_staged:
            marks += orders.watermarks  # host pages have nothing before the ticket is made
        with self._lock:
            self._holds.apply(orders, self._clock())
            if passed is None:
                self._computed(marks)
            elif marks:
                self._device_works.append(_DeviceWork(passed=passed, marks=marks))

    def _computed(self, marks: Iterable[tuple[Hold, int | None]]) -> None:
        """Write that holds' first tokens are computed, or all, so that they are ready."""
        for hold, tokens in marks:
            if tokens is None:
                self._holds.ready(hold, self._clock())
            else:
                self._holds.mark(hold, tokens)

    def progress(self) -> bool:
        """Mark holds as ready whose pages are computed, or copy these; return whether any are."""
        with self._lock:
            waiting = [work for work in self._device_works if not self._is_over(work)]
            busy = len(waiting) < len(self._device_works)
            self._device_works = waiting
            tickets = self._holds.take_copies()
        for ticket in tickets:
            what = f"pages of request {on_one_line(ticket.request)}"
            ended = partial(self._on_copied, ticket)
            self._copies.begin(what, CopyDirection.TO_HOST, ticket.copy, ended)
        return busy or bool(tickets)

    def _is_over(self, work: _DeviceWork) -> bool:
        """Return whether work has passed, and say so, or its holds have all ended."""
        if not any(hold in self._holds for hold, _ in work.marks):
            return True
        try:
            has_passed = work.passed()
        except Exception:  # a device library may raise any type
            if not work.has_failed:
                logger.exception(
                    "cannot tell whether the work for %d holds has passed, the first %s (stage "
                    "held, cause device): nobody may read their pages, and their leases end them",
                    len(work.marks),
                    work.marks[0][0],
                )
            has_passed, work.has_failed = False, True
        if has_passed:
            self._computed(work.marks)
        elif work.has_failed:
            for hold, _ in work.marks:
                self._holds.failed(hold)  # of one with a copy, which does not begin
        return has_passed

    def _on_copied(self, ticket: NewTicket, error: KVFerryError | None) -> None:
        if error is not None:
            logger.warning(
                "request %s: its pages cannot be read by others, and its hold ends (stage copy, "
                "cause %s): %s",
                on_one_line(ticket.request),
                error.cause,
                on_one_line(str(error)),
            )
        with self._lock:
            if error is None:
                self._holds.copied(ticket.hold, self._clock())
            else:
                self._holds.failed(ticket.hold)

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
                for note in notes:
                    self._take(note)

    def listened(self, until: float) -> None:
        """Record that messages are processed up to a time; ``silent`` counts no time after it."""
        with self._lock:
            self._listened = until

    def tick(self) -> None:
        """Mark holds as ready whose pages are computed, and end holds whose lease has expired."""
        self.progress()
        with self._lock:
            expired = self._holds.expire(self._clock())
        if expired:
            more = len(expired) - NAMED_REQUESTS
            logger.warning(
                "request %s%s: nobody read its pages within the lease; they are given back (stage "
                "held, cause expired; if its client did not go away, see whether decode runs and "
                "gets requests; if it does, let it take them sooner, or set a longer "
                "kv_lease_duration)",
                ", ".join(map(on_one_line, expired[:NAMED_REQUESTS])),
                f" and {more} more" if more > 0 else "",
            )

    def silent(self) -> list[Silence]:
        """Return the holds that are silent, the longest first; see ``Endpoint.silent``."""
        # The time since messages were last processed does not count: a rank that hangs does not
        # take its consumers for gone.
        with self._lock:
            return self._holds.silent(self._listened, GONE_SECONDS, MAX_SILENT)

    def take_ended(self) -> tuple[list[RequestId], list[EndedHold]]:
        """Return, once, the requests whose blocks are free, and the tickets' holds that ended."""
        with self._lock:
            return self._holds.take_sent(), self._holds.take_ended()

    def close(self) -> None:
        """End all holds and clear their slot words, so that no consumer's fence passes any more."""
        with self._lock:
            self._holds.end_all()

    def _take(self, note: Note) -> None:
        if isinstance(note, Renewal):
            self._holds.renew(note, self._clock())  # the consumer sees the outcome in the slot word
            return
        if isinstance(note, Heartbeat):
            self._holds.heartbeat(note, self._clock())
            return
        outcome = self._holds.release(note)
        if outcome is ReleaseOutcome.LATE:
            self._metrics.add(LATE)
        elif outcome is ReleaseOutcome.IGNORED:
            self._metrics.add(IGNORED)
