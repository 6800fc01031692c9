"""Findings of ``kvferry doctor`` about GPUs and NICs, on machines that folders stand in for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cli.doctor import devices, hardware, nvidia, topology
from kvferry.cli.doctor.finding import Finding, FindingLevel
from kvferry.cli.doctor.probe import Gpu, Probed, gpus
from kvferry.cli.plan.report import BACKENDS
from kvferry.drivers.cuda import CudaDriver
from tests.cli.findings import BAD, OK, WARN, check, write_files
from tests.gpu.driver_api import StandInCuda

ORDERING, FLUSH_OPTIONS, DMABUF = 118, 117, 124
"""Device attributes of CUDA's driver API."""

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 13.3\n"
)
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n"
LIBC = "libc.so.6"
"""A library that loads everywhere."""

GPU_A, GPU_B = "0000:1b:00.0", "0000:c3:00.0"
NIC_A, NIC_B = "0000:1c:00.0", "0000:d4:00.0"


def gpu(*, index: int = 0, dmabuf: bool = True, flush: bool = False, can: bool = True) -> Gpu:
    address = f"0000:{0x1B + index:02X}:00.0"
    return Gpu(index=index, address=address, dmabuf=dmabuf, needs_flush=flush, can_flush=can)


def pci_device(root: Path, route: str, **facts: str) -> None:
    """Make a PCI device; its address is the last part of the route below its root complex."""
    where = write_files(root / "sys/devices" / route)
    where.mkdir(parents=True)
    for name, text in facts.items():
        (where / name).write_text(f"{text}\n")
    link = root / "sys/bus/pci/devices" / where.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(where)


def graphics(root: Path, route: str, *, node: int = 0, kind: str = "0x030200") -> None:
    pci_device(root, route, vendor="0x10de", numa_node=str(node), **{"class": kind})


def nic(root: Path, name: str, route: str, *, node: int = 0) -> None:
    pci_device(root, route, vendor="0x15b3", numa_node=str(node), **{"class": "0x020700"})
    folder = root / "sys/class/infiniband" / name
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(root / "sys/devices" / route)


def two_sockets(root: Path) -> Path:
    """Make a GPU and a NIC behind one switch at node 0, and a GPU and a NIC at node 1."""
    graphics(root, f"pci0000:15/0000:15:01.0/0000:16:00.0/{GPU_A}")
    nic(root, "mlx5_0", f"pci0000:15/0000:15:01.0/0000:16:01.0/{NIC_A}")
    graphics(root, f"pci0000:c0/0000:c0:01.0/{GPU_B}", node=1)
    nic(root, "mlx5_1", f"pci0000:d0/0000:d0:01.0/{NIC_B}", node=1)
    return root


def pid_namespace(root: Path, number: int) -> Path:
    link = root / "proc/self/ns/pid"
    link.parent.mkdir(parents=True)
    link.symlink_to(f"pid:[{number}]")
    return root


# The driver.


