"""``kvferry doctor``: check whether this machine can move KV cache, and say what to change."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from kvferry.cli.doctor.engine import running
from kvferry.cli.doctor.finding import Finding, FindingLevel
from kvferry.cli.doctor.probe import probe
from kvferry.cli.output import output, print_json
from kvferry.cli.side_channel import engine_address, keys_of
from kvferry.core.errors import KVFerryError

MARKS = {
    FindingLevel.OK: "[green]✓[/]",
    FindingLevel.WARN: "[yellow]![/]",
    FindingLevel.BAD: "[red]✗[/]",
}


class DoctorError(KVFerryError):
    """The address of the running engine that options are about is missing."""


def run(
    *,
    address: str | None = None,
    engine: str | None = None,
    curve_secret_key: str = "",
    curve_peer: str = "",
    as_json: bool = False,
) -> int:
    """Run all checks, and print the findings; the exit status is 1 if something is bad."""
    keys = keys_of(curve_secret_key, curve_peer)
    if address is None and (engine is not None or keys["key"]):
        raise DoctorError("a running engine is asked by its address: give HOST:PORT, too")
    place = None if address is None else engine_address([address])
    with Console(stderr=True).status("loading the drivers"):
        findings = probe()
    if place is not None:
        findings.append(running(*place, engine, keys))
    verdict = worst(findings)
    if as_json:
        print_json(msgspec.to_builtins({"verdict": verdict, "findings": findings}))
    else:
        _print(findings)
    return int(verdict is FindingLevel.BAD)


def worst(findings: Sequence[Finding]) -> FindingLevel:
    """Return the worst verdict of all findings."""
    found = {finding.verdict for finding in findings}
    return next(level for level in reversed(FindingLevel) if level in found)


def _print(findings: Sequence[Finding]) -> None:
    console = output()
    for finding in findings:
        mark = f"{MARKS[finding.verdict]} [bold]{escape(finding.name)}[/]: "
        console.print(f"{mark}{escape(finding.found)}")
        if finding.remedy:
            remedy = f"[bold]→ {escape(finding.remedy)}[/]"
            console.print(Padding(remedy, (0, 0, 0, 4), expand=False))
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in FindingLevel}
    console.print(
        f"\n{counts[FindingLevel.BAD]} bad, {counts[FindingLevel.WARN]} worth knowing, "
        f"{counts[FindingLevel.OK]} fine"
    )
