"""Copies between device and host pages, as ``StagedHolds`` and ``StagedLoads`` decide."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvferry.core.endpoint.load import Load
from kvferry.core.endpoint.page_copies import PageCopies
from kvferry.core.endpoint.peers import STUCK_SECONDS
from kvferry.core.endpoint.producer import HoldServer
from kvferry.core.error_causes import cause_of, on_one_line
from kvferry.core.errors import CopyError, DeadlineError, KVFerryError
from kvferry.core.lifecycle.holds import EndedHold, Hold, HoldEnd, RequestId
from kvferry.core.lifecycle.loads import LoadId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.staging import HoldCopy, PageCopy, StagedHolds, StagedLoads
from kvferry.core.metrics import COPY_SECONDS, CopyDirection, LoadRecord, Metrics, Stage

logger = logging.getLogger(__name__)

LOST = (
    "cannot tell whether the copy of the %s is over (stage copy, cause device): its blocks and "
    "host pages are not reused; restart the engine"
)
"""Logged when a copy's end is unknown."""

Passed = Callable[[], bool]
"""Returns whether the device has finished some work; may raise any exception."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Wait:
    """A copy that waits, at most ``until``, for the device's earlier work on the blocks."""

    what: str
    passed: Passed
    until: float | None
    begin: Callable[[], None]
    fail: Callable[[KVFerryError], None]
    is_wanted: Callable[[], bool]


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """A copy under way; without ``passed``, nobody can tell any more whether it is over (lost)."""

    what: str
    direction: CopyDirection
    begun: float
    passed: Passed | None
    end: Callable[[], None]
    fail: Callable[[KVFerryError], None]


