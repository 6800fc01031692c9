"""``kvferry drivers``: list the installed drivers, and whether each works here."""

from __future__ import annotations

from dataclasses import asdict

from rich.markup import escape
from rich.padding import Padding

from kvferry.cli.output import output, print_json
from kvferry.core.transport import Capabilities, Quiescence
from kvferry.core.transport.registry import DriverReport, describe, installed


def run(*, as_json: bool) -> None:
    """Load every installed driver, and print its capabilities or why it does not work."""
    reports = [describe(info) for info in installed()]
    if as_json:
        print_json([_record(report) for report in reports])
    else:
        _print_reports(reports)


def _record(report: DriverReport) -> dict[str, object]:
    can = report.capabilities
    return {
        **asdict(report.info),
        "library": report.library,
        "works": can is not None,
        "reason": report.reason,
        "capabilities": can
        and asdict(can) | {"memory": sorted(can.memory), "quiescence": can.quiescence.value},
    }


QUIESCENCE_TEXTS = {
    Quiescence.ALWAYS: "after a failure no byte lands any more",
    Quiescence.AFTER_DISCONNECT: "after a failure bytes may land until it disconnects",
}


def _print_reports(reports: list[DriverReport]) -> None:
    console = output()
    if not reports:
        console.print("No driver is installed. kvferry brings one, loopback: reinstall kvferry.")
    for report in reports:
        info, can = report.info, report.capabilities
        origin = ", ".join(filter(None, (f"{info.distribution} {info.version}", report.library)))
        console.print(f"[bold]{info.name}[/]: {escape(origin)}")
        if can is None:
            lines = [f"[red]does not work here:[/] {escape(report.reason or '')}"]
        else:
            lines = [f"memory: {', '.join(sorted(can.memory))}", _more(can)]
        for line in lines:
            console.print(Padding(line, (0, 0, 0, 4), expand=False))


def _more(can: Capabilities) -> str:
    notes = [
        f"notifications up to {can.max_notification} bytes",
        "can cancel" if can.cancel else "cannot cancel",
        "progresses by itself" if can.background_progress else "progresses when polled",
        QUIESCENCE_TEXTS[can.quiescence],
    ]
    if can.max_outstanding is not None:
        notes.append(f"{can.max_outstanding} transfers at once")
    if not can.concurrent_connect:
        notes.append("a peer that is slow to connect holds others up")
    return "; ".join(notes)
