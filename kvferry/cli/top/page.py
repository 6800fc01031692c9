"""A page of metrics, in Prometheus's text format.

Only the lines of kvferry, and the few of vLLM that ``kvferry top`` shows, are parsed. A page comes
from the network, so its size and each of these lines are checked.
"""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from kvferry.core.errors import KVFerryError

Labels = tuple[tuple[str, str], ...]
"""Names and values of labels, sorted by name."""
MetricsPage = dict[str, dict[Labels, float]]
"""The values on a page by the metric's name and by labels."""

KVFERRY = "vllm:kvferry_"
"""The prefix of kvferry's metrics."""
VLLM = "vllm:"
CACHE_CONFIG = "vllm:cache_config_info"
CACHE_USED = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
STARTED = "process_start_time_seconds"
OTHERS = frozenset({CACHE_CONFIG, CACHE_USED, RUNNING, WAITING, STARTED})
"""The other metrics that are parsed."""
UNUSED = ("_bucket", "_created")
"""Endings of kvferry's metrics that are not parsed."""

MAX_BYTES = 8 << 20
"""The largest page that is read; one engine's has about 100 kB."""
MAX_SAMPLES = 50_000
"""The most lines of a page that are parsed; one engine's has fewer than 1,000."""
MAX_VALUE = 1e18
"""Larger values are left out: what is computed from two of them might not be finite."""
SHOWN = 80
"""The most characters of a line in an error."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


class MetricsPageError(KVFerryError):
    """A page of metrics cannot be fetched, or is not a page of metrics."""


def parse(page: bytes) -> MetricsPage:
    """Return the values of the metrics that ``kvferry top`` shows; not those that are no number."""
    if len(page) > MAX_BYTES:
        raise MetricsPageError(f"the page has more than {MAX_BYTES:,} bytes")
    try:
        lines = page.decode().split("\n")
    except UnicodeDecodeError as exc:
        raise MetricsPageError("the page is not text in UTF-8") from exc
    wanted = [n for n, line in enumerate(lines) if (name := _NAME.match(line)) and _wanted(name[0])]
    if len(wanted) > MAX_SAMPLES:
        raise MetricsPageError(f"the page has more than {MAX_SAMPLES:,} values to parse")
    found: MetricsPage = {}
    for n in wanted:
        try:
            [[sample]] = [each.samples for each in text_string_to_metric_families(lines[n])]
        except ValueError as exc:
            raise MetricsPageError(f"line {n + 1} is malformed: {printable(lines[n])}") from exc
        if abs(sample.value) <= MAX_VALUE:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = float(sample.value)
    if not any(name.startswith(VLLM) for name in found):
        raise MetricsPageError("the page has no metric of vLLM: expected a page like /metrics")
    return found


def _wanted(name: str) -> bool:
    return name in OTHERS or (name.startswith(KVFERRY) and not name.endswith(UNUSED))


def printable(text: str, limit: int = SHOWN) -> str:
    """Return text of another process without control characters, cut to a length."""
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return "".join(character if character.isprintable() else "?" for character in cut)
