"""The machine and its software, and whether two processes can share GPU memory by CUDA IPC."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from typing import Any

from tests.long.gpu.conftest import Table
from tests.long.gpu.device import Device, load_torch

IPC_WORDS, IPC_WRITTEN = 1 << 20, 7


def test_software(device: Device, table: Table) -> None:
    """The log has what NVIDIA's and our tools say; every other step says itself what is missing."""
    torch = device.torch
    doctor = [sys.executable, "-c", "from kvferry.cli import main; main()", "doctor"]
    for command in (["nvidia-smi", "-q"], ["nvidia-smi", "topo", "-m"], doctor):
        if shutil.which(command[0]) is not None:
            subprocess.run(command, check=command is doctor)
    for name, value in {
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "GPU": device.describe(),
    }.items():
        table("software", {"what": name, "value": value})


def test_ipc(device: Device) -> None:
    """Another process reads and writes a tensor of this one."""
    multiprocessing: Any = load_torch().multiprocessing.get_context("spawn")
    tensor = device.torch.arange(IPC_WORDS, dtype=device.torch.int32, device=device.name)
    device.wait()
    process = multiprocessing.Process(target=ipc_peer, args=(tensor,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert bool((tensor == IPC_WRITTEN).all())


def ipc_peer(tensor: Any) -> None:
    torch = load_torch()
    assert torch.equal(tensor, torch.arange(IPC_WORDS, dtype=torch.int32, device=tensor.device))
    tensor.fill_(IPC_WRITTEN)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
