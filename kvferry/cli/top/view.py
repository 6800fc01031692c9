"""Tables of engines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvferry.cli.formatting import counted
from kvferry.cli.output import table_of
from kvferry.cli.top.report import LOST, Counted, EngineReport, HoldsReport
from kvferry.cli.top.scrape import brief
from kvferry.core.metrics import Stage

UNKNOWN = "-"
MAX_PROBLEMS = 20
"""The most rows of the table of problems."""
MAX_PEERS = 40
"""The most prefill engines that are shown of one decode engine."""
STAGE_HEADINGS = {
    Stage.WAIT: "wait",
    Stage.HANDSHAKE: "hand-\nshake",
    Stage.CHECK: "check",
    Stage.POST: "post",
    Stage.TRANSFER: "trans-\nfer",
    Stage.FENCE: "fence",
    Stage.COPY: "copy",
}
"""The heading of each stage; that of the copy is left out if no engine shown stages its cache."""

Row = Sequence[str | Text]


def tables(engines: Sequence[EngineReport], width: int) -> RenderableType:
    """Return the tables of all engines."""
    is_staged = any(engine.host_pages_used is not None for engine in engines)
    staged = ",host\npages" if is_staged else ""
    copied = any(Stage.COPY in pull.seconds_per_pull for one in engines for pull in one.pulls)
    stages = [stage for stage in STAGE_HEADINGS if copied or stage is not Stage.COPY]
    answered = [engine for engine in engines if engine.error is None]
    parts: list[RenderableType] = [_heading(engines)]
    for title, headings, rows in (
        (
            "Engines",
            "engine,run-\nning,wait-\ning,cache\nused,loads\n/s,tokens\n/s,failed\nloads,"
            f"peers\nup,peers\ndown,quaran-\ntined{staged}",
            [_engine(engine)[: 11 if staged else 10] for engine in answered],
        ),
        (
            "Without values",
            "engine,*error",
            [(engine.name, Text(engine.error, style="red")) for engine in engines if engine.error],
        ),
        (
            "Who pulls from whom, and average ms of a pull by stage",
            ",".join(
                [
                    "decode,*from\nprefill,*path,pulls\n/s,MB/s",
                    *(STAGE_HEADINGS[one] for one in stages),
                ]
            ),
            list(_pulls(engines, stages)),
        ),
        (
            "Held for decode: blocks now, and what became of holds",
            "prefill,held\nblocks,of\ncache,of\nlimit,holds\nmade,read,given\nback,lost",
            [_holds(engine.name, engine.holds) for engine in engines if engine.holds is not None],
        ),
        (
            "What failed since the engine started",
            "engine,*what,*with peer,count",
            list(_problems(engines)),
        ),
    ):
        first, *others = headings.split(",")
        # A star is before the heading of other names; all else is a number.
        kinds = {first: "name"}
        kinds |= {one.strip("*"): "name" if one[0] == "*" else "number" for one in others}
        # Names are other processes'.
        safe = [[brief(one) if isinstance(one, str) else one for one in row] for row in rows]
        if rows:
            parts += ["", Text(title, style="bold"), table_of(kinds, safe, width)]
    return Group(*parts)


def _safe(rows: Sequence[Row]) -> list[Row]:
    """Return rows with names, which are other processes', as text that a terminal can show."""
    return [[brief(one) if isinstance(one, str) else one for one in row] for row in rows]


def number(value: float | None, factor: float = 1) -> str:
    """Return a number with about three significant digits; ``-`` if it is unknown."""
    if value is None:
        return UNKNOWN
    value *= factor
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    whole = abs(value) >= 100 or value == int(value)
    return f"{value:,.{0 if whole else 1 if abs(value) >= 10 else 2}f}"


def _heading(engines: Sequence[EngineReport]) -> Text:
    """Return the first line: how many engines there are, and over how long rates were taken."""
    silent = sum(engine.is_silent for engine in engines)
    seconds = max((engine.seconds for engine in engines if engine.seconds), default=None)
    words = [counted(len(engines), "engine")]
    words += [f"{silent} without an answer"] if silent else []
    words.append(f"rates over {seconds:.1f} s" if seconds else "no rates yet")
    return Text("kvferry top", style="bold").append(f"  {', '.join(words)}", style="not bold")


def _engine(engine: EngineReport) -> Row:
    return [
        engine.name,
        number(engine.running),
        number(engine.waiting),
        _percent(engine.cache_used),
        number(engine.loads_per_second),
        number(engine.tokens_per_second),
        _counted(engine.failed_loads),
        number(engine.peers_up),
        Text(number(engine.peers_down), style="red" if engine.peers_down else ""),
        Text(number(engine.quarantined_pages), style="red" if engine.quarantined_pages else ""),
        _percent(engine.host_pages_used),
    ]


def _pulls(engines: Sequence[EngineReport], stages: Sequence[Stage]) -> Iterator[Row]:
    for engine in engines:
        for pull in engine.pulls[:MAX_PEERS]:
            times = [number(pull.seconds_per_pull.get(stage), 1e3) for stage in stages]
            rates = number(pull.pulls_per_second), number(pull.bytes_per_second, 1e-6)
            yield [engine.name, pull.peer, ", ".join(pull.paths), *rates, *times]
        if len(engine.pulls) > MAX_PEERS:
            more = f"{len(engine.pulls) - MAX_PEERS} more"
            yield [engine.name, more, *[""] * (3 + len(stages))]


def _holds(name: str, holds: HoldsReport) -> Row:
    of = holds.outcomes
    lost = [of[outcome] for outcome in LOST if outcome in of]
    new = [one.new for one in lost if one.new is not None]
    every = Counted(total=sum(one.total for one in lost), new=sum(new) if new else None)
    return [
        name,
        number(holds.pages),
        _percent(holds.share_of_cache),
        _percent(holds.share_of_limit),
        *(_counted(of.get(outcome), "green") for outcome in ("made", "read", "abandoned")),
        _counted(every if lost else None),
    ]


def _problems(engines: Sequence[EngineReport]) -> Iterator[Row]:
    found = [(engine.name, problem) for engine in engines for problem in engine.problems]
    found.sort(key=lambda one: -(one[1].counted.new or 0.0))
    for name, problem in found[:MAX_PROBLEMS]:
        yield [name, problem.what, problem.peer, _counted(problem.counted)]
    if len(found) > MAX_PROBLEMS:
        yield ["", f"{len(found) - MAX_PROBLEMS} more", "", ""]


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f}%"


def _counted(one: Counted | None, style: str = "red") -> Text:
    """Return a total, with what came since the previous reading in a style: ``12 +2``."""
    if one is None:
        return Text(UNKNOWN)
    text = Text(f"{one.total:,.0f}" if one.total < 1e9 else f"{one.total:.3g}")
    return text.append(f" +{one.new:,.0f}", style=style) if one.new else text
