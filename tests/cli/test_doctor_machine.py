"""Findings of ``kvferry doctor`` about a machine, which a folder stands in for."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from kvferry.cli.doctor import hardware
from kvferry.cli.doctor.finding import Finding, FindingLevel
from kvferry.cli.doctor.machine import CudaGpu, Machine
from kvferry.cli.doctor.probe import gpus
from kvferry.drivers.cuda import CudaDriver
from tests.cli.findings import BAD, OK, WARN, check
from tests.gpu.driver_api import StandInCuda

ORDERING, FLUSH_OPTIONS, DMABUF = 118, 117, 124  # device attributes of CUDA's driver API

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 13.3\n"
)
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n"
LIBC = "libc.so.6"  # a library that loads everywhere

GPU_A, GPU_B = "0000:1b:00.0", "0000:c3:00.0"
NIC_A, NIC_B = "0000:1c:00.0", "0000:d4:00.0"

Files = Mapping[str, str | Path]
"""Files below a folder by their paths: the text of each, or where a link leads."""


def write_files(root: Path, files: Files) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_text(content)
    return root


def gpu(*, index: int = 0, dmabuf: bool = True, flush: bool = False, can: bool = True) -> CudaGpu:
    address = f"0000:{0x1B + index:02X}:00.0"
    return CudaGpu(index=index, address=address, dmabuf=dmabuf, needs_flush=flush, can_flush=can)


# Findings that a few files decide.

PORT = "sys/class/infiniband/mlx5_0/ports/1/"
ACTIVE = {
    PORT + "state": "4: ACTIVE\n",
    PORT + "rate": "400 Gb/sec (4X NDR)\n",
    PORT + "link_layer": "InfiniBand\n",
}
DOWN = ACTIVE | {PORT + "state": "1: DOWN\n"}
PORT_FOUND = "mlx5_0:1 InfiniBand, 400 Gb/sec (4X NDR), "
VERBS = {"dev/infiniband/uverbs0": ""}
PID = "proc/self/ns/pid"
VERSION, RELEASE = "proc/driver/nvidia/version", "proc/sys/kernel/osrelease"
PEERMEM = "sys/module/nvidia_peermem/version"
CLOSED = {VERSION: PROPRIETARY}
NEWER = {RELEASE: "6.8.0-60-generic", VERSION: OPEN}
MIG = "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access"
IMEX = {"dev/nvidia-caps-imex-channels/channel0": ""}


CheckOfMachine = Callable[[Machine], Finding]
MODEL = {"proc/driver/nvidia/gpus/0/information": "Model: \t NVIDIA H200\n"}
GB200 = {"proc/driver/nvidia/gpus/0/information": "Model: NVIDIA GB200\n"}


def h200(library: str = LIBC, *, answers: bool = True) -> CheckOfMachine:
    return partial(hardware.gpu, cuda_answers=answers, library=library)


def locked(limit: int, *, rdma: bool) -> CheckOfMachine:
    return lambda _: hardware.locked_memory(rdma=rdma, limit=limit)


def seen(check: CheckOfMachine, *by_cuda: CudaGpu) -> CheckOfMachine:
    return lambda machine: check(Machine(by_cuda, {}, machine.root))


direct, visibility = partial(seen, hardware.direct), partial(seen, hardware.visibility)


@pytest.mark.parametrize(
    ("files", "finding", "verdict", "found", "remedy"),
    [
        ({}, locked(resource.RLIM_INFINITY, rdma=True), OK, "unlimited", ""),
        ({}, locked(1 << 23, rdma=True), WARN, "8 MiB: registering", "ulimit -l unlimited"),
        ({}, locked(1 << 16, rdma=False), OK, "64 KiB (matters only with RDMA)", ""),
        ({}, hardware.rdma, OK, "no NIC with RDMA", ""),
        (ACTIVE | VERBS, hardware.rdma, OK, f"{PORT_FOUND}4: ACTIVE", ""),
        (DOWN | VERBS, hardware.rdma, WARN, f"{PORT_FOUND}1: DOWN", "check the cable"),
        (ACTIVE, hardware.rdma, WARN, "may not use /dev/infiniband", "--device=/dev/infiniband"),
        # The GPU's driver.
        ({}, hardware.gpu, OK, "none", ""),
        (MODEL | {VERSION: OPEN}, h200(), OK, "NVIDIA H200; kernel module open 580.95.05", ""),
        (MODEL, h200("libno_such.so.1"), WARN, "does not load", "NVIDIA_DRIVER_CAPABILITIES"),
        (MODEL, h200(answers=False), WARN, "CUDA finds no GPU", "CUDA_VISIBLE_DEVICES"),
        # GPU memory and NICs.
        ({PEERMEM: "1"}, hardware.direct, OK, "nvidia_peermem is loaded", ""),
        ({"sys/module/nv_peer_mem/version": "1"}, hardware.direct, OK, "nv_peer_mem is loaded", ""),
        ({}, hardware.direct, WARN, "none of the kernel modules", "modprobe nvidia_peermem"),
        (NEWER, direct(gpu()), OK, "CUDA exports GPU memory", ""),
        (CLOSED | {RELEASE: "5.12.0"}, direct(gpu()), OK, "CUDA exports", ""),
        (NEWER, hardware.direct, OK, "the kernel module is open", ""),
        (NEWER | {RELEASE: "5.11.22"}, direct(gpu()), WARN, "5.11.22 is older than 5.12", "5.12"),
        (NEWER, direct(gpu(), gpu(index=1, dmabuf=False)), WARN, "memory of GPU 1", "modprobe"),
        (NEWER | CLOSED, hardware.direct, WARN, "is proprietary 535.104.05", "modprobe"),
        ({RELEASE: "6.8.0"}, hardware.direct, WARN, "modules is loaded cannot be told", "modprobe"),
        ({VERSION: OPEN}, direct(gpu()), WARN, "the version of Linux cannot be told", "modprobe"),
        ({}, visibility(gpu()), OK, "in order", ""),
        ({}, visibility(gpu(index=2, flush=True)), OK, "kvferry flushes GPU 2", ""),
        (
            *({}, visibility(gpu(), gpu(index=1, flush=True, can=False))),
            *(WARN, "GPU 1 may not see at once what a NIC has written", "use NVLink"),
        ),
        # From GPU to GPU.
        ({}, hardware.ipc, OK, "cannot be told", ""),
        ({PID: Path("pid:[4026531836]")}, hardware.ipc, OK, "the host's PID namespace", ""),
        ({PID: Path("pid:[4026532833]")}, hardware.ipc, WARN, "without NVLink", "--pid"),
        ({MIG: "12\n"}, lambda it: next(hardware.mig(it)), WARN, "gpu0 gi1", "whole GPUs"),
        ({}, hardware.imex, OK, "no IMEX channel", ""),
        (GB200, hardware.imex, WARN, "there is no IMEX channel", "nvidia-imex"),
        (GB200 | IMEX, hardware.imex, OK, "IMEX channel0", ""),
    ],
)
def test_finding(
    tmp_path: Path,
    files: Files,
    finding: CheckOfMachine,
    verdict: FindingLevel,
    found: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    machine = Machine(root=write_files(tmp_path, files))
    check(finding(machine), verdict, found, remedy)


def test_small_or_missing_shared_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for enough, folder, verdict in (
        (0, tmp_path, OK),
        (1 << 62, tmp_path, WARN),
        (0, tmp_path / "missing", WARN),
    ):
        monkeypatch.setattr(hardware, "SHARED_ENOUGH", enough)
        check(hardware.shared_memory(folder), verdict)


def test_nics_with_an_active_port(tmp_path: Path) -> None:
    for name, files, active in (("none", {}, []), ("down", DOWN, [False]), ("up", ACTIVE, [True])):
        machine = Machine(root=write_files(tmp_path / name, files))
        assert [nic.is_active for nic in machine.nics] == active


def test_imex_channel_that_may_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may open everything
    machine = Machine(root=write_files(tmp_path, IMEX))
    check(hardware.imex(machine), WARN, "may not open", "let this process")


@pytest.mark.parametrize("order", ["", "NHD", "LBHNC", "BLHNC", "BHLNC", "BLNHC"])
def test_order_with_small_copies_is_a_warning_where_vllm_is_installed(order: str) -> None:
    environment = {"VLLM_KV_CACHE_LAYOUT": order} if order else {}
    machine = Machine(environment=environment)
    finding = hardware.cache_order(machine, has_vllm=True)
    said = f"VLLM_KV_CACHE_LAYOUT is {order or 'not set: kvferry asks for LBHNC (not with MLA)'}"
    if order.startswith("B"):
        check(finding, OK, said)
        return
    backends = "FLASH_ATTN, FLASHINFER and TRITON_ATTN"
    check(finding, WARN, f"{said}.", "VLLM_KV_CACHE_LAYOUT=BLHNC", backends, "kvferry plan")
    assert "40,960 copies of 8 KiB" in finding.found
    check(hardware.cache_order(machine, has_vllm=False), OK, finding.found)


# GPUs that are found.


def test_cuda_is_asked_about_each_gpu() -> None:
    attributes = {(0, ORDERING): 100, (0, DMABUF): 1, (1, FLUSH_OPTIONS): 1}
    library = StandInCuda(devices=2, active=set(), attributes=attributes)
    assert gpus(CudaDriver(library)) == [
        gpu(index=0, can=False),
        gpu(index=1, dmabuf=False, flush=True),
    ]
    assert (library.active, library.calls) == (set(), [])  # no context was made
    assert gpus(None) is None


def test_gpus_found_with_and_without_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Machine(root=tmp_path).gpus == []
    on_bus = write_files(tmp_path / "a", {"sys/class/drm/card0/device/vendor": "0x10de\n"})
    assert Machine(root=on_bus).gpus == ["NVIDIA GPU at device"]
    assert Machine(root=write_files(tmp_path, MODEL)).gpus == ["NVIDIA H200"]
    program = "#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n"
    (write_files(tmp_path, {"nvidia-smi": program}) / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{path}")
    (found,) = Machine(root=tmp_path).gpus
    assert found.startswith("NVIDIA H200, 143771 MiB, 570.1")


# NICs near GPUs.


def pci_device(root: Path, route: str, **facts: str) -> None:
    """Make a PCI device; its address is the last part of the route below its root complex."""
    where = root / "sys/devices" / route
    write_files(where, {name: f"{text}\n" for name, text in facts.items()})
    write_files(root, {f"sys/bus/pci/devices/{where.name}": where})


def graphics(root: Path, route: str, *, node: int = 0, kind: str = "0x030200") -> None:
    pci_device(root, route, vendor="0x10de", numa_node=str(node), **{"class": kind})


def nic(root: Path, name: str, route: str, *, node: int = 0) -> None:
    pci_device(root, route, vendor="0x15b3", numa_node=str(node), **{"class": "0x020700"})
    write_files(root, {f"sys/class/infiniband/{name}/device": root / "sys/devices" / route})


def two_sockets(root: Path) -> Path:
    """Make a GPU and a NIC behind one switch at node 0, and a GPU and a NIC at node 1."""
    graphics(root, f"pci0000:15/0000:15:01.0/0000:16:00.0/{GPU_A}")
    nic(root, "mlx5_0", f"pci0000:15/0000:15:01.0/0000:16:01.0/{NIC_A}")
    graphics(root, f"pci0000:c0/0000:c0:01.0/{GPU_B}", node=1)
    nic(root, "mlx5_1", f"pci0000:d0/0000:d0:01.0/{NIC_B}", node=1)
    return root


def one_root_complex(root: Path) -> Path:
    graphics(root, f"pci0000:15/0000:15:01.0/{GPU_A}", node=-1)
    for number in (0, 1):
        nic(root, f"mlx5_{number}", f"pci0000:15/0000:15:05.0/0000:2{number}:00.0", node=-1)
    nic(root, "mlx5_2", f"pci0000:d0/0000:d0:01.0/{NIC_B}", node=-1)
    return root


def far_nic(node: int, root: Path) -> Path:
    graphics(root, f"pci0000:15/0000:15:01.0/{GPU_A}", node=node)
    nic(root, "mlx5_1", f"pci0000:d0/0000:d0:01.0/{NIC_B}", node=1)
    return root


NEAR_A = f"GPU {GPU_A}: mlx5_0 (same PCIe switch)"


@pytest.mark.parametrize(
    ("machine", "cuda", "verdict", "found"),
    [
        (two_sockets, None, OK, f"{NEAR_A}; GPU {GPU_B}: mlx5_1 (same NUMA node)"),
        (two_sockets, [gpu()], OK, NEAR_A),  # CUDA does not see the other one
        (one_root_complex, None, OK, f"GPU {GPU_A}: mlx5_0, mlx5_1 (same PCIe root complex)"),
        (partial(far_nic, 0), None, WARN, f"GPU {GPU_A}: mlx5_1 (another NUMA node)"),
        (partial(far_nic, -1), None, OK, f"GPU {GPU_A}: mlx5_1 (how near is not known)"),
    ],
)
def test_nics_near_gpus(
    tmp_path: Path,
    machine: Callable[[Path], Path],
    cuda: list[CudaGpu] | None,
    verdict: FindingLevel,
    found: str,
) -> None:
    (finding,) = hardware.near(Machine(cuda, {}, machine(tmp_path)))
    assert (finding.verdict, finding.found) == (verdict, found)
    assert (GPU_A in finding.remedy) == (verdict is WARN)


def test_distance_needs_gpus_and_nics(tmp_path: Path) -> None:
    assert list(hardware.near(Machine(root=tmp_path))) == []
    graphics(tmp_path, f"pci0000:15/0000:15:01.0/{GPU_A}")
    graphics(tmp_path, "pci0000:15/0000:15:01.0/0000:1b:00.1", kind="0x040300")  # its sound device
    machine = Machine(root=tmp_path)
    assert [card.name for card in machine.pci_gpus] == [GPU_A]
    assert list(hardware.near(machine)) == []


# Variables that bind GPUs to NICs.

BOTH = f"{GPU_A}={NIC_A},{GPU_B}={NIC_B}"
TO_UCX = "UCX_NET_DEVICES:1,NCCL_IB_HCA:1"


@pytest.mark.parametrize(
    ("mapping", "selection", "cuda", "verdict", "found"),
    [
        (BOTH, TO_UCX, None, OK, f"{GPU_A}: mlx5_0, {GPU_B}: mlx5_1"),
        ("1B:00.0=1c:00.0, 00000000:C3:00.0=0000:d4:00.0", TO_UCX, None, OK, "mlx5_0, 0000:c3"),
        (f"{GPU_A}={NIC_A}", TO_UCX, [gpu()], OK, "mlx5_0"),  # CUDA does not see the other one
        (BOTH, "", None, BAD, "MAPPING is set alone"),
        ("", TO_UCX, None, BAD, "VARS is set alone"),
        ("mlx5_0", TO_UCX, None, BAD, "is no list of GPU=NIC"),
        (f"{GPU_A}=mlx5_0", TO_UCX, None, BAD, "is no list of GPU=NIC"),
        (f"{GPU_A}=0000:99:00.0", TO_UCX, None, BAD, "names 0000:99:00.0, where no NIC"),
        (f"{GPU_A}={NIC_A}", TO_UCX, None, WARN, f"no entry for GPU {GPU_B}"),
        (BOTH, "NCCL_IB_HCA:1", None, WARN, "does not set UCX_NET_DEVICES"),
    ],
)
def test_bindings_of_gpus(
    tmp_path: Path,
    mapping: str,
    selection: str,
    cuda: list[CudaGpu] | None,
    verdict: FindingLevel,
    found: str,
) -> None:
    environment = {hardware.MAPPING: mapping, hardware.SELECTION: selection}
    (finding,) = hardware.bound(Machine(cuda, environment, two_sockets(tmp_path)))
    check(finding, verdict, found)


@pytest.mark.parametrize("listed", ["mlx5_0:1", "mlx5_0:1,eth0", "all", "^eth0", "mlx5_*"])
def test_devices_of_ucx(tmp_path: Path, listed: str) -> None:
    (two_sockets(tmp_path) / "sys/class/net/eth0").mkdir(parents=True)
    for names, verdict, found in (
        (listed, OK, listed),
        (f"{listed},mlx5_7:1", WARN, "there is no mlx5_7 here"),
    ):
        (finding,) = hardware.bound(Machine(None, {"UCX_NET_DEVICES": names}, tmp_path))
        check(finding, verdict, found, "correct it" if verdict is WARN else "")


# All of it.

GPU_FINDINGS = {"CUDA IPC", "NVLink between hosts", "cache order"}
DIRECT_FINDINGS = {"GPU memory over RDMA", "NICs near GPUs", "RDMA writes to GPU memory"}
ALWAYS = {"GPU", "RDMA", "locked memory"}
AMD = {"sys/class/drm/card0/device/vendor": "0x1002\n"}


@pytest.mark.parametrize("with_nics", [True, False])
@pytest.mark.parametrize("gpus", ["none", "nvidia", "amd"])
def test_findings_are_about_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, with_nics: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    expected, nvidia = set(ALWAYS), gpus == "nvidia"
    write_files(tmp_path, {"none": {}, "nvidia": MODEL, "amd": AMD}[gpus])
    if nvidia:
        graphics(tmp_path, f"pci0000:15/0000:15:01.0/{GPU_A}")
        expected |= GPU_FINDINGS
    if with_nics:
        nic(tmp_path, "mlx5_0", f"pci0000:15/0000:15:01.0/{NIC_A}")
        expected |= DIRECT_FINDINGS if nvidia else set()
    machine = Machine([gpu()] if nvidia else None, {}, tmp_path)
    found = {one.name: one for one in hardware.hardware(machine, cuda_answers=True, has_vllm=False)}
    assert set(found) == expected
    assert nvidia or found["GPU"].verdict is OK
