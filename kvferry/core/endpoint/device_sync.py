"""Loads that wait until the device (such as a GPU) has finished earlier work on their pages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvferry.core.endpoint.load import Load, check_same_engine
from kvferry.core.errors import DeadlineError, EndpointClosedError, KVFerryError, TicketError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _WaitingLoad:
    """A load that has not begun, since the device may work on its pages; it fails at ``until``."""

    load: Load
    passed: Callable[[], bool]
    until: float


class DeviceSync:
    """Begin each load, in order, when the device has finished the earlier work on the load's pages.

    That work (zeroing the pages, for example) would overwrite what the load has read. A load that
    waits ``patience`` seconds fails: ``begin`` gets it with an error. Used by the endpoint's thread
    only.
    """

    def __init__(
        self,
        begin: Callable[[Load, KVFerryError | None], object],
        *,
        clock: Callable[[], float],
        patience: float,
    ) -> None:
        self._begin = begin
        self._clock = clock
        self._patience = patience
        self._waiting: deque[_WaitingLoad] = deque()
        self._early: dict[RequestId, _WaitingLoad] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, load: Load, passed: Callable[[], bool]) -> None:
        """Begin a load when ``passed`` (polled) has returned ``True``, after earlier loads."""
        until = self._clock() + self._patience
        one = _WaitingLoad(load=load, passed=passed, until=until)
        self._waiting.append(one)
        if load.is_early:
            self._early[load.request] = one

    def extend(self, request: RequestId, part: Ticket, *, is_last: bool) -> bool:
        """Use a newer part of an early load that waits; return whether there is one.

        If the part is not of the first part's engine, the load fails.
        """
        one = self._early.get(request)
        if one is None:
            return False
        try:
            check_same_engine(one.load.ticket, part)
        except TicketError as exc:
            self._remove(one)
            self._begin(one.load, exc)
            return True
        one.load = replace(one.load, ticket=part, is_early=not is_last)
        if is_last:
            del self._early[request]
        return True

    def progress(self) -> bool:
        """Begin or fail, in order, the loads whose wait is over; return whether there were any."""
        begun = False
        while self._waiting:
            one = self._waiting[0]
            is_over, error = self._check(one)
            if not is_over:
                break
            begun = True
            self._remove(one)
            self._begin(one.load, error)
        return begun

    def give_up(self, request: RequestId | None = None) -> None:
        """Fail a request's waiting loads that read anything; without a request, all waiting."""
        for one in list(self._waiting):
            if request is None or (one.load.request == request and one.load.reads):
                self._remove(one)
                self._begin(one.load, EndpointClosedError("given up by this engine"))

    def _remove(self, one: _WaitingLoad) -> None:
        self._waiting.remove(one)  # mostly the first
        if self._early.get(one.load.request) is one:
            del self._early[one.load.request]

    def _check(self, one: _WaitingLoad) -> tuple[bool, KVFerryError | None]:
        """Return whether a load's wait is over, and with which error it fails (``None``: begin)."""
        try:
            if one.passed():
                return True, None
        except Exception as exc:  # a device library may raise any type
            logger.exception("cannot tell whether the work for %s has passed", one.load.request)
            return True, EndpointClosedError(f"the device does not say when it is done: {exc}")
        if self._clock() < one.until:
            return False, None
        return True, DeadlineError(
            f"the device was not done with the pages of this load after {self._patience:g} s"
        )
