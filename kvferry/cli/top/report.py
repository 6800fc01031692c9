"""What ``kvferry top`` shows of each engine, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.cli.top.changes import Counted, MetricsChange
from kvferry.cli.top.page import CACHE_CONFIG, CACHE_USED, KVFERRY, RUNNING, WAITING
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPulls:
    """What a decode engine pulls from one prefill engine.

    Attributes:
        paths: What carried the bytes since the previous reading; if nothing did, since the start.
        pulls_per_second: Loads, counted on each rank of the decode engine.
        seconds_per_pull: Average time of a pull in each stage. Only for stages with pulls.
    """

    peer: str
    paths: list[str]
    pulls_per_second: float | None
    bytes_per_second: float | None
    seconds_per_pull: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsReport:
    """What a prefill engine holds for others.

    Attributes:
        pages: How many of its blocks, or of its host pages.
        share_of_cache: The same as a share of all blocks; ``None`` if the cache is staged, because
            host pages are held then, and no blocks.
        share_of_limit: The same as a share of the blocks that may be held, or of the host pages.
        outcomes: Holds by outcome.
    """

    pages: float | None
    share_of_cache: float | None
    share_of_limit: float | None
    outcomes: dict[str, Counted]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemCount:
    """How often something went wrong; ``peer`` is empty if none took part, or if it is unknown."""

    what: str
    peer: str
    counted: Counted


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine. ``None`` is unknown.

    Attributes:
        name: Host and port, with ``#`` and the index if the page has several engines.
        error: Why its page was not read; everything else is unknown then.
        seconds: The time over which rates were taken.
        cache_used: The share of the KV cache that requests and holds use.
        loads_per_second, tokens_per_second: Requests whose cache was pulled, and their tokens.
        peers_up, peers_down: Prefill engines; of ranks that differ, the largest number.
        quarantined_pages: Pages that are not reused because a failed load may still write them.
        host_pages_used: The share of its host pages that requests have reserved or use, if its
            cache is staged. Of those for holds and those for loads, the larger share.
        pulls: What is pulled from each prefill engine, the most bytes first.
        problems: What went wrong since it started, the most recent first.
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
    pulls: list[PeerPulls] = field(default_factory=list)
    holds: HoldsReport | None = None
    problems: list[ProblemCount] = field(default_factory=list)

    @property
    def is_silent(self) -> bool:
        """Whether the engine did not answer."""
        return self.seconds is None and self.error is not None


def engine_report(name: str, change: MetricsChange) -> EngineReport:
    """Return what is shown of an engine that answered."""
    without = not any(metric.startswith(KVFERRY) for metric in change.now)
    host_pages = change.counted("host_pages_used", "use")
    return EngineReport(
        name=name,
        error="has no metrics of kvferry" if without else None,
        seconds=change.seconds or None,
        running=change.value(RUNNING),
        waiting=change.value(WAITING),
        cache_used=change.largest(CACHE_USED),
        loads_per_second=change.per_second("loads_total").get(()),
        tokens_per_second=change.per_second("tokens_total").get(()),
        failed_loads=change.counted("failed_loads_total").get(()),
        peers_up=change.largest("peers_up"),
        peers_down=change.largest("peers_down"),
        quarantined_pages=change.value("quarantined_pages"),
        host_pages_used=max(
            (
                host_pages[use].total / pages.total
                for use, pages in change.counted("host_pages", "use").items()
                if pages.total and use in host_pages
            ),
            default=None,
        ),
        pulls=sorted(_pulls(change), key=lambda pull: -(pull.bytes_per_second or 0.0)),
        holds=_holds(change),
        problems=sorted(
            _problems(change),
            key=lambda problem: (-(problem.counted.new or 0.0), -problem.counted.total),
        ),
    )


def _pulls(change: MetricsChange) -> Iterator[PeerPulls]:
    """Yield what is pulled from each prefill engine."""
    rates, byte_rates = (change.per_second(name, "peer") for name in ("pulls_total", "bytes_total"))
    seconds = change.counted("peer_seconds_total", "peer", "stage")
    carried = change.counted("bytes_total", "peer", "path")
    for (peer,), counted in change.counted("pulls_total", "peer").items():
        own = {path: nbytes for (whose, path), nbytes in carried.items() if whose == peer}
        spent = {stage: seconds.get((peer, stage.value)) for stage in Stage}
        yield PeerPulls(
            peer=peer,
            paths=[path for path, nbytes in own.items() if nbytes.new] or list(own),
            pulls_per_second=rates.get((peer,)),
            bytes_per_second=byte_rates.get((peer,)),
            seconds_per_pull={
                stage.value: one.new / counted.new
                for stage, one in spent.items()
                if one is not None and one.new is not None and counted.new
            },
        )


def _holds(change: MetricsChange) -> HoldsReport | None:
    """Return what an engine holds for others; ``None`` if it is not known to have held anything."""
    outcomes = {of: one for (of,), one in change.counted("holds_total", "outcome").items()}
    pages = change.value("held_pages")
    if not pages and not any(one.total for one in outcomes.values()):
        return None
    labels = dict(next(iter(change.series(CACHE_CONFIG)), ()))
    blocks, share = labels.get("num_gpu_blocks", ""), None
    if pages is not None and blocks.isascii() and blocks.isdecimal() and len(blocks) < 16:
        share = pages / int(blocks) if int(blocks) and not change.value("host_pages") else None
    return HoldsReport(
        pages=pages,
        share_of_cache=share,
        share_of_limit=change.largest("held_fraction"),
        outcomes=outcomes,
    )


def _problems(change: MetricsChange) -> Iterator[ProblemCount]:
    for (outcome,), counted in change.counted("holds_total", "outcome").items():
        if outcome in LOST and counted.total:
            yield ProblemCount(what=f"hold {outcome} before it was read", peer="", counted=counted)
    for name, (what, by) in PROBLEMS.items():
        for values, counted in change.counted(name, *by).items():
            if counted.total:
                labels = dict(zip(by, values, strict=True))
                yield ProblemCount(
                    what=what.format(**labels), peer=labels.get("peer", ""), counted=counted
                )
