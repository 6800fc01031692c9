"""The plugin by which ``lmcache server`` imports this package, and gets its settings.

LMCache 0.5.6 loads no module for a transfer channel. Its plugins for second-level caches are loaded
before the channel is made, and have settings of their own; so this is such a cache, always empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import EventNotifier, create_event_notifier

from kvferry.integrations.lmcache.settings import configure


class KVFerryPlugin(L2AdapterInterface):
    """An empty cache: it stores nothing, and finds nothing."""

    def __init__(
        self, adapter_params: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        super().__init__(max_capacity_bytes=0)
        configure(adapter_params)
        self._store, self._lookup, self._load = (create_event_notifier() for _ in range(3))
        self._ids = itertools.count()
        self._stored: dict[L2TaskId, L2StoreResult] = {}
        self._asked: dict[L2TaskId, int] = {}

    def get_store_event_fd(self) -> int:
        """Return the descriptor that tells of stores."""
        return int(self._store.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that tells of lookups."""
        return int(self._lookup.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that tells of loads."""
        return int(self._load.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Say that 0 bytes were stored."""
        task = next(self._ids)
        self._stored[task] = L2StoreResult(True, 0)
        self._store.notify()
        return task

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        """Return the stores since the last call."""
        stored, self._stored = self._stored, {}
        return stored

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """Begin to find nothing."""
        return self._ask(len(keys), self._lookup)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Begin to load nothing."""
        return self._ask(len(keys), self._load)

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return that nothing was found, or loaded."""
        count = self._asked.pop(task_id, None)
        return None if count is None else Bitmap(count)

    query_load_result = query_lookup_and_lock_result

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: nothing was locked."""

    def report_status(self) -> dict[str, Any]:
        """Return what LMCache's status page shows."""
        return {"is_healthy": True, "type": type(self).__name__}

    def close(self) -> None:
        """Close the descriptors."""
        for each in (self._store, self._lookup, self._load):
            each.close()

    def _ask(self, count: int, event: EventNotifier) -> L2TaskId:
        task = next(self._ids)
        self._asked[task] = count
        event.notify()
        return task
