"""A stand-in for a device whose memory no driver can register.

Its copies pass when a test lets them, page by page, and its memory cannot be read from the host:
whoever reads it as an array finds other bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import CopyError


class LateDevice:
    """The memory of a device, and ``PageCopies`` between it and a pool of host pages.

    Args:
        host: the pool, as (layer, page, ...) of float32.
        blocks: how many blocks the device has.

    Attributes:
        lets: cleared, no copy makes progress.
        fails: raised by the copies from now on, when they are half done (``CopyError``: nothing
            more happens then).
        refuses: raised when a copy is to begin.
        copied: the copies that have passed, as ("out" or "into", blocks, pages).
        begun: those that were begun.
    """

    def __init__(self, host: npt.NDArray[np.float32], blocks: int) -> None:
        self._host = host
        self.memory = np.full((host.shape[0], blocks, *host.shape[2:]), np.nan, dtype=np.float32)
        self._hide()
        self.lets = threading.Event()
        self.lets.set()
        self.fails: Exception | None = None
        self.refuses: Exception | None = None
        self.begun: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.copied: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def write(self, blocks: Sequence[int], values: npt.ArrayLike) -> None:
        """Write (layer, block, ...), or one value, into the device's memory, as a kernel does."""
        self._hide()
        self.memory[:, list(blocks)] = np.asarray(values)
        self._hide()

    def read(self) -> npt.NDArray[np.float32]:
        """Return all of the device's memory, as a kernel sees it."""
        self._hide()
        seen = self.memory.copy()
        self._hide()
        return seen

    def out(self, blocks: Sequence[int], pages: Sequence[int]) -> Callable[[], bool]:
        """See ``PageCopies``."""
        return self._begin("out", blocks, pages)

    def into(self, pages: Sequence[int], blocks: Sequence[int]) -> Callable[[], bool]:
        """See ``PageCopies``."""
        return self._begin("into", blocks, pages)

    def _begin(self, way: str, blocks: Sequence[int], pages: Sequence[int]) -> Callable[[], bool]:
        if self.refuses is not None:
            raise self.refuses
        self.begun.append((way, tuple(blocks), tuple(pages)))
        left = list(zip(blocks, pages, strict=True))

        def passed() -> bool:
            if not self.lets.is_set():
                return False
            if self.fails is not None and len(left) <= len(blocks) // 2:
                raise self.fails
            if left:
                self._copy(way, *left.pop())
                return False
            self.copied.append((way, tuple(blocks), tuple(pages)))
            return True

        return passed

    def _copy(self, way: str, block: int, page: int) -> None:
        if way == "out":
            self._host[:, page] = self.read()[:, block]
        else:
            self.write([block], self._host[:, [page]])

    def _hide(self) -> None:
        """Invert all bits, so that what the host reads is no value that anybody wrote."""
        cells = self.memory.view(np.uint32)
        np.invert(cells, out=cells)


def failed_copy() -> CopyError:
    """Return the error of a copy that has failed, and does nothing any more."""
    return CopyError("the device reports an error")
