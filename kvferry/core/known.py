"""What was made already, by what it was made from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Known(Generic[V]):
    """The last few of something, by what they were made from. From any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: Hashable) -> V | None:
        """What is known, if it is."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def keep(self, key: Hashable, value: V) -> None:
        """Know it; what was not found for the longest time is forgotten instead."""
        with self._lock:
            self._found[key] = value
            if len(self._found) > self._most:
                self._found.popitem(last=False)
