"""Loads into host pages, whose pages are then copied to the device, as ``StagedLoads`` decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvferry.core.endpoint.load import Load
from kvferry.core.endpoint.page_copies import Passed, RunningCopies
from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import CopyError, DeadlineError, KVFerryError
from kvferry.core.lifecycle.loads import LoadId
from kvferry.core.lifecycle.staging import PageCopy, StagedLoads
from kvferry.core.metrics import CopyDirection, LoadRecord, Stage

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Wait:
    """A copy that waits, at most ``until``, for the device's earlier work on the blocks."""

    what: str
    passed: Passed
    until: float
    begin: Callable[[], None]
    fail: Callable[[KVFerryError], None]
    is_wanted: Callable[[], bool]


class CopyStage:
    """Copy loaded pages to the device. For the endpoint's thread.

    ``report`` gets each load that is over; a load waits ``patience`` seconds for the device.
    """

    def __init__(
        self,
        copies: RunningCopies,
        *,
        report: Callable[[Load, KVFerryError | None, LoadRecord], None],
        clock: Callable[[], float],
        patience: float,
    ) -> None:
        self._copies = copies
        self._report = report
        self._clock = clock
        self._patience = patience
        self._loads = StagedLoads()
        self._loaded: dict[LoadId, tuple[Load, LoadRecord, float]] = {}
        """Loads that have succeeded in host pages, and when, by ``time.perf_counter``."""
        self._waits: list[_Wait] = []

    @property
    def is_waiting(self) -> bool:
        """Return whether a load waits for the device."""
        return bool(self._waits)

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
        """Begin copies, and report the loads that are over; return whether any was begun."""
        busy = self._look_at_device()
        busy = self._begin_copies() or busy
        self._report_loads()
        return busy

    def _look_at_device(self) -> bool:
        before, answers = len(self._waits), dict[Passed, bool]()
        self._waits = [wait for wait in self._waits if not self._is_over(wait, answers)]
        return len(self._waits) < before

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
        if self._clock() >= wait.until:
            wait.fail(
                DeadlineError(
                    f"the device was not done with the pages after {self._patience:g} s "
                    "(load_timeout)"
                )
            )
            return True
        return False

    def _begin_copies(self) -> bool:
        loads = self._loads.take_copies()
        for load_id, copy in loads:
            load, _, _ = self._loaded[load_id]
            self._copies.begin(
                f"load of request {on_one_line(load.request)}",
                CopyDirection.TO_DEVICE,
                copy,
                end=partial(self._loads.copied, load_id),
                fail=partial(self._loads.failed, load_id),
            )
        return bool(loads)

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
