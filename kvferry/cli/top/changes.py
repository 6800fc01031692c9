"""What changed between two readings of an engine's metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.cli.top.page import KVFERRY, STARTED, Labels, MetricsPage
from kvferry.cli.top.scrape import MetricsReading


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A counter since the engine started, and since the previous reading (``None`` without one)."""

    total: float
    new: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsChange:
    """An engine's metrics at its latest reading and at the one before.

    Names of kvferry's metrics are without their prefix ``vllm:kvferry_``. A metric that is not on
    the page is unknown: its value is ``None``, or not in the dictionary.

    Attributes:
        before: The page before; ``None`` if there is none. Empty if the engine has restarted since.
        seconds: The time between the two.
    """

    now: MetricsPage
    before: MetricsPage | None = None
    seconds: float = 0.0

    def series(self, name: str) -> dict[Labels, float]:
        """Return a metric's values by labels."""
        return self.now.get(name if ":" in name else KVFERRY + name, {})

    def value(self, name: str) -> float | None:
        """Return the sum of a metric's values."""
        values = self.series(name).values()
        return sum(values) if values else None

    def largest(self, name: str) -> float | None:
        """Return the largest of a metric's values."""
        return max(self.series(name).values(), default=None)

    def counted(self, name: str, *by: str) -> dict[tuple[str, ...], Counted]:
        """Return a counter's values, added up by some of its labels; one that is missing is ``""``.

        A series that is lower than before was reset by a restart, and counts from 0; so does one
        that was not there before.
        """
        before = None if self.before is None else self.before.get(KVFERRY + name, {})
        sums: dict[tuple[str, ...], Counted] = {}
        for key, total in self.series(name).items():
            group = tuple(dict(key).get(label, "") for label in by)
            sum_ = sums.get(group, Counted(total=0, new=0))
            new = None
            if before is not None and sum_.new is not None:
                earlier = before.get(key, 0.0)
                new = sum_.new + (total - earlier if total >= earlier else total)
            sums[group] = Counted(total=sum_.total + total, new=new)
        return sums

    def per_second(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """Return by how much a counter grew per second, by some of its labels."""
        if self.seconds <= 0:
            return {}
        counted = self.counted(name, *by).items()
        return {group: one.new / self.seconds for group, one in counted if one.new is not None}


def changes(
    reading: MetricsReading, before: MetricsReading | None
) -> Iterator[tuple[str, MetricsChange]]:
    """Yield the change of each engine on a page; vLLM has several with data parallelism."""
    earlier = None if before is None else _engines(before.page)
    restarted = before is not None and reading.page.get(STARTED) != before.page.get(STARTED)
    for engine, page in _engines(reading.page).items():
        yield (
            engine,
            MetricsChange(
                now=page,
                before=None if earlier is None else {} if restarted else earlier.get(engine, {}),
                seconds=0.0 if before is None else reading.time - before.time,
            ),
        )


def _engines(page: MetricsPage) -> dict[str, MetricsPage]:
    """Split a page by the label ``engine``; what has none of this label is left out."""
    engines: dict[str, MetricsPage] = {}
    for name, series in page.items():
        for labels, value in series.items():
            if (engine := dict(labels).get("engine")) is not None:
                engines.setdefault(engine, {}).setdefault(name, {})[labels] = value
    return dict(sorted(engines.items()))
