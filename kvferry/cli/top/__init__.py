"""``kvferry top``: watch engines by their pages of metrics."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live

from kvferry.cli.output import output
from kvferry.cli.top.report import EngineReport, changes, engine_report
from kvferry.cli.top.scrape import MetricsAddress, MetricsPageError, MetricsReading, Scraper
from kvferry.cli.top.view import tables


def run(
    addresses: Sequence[str], *, interval: float, timeout: float, once: bool, as_json: bool
) -> int:
    """Show the engines until Ctrl-C, or ``once``; then 1 is the status if one did not answer."""
    pages = list(dict.fromkeys(MetricsAddress.parse(address) for address in addresses))
    console, scraper = output(), Scraper(pages, timeout=timeout)
    reports = _reports(scraper, pages, interval)
    try:
        if once:
            next(reports)
            engines = next(reports)  # the first that has rates
            _print(console, engines, as_json=as_json, once=True)
            return int(any(engine.is_silent for engine in engines))
        if as_json or not console.is_terminal:
            next(reports)
            for engines in reports:
                _print(console, engines, as_json=as_json)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for engines in reports:
                live.update(tables(engines, console.width), refresh=True)
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    finally:
        scraper.close()
    return 0


def _print(
    console: Console, engines: list[EngineReport], *, as_json: bool, once: bool = False
) -> None:
    if as_json:
        record = {"engines": [dataclasses.asdict(engine) for engine in engines]}
        console.file.write(f"{json.dumps(record, allow_nan=False)}\n")
    else:
        console.print(tables(engines, console.width, once=once))
    console.file.flush()


def _reports(
    scraper: Scraper, pages: Sequence[MetricsAddress], interval: float
) -> Iterator[list[EngineReport]]:
    """Read all engines again and again, and yield a report of each time."""
    before: dict[MetricsAddress, MetricsReading] = {}
    while True:
        start = time.monotonic()
        engines: list[EngineReport] = []
        for address, outcome in zip(pages, scraper.scrape(), strict=True):
            engines += _engines(address, outcome, before.get(address))
            if isinstance(outcome, MetricsReading):
                before[address] = outcome
        yield engines
        time.sleep(max(0.0, start + interval - time.monotonic()))


def _engines(
    address: MetricsAddress,
    outcome: MetricsReading | MetricsPageError,
    before: MetricsReading | None,
) -> list[EngineReport]:
    if isinstance(outcome, MetricsPageError):
        return [EngineReport(name=address.name, error=str(outcome))]
    found = dict(changes(outcome, before))
    if not found:
        return [EngineReport(name=address.name, error="the page has no metric of an engine")]
    return [
        engine_report(address.name if len(found) == 1 else f"{address.name}#{engine}", change)
        for engine, change in found.items()
    ]
