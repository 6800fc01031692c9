"""What changed between two readings of an engine's metrics."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.cli.top.exposition import KVFERRY, STARTED, Labels, MetricsPage
from kvferry.cli.top.scrape import MetricsReading


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A counter's value.

    Attributes:
        total: Since the engine started.
        new: Since the previous reading; ``None`` if there is none.
    """

    total: float
    new: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsChange:
    """An engine's metrics at its latest reading and at the one before.

    Names of kvferry's metrics are without their prefix ``vllm:kvferry_``. A metric that is not on
    the page is unknown: its value is ``None``, or not in the dictionary.

    Attributes:
        now: The latest page.
        before: The page before; ``None`` if there is none. Empty if the engine has restarted since.
        seconds: The time between the two.
    """

    now: MetricsPage
    before: MetricsPage | None = None
    seconds: float = 0.0

    def value(self, name: str) -> float | None:
        """Return the sum of a metric's values."""
        values = self._series(name).values()
        return sum(values) if values else None

    def largest(self, name: str) -> float | None:
        """Return the largest of a metric's values."""
        return max(self._series(name).values(), default=None)

    def label(self, name: str, label: str) -> str | None:
        """Return the value of a metric's label, which is the same in all of its series."""
        return next((dict(labels).get(label) for labels in self._series(name)), None)

    def counted(self, name: str, *by: str) -> dict[tuple[str, ...], Counted]:
        """Return a counter's values, added up by some of its labels.

        A series that is lower than before was reset by a restart, and counts from 0; so does one
        that was not there before.
        """
        before = None if self.before is None else self.before.get(_full(name), {})
        sums: dict[tuple[str, ...], Counted] = {}
        for key, total in self._series(name).items():
            labels = dict(key)
            group = tuple(labels.get(label, "") for label in by)
            sums[group] = _added(sums.get(group), total, _growth(key, total, before))
        return sums

    def per_second(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """Return by how much a counter grew per second, by some of its labels."""
        if self.seconds <= 0:
            return {}
        counted = self.counted(name, *by).items()
        return {group: one.new / self.seconds for group, one in counted if one.new is not None}

    def _series(self, name: str) -> dict[Labels, float]:
        """Return a metric's values by labels."""
        return self.now.get(_full(name), {})


def changes(reading: MetricsReading, before: MetricsReading | None) -> dict[str, MetricsChange]:
    """Compare two readings of a page."""
    earlier = None if before is None else _engines(before.page)
    restarted = before is not None and reading.page.get(STARTED) != before.page.get(STARTED)
    return {
        engine: MetricsChange(
            now=page,
            before=None if earlier is None else {} if restarted else earlier.get(engine, {}),
            seconds=0.0 if before is None else reading.time - before.time,
        )
        for engine, page in _engines(reading.page).items()
    }


def _growth(key: Labels, total: float, before: dict[Labels, float] | None) -> float | None:
    """Return by how much one series of a counter grew; ``None`` if there is no page before."""
    if before is None:
        return None
    earlier = before.get(key, 0.0)
    return total - earlier if total >= earlier else total


def _added(sum_: Counted | None, total: float, new: float | None) -> Counted:
    """Return a sum with the values of one more series."""
    if sum_ is None:
        return Counted(total=total, new=new)
    return Counted(
        total=sum_.total + total,
        new=None if sum_.new is None or new is None else sum_.new + new,
    )


def _full(name: str) -> str:
    """Return a metric's name as it is on the page."""
    return name if ":" in name else KVFERRY + name


def _engines(page: MetricsPage) -> dict[str, MetricsPage]:
    """Split a page by the label ``engine``; what has none of this label is left out."""
    engines: dict[str, MetricsPage] = {}
    for name, series in page.items():
        for labels, value in series.items():
            engine = dict(labels).get("engine")
            if engine is not None:
                engines.setdefault(engine, {}).setdefault(name, {})[labels] = value
    return dict(sorted(engines.items()))
