"""What is counted about requests, beside what each rank's endpoint counts."""

from __future__ import annotations

import enum

from kvferry.core import metrics as stats
from kvferry.core.metrics import Metric, MetricKind


class NoTicket(enum.StrEnum):
    """Why a request that was to be decoded elsewhere got no ticket."""

    NO_HOLD = "no_hold"
    """No slot is free, or a request of its id is still held."""
    TOO_LARGE = "too_large"
    """It alone has more blocks than may be held."""
    ROLE = "role"
    """This engine's role is a consumer's: nobody would come for its pages."""
    WENT_ON = "went_on"
    """It was decoded here for too long: its states and windows are past its prompt."""
    SCORED = "scored"
    """It asked for ``prompt_logprobs``, so its states and windows are past what decode needs."""


LOADS = Metric(
    name="loads",
    kind=MetricKind.COUNTER,
    text="Loads of KV cache from another engine that succeeded, each once.",
)
FAILED = Metric(
    name="failed_loads",
    kind=MetricKind.COUNTER,
    text="Loads of KV cache from another engine that failed, each once.",
)
TOKENS = Metric(
    name="tokens",
    kind=MetricKind.COUNTER,
    text="Tokens whose KV cache was pulled from another engine.",
)
EVICTED = Metric(
    name="evicted_holds",
    kind=MetricKind.COUNTER,
    text="Holds that were given up because more than max_held_fraction was held.",
)
ORPHANED = Metric(
    name="orphaned_holds",
    kind=MetricKind.COUNTER,
    text=(
        "Holds that were given up because requests waited for blocks and no consumer gave a sign "
        "of life."
    ),
)
NO_TICKETS = Metric(
    name="tickets_not_made",
    kind=MetricKind.COUNTER,
    text="Requests that were to be decoded elsewhere and got no ticket, by reason.",
    labels=("driver", "reason"),
)
HELD = Metric(
    name="held_pages",
    kind=MetricKind.GAUGE,
    text="Blocks that are held for other engines, each counted once.",
)

FIGURES = (LOADS, FAILED, TOKENS, EVICTED, ORPHANED, NO_TICKETS, HELD, *stats.FIGURES)
"""All. The metric of each is called ``vllm:kvferry_`` and its name."""
BY_NAME = {figure.name: figure for figure in FIGURES}
