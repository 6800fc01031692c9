"""Tables of engines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvferry.cli.formatting import counted, number
from kvferry.cli.output import table_of
from kvferry.cli.top.report import LOST, Counted, EngineReport
from kvferry.cli.top.scrape import brief
from kvferry.core.metrics import Stage

UNKNOWN = "-"

STAGES = {Stage.HANDSHAKE: "hand-\nshake", Stage.TRANSFER: "trans-\nfer"}
"""The headings of stages that are not their names."""

Row = Sequence[str | Text]


def tables(engines: Sequence[EngineReport], width: int) -> RenderableType:
    """Return the tables of all engines; columns of staging only if one of them stages its cache."""
    is_staged = any(engine.host_pages_used is not None for engine in engines)
    copied = any(Stage.COPY in pull.seconds_per_pull for one in engines for pull in one.pulls)
    stages = [stage for stage in Stage if copied or stage is not Stage.COPY]
    parts: list[RenderableType] = [_heading(engines)]
    # A star is before the heading of names; all else is a number.
    for title, headings, rows in (
        (
            "Engines",
            "*engine,run-\nning,wait-\ning,cache\nused,loads\n/s,tokens\n/s,failed\nloads,"
            "peers\nup,peers\ndown,quaran-\ntined" + ",host\npages" * is_staged,
            [_engine(one)[: 10 + is_staged] for one in engines if one.error is None],
        ),
        (
            "Without values",
            "*engine,*error",
            [(one.name, Text(one.error, style="red")) for one in engines if one.error],
        ),
        (
            "Who pulls from whom, and average ms of a pull by stage",
            "*decode,*from\nprefill,*path,pulls\n/s,MB/s,"
            + ",".join(STAGES.get(stage, stage.value) for stage in stages),
            list(_pulls(engines, stages)),
        ),
        (
            "Held for decode: blocks now, and what became of holds",
            "*prefill,held\nblocks,of\ncache,of\nlimit,holds\nmade,read,given\nback,lost",
            list(_holds(engines)),
        ),
        (
            "What failed since the engine started",
            "*engine,*what,*with peer,count",
            list(_problems(engines)),
        ),
    ):
        if rows:
            names = headings.split(",")
            kinds = {one.strip("*"): "name" if one[0] == "*" else "number" for one in names}
            # Names are other processes'.
            safe = [[brief(one) if isinstance(one, str) else one for one in row] for row in rows]
            parts += ["", Text(title, style="bold"), table_of(kinds, safe, width)]
    return Group(*parts)


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
        _number(engine.running),
        _number(engine.waiting),
        _percent(engine.cache_used),
        _number(engine.loads_per_second),
        _number(engine.tokens_per_second),
        _counted(engine.failed_loads),
        _number(engine.peers_up),
        Text(_number(engine.peers_down), style="red" if engine.peers_down else ""),
        Text(_number(engine.quarantined_pages), style="red" if engine.quarantined_pages else ""),
        _percent(engine.host_pages_used),
    ]


def _pulls(engines: Sequence[EngineReport], stages: Sequence[Stage]) -> Iterator[Row]:
    for engine in engines:
        for pull in engine.pulls:
            times = [_number(pull.seconds_per_pull.get(stage), 1e3) for stage in stages]
            rates = _number(pull.pulls_per_second), _number(pull.bytes_per_second, 1e-6)
            yield [engine.name, pull.peer, ", ".join(pull.paths), *rates, *times]


def _holds(engines: Sequence[EngineReport]) -> Iterator[Row]:
    for engine in engines:
        if (holds := engine.holds) is not None:
            of = holds.outcomes
            lost = [of[outcome] for outcome in LOST if outcome in of]
            new = [one.new for one in lost if one.new is not None]
            every = Counted(total=sum(one.total for one in lost), new=sum(new) if new else None)
            yield [
                engine.name,
                _number(holds.pages),
                _percent(holds.share_of_cache),
                _percent(holds.share_of_limit),
                *(_counted(of.get(outcome), "green") for outcome in ("made", "read", "abandoned")),
                _counted(every if lost else None),
            ]


def _problems(engines: Sequence[EngineReport]) -> Iterator[Row]:
    found = [(engine.name, problem) for engine in engines for problem in engine.problems]
    for name, problem in sorted(found, key=lambda one: -(one[1].counted.new or 0.0)):
        yield [name, problem.what, problem.peer, _counted(problem.counted)]


def _number(value: float | None, factor: float = 1) -> str:
    return UNKNOWN if value is None else number(value * factor)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f}%"


def _counted(one: Counted | None, style: str = "red") -> Text:
    """Return a total, with what came since the previous reading in a style: ``12 +2``."""
    if one is None:
        return Text(UNKNOWN)
    text = Text(f"{one.total:,.0f}" if one.total < 1e9 else f"{one.total:.3g}")
    return text.append(f" +{one.new:,.0f}", style=style) if one.new else text
