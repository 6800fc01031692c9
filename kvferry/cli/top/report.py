"""What ``kvferry top`` shows of each engine, as data: what changed between two readings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct

from kvferry.cli.top.scrape import (
    CACHE_CONFIG,
    CACHE_USED,
    KVFERRY,
    RUNNING,
    STARTED,
    WAITING,
    Labels,
    MetricsPage,
    MetricsReading,
)
from kvferry.core.metrics import Stage

LOST = ("expired", "evicted", "orphaned", "revoked")
"""The outcomes of holds that ended before decode had read them or given them back."""

PROBLEMS = {
    "load_failures_total": ("load failed at {stage}: {cause}", ("peer", "stage", "cause")),
    "refused_tickets_total": ("ticket refused: {reason}", ("reason",)),
    "tickets_not_made_total": ("no ticket made: {reason}", ("reason",)),
    "lost_peers_total": ("peer lost", ("peer",)),
    "untold_releases_total": ("release not sent", ("peer",)),
    "done_after_expiry_total": ("done after expiry", ()),
}
"""The counters of what went wrong: what is shown of each, and by which labels it is counted."""


class Counted(Struct, frozen=True, kw_only=True):
    """A counter since the engine started, and since the previous reading (``None`` without one)."""

    total: float
    new: float | None


class PeerPulls(Struct, frozen=True, kw_only=True):
    """What a decode engine pulls from one prefill engine; each of its ranks counts.

    ``paths`` carried bytes since the previous reading or, if none did, since the start.
    ``seconds_per_pull`` has the average of each stage in which a pull was.
    """

    peer: str
    paths: list[str]
    pulls_per_second: float | None
    bytes_per_second: float | None
    seconds_per_pull: dict[str, float]


class HoldsReport(Struct, frozen=True, kw_only=True):
    """What a prefill engine holds: blocks, or host pages (of no share) if its cache is staged."""

    pages: float | None
    share_of_cache: float | None
    share_of_limit: float | None
    outcomes: dict[str, Counted]


class ProblemCount(Struct, frozen=True, kw_only=True):
    """How often something went wrong; ``peer`` is empty if none took part, or if it is unknown."""

    what: str
    peer: str
    counted: Counted


class EngineReport(Struct, frozen=True, kw_only=True):
    """One engine. ``None`` is unknown, and all is unknown if ``error`` is why it was not read.

    Shares are of 1. Of ranks that differ, the largest number counts, as does the larger share of
    host pages, for holds or for loads. Pulls with most bytes and newest problems are first.
    """

    name: str
    error: str | None = None
    seconds: float | None = None
    running: float | None = None
    waiting: float | None = None
    cache_used: float | None = None
    loads_per_second: float | None = None
    tokens_per_second: float | None = None
    failed_loads: Counted | None = None
    peers_up: float | None = None
    peers_down: float | None = None
    quarantined_pages: float | None = None
    host_pages_used: float | None = None
    pulls: list[PeerPulls] = []
    holds: HoldsReport | None = None
    problems: list[ProblemCount] = []

    @property
    def is_silent(self) -> bool:
        """Whether the engine did not answer."""
        return self.seconds is None and self.error is not None


class _Change(NamedTuple):
    """An engine's metrics at its latest reading and at the one before, ``seconds`` earlier.

    Names of kvferry's metrics are without their prefix. ``before`` is ``None`` at the first
    reading, and empty if the engine has restarted since.
    """

    now: MetricsPage
    before: MetricsPage | None
    seconds: float

    def series(self, name: str) -> dict[Labels, float]:
        return self.now.get(name if ":" in name else KVFERRY + name, {})

    def value(self, name: str, of: Callable[[Iterable[float]], float] = sum) -> float | None:
        """Return the sum, or what ``of`` returns, of a metric's values; ``None`` without any."""
        values = self.series(name).values()
        return of(values) if values else None

    def counted(self, name: str, *by: str) -> dict[tuple[str, ...], Counted]:
        """Return a counter's values, added up by some of its labels; one that is missing is ``""``.

        A series that is lower than before was reset by a restart, and counts from 0; so does one
        that was not there before.
        """
        before = None if self.before is None else self.before.get(KVFERRY + name, {})
        sums: dict[tuple[str, ...], Counted] = {}
        for labels, total in self.series(name).items():
            group = tuple(dict(labels).get(label, "") for label in by)
            so_far = sums.get(group, Counted(total=0, new=0))
            new = None
            if before is not None:
                earlier = before.get(labels, 0.0)
                new = (so_far.new or 0) + (total - earlier if total >= earlier else total)
            sums[group] = Counted(total=so_far.total + total, new=new)
        return sums

    def per_second(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """Return by how much a counter grew per second, by some of its labels."""
        counted = self.counted(name, *by).items()
        return {group: one.new / self.seconds for group, one in counted if one.new is not None}


def engine_reports(
    name: str, reading: MetricsReading, before: MetricsReading | None
) -> list[EngineReport]:
    """Return what is shown of each engine on a page; vLLM has several with data parallelism."""
    found = _by_engine(reading.page)
    if not found:
        return [EngineReport(name=name, error="the page has no metric of an engine")]
    earlier, seconds = None, 0.0
    if before:
        is_same = reading.page.get(STARTED) == before.page.get(STARTED)
        earlier, seconds = _by_engine(before.page) if is_same else {}, reading.time - before.time
    return [
        _engine_report(
            name if len(found) == 1 else f"{name}#{engine}",
            _Change(page, None if earlier is None else earlier.get(engine, {}), seconds),
        )
        for engine, page in found.items()
    ]


def _by_engine(page: MetricsPage) -> dict[str, MetricsPage]:
    """Split a page by the label ``engine``; what has none of this label is left out."""
    engines: dict[str, MetricsPage] = {}
    for name, series in page.items():
        for labels, value in series.items():
            if (engine := dict(labels).get("engine")) is not None:
                engines.setdefault(engine, {}).setdefault(name, {})[labels] = value
    return dict(sorted(engines.items()))


def _engine_report(name: str, change: _Change) -> EngineReport:
    without = not any(metric.startswith(KVFERRY) for metric in change.now)
    used = change.counted("host_pages_used", "use")
    shares = (
        used[use].total / pages.total
        for use, pages in change.counted("host_pages", "use").items()
        if pages.total and use in used
    )
    return EngineReport(
        name=name,
        error="has no metrics of kvferry" if without else None,
        seconds=change.seconds or None,
        running=change.value(RUNNING),
        waiting=change.value(WAITING),
        cache_used=change.value(CACHE_USED, max),
        loads_per_second=change.per_second("loads_total").get(()),
        tokens_per_second=change.per_second("tokens_total").get(()),
        failed_loads=change.counted("failed_loads_total").get(()),
        peers_up=change.value("peers_up", max),
        peers_down=change.value("peers_down", max),
        quarantined_pages=change.value("quarantined_pages"),
        host_pages_used=max(shares, default=None),
        pulls=sorted(_pulls(change), key=lambda pull: -(pull.bytes_per_second or 0.0)),
        holds=_holds(change),
        problems=sorted(
            _problems(change), key=lambda one: (-(one.counted.new or 0.0), -one.counted.total)
        ),
    )


def _pulls(change: _Change) -> Iterator[PeerPulls]:
    rates, byte_rates = (change.per_second(name, "peer") for name in ("pulls_total", "bytes_total"))
    seconds = change.counted("peer_seconds_total", "peer", "stage")
    carried = change.counted("bytes_total", "peer", "path")
    for (peer,), pulls in change.counted("pulls_total", "peer").items():
        own = {path: nbytes for (whose, path), nbytes in carried.items() if whose == peer}
        spent = {stage.value: seconds.get((peer, stage.value)) for stage in Stage}
        yield PeerPulls(
            peer=peer,
            paths=[path for path, nbytes in own.items() if nbytes.new] or list(own),
            pulls_per_second=rates.get((peer,)),
            bytes_per_second=byte_rates.get((peer,)),
            seconds_per_pull={
                stage: one.new / pulls.new
                for stage, one in spent.items()
                if one is not None and one.new is not None and pulls.new
            },
        )


def _holds(change: _Change) -> HoldsReport | None:
    """Return what an engine holds for others; ``None`` if it is not known to have held anything."""
    outcomes = {of: one for (of,), one in change.counted("holds_total", "outcome").items()}
    pages = change.value("held_pages")
    if not pages and not any(one.total for one in outcomes.values()):
        return None
    labels = dict(next(iter(change.series(CACHE_CONFIG)), ()))
    blocks, share = labels.get("num_gpu_blocks", ""), None
    if pages is not None and blocks.isascii() and blocks.isdecimal() and len(blocks) < 16:
        share = pages / int(blocks) if int(blocks) and not change.value("host_pages") else None
    limit = change.value("held_fraction", max)
    return HoldsReport(pages=pages, share_of_cache=share, share_of_limit=limit, outcomes=outcomes)


def _problems(change: _Change) -> Iterator[ProblemCount]:
    for (outcome,), counted in change.counted("holds_total", "outcome").items():
        if outcome in LOST and counted.total:
            yield ProblemCount(what=f"hold {outcome} before it was read", peer="", counted=counted)
    for name, (what, by) in PROBLEMS.items():
        for values, counted in change.counted(name, *by).items():
            if counted.total:
                labels = dict(zip(by, values, strict=True))
                peer = labels.get("peer", "")
                yield ProblemCount(what=what.format(**labels), peer=peer, counted=counted)
