"""A thread-safe cache that forgets its least recently used entries."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class LRUCache(Generic[V]):
    """Keep the most recently used values by key, within limits. Safe to use from any thread."""

    def __init__(self, max_entries: int, max_weight: float = math.inf) -> None:
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        """Return a key's value, now the most recently used; ``None`` if the key is not cached."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key, (None, 0))[0]

    def put(self, key: Hashable, value: V, weight: int = 0) -> None:
        """Store a value, and drop the least recently used beyond a limit.

        Weights, in any unit, add up to ``max_weight`` at most; a value above it alone is dropped,
        too.
        """
        with self._lock:
            self._weight += weight - self._entries.get(key, (None, 0))[1]
            self._entries[key] = value, weight
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries or self._weight > self._max_weight:
                _, (_, lost) = self._entries.popitem(last=False)
                self._weight -= lost
