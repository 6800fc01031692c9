"""One rank: its caches, its half of the connector, and what that has reported."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.core.endpoint import Endpoint
from kvferry.integrations.vllm.rank_position import RankPosition
from tests.vllm.geometry.model import Bytes, Part, Steps

if TYPE_CHECKING:
    from kvferry.integrations.vllm.worker import FerryWorker, UnreadRankWorker

SECONDS = 60.0
"""Until something that must happen counts as not happening."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The caches of a vLLM group on one rank: its tensors, and which tokens they are of."""

    parts: tuple[Part, ...]
    size: int = 1  # of context parallelism
    turn: int = 0  # this rank's
    interleave: int = 1

    def steps(self, part: Part, positions: Steps) -> Steps:
        """(positions, entries): which entries of a request pages at these positions hold."""
        entries = part.places.shape[1]
        local = np.add.outer(positions * entries, np.arange(entries)) * part.per_entry
        rounds, within = np.divmod(local, self.interleave)
        token = (rounds * self.size + self.turn) * self.interleave + within
        found: Steps = token // part.per_entry
        return found


@dataclass(kw_only=True)
class Rank:
    """One worker process's caches, its half of the connector, and every report of that."""

    position: RankPosition
    memory: Bytes  # every byte of its caches
    extents: tuple[Extent, ...]  # by vLLM's groups
    worker: FerryWorker | UnreadRankWorker
    endpoint: Endpoint | None  # None where another rank publishes the same caches
    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def hear(self, **said: Any) -> None:
        """What the scheduler half says in a step; see ``metadata.StepMetadata``."""
        from kvferry.integrations.vllm.metadata import StepMetadata

        self.worker.apply(StepMetadata(**said))

    def poll(self) -> None:
        """Take what is over."""
        results = self.worker.results()
        self.sent += results.finished_sending
        self.received += results.finished_recving
        self.failed += results.failed_recving

    def await_received(self, request: str) -> None:
        self._await(self.received, request)

    def await_sent(self, request: str) -> None:
        self._await(self.sent, request)

    def _await(self, reports: list[str], request: str) -> None:
        deadline = time.monotonic() + SECONDS
        while request not in reports:
            assert time.monotonic() < deadline, f"{request} is not reported"
            if self.endpoint is not None:
                self.endpoint.wait(0.02)
            self.poll()

    @property
    def words(self) -> int:
        """How many words of the slot table are not zero."""
        if self.endpoint is None:
            return 0
        slots = self.endpoint.payload.slots
        table = (ctypes.c_uint64 * (slots.nbytes // 8)).from_address(slots.address)
        return sum(word != 0 for word in table)
