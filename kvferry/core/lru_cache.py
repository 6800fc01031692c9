"""What was made already, by what it was made from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class LRUCache(Generic[V]):
    """The last few of something, by what they were made from. From any thread.

    Args:
        most: how many.
        weight: how much all of them may weigh together; ``None`` for any weight.
    """

    def __init__(self, most: int, weight: int | None = None) -> None:
        self._most = most
        self._limit = weight
        self._found: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: Hashable) -> V | None:
        """What is known, if it is."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key, (None, 0))[0]

    def keep(self, key: Hashable, value: V, weight: int = 0) -> None:
        """Know it; what was not found for the longest time is forgotten instead."""
        with self._lock:
            self._weight += weight - self._found.get(key, (None, 0))[1]
            self._found[key] = value, weight
            while len(self._found) > self._most or self._is_too_heavy:
                _, (_, lost) = self._found.popitem(last=False)
                self._weight -= lost

    @property
    def _is_too_heavy(self) -> bool:
        return self._limit is not None and self._weight > self._limit
