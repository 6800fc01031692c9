"""``kvferry doctor``: check whether this machine can move KV cache, and say what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from kvferry.cli.doctor import channel, hardware, software
from kvferry.cli.doctor.finding import Finding, FindingLevel
from kvferry.cli.doctor.machine import Machine
from kvferry.cli.doctor.probe import Probed, probe
from kvferry.cli.output import output, print_json
from kvferry.cli.side_channel import NONE, engine_address, keys_of
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
    if address is None and (engine is not None or keys != NONE):
        raise DoctorError("a running engine is asked by its address: give HOST:PORT, too")
    place = None if address is None else engine_address([address])
    with Console(stderr=True).status("loading the drivers"):
        probed = probe()
    findings = list(_findings(probed))
    if place is not None:
        findings.append(channel.running(*place, engine, keys))
    if as_json:
        found = {"verdict": worst(findings), "findings": findings}
        print_json(msgspec.to_builtins(found))
    else:
        _print(findings)
    return int(worst(findings) is FindingLevel.BAD)


def worst(findings: Sequence[Finding]) -> FindingLevel:
    """Return the worst verdict of all findings; ``OK`` if there are none."""
    order = list(FindingLevel)
    return max((finding.verdict for finding in findings), key=order.index, default=FindingLevel.OK)


def _findings(probed: Probed) -> Iterator[Finding]:
    machine = Machine(probed.gpus)
    yield software.python()
    yield software.package()
    yield software.vllm()
    yield from probed.drivers
    yield from software.no_driver(probed.drivers, probed.trouble)
    yield from probed.ucx
    yield hardware.reading(probed.reading)
    answers = bool(probed.gpus or probed.trouble)
    yield from hardware.hardware(machine, cuda_answers=answers, has_vllm=software.has_vllm())
    yield hardware.shared_memory()
    yield from channel.channels()


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
