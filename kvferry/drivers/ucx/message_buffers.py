"""Memory for what goes with messages: used again, for fresh memory is slow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.drivers.ucx.messages import MAX_BODY

_KEPT = 32
"""How many a pool keeps that nobody uses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageBuffer:
    """(MAX_BODY,) bytes, and where they lie."""

    array: npt.NDArray[np.uint8]
    address: int


@dataclass(slots=True, eq=False)
class MessageBuffers:
    """A pool; not for two threads at once."""

    _free: list[MessageBuffer] = field(default_factory=list)

    def take(self) -> MessageBuffer:
        """One, which is the caller's until it is given back."""
        if self._free:
            return self._free.pop()
        array = np.empty(MAX_BODY, np.uint8)
        return MessageBuffer(array=array, address=array.ctypes.data)

    def give(self, buffer: MessageBuffer) -> None:
        """Give one back."""
        if len(self._free) < _KEPT:
            self._free.append(buffer)
