"""How much memory the producers take that a rank knows, and how many of them there may be.

A producer chooses what it publishes, so what is kept of it is counted. The engines of a deployment
publish the same fields, which are kept once, whoever published them; so bytes are counted by what
takes them, and not by producer.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Mapping, Sequence

from kvferry.core.messages import RankPayload
from kvferry.core.planner.plan import Plan

MAX_PEERS = 1024
"""Engines that a rank is connected to; fewer where the process may open few files. A deployment
may have a thousand producers (``docs/scale.md``), and each that is given up costs a handshake when
it is used again."""
FILES_PER_PEER = 8
"""Two are its watch's. An eighth of a process's files are those of watches at most, therefore a
quarter, and there is room for the driver and for those who connect to us."""
MAX_KEPT_BYTES = 48 << 20
"""For what all of them publish, and the plans of it. An engine of 8 ranks and 80 layers takes 2 MB,
a further one that is laid out alike some 20 kB."""

DECODED = 5
"""A payload takes so many times as much when it is decoded, at most."""
RANK_BYTES, REGION_BYTES, FACT_BYTES, CUT_BYTES = 2000, 200, 200, 100


def most_peers() -> int:
    """How many engines this process may be connected to."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_PEERS
    return max(min(MAX_PEERS, files // FILES_PER_PEER), 1)


def memory_of(
    payloads: Sequence[RankPayload], sizes: Sequence[int], plan: Plan
) -> Mapping[int, int]:
    """Estimate what keeping a producer takes.

    Args:
        payloads: of its ranks, and ``sizes``: in bytes, as they came.
        plan: of it.

    Returns:
        Bytes, by the ``id`` of what takes them: for as long as the producer is kept nothing else
        has that.
    """
    memory = {id(plan): sum(map(_own_bytes, payloads))}
    for payload, size in zip(payloads, sizes, strict=True):
        memory[id(payload.layout.fields)] = DECODED * size
    for source in plan.sources:
        for batch in (batch for match in source.matches for batch in match.batches):
            memory[id(batch.local)] = batch.local.nbytes
            memory[id(batch.remote)] = batch.remote.nbytes
            memory[id(plan)] += CUT_BYTES * (1 + len(batch.cuts))
    return memory


def _own_bytes(payload: RankPayload) -> int:
    """What no other producer shares."""
    facts = sum(len(name) + len(value) for name, value in payload.agreement.items())
    return (
        RANK_BYTES
        + REGION_BYTES * len(payload.layout.regions)
        + FACT_BYTES * len(payload.agreement)
        + facts
        + len(payload.address)
    )


class PeerMemoryBudget:
    """Bytes that are kept, each once however many keep them."""

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.nbytes = 0

    def add(self, memory: Mapping[int, int]) -> None:
        """Somebody keeps these."""
        for key, nbytes in memory.items():
            self._users[key] += 1
            if self._users[key] == 1:
                self._sizes[key] = nbytes
                self.nbytes += nbytes

    def remove(self, memory: Mapping[int, int]) -> None:
        """Somebody who kept these keeps them no more."""
        for key in memory:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.nbytes -= self._sizes.pop(key)
