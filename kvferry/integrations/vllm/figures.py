"""The names of what is counted about loads."""

from __future__ import annotations

LOADS = "loads"
FAILED = "failed_loads"
REFUSED = "refused_tickets"
EVICTED = "evicted_holds"
IGNORED = "ignored_releases"
TOKENS = "tokens"
BYTES = "bytes"
SECONDS = "load_seconds"

COUNTERS = {
    LOADS: "Loads of KV cache from another engine that succeeded.",
    FAILED: "Loads of KV cache from another engine that failed.",
    REFUSED: "Tickets that were refused before their engine was asked.",
    EVICTED: "Holds that were given up because more than max_held_fraction was held.",
    IGNORED: "Messages that end holds, about holds that did not stand (any more).",
    TOKENS: "Tokens whose KV cache was pulled from another engine.",
    BYTES: "Bytes of KV cache that were pulled from another engine.",
}
"""The figures that are sums. The metric of each is called ``vllm:kvferry_`` and its name."""
