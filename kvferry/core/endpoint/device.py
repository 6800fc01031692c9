"""Loads whose pages the device has yet to let go of."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from kvferry.core.endpoint.context import Load
from kvferry.core.lifecycle.holds import RequestId

logger = logging.getLogger(__name__)


class Awaiting:
    """Loads that begin when the device has passed the work that was enqueued before them.

    What the engine enqueued for their pages, zeroing them say, would otherwise overwrite what was
    read. Loads begin in the order in which they came, as the device works.

    Args:
        begin: starts a load, and ``abort``: gives one up that has been started.
    """

    def __init__(self, begin: Callable[[Load], None], abort: Callable[[RequestId], None]) -> None:
        self._begin = begin
        self._abort = abort
        self._loads: deque[tuple[Load, Callable[[], bool]]] = deque()

    def __len__(self) -> int:
        """Loads that have not begun."""
        return len(self._loads)

    def add(self, load: Load, passed: Callable[[], bool]) -> None:
        """Begin a load as soon as ``passed`` says so."""
        self._loads.append((load, passed))

    def progress(self) -> bool:
        """Begin what may begin; whether there was anything."""
        begun = False
        while self._loads and self._may_begin(*self._loads[0]):
            begun = True
            self._begin(self._loads.popleft()[0])
        return begun

    def abort(self, request: RequestId) -> None:
        """Give a load up, begun or not; one that had not begun reads nothing."""
        for waits in [waits for waits in self._loads if waits[0].request == request]:
            self._loads.remove(waits)
            self._begin(waits[0])
        self._abort(request)

    def _may_begin(self, load: Load, passed: Callable[[], bool]) -> bool:
        try:
            return passed()
        except Exception:  # a device library's own, of any type
            logger.exception(
                "cannot tell whether the work for the pages of %s has passed (cause device): "
                "nothing is read into them",
                load.request,
            )
            self.abort(load.request)
            return False