class CopyStage:
    """Copy pages that peers may read to the host, and loaded pages to the device.

    ``apply`` and ``take_ended`` are for any thread, all else for the endpoint's. ``report`` gets
    each load that is over; a load waits ``patience`` seconds for the device.
    """

    def __init__(
        self,
        copies: PageCopies,
        *,
        server: HoldServer,
        report: Callable[[Load, KVFerryError | None, LoadRecord], None],
        metrics: Metrics,
        clock: Callable[[], float],
        patience: float,
    ) -> None:
        self._copies = copies
        self._server = server
        self._report = report
        self._metrics = metrics
        self._clock = clock
        self._patience = patience
        self._holds = StagedHolds()
        self._lock = threading.Lock()
        """Guards ``_holds``, ``_failed``, ``_ended`` and ``_ordered``."""
        self._failed: set[RequestId] = set()
        """Requests with a hold that is not over, of which the copy has failed."""
        self._ended: dict[RequestId, EndedHold] = {}
        self._ordered: list[_Wait] = []
        """Waits of holds that the endpoint's thread has not seen."""
        self._loads = StagedLoads()
        self._loaded: dict[LoadId, tuple[Load, LoadRecord, float]] = {}
        """Loads that have succeeded in host pages, and when, by ``time.perf_counter``."""
        self._waits: list[_Wait] = []
        self._running: list[_Running] = []

    @property
    def is_busy(self) -> bool:
        """Return whether a copy waits for the device, or is under way and not lost."""
        running = any(each.passed is not None for each in self._running)
        return bool(self._ordered or self._waits or running)

    @property
    def running(self) -> int:
        """Return how many copies may use the memory on both sides."""
        return len(self._running)

    @property
    def problems(self) -> list[str]:
        """Return the problems to report in a health check; empty if all is well."""
        running = list(self._running)
        lost = [each.what for each in running if each.passed is None]
        now = self._clock()
        stuck = [each.what for each in running if now - each.begun > STUCK_SECONDS]
        if lost:
            return [
                f"{len(lost)} copies between the device and host pages have failed, and may still "
                f"be under way ({lost[0]}): their pages are not reused; restart the engine"
            ]
        if stuck:
            return [
                f"{len(stuck)} copies between the device and host pages do not end ({stuck[0]}): "
                "restart the engine if that lasts"
            ]
        return []

    # The producer's side.

    def apply(self, orders: HoldOrders, passed: Passed | None) -> None:
        """Begin, make readable, and end holds, as ``HoldServer.apply``.

        ``orders`` have a copy for each of ``ready``; the hold is ready when it has passed.
        Watermarks are not written: host pages have nothing before the ticket is made.

        Raises:
            CopyError: a hold of ``ready`` has no copy.
        """
        copies = {each.hold: each for each in orders.copies}
        if missing := [hold for hold, _ in orders.ready if hold not in copies]:
            raise CopyError(
                f"{missing[0]} is to be made readable, and its copy was not ordered: this endpoint "
                "stages its cache, so pass SchedulerHolds.ticket the copy"
            )
        self._server.apply(HoldOrders(drops=orders.drops, take_ons=orders.take_ons), None)
        with self._lock:
            for copy in orders.copies:
                self._holds.order(copy)
        ttls = dict(orders.ttls)
        for hold, lease in orders.ready:
            one = HoldOrders(
                ready=((hold, lease),), ttls=((hold, ttls[hold]),) if hold in ttls else ()
            )
            self._server.apply(one, partial(self._is_copied, hold))
        self._server.apply(HoldOrders(ends=orders.ends), None)
        # Last: no copy begins, and no word says ready, of a hold that these orders end.
        with self._lock:
            self._ordered += [self._hold_wait(copy, passed) for copy in orders.copies]

    def take_ended(self, ended: Sequence[EndedHold]) -> tuple[list[RequestId], list[EndedHold]]:
        """Record which holds have ended; return requests with free blocks, and holds that are over.

        The host pages of the latter are free. Each is returned once.
        """
        with self._lock:
            for each in ended:
                is_revoked = each.end is None and each.request in self._failed
                end = HoldEnd.REVOKED if is_revoked else each.end
                self._ended[each.request] = replace(each, end=end)
                self._holds.ended(each.request)
            over = [self._ended.pop(request) for request in self._holds.take_over()]
            self._failed.difference_update(each.request for each in over)
            return self._holds.take_sent(), over

    # The consumer's side.

    def begin(self, load_id: LoadId, load: Load, copy: PageCopy, passed: Passed | None) -> None:
        """Add a load into host pages; once it has succeeded and ``passed``, ``copy`` is made."""
        self._loads.begin(load_id, copy)
        if passed is None:
            self._loads.passed(load_id)
            return
        wait = _Wait(
            what=f"load of request {on_one_line(load.request)}",
            passed=passed,
            until=self._clock() + self._patience,
            begin=partial(self._loads.passed, load_id),
            fail=partial(self._loads.failed, load_id),
            is_wanted=lambda: load_id in self._loads,
        )
        self._waits.append(wait)

    def loaded(
        self, load_id: LoadId, load: Load, error: KVFerryError | None, record: LoadRecord
    ) -> None:
        """Keep a load that is over back until its pages are copied, or report that it failed."""
        self._loaded[load_id] = (load, record, time.perf_counter())
        self._loads.loaded(load_id, error)
        self._report_loads()

    def progress(self) -> bool:
        """Begin copies, and act on those that have ended; return whether there were any."""
        busy = self._look_at_device()
        busy = self._begin_copies() or busy
        busy = self._look_at_copies() or busy
        self._end_failed_holds()
        self._report_loads()
        return busy

    def _is_copied(self, hold: Hold) -> bool:
        with self._lock:
            return self._holds.is_copied(hold)

    def _is_ordered(self, hold: Hold) -> bool:
        with self._lock:
            return hold in self._holds

    def _with_holds(self, event: Callable[[Hold], None], hold: Hold) -> None:
        with self._lock:
            event(hold)

    def _fail_hold(self, order: HoldCopy, error: KVFerryError) -> None:
        logger.warning(
            "request %s: its pages cannot be read by others, and its hold ends (stage copy, cause "
            "%s): %s",
            on_one_line(order.request),
            cause_of(error),
            on_one_line(str(error)),
        )
        with self._lock:
            self._failed.add(order.request)
            self._holds.failed(order.hold)

    def _hold_wait(self, order: HoldCopy, passed: Passed | None) -> _Wait:
        """Return the wait of a hold's copy for the device; its lease ends it."""
        return _Wait(
            what=f"pages of request {on_one_line(order.request)}",
            passed=_at_once if passed is None else passed,
            until=None,
            begin=partial(self._with_holds, self._holds.passed, order.hold),
            fail=partial(self._fail_hold, order),
            is_wanted=partial(self._is_ordered, order.hold),
        )

    def _look_at_device(self) -> bool:
        with self._lock:
            ordered, self._ordered = self._ordered, []
        waits = [*self._waits, *ordered]
        answers: dict[Passed, bool] = {}
        self._waits = [wait for wait in waits if not self._is_over(wait, answers)]
        return len(self._waits) < len(waits)

    def _is_over(self, wait: _Wait, answers: dict[Passed, bool]) -> bool:
        """Return whether a wait is over, and act on it; ``answers``: what ``passed`` said."""
        if not wait.is_wanted():
            return True
        try:
            if wait.passed not in answers:
                answers[wait.passed] = wait.passed()
        except Exception as exc:  # a device library may raise any type
            logger.exception("cannot tell whether the work for the %s has passed", wait.what)
            wait.fail(CopyError(f"the device does not say when it is done: {exc}"))
            return True
        if answers[wait.passed]:
            wait.begin()
            return True
        if wait.until is not None and self._clock() >= wait.until:
            wait.fail(
                DeadlineError(
                    f"the device was not done with the pages after {self._patience:g} s "
                    "(load_timeout)"
                )
            )
            return True
        return False

    def _begin_copies(self) -> bool:
        with self._lock:
            orders = self._holds.take_copies()
        loads = self._loads.take_copies()
        for order in orders:
            self._begin(
                f"pages of request {on_one_line(order.request)}",
                CopyDirection.TO_HOST,
                partial(self._copies.out, order.copy.blocks, order.copy.pages),
                order.copy,
                end=partial(self._with_holds, self._holds.copied, order.hold),
                fail=partial(self._fail_hold, order),
            )
        for load_id, copy in loads:
            load, _, _ = self._loaded[load_id]
            self._begin(
                f"load of request {on_one_line(load.request)}",
                CopyDirection.TO_DEVICE,
                partial(self._copies.into, copy.pages, copy.blocks),
                copy,
                end=partial(self._loads.copied, load_id),
                fail=partial(self._loads.failed, load_id),
            )
        return bool(orders or loads)

    def _begin(
        self,
        what: str,
        direction: CopyDirection,
        call: Callable[[], Passed],
        copy: PageCopy,
        *,
        end: Callable[[], None],
        fail: Callable[[KVFerryError], None],
    ) -> None:
        begun, passed = self._clock(), None
        try:
            passed = call() if copy.blocks else _at_once
        except CopyError as exc:
            fail(exc)
            return
        except Exception:  # a device library may raise any type
            logger.exception(LOST, what)
        self._running.append(
            _Running(what=what, direction=direction, begun=begun, passed=passed, end=end, fail=fail)
        )

    def _look_at_copies(self) -> bool:
        before = len(self._running)
        self._running = [each for each in self._running if not self._has_ended(each)]
        return len(self._running) < before

    def _has_ended(self, copy: _Running) -> bool:
        if copy.passed is None:
            return False
        try:
            if not copy.passed():
                return False
        except CopyError as exc:
            copy.fail(exc)
            return True
        except Exception:  # a device library may raise any type
            logger.exception(LOST, copy.what)
            copy.passed = None
            return False
        seconds = self._clock() - copy.begun
        self._metrics.observe(COPY_SECONDS, seconds, direction=copy.direction.value)
        copy.end()
        return True

    def _end_failed_holds(self) -> None:
        with self._lock:
            failed = self._holds.take_failed()
        if failed:
            self._server.apply(HoldOrders(ends=tuple(failed)), None)

    def _report_loads(self) -> None:
        for load_id, error in self._loads.take_over():
            load, record, loaded = self._loaded.pop(load_id)
            if record.error is None:
                seconds = time.perf_counter() - loaded
                record = replace(
                    record,
                    error=error,
                    stage=None if error is None else Stage.COPY,
                    seconds=record.seconds + seconds,
                    copy_seconds=seconds,
                    ended=time.time(),
                )
            self._report(load, error, record)


def _at_once() -> bool:
    return True
