"""Pages of metrics in Prometheus's text format, fetched over HTTP from several engines at once.

A page comes from the network: its size, and each line of what ``kvferry top`` shows, are checked.
"""

from __future__ import annotations

import http.client
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import KVFerryError

Labels = tuple[tuple[str, str], ...]  # names and values of labels, sorted by name
MetricsPage = dict[str, dict[Labels, float]]
"""The values on a page by the metric's name and by labels."""

KVFERRY, VLLM = "vllm:kvferry_", "vllm:"
CACHE_CONFIG = "vllm:cache_config_info"
CACHE_USED = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
STARTED = "process_start_time_seconds"
OTHERS = frozenset({CACHE_CONFIG, CACHE_USED, RUNNING, WAITING, STARTED})
"""The metrics that are parsed beside kvferry's, of which histograms are left out."""

MAX_BYTES = 8 << 20  # the largest page that is read; one engine's has about 100 kB
MAX_SAMPLES = 50_000  # the most lines of a page that are parsed; one engine's has fewer than 1,000
MAX_VALUE = 1e18
"""Larger values are left out: what is computed from two of them might not be finite."""
MAX_THREADS = 32
LATE_SECONDS = 1.0
"""How long a thread may take, beyond an engine's time to answer, until nobody waits for it."""

brief = partial(on_one_line, limit=80)  # text of another process, as it is shown
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


class MetricsPageError(KVFerryError):
    """A page of metrics cannot be fetched, or is not a page of metrics."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow no redirection: it would be an error with its status."""


# Engines are asked directly, as Prometheus does, even where http_proxy is set.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


class MetricsAddress(NamedTuple):
    """The URL of a page of metrics, and a name for people: without scheme and ``/metrics``."""

    url: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address that a user wrote: a URL, or ``HOST:PORT``."""
        parts, valid = urlsplit(""), False
        with suppress(ValueError):
            parts = urlsplit(text if "://" in text else f"http://{text}")
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        if not valid or "@" in parts.netloc or not text.isprintable() or " " in text:
            raise MetricsPageError(
                f"{brief(text)!r} is no address of a page of metrics: give HOST:PORT or a URL "
                "such as http://10.0.0.1:8000/metrics"
            )
        path = parts.path if parts.path.strip("/") else "/metrics"
        rest = f"{path}?{parts.query}" if parts.query else path
        name = parts.netloc + (rest if rest != "/metrics" else "")
        return cls(f"{parts.scheme}://{parts.netloc}{rest}", name)


class MetricsReading(NamedTuple):
    """An engine's page, and when it had been read, by ``time.monotonic``."""

    time: float
    page: MetricsPage


class Scraper:
    """Fetch the pages of several engines at once, each in a thread."""

    def __init__(self, addresses: Sequence[MetricsAddress], *, timeout: float) -> None:
        self._addresses, self._timeout = addresses, timeout
        self._pool = ThreadPoolExecutor(min(len(addresses), MAX_THREADS), "scrape")
        self._started: dict[MetricsAddress, Future[MetricsReading | MetricsPageError]] = {}

    def scrape(self) -> list[MetricsReading | MetricsPageError]:
        """Fetch every page once, and return it, or why there is none, in the addresses' order."""
        for address in self._addresses:
            # One that sends a byte now and then is still read: it is not asked again meanwhile.
            if address not in self._started or self._started[address].done():
                self._started[address] = self._pool.submit(read, address, self._timeout)
        turns = math.ceil(len(self._addresses) / MAX_THREADS)
        wait(self._started.values(), turns * (self._timeout + LATE_SECONDS))
        late = _silent(TimeoutError(), self._timeout)
        return [one.result() if one.done() else late for one in self._started.values()]

    def close(self) -> None:
        """Stop fetching. Does not wait for an engine that has not answered yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def read(address: MetricsAddress, timeout: float) -> MetricsReading | MetricsPageError:
    """Fetch and parse a page; return why there is none."""
    deadline = time.monotonic() + timeout
    page = bytearray()
    try:
        with _OPENER.open(address.url, timeout=timeout) as answer:
            # One byte more than a page may have at most.
            while len(page) <= MAX_BYTES and (piece := answer.read1(1 << 16)):
                page += piece
                if time.monotonic() > deadline:
                    raise TimeoutError
        return MetricsReading(time.monotonic(), parse(bytes(page)))
    except MetricsPageError as exc:
        return exc
    except urllib.error.HTTPError as exc:
        exc.close()
        hint = ": is this the port of vLLM's server?" if exc.code == 404 else ""
        return MetricsPageError(f"answers with HTTP status {exc.code}{hint}")
    except (OSError, http.client.HTTPException, ValueError) as exc:
        return _silent(exc, timeout)


def _silent(error: Exception, timeout: float) -> MetricsPageError:
    """Return the error of an engine that did not answer, with the reason in a few words."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    if isinstance(cause, TimeoutError):
        reason = f"no page within {timeout:g} s"
    return MetricsPageError(f"does not answer: {brief(reason)}")


def parse(page: bytes) -> MetricsPage:
    """Return the values of the metrics that ``kvferry top`` shows; not those that are no number."""
    if len(page) > MAX_BYTES:
        raise MetricsPageError(f"the page has more than {MAX_BYTES:,} bytes")
    try:
        lines = page.decode().split("\n")
    except UnicodeDecodeError as exc:
        raise MetricsPageError("the page is not text in UTF-8") from exc
    wanted = [line for line in lines if (name := _NAME.match(line)) and _wanted(name[0])]
    if len(wanted) > MAX_SAMPLES:
        raise MetricsPageError(f"the page has more than {MAX_SAMPLES:,} values to parse")
    found: MetricsPage = {}
    for line in wanted:
        try:
            [[sample]] = [each.samples for each in text_string_to_metric_families(line)]
        except ValueError as exc:
            raise MetricsPageError(f"the page has a malformed line: {brief(line)}") from exc
        if abs(sample.value) <= MAX_VALUE:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = float(sample.value)
    if not any(name.startswith(VLLM) for name in found):
        raise MetricsPageError("the page has no metric of vLLM: expected a page like /metrics")
    return found


def _wanted(name: str) -> bool:
    return name in OTHERS or (
        name.startswith(KVFERRY) and not name.endswith(("_bucket", "_created"))
    )
