"""``kvferry doctor``: check whether this machine can move KV cache, and say what to change."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from kvferry.cli.doctor import channel, devices, kernel, nvidia, software, topology
from kvferry.cli.doctor.finding import Finding, FindingLevel
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
    """The options that name a running engine are incomplete."""


def run(
    *,
    address: str | None = None,
    host: str | None = None,
    port: int | None = None,
    engine: str | None = None,
    curve_secret_key: str = "",
    curve_peer: str = "",
    as_json: bool = False,
) -> int:
    """Run all checks, and print the findings; the exit status is 1 if something is bad."""
    if address is not None:
        host, port = engine_address([address])
    keys = keys_of(curve_secret_key, curve_peer)
    about = engine is not None or keys != NONE
    if (host is None) != (port is None) or (about and host is None):
        raise DoctorError("a running engine is asked by its address: give HOST:PORT, too")
    with Console(stderr=True).status("loading the drivers"):
        probed = probe()
    findings = list(_findings(probed))
    if host is not None and port is not None:
        findings.append(channel.running(host, port, engine, keys))
    if as_json:
        found = [asdict(finding) | {"verdict": finding.verdict.value} for finding in findings]
        print_json({"verdict": worst(findings).value, "findings": found})
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


def _findings(probed: Probed) -> Iterator[Finding]:
    yield software.python()
    yield software.package()
    yield software.vllm()
    yield from software.drivers(probed, nics=devices.active_nics())
    yield kernel.reading(probed.reading)
    yield kernel.ptrace_scope()
    yield from hardware(probed)
    yield kernel.shared_memory()
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
