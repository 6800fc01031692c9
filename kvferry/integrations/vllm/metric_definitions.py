"""The metrics of the scheduler half, and a list of them with the endpoint's (``core.metrics``).

``kvferry.integrations.vllm.metrics`` exports them to vLLM's log line and to Prometheus.
"""

from __future__ import annotations

import enum

from kvferry.core import metrics as endpoint_metrics
from kvferry.core.metrics import Metric, counter, gauge


class NoTicket(enum.StrEnum):
    """Why a request that another engine was to decode got no ticket."""

    NO_HOLD = "no_hold"
    """No slot is free, or a request with the same id is still held."""
    TOO_LARGE = "too_large"
    """The request alone has more blocks than may be held."""
    ROLE = "role"
    """The engine's ``kv_role`` is ``kv_consumer``, so no other engine would read the pages."""
    WENT_ON = "went_on"
    """The request generated tokens here: its states and windows are past its prompt."""
    SCORED = "scored"
    """The request asked for ``prompt_logprobs``: its states and windows are past the position from
    which decode continues."""
    HOST_PAGES = "host_pages"
    """The engine stages its cache in host memory, and had too few host pages for too long."""
    CUT_MEDIA = "cut_media"
    """The prompt ends with an image, and decode must compute a part of that image's tokens."""
    LIST = "list"
    """The prompt is a further one of a completion request, and vLLM would not answer with its
    ticket."""
    ADAPTER = "adapter"
    """The content of the request's LoRA adapter is not known, or not what the engine loaded."""


class HoldOutcome(enum.StrEnum):
    """What became of a request that another engine was to decode, and of the hold of its pages.

    The values from ``READ`` to ``REVOKED`` are those of ``HoldEnd``.
    """

    MADE = "made"
    """A ticket was made, so that the request's pages are held."""
    READ = "read"
    """A decode engine has read the pages, or needed none of them."""
    ABANDONED = "abandoned"
    """A decode engine gave the pages back unused: its load failed, or its client went away."""
    EXPIRED = "expired"
    """The lease ran out on at least one rank; of a conversation, also ``decoder_kv_blocks_ttl``."""
    EVICTED = "evicted"
    """The hold was ended because more than ``max_held_fraction`` was held."""
    RECLAIMED = "reclaimed"
    """The hold was a conversation's, and was ended because requests waited for blocks."""
    ORPHANED = "orphaned"
    """The hold was ended because requests waited for blocks, and no decode engine gave a sign of
    life."""
    REVOKED = "revoked"
    """The hold was ended by a reset of the prefix cache, because the engine had loaded another LoRA
    adapter than the ticket's, or because the pages could not be copied to host pages."""
    REFUSED = "refused"
    """No ticket was made; ``NoTicket`` has the reasons."""


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
    [outcome for outcome in HoldOutcome if outcome is not HoldOutcome.RECLAIMED],
)
CONVERSATION_HOLDS = counter(
    "conversation_holds",
    "Holds of answers, for the next turn of their conversations, and how each ended.",
    ["outcome"],
    HoldOutcome,
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
