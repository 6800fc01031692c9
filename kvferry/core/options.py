"""The options of an engine's endpoints, and of its directory."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from kvferry.core.planner.build_copies import BATCH_COPIES
from kvferry.core.security import OPEN, Access
from kvferry.core.side_channel.compatibility import Judgements


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """Options of an endpoint, and of the directory of its engine. Times are in seconds.

    Attributes:
        handshake_timeout: time within which a producer must have answered a handshake.
        lease: time for which this rank, as a producer, keeps a request's pages after the consumer
            has renewed their hold. The time before the first renewal is in ``HoldOrders``.
        load_timeout: time after which a load that is not over fails.
        liveness_interval: time between two pings of a producer; 0 for no pings.
        liveness_misses: pings in a row without an answer after which a producer counts as dead.
        max_copies: the most copies in one read. A load that takes more from one rank of a producer
            is read in several batches, one after another.
        engine_ttl: time after which a producer that no request uses is disconnected; without pings,
            in the engine's next step.
        judgements: which differences between two engines the operator allows.
        access: this engine's keys, and the networks that it may connect to.
    """

    handshake_timeout: float = 10.0
    lease: float = 30.0
    load_timeout: float = 60.0
    max_copies: int = BATCH_COPIES
    liveness_interval: float = 5.0
    liveness_misses: int = 3
    engine_ttl: float = 600.0
    judgements: Judgements = Judgements()  # noqa: RUF009 - frozen
    access: Access = OPEN


DEFAULTS = EndpointOptions()
"""The options of an endpoint that is given none."""

# High, because a deployment may have a thousand producers (docs/operations.md), and one that is
# released costs a handshake when it is used again.
MAX_PEERS = 1024
"""The most engines that an engine is connected to; fewer if it may open few files."""
FILES_PER_PEER = 8
"""File descriptors that must be allowed per peer; its liveness check takes two of them."""


def most_peers() -> int:
    """Return the most engines that a rank in this process may be connected to."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_PEERS
    return max(min(MAX_PEERS, files // FILES_PER_PEER), 1)
