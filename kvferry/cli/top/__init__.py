"""``kvferry top``: watch engines by their pages of metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import msgspec
from rich.console import Console
from rich.live import Live

from kvferry.cli.output import output
from kvferry.cli.top.report import EngineReport, engine_reports
from kvferry.cli.top.scrape import MetricsAddress, MetricsPageError, MetricsReading, Scraper
from kvferry.cli.top.view import tables


def run(
    addresses: Sequence[str], *, interval: float, timeout: float, once: bool, as_json: bool
) -> int:
    """Show the engines until Ctrl-C, or ``once``; then 1 is the status if one did not answer."""
    pages = list(dict.fromkeys(map(MetricsAddress.parse, addresses)))
    console = output()
    with (
        closing(Scraper(pages, timeout=timeout)) as scraper,
        suppress(KeyboardInterrupt, BrokenPipeError),
    ):
        reports = _reports(scraper, pages, interval)
        if console.is_terminal and not (once or as_json):
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for engines in reports:
                    live.update(tables(engines, console.width), refresh=True)
        next(reports)  # has no rates
        for engines in reports:
            _print(console, engines, as_json=as_json)
            if once:
                return int(any(engine.is_silent for engine in engines))
    return 0


def _print(console: Console, engines: list[EngineReport], *, as_json: bool) -> None:
    if as_json:
        console.file.write(f"{msgspec.json.encode({'engines': engines}).decode()}\n")
    else:
        console.print(tables(engines, console.width))
    console.file.flush()


def _reports(
    scraper: Scraper, pages: Sequence[MetricsAddress], interval: float
) -> Iterator[list[EngineReport]]:
    before: dict[MetricsAddress, MetricsReading] = {}
    while True:
        start = time.monotonic()
        engines: list[EngineReport] = []
        for address, outcome in zip(pages, scraper.scrape(), strict=True):
            if isinstance(outcome, MetricsPageError):
                engines.append(EngineReport(name=address.name, error=str(outcome)))
            else:
                engines += engine_reports(address.name, outcome, before.get(address))
                before[address] = outcome
        yield engines
        time.sleep(max(0.0, start + interval - time.monotonic()))
