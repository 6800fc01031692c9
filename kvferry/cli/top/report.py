"""What ``kvferry top`` shows of each engine, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.cli.top.changes import Counted, MetricsChange
from kvferry.cli.top.exposition import CACHE_CONFIG, CACHE_USED, KVFERRY, RUNNING, WAITING
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
        peer: The prefill engine's id.
        paths: What carried the bytes since the previous reading; if nothing did, since the start.
        pulls_per_second: Loads, counted on each rank of the decode engine.
        bytes_per_second: Bytes of KV cache.
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
    """How often something went wrong.

    Attributes:
        what: In a few words.
        peer: The prefill engine that took part; empty if none did, or unknown.
        counted: How often.
    """

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
        running, waiting: Requests.
        cache_used: The share of the KV cache that requests and holds use.
        loads_per_second, tokens_per_second: Requests whose cache was pulled, and their tokens.
        failed_loads: Requests whose load failed.
        peers_up, peers_down: Prefill engines; of ranks that differ, the largest number.
        quarantined_pages: Pages that are not reused because a failed load may still write them.
        host_pages_used: The share of its host pages that requests have reserved or use, if its
            cache is staged. Of those for holds and those for loads, the larger share.
        pulls: What is pulled from each prefill engine, the most bytes first.
        holds: What it holds for others.
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


def engine_report(name: str, change: MetricsChange) -> EngineReport:
    """Return what is shown of an engine that answered."""
    without = not any(metric.startswith(KVFERRY) for metric in change.now)
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
        host_pages_used=_host_pages_used(change),
        pulls=sorted(_pulls(change), key=lambda pull: -(pull.bytes_per_second or 0.0)),
        holds=_holds(change),
        problems=sorted(
            _problems(change),
            key=lambda problem: (-(problem.counted.new or 0.0), -problem.counted.total),
        ),
    )


def _pulls(change: MetricsChange) -> Iterator[PeerPulls]:
    """Yield what is pulled from each prefill engine."""
    pulls = change.counted("pulls_total", "peer")
    rates, byte_rates = (change.per_second(name, "peer") for name in ("pulls_total", "bytes_total"))
    seconds = change.counted("peer_seconds_total", "peer", "stage")
    paths: dict[str, dict[str, Counted]] = {}
    for (peer, path), nbytes in change.counted("bytes_total", "peer", "path").items():
        paths.setdefault(peer, {})[path] = nbytes
    for (peer,), counted in pulls.items():
        own = paths.get(peer, {})
        yield PeerPulls(
            peer=peer,
            paths=[path for path, nbytes in own.items() if nbytes.new] or list(own),
            pulls_per_second=rates.get((peer,)),
            bytes_per_second=byte_rates.get((peer,)),
            seconds_per_pull={
                stage.value: spent.new / counted.new
                for stage in Stage
                if (spent := seconds.get((peer, stage.value))) is not None
                and spent.new is not None
                and counted.new
            },
        )


def _host_pages_used(change: MetricsChange) -> float | None:
    """Return the share of an engine's host pages that is used; ``None`` if it has none."""
    used = change.counted("host_pages_used", "use")
    return max(
        (
            used[use].total / pages.total
            for use, pages in change.counted("host_pages", "use").items()
            if pages.total and use in used
        ),
        default=None,
    )


def _holds(change: MetricsChange) -> HoldsReport | None:
    """Return what an engine holds for others; ``None`` if it is not known to have held anything."""
    counted = change.counted("holds_total", "outcome")
    pages = change.value("held_pages")
    if not pages and not any(one.total for one in counted.values()):
        return None
    return HoldsReport(
        pages=pages,
        share_of_cache=(
            None
            if change.value("host_pages")
            else _share(pages, change.label(CACHE_CONFIG, "num_gpu_blocks"))
        ),
        share_of_limit=change.largest("held_fraction"),
        outcomes={outcome: one for (outcome,), one in counted.items()},
    )


def _share(pages: float | None, blocks: str | None) -> float | None:
    """Return pages as a share of a number of blocks, which is a label's value."""
    if pages is None or blocks is None or not (blocks.isascii() and blocks.isdecimal()):
        return None
    return pages / int(blocks) if len(blocks) < 16 and int(blocks) else None


def _problems(change: MetricsChange) -> Iterator[ProblemCount]:
    """Yield everything that went wrong."""
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
