"""Findings of ``kvferry doctor`` about a machine, which a folder stands in for."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvferry.cli.doctor import hardware
from kvferry.cli.doctor.finding import Finding, FindingLevel
from kvferry.cli.doctor.machine import CudaGpu, Machine
from kvferry.cli.doctor.probe import gpus
from kvferry.drivers.cuda import CudaDriver
from tests.cli.test_doctor import BAD, OK, WARN, check
from tests.gpu.driver_api import StandInCuda

ORDERING, FLUSH_OPTIONS, DMABUF = 118, 117, 124  # device attributes of CUDA's driver API

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 13.3\n"
)
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n"

GPU_A, GPU_B = "0000:1b:00.0", "0000:c3:00.0"
NIC_A, NIC_B = "0000:1c:00.0", "0000:d4:00.0"

Files = Mapping[str, str | Path]
"""Files below a folder by their paths: the text of each, or where a link leads."""
Make = Callable[[Path], None]
"""A function that makes the devices of a machine below a folder."""


def write_files(root: Path, files: Files) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_text(content)


def pci_device(root: Path, route: str, **facts: str) -> None:
    """Make a PCI device; its address is the last part of the route below its root complex."""
    where = root / "sys/devices" / route
    write_files(where, {name: f"{text}\n" for name, text in facts.items()})
    write_files(root, {f"sys/bus/pci/devices/{where.name}": where})


def graphics(
    root: Path, route: str, *, node: int = 0, vendor: str = "0x10de", kind: str = "0x030200"
) -> None:
    pci_device(root, route, vendor=vendor, numa_node=str(node), **{"class": kind})


def nic(root: Path, name: str, route: str, *, node: int = 0) -> None:
    pci_device(root, route, vendor="0x15b3", numa_node=str(node), **{"class": "0x020700"})
    write_files(root, {f"sys/class/infiniband/{name}/device": root / "sys/devices" / route})


def two_sockets(root: Path) -> None:
    """Make a GPU and a NIC behind one switch at node 0, and a GPU and a NIC at node 1."""
    graphics(root, f"pci0000:15/0000:15:01.0/0000:16:00.0/{GPU_A}")
    nic(root, "mlx5_0", f"pci0000:15/0000:15:01.0/0000:16:01.0/{NIC_A}")
    graphics(root, f"pci0000:c0/0000:c0:01.0/{GPU_B}", node=1)
    nic(root, "mlx5_1", f"pci0000:d0/0000:d0:01.0/{NIC_B}", node=1)


def one_root_complex(root: Path) -> None:
    graphics(root, f"pci0000:15/0000:15:01.0/{GPU_A}", node=-1)
    for number in (0, 1):
        nic(root, f"mlx5_{number}", f"pci0000:15/0000:15:05.0/0000:2{number}:00.0", node=-1)
    nic(root, "mlx5_2", f"pci0000:d0/0000:d0:01.0/{NIC_B}", node=-1)


def far_nic(root: Path, node: int = 0) -> None:
    graphics(root, f"pci0000:15/0000:15:01.0/{GPU_A}", node=node)
    nic(root, "mlx5_1", f"pci0000:d0/0000:d0:01.0/{NIC_B}", node=1)


def one_gpu(root: Path, model: str = "NVIDIA H200") -> None:
    graphics(root, f"pci0000:15/0000:15:01.0/{GPU_A}")
    graphics(root, "pci0000:15/0000:15:01.0/0000:1b:00.1", kind="0x040300")  # its sound device
    said = f"Model: \t {model}\n"
    write_files(root, {f"proc/driver/nvidia/gpus/{GPU_A}/information": said} if model else {})


def nothing(root: Path) -> None:
    pass


SEEN = CudaGpu(index=0, address=GPU_A.upper(), dmabuf=True, needs_flush=False, can_flush=True)
UNEXPORTED, FLUSHED = replace(SEEN, index=1, dmabuf=False), replace(SEEN, needs_flush=True)
BLIND = replace(FLUSHED, index=1, can_flush=False)
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
NEWER = {RELEASE: "6.8.0-60-generic"}
MIG = "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access"
IMEX = {"dev/nvidia-caps-imex-channels/channel0": ""}
NEAR_A = f"GPU {GPU_A}: mlx5_0 (same PCIe switch)"
GB200 = partial(one_gpu, model="NVIDIA GB200")
AMD = partial(graphics, route=f"pci0000:15/{GPU_A}", vendor="0x1002", kind="0x120000")
CheckOfMachine = Callable[[Machine], Finding]


def locked(limit: int, *, rdma: bool) -> CheckOfMachine:
    return lambda _: hardware.locked_memory(rdma=rdma, limit=limit)


@pytest.mark.parametrize(
    ("make", "files", "cuda", "finding", "verdict", "found", "remedy"),
    [
        (nothing, {}, [], locked(resource.RLIM_INFINITY, rdma=True), OK, "unlimited", ""),
        (nothing, {}, [], locked(1 << 23, rdma=True), WARN, "8 MiB: register", "ulimit -l unlim"),
        (nothing, {}, [], locked(1 << 16, rdma=False), OK, "64 KiB (matters only with RDMA)", ""),
        (nothing, {}, [], hardware.rdma, OK, "no NIC with RDMA", ""),
        (nothing, ACTIVE | VERBS, [], hardware.rdma, OK, f"{PORT_FOUND}4: ACTIVE", ""),
        (nothing, DOWN | VERBS, [], hardware.rdma, WARN, f"{PORT_FOUND}1: DOWN", "check the cable"),
        (nothing, ACTIVE, [], hardware.rdma, WARN, "may not use /dev/infin", "--device=/dev/infin"),
        # The GPU's driver.
        (nothing, {}, [], hardware.gpu, OK, "none", ""),
        (AMD, {}, [], hardware.gpu, OK, f"AMD GPU at {GPU_A}", ""),
        (one_gpu, {VERSION: OPEN}, [SEEN], hardware.gpu, OK, "H200; kernel module open 580.95", ""),
        (one_gpu, {VERSION: PROPRIETARY}, [SEEN], hardware.gpu, OK, "proprietary 535.104.05", ""),
        (nothing, {}, [SEEN], hardware.gpu, OK, f"NVIDIA GPU at {GPU_A}", ""),
        (two_sockets, {}, [], hardware.gpu, WARN, f"NVIDIA GPU at {GPU_B}; but", "CUDA_VISIBLE"),
        # GPU memory and NICs.
        (nothing, {"sys/module/nvidia_peermem/x": ""}, [], hardware.direct, OK, "nvidia_peer", ""),
        (nothing, {"sys/module/nv_peer_mem/x": ""}, [], hardware.direct, OK, "nv_peer_mem is", ""),
        (nothing, NEWER, [], hardware.direct, WARN, "CUDA does not answer", "modprobe nvidia_peer"),
        (nothing, NEWER, [SEEN], hardware.direct, OK, "CUDA exports GPU memory", ""),
        (nothing, {RELEASE: "5.12.0"}, [SEEN], hardware.direct, OK, "dmabuf: Linux 5.12.0", ""),
        (nothing, {RELEASE: "5.11.22"}, [SEEN], hardware.direct, WARN, "Linux is 5.11.22", "5.12"),
        (
            nothing,
            NEWER,
            [SEEN, UNEXPORTED],
            hardware.direct,
            WARN,
            "no memory of GPU 1",
            "CUDA 11",
        ),
        (nothing, {}, [SEEN], hardware.visibility, OK, "in order", ""),
        (nothing, {}, [SEEN, FLUSHED], hardware.visibility, OK, "kvferry flushes GPU 0", ""),
        (nothing, {}, [SEEN, BLIND], hardware.visibility, WARN, "GPU 1 may not see", "use NVLink"),
        # From GPU to GPU.
        (nothing, {PID: Path("pid:[4026531836]")}, [], hardware.ipc, OK, "host's PID names", ""),
        (nothing, {PID: Path("pid:[4026532833]")}, [], hardware.ipc, WARN, "out NVLink", "--pid"),
        (nothing, {MIG: ""}, [], lambda it: next(hardware.mig(it)), WARN, "gpu0 gi1", "whole GPUs"),
        (nothing, {}, [], hardware.imex, OK, "no IMEX channel", ""),
        (GB200, {}, [], hardware.imex, WARN, "has no IMEX channel", "nvidia-imex"),
        (GB200, IMEX, [], hardware.imex, OK, "by an IMEX channel", ""),
        # NICs near GPUs.
        (two_sockets, {}, [], hardware.near, OK, f"{NEAR_A}; GPU {GPU_B}: mlx5_1 (same NUMA n", ""),
        (two_sockets, {}, [SEEN], hardware.near, OK, NEAR_A, ""),
        (one_root_complex, {}, [], hardware.near, OK, "mlx5_0, mlx5_1 (same PCIe root comp", ""),
        (far_nic, {}, [], hardware.near, WARN, "mlx5_1 (another NUMA node)", f"GPUs than {GPU_A}:"),
        (partial(far_nic, node=-1), {}, [], hardware.near, OK, "(how near is not known)", ""),
    ],
)
def test_finding(
    tmp_path: Path,
    make: Make,
    files: Files,
    cuda: Sequence[CudaGpu],
    finding: CheckOfMachine,
    verdict: FindingLevel,
    found: str,
    remedy: str,
) -> None:
    make(tmp_path)
    write_files(tmp_path, files)
    check(finding(Machine(cuda, {}, tmp_path)), verdict, found, remedy)


def test_only_gpus_that_cuda_sees_are_named(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    assert [card.name for card in Machine([SEEN], {}, tmp_path).nvidia] == [GPU_A]
    assert [card.name for card in Machine([], {}, tmp_path).nvidia] == [GPU_A, GPU_B]


def test_small_or_missing_shared_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "SHARED_ENOUGH", 1)
    check(hardware.shared_memory(tmp_path), OK)
    check(hardware.shared_memory(tmp_path / "missing"), WARN, "0 B free", "enlarge")


def test_imex_channel_that_may_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may open everything
    write_files(tmp_path, IMEX)
    check(hardware.imex(Machine(root=tmp_path)), WARN, "that it may open", "let this process")


@pytest.mark.parametrize("order", ["", "NHD", "LBHNC", "BLHNC", "BHLNC", "BLNHC"])
def test_order_with_small_copies_is_a_warning_where_vllm_is_installed(order: str) -> None:
    machine = Machine(environment={"VLLM_KV_CACHE_LAYOUT": order} if order else {})
    finding = hardware.cache_order(machine, has_vllm=True)
    said = f"VLLM_KV_CACHE_LAYOUT is {order or 'not set: kvferry asks for LBHNC (not with MLA)'}"
    if order.startswith("B"):
        check(finding, OK, said)
        return
    check(finding, WARN, f"{said}.", "set VLLM_KV_CACHE_LAYOUT=BLHNC")
    check(hardware.cache_order(machine, has_vllm=False), OK, finding.found)


def test_cuda_is_asked_about_each_gpu() -> None:
    attributes = {(0, ORDERING): 100, (0, DMABUF): 1, (1, FLUSH_OPTIONS): 1}
    library = StandInCuda(devices=2, active=set(), attributes=attributes)
    other = replace(UNEXPORTED, address="0000:1C:00.0", needs_flush=True)
    assert gpus(CudaDriver(library)) == [replace(SEEN, can_flush=False), other]
    assert (library.active, library.calls) == (set(), [])  # no context was made
    assert gpus(None) == []


@pytest.mark.parametrize(
    ("mapping", "cuda", "verdict", "found"),
    [
        (f"{GPU_A}={NIC_A},{GPU_B}={NIC_B}", [], OK, f"{GPU_A}: mlx5_0, {GPU_B}: mlx5_1"),
        ("1B:00.0=1c:00.0, 00000000:C3:00.0=0000:d4:00.0", [], OK, "mlx5_0, 0000:c3"),
        (f"{GPU_A}={NIC_A}", [SEEN], OK, "mlx5_0"),  # CUDA does not see the other one
        (f"{GPU_A}={NIC_A}", [], BAD, f"lacks GPU {GPU_B}"),
        ("mlx5_0", [SEEN], BAD, "names a NIC that is not there"),
        (f"{GPU_A}=0000:99:00.0", [SEEN], BAD, "names a NIC that is not there"),
    ],
)
def test_bindings_of_gpus(
    tmp_path: Path, mapping: str, cuda: list[CudaGpu], verdict: FindingLevel, found: str
) -> None:
    two_sockets(tmp_path)
    machine = Machine(cuda, {hardware.MAPPING: mapping}, tmp_path)
    check(hardware.binding(machine), verdict, found)


ALWAYS = {"GPU", "RDMA", "locked memory", "shared memory"}
GPU_FINDINGS = {"CUDA IPC", "NVLink between hosts", "cache order"}
DIRECT_FINDINGS = {"GPU memory over RDMA", "NICs near GPUs", "RDMA writes to GPU memory"}


@pytest.mark.parametrize("with_nics", [True, False])
@pytest.mark.parametrize(
    ("make", "cuda", "expected"),
    [(nothing, [], set()), (AMD, [], set()), (one_gpu, [SEEN], GPU_FINDINGS)],
    ids=["none", "amd", "nvidia"],
)
def test_findings_are_about_what_is_there(
    tmp_path: Path, make: Make, cuda: list[CudaGpu], expected: set[str], with_nics: bool
) -> None:
    make(tmp_path)
    write_files(tmp_path, {PID: Path("pid:[4026531836]")})
    if with_nics:
        nic(tmp_path, "mlx5_0", f"pci0000:15/0000:15:05.0/{NIC_A}")
        expected = expected | (DIRECT_FINDINGS if cuda else set())
    environment = {hardware.MAPPING: f"{GPU_A}={NIC_A}"} if cuda else {}
    machine = Machine(cuda, environment, tmp_path)
    found = [
        *hardware.nics_and_memory(machine),
        *hardware.hardware(machine, has_vllm=False),
    ]
    binding = {"NIC of each GPU"} if cuda else set()
    assert {one.name for one in found} == ALWAYS | expected | binding
