"""The machine and its software, and whether two processes can share GPU memory by CUDA IPC."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

from kvferry.core.transport.registry import describe, installed

from .devices import Device, load_torch
from .outcome import Outcome, Settings, TableRow

DOCTOR = "from kvferry.cli import main; main()"
DOCTOR_SECONDS = 60
IPC_SECONDS = 60
IPC_WORDS, IPC_WRITTEN = 1 << 20, 7


def run(settings: Settings) -> Outcome:
    """Collect the versions, the driver reports, the findings of ``kvferry doctor``, and probe IPC.

    Only a failing IPC probe is a problem: every other step says itself what is missing.
    """
    outcome = Outcome()
    torch = load_torch()
    outcome.tables["software"] = [
        {"what": name, "value": value} for name, value in _software(torch).items()
    ]
    outcome.tables["GPUs"] = _gpus(torch)
    outcome.tables["drivers"] = [
        {
            "driver": report.info.name,
            "library": report.library or ("its own" if report.capabilities else "does not work"),
            "memory": ", ".join(sorted(report.capabilities.memory)) if report.capabilities else "",
            "reason": report.reason or "",
        }
        for report in map(describe, installed())
    ]
    outcome.details["UCX and NIXL variables"] = {
        name: value for name, value in os.environ.items() if name.startswith(("UCX_", "NIXL_"))
    }
    outcome.details["nvidia-smi"] = _output("nvidia-smi", "-q") or "not found"
    outcome.details["topology"] = _output("nvidia-smi", "topo", "-m")
    outcome.details["doctor"] = _doctor()
    _probe_ipc(settings, outcome)
    return outcome


def _software(torch: Any) -> dict[str, str]:
    return {
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "processor": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "CUDA of torch": str(torch.version.cuda),
        "GPU driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def _gpus(torch: Any) -> list[TableRow]:
    rows: list[TableRow] = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        rows.append({"GPU": index, "name": found.name, "GiB": found.total_memory >> 30})
    return rows


def _output(*command: str) -> str:
    """Return what a command prints, or nothing if it is not there."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip()


def _doctor() -> Any:
    command = [sys.executable, "-c", DOCTOR, "doctor", "--json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOCTOR_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {DOCTOR_SECONDS} s"
    try:
        return json.loads(done.stdout)
    except ValueError:
        return (done.stdout + done.stderr)[-2000:]


def _probe_ipc(settings: Settings, outcome: Outcome) -> None:
    """Let another process read and write a tensor of this one."""
    multiprocessing: Any = load_torch().multiprocessing.get_context("spawn")
    device = Device(settings.near)
    device.enter()
    tensor = device.torch.arange(IPC_WORDS, dtype=device.torch.int32, device=device.name)
    device.wait()
    answers = multiprocessing.Queue()
    process = multiprocessing.Process(target=_ipc_peer, args=(tensor, answers))
    process.start()
    process.join(IPC_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        said = f"no answer in {IPC_SECONDS} s"
    elif process.exitcode:
        said = f"the other process ended with status {process.exitcode}"
    else:
        said = answers.get(timeout=5)
    if not said and not bool((tensor == IPC_WRITTEN).all()):
        said = "what the other process wrote is not here"
    kind = "CUDA IPC" if device.is_cuda else "Shared CPU memory"
    if said:
        outcome.problems.append(f"{kind} does not work between two processes: {said}")
    else:
        outcome.notes.append(f"{kind} works between two processes.")


def _ipc_peer(tensor: Any, answers: Any) -> None:
    torch = load_torch()
    expected = torch.arange(IPC_WORDS, dtype=torch.int32, device=tensor.device)
    answers.put("" if bool((tensor == expected).all()) else "the other process sees other bytes")
    tensor.fill_(IPC_WRITTEN)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
