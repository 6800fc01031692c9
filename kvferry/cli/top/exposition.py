"""Parse a page of metrics in Prometheus's text format.

Only the lines of kvferry, and the few of vLLM that ``kvferry top`` shows, are parsed. A page comes
from the network, so its size and each of these lines are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

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
_SAMPLE = re.compile(
    r"[ \t]*(?:\{(?P<labels>.*)\}[ \t]*)?"
    r"(?P<value>[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|Inf|NaN))"
    r"(?:[ \t]+-?[0-9]+)?[ \t]*",
    re.DOTALL,
)
_LABEL = re.compile(
    r"[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"
    r'"([^"\\]*(?:\\["\\n][^"\\]*)*)"[ \t]*(?:,[ \t]*|\Z)'
)
_ESCAPED = re.compile(r"\\(.)")


class MetricsPageError(KVFerryError):
    """A page of metrics cannot be fetched, or is not a page of metrics."""


def parse(page: bytes) -> MetricsPage:
    """Parse a page."""
    if len(page) > MAX_BYTES:
        raise MetricsPageError(f"the page has more than {MAX_BYTES:,} bytes")
    try:
        text = page.decode()
    except UnicodeDecodeError as exc:
        raise MetricsPageError("the page is not text in UTF-8") from exc
    found: MetricsPage = {}
    for count, (name, labels, value) in enumerate(_samples(text)):
        if count >= MAX_SAMPLES:
            raise MetricsPageError(f"the page has more than {MAX_SAMPLES:,} values to parse")
        if abs(value) <= MAX_VALUE:
            found.setdefault(name, {})[labels] = value
    if not any(name.startswith(VLLM) for name in found):
        raise MetricsPageError("the page has no metric of vLLM: expected a page like /metrics")
    return found


def printable(text: str, limit: int = SHOWN) -> str:
    """Return text of another process without control characters, cut to a length."""
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return "".join(character if character.isprintable() else "?" for character in cut)


def _samples(text: str) -> Iterator[tuple[str, Labels, float]]:
    """Yield name, labels and value of each line that is to be parsed."""
    for number, line in enumerate(text.split("\n"), 1):
        name = _NAME.match(line)
        if name is None or not _wanted(name[0]):
            continue
        sample = _SAMPLE.fullmatch(line, name.end())
        labels = None if sample is None else _labels(sample["labels"] or "")
        if sample is None or labels is None:
            raise MetricsPageError(f"line {number} is malformed: {printable(line)}")
        yield name[0], labels, float(sample["value"])


def _wanted(name: str) -> bool:
    """Return whether the values of a metric are parsed."""
    return name in OTHERS or (name.startswith(KVFERRY) and not name.endswith(UNUSED))


def _labels(text: str) -> Labels | None:
    """Return the labels between the braces of a line; ``None`` if they are malformed."""
    labels: dict[str, str] = {}
    position = 0
    while position < len(text):
        label = _LABEL.match(text, position)
        if label is None or label[1] in labels:
            return None
        labels[label[1]] = _ESCAPED.sub(_unescaped, label[2])
        position = label.end()
    return tuple(sorted(labels.items()))


def _unescaped(escaped: re.Match[str]) -> str:
    """Return the character that two escaped ones stand for."""
    return "\n" if escaped[1] == "n" else escaped[1]
