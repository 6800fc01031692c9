"""``kvferry drivers``: list the installed drivers, and whether each works here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.padding import Padding

from kvferry.cli.output import output, print_json
from kvferry.core.transport.registry import DriverReport, describe, installed


def run(*, as_json: bool) -> None:
    """Load every installed driver, and print its capabilities or why it does not work."""
    records = [_record(describe(info)) for info in installed()]
    if as_json:
        print_json(records)
        return
    console = output()
    for record in records:
        origin = f"{record['distribution']} {record['version']}"
        origin += f", {record['library']}" if record["library"] else ""
        console.print(f"[bold]{record['name']}[/]: {escape(origin)}")
        if record["works"]:
            said = "; ".join(
                f"{name.replace('_', ' ')}: {_text(value)}"
                for name, value in record["capabilities"].items()
                if value is not None
            )
        else:
            said = f"[red]does not work here:[/] {escape(record['reason'])}"
        console.print(Padding(said, (0, 0, 0, 4), expand=False))


def _record(report: DriverReport) -> dict[str, Any]:
    can = report.capabilities
    return {
        **asdict(report.info),
        "library": report.library,
        "works": can is not None,
        "reason": report.reason,
        "capabilities": can
        and asdict(can) | {"memory": sorted(can.memory), "quiescence": can.quiescence.value},
    }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)