@pytest.mark.parametrize(
    ("library", "answers", "verdict", "found", "remedy"),
    [
        (LIBC, True, OK, "NVIDIA H200; kernel module open 580.95.05", ""),
        ("libno_such_thing.so.1", True, WARN, "", "NVIDIA_DRIVER_CAPABILITIES"),
        (LIBC, False, WARN, "CUDA finds no GPU", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpu_that_cuda_cannot_use_is_a_warning(
    tmp_path: Path, library: str, answers: bool, verdict: FindingLevel, found: str, remedy: str
) -> None:
    write_files(tmp_path, proc__driver__nvidia__version=OPEN)
    finding = devices.gpu(["NVIDIA H200"], cuda_answers=answers, root=tmp_path, library=library)
    check(finding, verdict, found, remedy)


def test_cuda_is_asked_about_each_gpu() -> None:
    attributes = {(0, ORDERING): 100, (0, DMABUF): 1, (1, FLUSH_OPTIONS): 1}
    library = StandInCuda(devices=2, active=set(), attributes=attributes)
    assert gpus(CudaDriver(library)) == [
        gpu(index=0, can=False),
        gpu(index=1, dmabuf=False, flush=True),
    ]
    assert (library.active, library.calls) == (set(), [])  # no context was made
    assert gpus(None) is None


# GPU memory and NICs.


@pytest.mark.parametrize("module", ["nvidia_peermem", "nv_peer_mem"])
def test_peermem_is_fine(tmp_path: Path, module: str) -> None:
    check(nvidia.direct(None, tmp_path), WARN)
    write_files(tmp_path / "sys/module" / module, version="1")
    check(nvidia.direct(None, tmp_path), OK)


@pytest.mark.parametrize(
    ("release", "module", "asked", "verdict", "words"),
    [
        ("6.8.0-60-generic", OPEN, [gpu()], OK, "CUDA exports GPU memory"),
        ("5.12.0", PROPRIETARY, [gpu()], OK, "CUDA exports GPU memory"),
        ("6.8.0", OPEN, None, OK, "the kernel module is open"),
        ("5.11.22", OPEN, [gpu()], WARN, "Linux 5.11.22 is older than 5.12"),
        (
            "6.8.0",
            OPEN,
            [gpu(), gpu(index=1, dmabuf=False)],
            WARN,
            "does not export memory of GPU 1",
        ),
        ("6.8.0", PROPRIETARY, None, WARN, "module is proprietary 535.104.05"),
        ("6.8.0", "", None, WARN, "cannot be told"),
        ("", OPEN, [gpu()], WARN, "the version of Linux cannot be told"),
    ],
)
def test_dmabuf_instead_of_peermem(
    tmp_path: Path,
    release: str,
    module: str,
    asked: list[Gpu] | None,
    verdict: FindingLevel,
    words: str,
) -> None:
    write_files(
        tmp_path, proc__sys__kernel__osrelease=release, proc__driver__nvidia__version=module
    )
    finding = nvidia.direct(asked, tmp_path)
    assert finding.verdict is verdict
    assert words in finding.found
    assert ("modprobe nvidia_peermem" in finding.remedy) is (verdict is WARN)


def test_gpu_that_neither_orders_nor_flushes_writes_is_a_warning() -> None:
    check(nvidia.visibility([gpu()]), OK)
    check(nvidia.visibility([gpu(index=2, flush=True)]), OK, "kvferry flushes GPU 2")
    stale = gpu(index=1, flush=True, can=False)
    said = "GPU 1 may not see at once what a NIC has written"
    check(nvidia.visibility([gpu(), stale]), WARN, said)


def test_nics_near_gpus(tmp_path: Path) -> None:
    (finding,) = topology.near(None, two_sockets(tmp_path))
    near = f"GPU {GPU_A}: mlx5_0 (same PCIe switch); GPU {GPU_B}: mlx5_1 (same NUMA node)"
    assert (finding.verdict, finding.found) == (OK, near)


def test_nics_of_one_root_complex(tmp_path: Path) -> None:
    graphics(tmp_path, f"pci0000:15/0000:15:01.0/{GPU_A}", node=-1)
    for number in (0, 1):
        nic(tmp_path, f"mlx5_{number}", f"pci0000:15/0000:15:05.0/0000:2{number}:00.0", node=-1)
    nic(tmp_path, "mlx5_2", f"pci0000:d0/0000:d0:01.0/{NIC_B}", node=-1)
    (finding,) = topology.near(None, tmp_path)
    assert finding.found == f"GPU {GPU_A}: mlx5_0, mlx5_1 (same PCIe root complex)"


@pytest.mark.parametrize(
    ("node", "verdict", "found", "remedy"),
    [
        (0, WARN, f"GPU {GPU_A}: mlx5_1 (another NUMA node)", GPU_A),
        (-1, OK, "how near is not known", ""),
    ],
)
def test_gpu_far_from_every_nic_is_a_warning(
    tmp_path: Path, node: int, verdict: FindingLevel, found: str, remedy: str
) -> None:
    graphics(tmp_path, f"pci0000:15/0000:15:01.0/{GPU_A}", node=node)
    nic(tmp_path, "mlx5_1", f"pci0000:d0/0000:d0:01.0/{NIC_B}", node=1)
    (finding,) = topology.near(None, tmp_path)
    check(finding, verdict, found, remedy)


def test_distance_needs_gpus_and_nics(tmp_path: Path) -> None:
    assert list(topology.near(None, tmp_path)) == []
    graphics(tmp_path, f"pci0000:15/0000:15:01.0/{GPU_A}")
    graphics(tmp_path, "pci0000:15/0000:15:01.0/0000:1b:00.1", kind="0x040300")  # its sound device
    assert [card.name for card in topology.gpus(None, tmp_path)] == [GPU_A]
    assert list(topology.near(None, tmp_path)) == []


def test_gpus_that_cuda_does_not_see_are_left_out(tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    (finding,) = topology.near([gpu()], root)
    assert finding.found == f"GPU {GPU_A}: mlx5_0 (same PCIe switch)"
    environment = {topology.MAPPING: f"{GPU_A}={NIC_A}", topology.SELECTION: "UCX_NET_DEVICES:1"}
    (finding,) = topology.bound(environment, [gpu()], root)
    assert finding.verdict is OK


# Variables that bind GPUs to NICs.

BOTH = f"{GPU_A}={NIC_A},{GPU_B}={NIC_B}"
TO_UCX = "UCX_NET_DEVICES:1,NCCL_IB_HCA:1"


def binding(root: Path, mapping: str | None, selection: str | None) -> Finding:
    given = {topology.MAPPING: mapping, topology.SELECTION: selection}
    environment = {name: value for name, value in given.items() if value is not None}
    (finding,) = topology.bound(environment, None, root)
    return finding


@pytest.mark.parametrize("mapping", [BOTH, "1B:00.0=1c:00.0, 00000000:C3:00.0=0000:d4:00.0"])
def test_bound_gpus_are_fine(tmp_path: Path, mapping: str) -> None:
    finding = binding(two_sockets(tmp_path), mapping, TO_UCX)
    assert finding.verdict is OK
    assert finding.found == f"{GPU_A}: mlx5_0, {GPU_B}: mlx5_1"


@pytest.mark.parametrize(
    ("mapping", "selection", "verdict", "words"),
    [
        (BOTH, None, BAD, "MAPPING is set alone"),
        (None, TO_UCX, BAD, "VARS is set alone"),
        ("mlx5_0", TO_UCX, BAD, "is no list of GPU=NIC"),
        (f"{GPU_A}=mlx5_0", TO_UCX, BAD, "is no list of GPU=NIC"),
        (f"{GPU_A}=0000:99:00.0", TO_UCX, BAD, "names 0000:99:00.0, where no NIC"),
        (f"{GPU_A}={NIC_A}", TO_UCX, WARN, f"no entry for GPU {GPU_B}"),
        (BOTH, "NCCL_IB_HCA:1", WARN, "does not set UCX_NET_DEVICES"),
    ],
)
def test_wrong_binding_is_found(
    tmp_path: Path, mapping: str | None, selection: str | None, verdict: FindingLevel, words: str
) -> None:
    finding = binding(two_sockets(tmp_path), mapping, selection)
    assert (finding.verdict, words in finding.found) == (verdict, True), finding.found
    assert finding.remedy


@pytest.mark.parametrize(
    ("listed", "missing"),
    [
        ("mlx5_0:1", ""),
        ("mlx5_0:1,eth0", ""),
        ("all", ""),
        ("^eth0", ""),
        ("mlx5_*", ""),
        ("mlx5_7:1,eth0", "mlx5_7"),
    ],
)
def test_devices_of_ucx(tmp_path: Path, listed: str, missing: str) -> None:
    (two_sockets(tmp_path) / "sys/class/net/eth0").mkdir(parents=True)
    (finding,) = topology.bound({"UCX_NET_DEVICES": listed}, None, tmp_path)
    assert finding.verdict is (WARN if missing else OK)
    assert (f"there is no {missing} here" in finding.found) is bool(missing)


def test_unset_variables_are_not_reported(tmp_path: Path) -> None:
    assert list(topology.bound({}, None, two_sockets(tmp_path))) == []


# From GPU to GPU.


def test_container_with_a_pid_namespace_is_a_warning(tmp_path: Path) -> None:
    check(nvidia.ipc(tmp_path), OK)
    own, inner = (pid_namespace(tmp_path / str(n), n) for n in (4026531836, 4026532833))
    check(nvidia.ipc(own), OK, "the host's PID namespace")
    check(nvidia.ipc(inner), WARN, "without NVLink", "--pid")


def test_mig_instances_are_a_warning(tmp_path: Path) -> None:
    folder = "proc__driver__nvidia__capabilities__"
    write_files(tmp_path, **{f"{folder}mig__config": "DeviceFileMinor: 1\n"})
    assert list(nvidia.mig(tmp_path)) == []
    write_files(tmp_path, **{f"{folder}gpu0__mig__gi1__access": "DeviceFileMinor: 12\n"})
    (finding,) = nvidia.mig(tmp_path)
    check(finding, WARN, "gpu0 gi1")


def test_nvlink_between_hosts_needs_an_imex_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(nvidia.imex(["NVIDIA H200"], tmp_path), OK)
    check(nvidia.imex(["NVIDIA GB200"], tmp_path), WARN, "", "nvidia-imex")
    write_files(tmp_path, **{"dev__nvidia-caps-imex-channels__channel0": ""})
    check(nvidia.imex(["NVIDIA GB200"], tmp_path), OK)
    monkeypatch.setattr("os.access", lambda *_: False)  # root may open everything
    check(nvidia.imex(["NVIDIA GB200"], tmp_path), WARN, "may not open")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "VLLM_KV_CACHE_LAYOUT is not set: kvferry asks for LBHNC (not with MLA)."),
        ({"VLLM_KV_CACHE_LAYOUT": "NHD"}, "VLLM_KV_CACHE_LAYOUT is NHD."),
        ({"VLLM_KV_CACHE_LAYOUT": "LBHNC"}, "VLLM_KV_CACHE_LAYOUT is LBHNC."),
    ],
)
def test_order_with_small_copies_is_a_warning_where_vllm_is_installed(
    environment: dict[str, str], words: str
) -> None:
    finding = nvidia.cache_order(environment, has_vllm=True)
    backends = BACKENDS["BLHNC"].partition(" can")[0]
    check(finding, WARN, words, "VLLM_KV_CACHE_LAYOUT=BLHNC", backends, "kvferry plan")
    assert "40,960 copies of 8 KiB" in finding.found
    without = nvidia.cache_order(environment, has_vllm=False)
    assert (without.verdict, without.found) == (OK, finding.found)


@pytest.mark.parametrize("order", ["BLHNC", "BHLNC", "BLNHC"])
def test_order_with_the_layers_of_a_page_together_is_fine(order: str) -> None:
    check(nvidia.cache_order({"VLLM_KV_CACHE_LAYOUT": order}, has_vllm=True), OK, f"is {order}")


# All of it.

GPU_FINDINGS = {"CUDA IPC", "NVLink between hosts", "cache order"}
DIRECT_FINDINGS = {"GPU memory over RDMA", "NICs near GPUs", "RDMA writes to GPU memory"}
ALWAYS = {"GPU", "RDMA", "locked memory"}


@pytest.mark.parametrize("with_nics", [True, False])
@pytest.mark.parametrize("with_gpus", [True, False])
def test_findings_are_about_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_gpus: bool, with_nics: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    if with_gpus:
        graphics(tmp_path, f"pci0000:15/0000:15:01.0/{GPU_A}")
        write_files(tmp_path, proc__driver__nvidia__gpus__0__information="Model: NVIDIA H200\n")
    if with_nics:
        nic(tmp_path, "mlx5_0", f"pci0000:15/0000:15:01.0/{NIC_A}")
    probed = Probed(gpus=[gpu()] if with_gpus else None)
    names = {finding.name for finding in hardware(probed, {}, tmp_path)}
    expected = ALWAYS | (GPU_FINDINGS if with_gpus else set())
    assert names == expected | (DIRECT_FINDINGS if with_gpus and with_nics else set())


def test_amd_gpu_gets_no_findings_about_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    write_files(tmp_path, sys__class__drm__card0__device__vendor="0x1002\n")
    nic(tmp_path, "mlx5_0", f"pci0000:15/0000:15:01.0/{NIC_A}")
    found = {finding.name: finding for finding in hardware(Probed(), {}, tmp_path)}
    assert (set(found), found["GPU"].verdict) == (ALWAYS, OK)
