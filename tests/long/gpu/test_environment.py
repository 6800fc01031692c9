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
from tests.long.gpu.conftest import Table
from tests.long.gpu.device import Device, load_torch

IPC_SECONDS, IPC_WORDS, IPC_WRITTEN = 60, 1 << 20, 7


def test_versions(device: Device, table: Table) -> None:
    """Every other step says itself what is missing."""
    torch = device.torch
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    for name, value in {
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "processor": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "GPU driver": output(*query),
        **{k: v for k, v in os.environ.items() if k.startswith(("UCX_", "NIXL_"))},
    }.items():
        table("software", {"what": name, "value": value})
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        table("GPUs", {"GPU": index, "name": found.name, "GiB": found.total_memory >> 30})
    for report in map(describe, installed()):
        can = report.capabilities
        library = report.library or ("its own" if can else "does not work")
        memory = ", ".join(sorted(can.memory)) if can else report.reason or ""
        table("drivers", {"driver": report.info.name, "library": library, "memory": memory})
    sys.stdout.write(output("nvidia-smi", "-q") + output("nvidia-smi", "topo", "-m"))


def test_doctor(table: Table) -> None:
    said = output(sys.executable, "-c", "from kvferry.cli import main; main()", "doctor", "--json")
    sys.stdout.write(said)
    json.loads(said)


def test_ipc(device: Device) -> None:
    """Another process reads and writes a tensor of this one."""
    multiprocessing: Any = load_torch().multiprocessing.get_context("spawn")
    tensor = device.torch.arange(IPC_WORDS, dtype=device.torch.int32, device=device.name)
    device.wait()
    answers = multiprocessing.Queue()
    process = multiprocessing.Process(target=ipc_peer, args=(tensor, answers))
    process.start()
    process.join(IPC_SECONDS)
    process.kill()
    process.join()
    assert process.exitcode == 0
    assert answers.get(timeout=5), "the other process sees other bytes"
    assert bool((tensor == IPC_WRITTEN).all())


def ipc_peer(tensor: Any, answers: Any) -> None:
    torch = load_torch()
    expected = torch.arange(IPC_WORDS, dtype=torch.int32, device=tensor.device)
    answers.put(bool((tensor == expected).all()))
    tensor.fill_(IPC_WRITTEN)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def output(*command: str) -> str:
    """What a command prints, or nothing if it is not there."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()
