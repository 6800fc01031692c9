"""The metrics of the scheduler half, and a list of them with the endpoint's (``core.metrics``).

``kvferry.integrations.vllm.metrics_export`` exports them to vLLM's log line and to Prometheus.
"""

from __future__ import annotations

import enum

from kvferry.core import metrics as endpoint_metrics
from kvferry.core.lifecycle.holds import HoldEnd
from kvferry.core.metrics import Metric, counter, gauge


class NoTicket(enum.StrEnum):
    """Why a request that another engine was to decode got no ticket (docs/metrics.md)."""

    NO_HOLD = "no_hold"  # no slot is free, or a request with the same id is still held
    TOO_LARGE = "too_large"
    ROLE = "role"
    WENT_ON = "went_on"  # it generated tokens: its states and windows are past its prompt
    SCORED = "scored"  # by ``prompt_logprobs``: its states are past where decode continues
    HOST_PAGES = "host_pages"
    CUT_MEDIA = "cut_media"
    LIST = "list"
    ADAPTER = "adapter"


HOLD_MADE, HOLD_REFUSED = "made", "refused"
HOLD_OUTCOMES = (HOLD_MADE, *HoldEnd, HOLD_REFUSED)
"""What became of a request that another engine was to decode, and of the hold of its pages.

Refused: no ticket was made; ``NoTicket`` has the reasons. docs/metrics.md explains all.
"""

LOADS = counter("loads", "Loads of KV cache from another engine that succeeded, each counted once.")
EARLY_LOADS = counter(
    "early_loads", "Those of the loads that succeeded which began while prefill was computing."
)
FAILED = counter(
    "failed_loads", "Loads of KV cache from another engine that failed, each counted once."
)
TOKENS = counter("tokens", "Tokens whose KV cache was pulled from another engine.")
EDITED_HISTORIES = counter(
    "edited_histories",
    "Turns of conversations whose prompt does not begin with all tokens of the ticket.",
)
HOLDS = counter(
    "holds",
    "Holds of finished requests' pages that were made, or not, and how each ended.",
    ["outcome"],
    [outcome for outcome in HOLD_OUTCOMES if outcome is not HoldEnd.RECLAIMED],
)
CONVERSATION_HOLDS = counter(
    "conversation_holds",
    "Holds of answers, for the next turn of their conversations, and how each ended.",
    ["outcome"],
    HOLD_OUTCOMES,
)
NO_TICKETS = counter(
    "tickets_not_made",
    "Requests that were to be decoded elsewhere and got no ticket, by reason.",
    ["reason"],
    NoTicket,
)
HELD = gauge(
    "held_pages",
    "Blocks that are held for other engines, each counted once; host pages, if the cache is "
    "staged.",
)
HELD_FRACTION = gauge(
    "held_fraction",
    "Blocks held for decode, over those that may be held: max_held_fraction of all, or all "
    "host pages.",
)
CONVERSATION_PAGES = gauge(
    "conversation_pages",
    "Blocks held for the next turns of conversations only, which go when others need them.",
)

METRICS = (
    *(each for each in tuple(vars().values()) if isinstance(each, Metric)),
    *endpoint_metrics.FIGURES,
    *endpoint_metrics.HOST_FIGURES,
)
"""All metrics. In Prometheus their names begin with ``vllm:kvferry_``."""
BY_NAME = {metric.name: metric for metric in METRICS}
"""The metrics by name."""
