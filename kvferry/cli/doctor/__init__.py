"""``kvferry doctor``: check whether this machine can move KV cache, and say what to change."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.doctor import channel, devices, kernel, nvidia, software, topology
from kvferry.cli.doctor.finding import Finding, FindingLevel
from kvferry.cli.doctor.probe import Probed, probe
from kvferry.cli.keys import NONE, Keys
from kvferry.core.errors import KVFerryError

MARKS = {
    FindingLevel.OK: "[green]✓[/]",
    FindingLevel.WARN: "[yellow]![/]",
    FindingLevel.BAD: "[red]✗[/]",
}


class DoctorError(KVFerryError):
    """The options that name a running engine are incomplete."""


def run(
    *,
    host: str | None = None,
    port: int | None = None,
    engine: str | None = None,
    keys: Keys = NONE,
    as_json: bool = False,
) -> int:
    """Run all checks, and print the findings."""
    about = engine is not None or keys != NONE
    if (host is None) != (port is None) or (about and host is None):
        raise DoctorError("a running engine is asked at --host HOST --port PORT; give both")
    findings = list(_findings(host, port, engine, keys))
    if as_json:
        Console().print_json(json.dumps(_json_record(findings)))
    else:
        _print(findings)
    return int(worst(findings) is FindingLevel.BAD)


def worst(findings: Sequence[Finding]) -> FindingLevel:
    """Return the worst verdict of all findings; ``OK`` if there are none."""
    order = list(FindingLevel)
    return max((finding.verdict for finding in findings), key=order.index, default=FindingLevel.OK)


def hardware(
    probed: Probed, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Iterator[Finding]:
    """Yield the findings about GPUs, NICs and pinned memory."""
    gpus, nics = devices.gpus(root), devices.nics(root)
    yield devices.gpu(gpus, cuda_answers=bool(probed.gpus or probed.trouble), root=root)
    nvidia_gpus = [gpu for gpu in gpus if "AMD" not in gpu]
    if nvidia_gpus:
        yield nvidia.ipc(root)
        yield from nvidia.mig(root)
        yield nvidia.imex(nvidia_gpus, root)
        yield nvidia.cache_order(environment, has_vllm=software.has_vllm())
    yield devices.rdma(root)
    if nvidia_gpus and nics:
        yield nvidia.direct(probed.gpus, root)
        yield from topology.near(probed.gpus, root)
    if probed.gpus and nics:
        yield nvidia.visibility(probed.gpus)
    yield from topology.bound(environment, probed.gpus, root)
    yield kernel.locked_memory(rdma=bool(nics))


def _findings(
    host: str | None, port: int | None, engine: str | None, keys: Keys
) -> Iterator[Finding]:
    """Run all checks, and yield their findings; see ``run`` for the arguments."""
    with _step("loading the drivers"):
        probed = probe()
    yield software.python()
    yield software.package()
    yield software.vllm()
    yield from software.drivers(probed, nics=devices.active_nics())
    yield kernel.reading()
    yield kernel.ptrace_scope()
    yield from hardware(probed)
    yield kernel.shared_memory()
    yield from channel.channels()
    if host is not None and port is not None:
        yield channel.running(host, port, engine, keys)


@contextmanager
def _step(title: str) -> Iterator[None]:
    """Show a title while the ``with`` block runs, if stderr is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(title):
        yield


def _json_record(findings: Sequence[Finding]) -> dict[str, object]:
    """Return the findings for ``--json``."""
    return {
        "verdict": worst(findings).value,
        "findings": [
            {
                "name": finding.name,
                "verdict": finding.verdict.value,
                "found": finding.found,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
    }


def _print(findings: Sequence[Finding]) -> None:
    """Print the findings as a table, with a summary."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=32)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(MARKS[finding.verdict], escape(finding.name), escape(finding.found))
        if finding.remedy:
            table.add_row("", "", f"[bold]→ {escape(finding.remedy)}[/]")
    console.print(table)
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in FindingLevel}
    console.print(
        f"\n{counts[FindingLevel.BAD]} bad, {counts[FindingLevel.WARN]} worth knowing, "
        f"{counts[FindingLevel.OK]} fine"
    )
