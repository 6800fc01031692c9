"""Tables of engines for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvferry.cli.top.changes import Counted
from kvferry.cli.top.exposition import printable
from kvferry.cli.top.report import LOST, EngineReport
from kvferry.core.metrics import Stage

WIDTH = 100
"""Columns that the tables need."""
UNKNOWN = "-"
MAX_PROBLEMS = 20
"""The most rows of the table of problems."""
MAX_PEERS = 40
"""The most prefill engines that are shown of one decode engine."""
STAGE_HEADINGS = {
    Stage.WAIT: "\nwait",
    Stage.HANDSHAKE: "hand-\nshake",
    Stage.CHECK: "\ncheck",
    Stage.POST: "\npost",
    Stage.TRANSFER: "trans-\nfer",
    Stage.FENCE: "\nfence",
    Stage.COPY: "\ncopy",
}
"""The heading of each stage; that of the copy is left out if no engine shown stages its cache."""


def tables(engines: Sequence[EngineReport], *, once: bool = False) -> RenderableType:
    """Return the tables of all engines."""
    parts: list[RenderableType] = [_heading(engines, once=once)]
    for title, table in (
        ("Engines", _engines(engines)),
        ("Without values", _errors(engines)),
        ("Who pulls from whom, and average ms of a pull by stage", _pulls(engines)),
        ("Held for decode: blocks now, and what became of holds", _holds(engines)),
        ("What failed since the engine started", _problems(engines)),
    ):
        if table.row_count:
            parts += ["", Text(title, style="bold"), table]
    return Group(*parts)


def number(value: float | None) -> str:
    """Return a number with about three significant digits; ``-`` if it is unknown."""
    if value is None:
        return UNKNOWN
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    whole = abs(value) >= 100 or value == int(value)
    return f"{value:,.{0 if whole else 1 if abs(value) >= 10 else 2}f}"


def _heading(engines: Sequence[EngineReport], *, once: bool) -> Text:
    """Return the first line: how many engines there are, and over how long rates were taken."""
    silent = sum(engine.seconds is None and engine.error is not None for engine in engines)
    seconds = max((engine.seconds for engine in engines if engine.seconds), default=None)
    words = [f"{len(engines)} engine{'s' if len(engines) != 1 else ''}"]
    words += [f"{silent} without an answer"] if silent else []
    if seconds:
        words.append(f"rates over {seconds:.1f} s")
    elif not once:
        words.append("rates follow with the next reading")
    return Text("kvferry top", style="bold").append(f"  {', '.join(words)}", style="not bold")


def _engines(engines: Sequence[EngineReport]) -> Table:
    """Return the table with a row per engine that answered."""
    table = _table("\nengine", 24)
    for heading, width in (
        ("run-\nning", 5),
        ("wait-\ning", 5),
        ("cache\nused", 5),
        ("loads\n/s", 6),
        ("tokens\n/s", 7),
        ("failed\nloads", 10),
        ("peers\nup", 5),
        ("peers\ndown", 5),
        ("quaran-\ntined", 7),
    ):
        table.add_column(heading, justify="right", width=width, no_wrap=True)
    if any(engine.host_pages_used is not None for engine in engines):
        table.add_column("host\npages", justify="right", width=5, no_wrap=True)
    for engine in engines:
        if engine.error is None:
            table.add_row(_name(engine.name), *_engine_cells(engine)[: len(table.columns) - 1])
    return table


def _errors(engines: Sequence[EngineReport]) -> Table:
    """Return the table with the errors of engines."""
    table = _table("engine", 24)
    table.add_column("error", overflow="fold")
    for engine in engines:
        if engine.error is not None:
            table.add_row(_name(engine.name), Text(engine.error, style="red"))
    return table


def _engine_cells(engine: EngineReport) -> list[Text]:
    """Return the cells of an engine that answered."""
    return [
        Text(number(engine.running)),
        Text(number(engine.waiting)),
        Text(_percent(engine.cache_used)),
        Text(number(engine.loads_per_second)),
        Text(number(engine.tokens_per_second)),
        _counted(engine.failed_loads),
        Text(number(engine.peers_up)),
        Text(number(engine.peers_down), style="red" if engine.peers_down else ""),
        Text(number(engine.quarantined_pages), style="red" if engine.quarantined_pages else ""),
        Text(_percent(engine.host_pages_used)),
    ]


def _pulls(engines: Sequence[EngineReport]) -> Table:
    """Return the table with a row per decode engine and prefill engine."""
    pulls = [pull for engine in engines for pull in engine.pulls]
    is_staged = any(Stage.COPY in pull.seconds_per_pull for pull in pulls)
    stages = [stage for stage in STAGE_HEADINGS if is_staged or stage is not Stage.COPY]
    table = _table("\ndecode", 15 if is_staged else 18)
    width = 10 if is_staged else 12
    table.add_column("from\nprefill", width=width, no_wrap=True, overflow="ellipsis")
    table.add_column("\npath", width=10, no_wrap=True, overflow="ellipsis")
    for heading, width in (
        ("pulls\n/s", 6),
        ("\nMB/s", 6),
        *((STAGE_HEADINGS[stage], 6) for stage in stages),
    ):
        table.add_column(heading, justify="right", width=width, no_wrap=True)
    for engine in engines:
        for pull in engine.pulls[:MAX_PEERS]:
            rate = pull.bytes_per_second
            table.add_row(
                _name(engine.name),
                _name(pull.peer),
                _name(", ".join(pull.paths)),
                number(pull.pulls_per_second),
                number(None if rate is None else rate / 1e6),
                *(_milliseconds(pull.seconds_per_pull.get(stage)) for stage in stages),
            )
        if len(engine.pulls) > MAX_PEERS:
            table.add_row(_name(engine.name), f"{len(engine.pulls) - MAX_PEERS} more")
    return table


def _holds(engines: Sequence[EngineReport]) -> Table:
    """Return the table with a row per prefill engine."""
    table = _table("\nprefill", 18)
    for heading, width in (
        ("held\nblocks", 7),
        ("of\ncache", 5),
        ("of\nlimit", 5),
        ("holds\nmade", 13),
        ("\nread", 13),
        ("given\nback", 11),
        ("\nlost", 11),
    ):
        table.add_column(heading, justify="right", width=width, no_wrap=True)
    for engine in engines:
        if (holds := engine.holds) is not None:
            table.add_row(
                _name(engine.name),
                number(holds.pages),
                _percent(holds.share_of_cache),
                _percent(holds.share_of_limit),
                _counted(holds.outcomes.get("made"), bad=False),
                _counted(holds.outcomes.get("read"), bad=False),
                _counted(holds.outcomes.get("abandoned"), bad=False),
                _counted(_lost(holds.outcomes)),
            )
    return table


def _lost(outcomes: Mapping[str, Counted]) -> Counted | None:
    """Return how many holds were lost, whatever the reason; ``None`` if that is unknown."""
    lost = [outcomes[outcome] for outcome in LOST if outcome in outcomes]
    if not lost:
        return None
    new = [one.new for one in lost if one.new is not None]
    return Counted(total=sum(one.total for one in lost), new=sum(new) if new else None)


def _problems(engines: Sequence[EngineReport]) -> Table:
    """Return the table of what went wrong, the most recent first."""
    table = _table("engine", 24)
    table.add_column("what", width=40, no_wrap=True, overflow="ellipsis")
    table.add_column("with peer", width=16, no_wrap=True, overflow="ellipsis")
    table.add_column("count", justify="right", width=14, no_wrap=True)
    found = [(engine, problem) for engine in engines for problem in engine.problems]
    found.sort(key=lambda one: -(one[1].counted.new or 0.0))
    for engine, problem in found[:MAX_PROBLEMS]:
        cells = (_name(engine.name), _name(problem.what), _name(problem.peer))
        table.add_row(*cells, _counted(problem.counted))
    if len(found) > MAX_PROBLEMS:
        table.add_row("", f"{len(found) - MAX_PROBLEMS} more")
    return table


def _table(first: str, width: int) -> Table:
    """Return an empty table whose first column has an engine's name."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, width=width, no_wrap=True, overflow="ellipsis")
    return table


def _name(text: str) -> Text:
    """Return a name, which is another process's, as text that a terminal shows as it stands."""
    return Text(printable(text))


def _percent(share: float | None) -> str:
    """Return a share as a percentage."""
    return UNKNOWN if share is None else f"{100 * share:.0f}%"


def _milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds."""
    return number(None if seconds is None else 1e3 * seconds)


def _counted(counted: Counted | None, *, bad: bool = True) -> Text:
    """Return a total, with what came since the previous reading: ``12 +2``."""
    if counted is None:
        return Text(UNKNOWN)
    text = Text(f"{counted.total:,.0f}" if counted.total < 1e9 else f"{counted.total:.3g}")
    if counted.new:
        text.append(f" +{counted.new:,.0f}", style="red" if bad else "green")
    return text
