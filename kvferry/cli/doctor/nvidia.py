"""Check what NVIDIA's GPUs need to exchange memory with NICs, and with GPUs of other processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvferry.cli.doctor.devices import OPEN, file_text, kernel_module
from kvferry.cli.doctor.finding import Check, Finding
from kvferry.cli.doctor.probe import Gpu
from kvferry.cli.formatting import numbers

DIRECT = Check("GPU memory over RDMA")
VISIBILITY = Check("RDMA writes to GPU memory")
IPC = Check("CUDA IPC")
MNNVL = Check("NVLink between hosts")
CACHE_ORDER = Check("cache order")

PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
"""Kernel modules with which a NIC's driver reaches GPU memory. UCX looks for the same."""

DMABUF_KERNEL = (5, 12)
"""The first version of Linux with which RDMA takes memory as dmabuf (UCX's FAQ)."""

FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Number of the PID namespace of the host itself (``PROC_PID_INIT_INO`` in Linux)."""

ORDER = "VLLM_KV_CACHE_LAYOUT"

MULTI_NODE_GPUS = ("GB200", "GB300")
"""In the names of GPUs whose NVLink may lead to other hosts."""


def direct(gpus: Sequence[Gpu] | None = None, root: Path = Path("/")) -> Finding:
    """Return the finding about the two ways in which a NIC can reach GPU memory."""
    loaded = [name for name in PEER_MODULES if (root / "sys/module" / name).exists()]
    if loaded:
        return DIRECT.ok(f"kernel module {loaded[0]} is loaded")
    lacking = list(_lacking_for_dmabuf(gpus, root))
    if lacking:
        return DIRECT.warn(
            f"none of the kernel modules {', '.join(PEER_MODULES)} is loaded, and dmabuf is not "
            f"known to work: {'; '.join(lacking)}",
            "modprobe nvidia_peermem; or, for dmabuf, Linux 5.12 or later with NVIDIA's open "
            "kernel modules and CUDA 11.7 or later",
        )
    asked = "CUDA exports GPU memory" if gpus else "the kernel module is open"
    return DIRECT.ok(
        f"dmabuf: Linux {_release(root)}, and {asked}. Whether the NIC's driver takes it is known "
        "when UCX starts with UCX_LOG_LEVEL=debug, which prints 'dmabuf is supported'"
    )


def _lacking_for_dmabuf(gpus: Sequence[Gpu] | None, root: Path) -> Iterator[str]:
    """Yield what dmabuf lacks, or what cannot be told; see ``direct`` for the arguments."""
    release = _release(root)
    version = re.match(r"(\d+)\.(\d+)", release)
    if version is None:
        yield "the version of Linux cannot be told"
    elif tuple(map(int, version.groups())) < DMABUF_KERNEL:
        yield f"Linux {release} is older than {'.'.join(map(str, DMABUF_KERNEL))}"
    module = kernel_module(root)
    if gpus:
        without = [gpu.index for gpu in gpus if not gpu.dmabuf]
        if without:
            yield f"CUDA does not export memory of GPU {numbers(without)}"
    elif not module:
        yield "which of NVIDIA's kernel modules is loaded cannot be told, nor does CUDA answer"
    elif not module.startswith(OPEN):
        yield f"the kernel module is {module}"


def _release(root: Path) -> str:
    return file_text(root / "proc/sys/kernel/osrelease")


def visibility(gpus: Sequence[Gpu]) -> Finding:
    """Return the finding about the order in which GPUs see what NICs have written."""
    blind = [gpu.index for gpu in gpus if gpu.needs_flush and not gpu.can_flush]
    if blind:
        return VISIBILITY.warn(
            f"GPU {numbers(blind)} may not see at once what a NIC has written, and cannot be told "
            "to: kvferry refuses such reads",
            "use NVLink, or keep the cache in CPU memory",
        )
    flushed = [gpu.index for gpu in gpus if gpu.needs_flush]
    if flushed:
        return VISIBILITY.ok(f"before a read is done, kvferry flushes GPU {numbers(flushed)}")
    return VISIBILITY.ok("each GPU sees them in order")


def ipc(root: Path = Path("/")) -> Finding:
    """Return the finding about CUDA IPC, by which engines on one host use NVLink.

    Legacy handles of CUDA IPC are only valid within a PID namespace (UCX's ``cuda_ipc_iface.c``).
    """
    try:
        own = os.readlink(root / "proc/self/ns/pid")
    except OSError:
        own = ""
    number = re.search(r"\[(\d+)\]", own)
    if number is None:
        return IPC.ok("this process's PID namespace cannot be told; engines must share one")
    if int(number[1]) == FIRST_PID_NAMESPACE:
        return IPC.ok("this process is in the host's PID namespace, which engines must share")
    return IPC.warn(
        "this process is in a PID namespace of a container: to engines of other containers on this "
        "host, bytes go without NVLink, and by tcp if there is no RDMA",
        "run both engines in one container, or in containers that share a PID and an IPC namespace "
        "(--pid, --ipc; shareProcessNamespace in Kubernetes) and see the GPUs of both",
    )


def mig(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield a finding if a GPU is split into MIG instances."""
    found = (root / "proc/driver/nvidia/capabilities").glob("gpu*/mig/gi*")
    instances = sorted(f"{path.parents[1].name} {path.name}" for path in found)
    if instances:
        yield Check("MIG").warn(
            f"instances {', '.join(instances)}: there is no CUDA IPC between MIG instances, and no "
            "NVLink",
            "give engines that exchange pages on this host whole GPUs (nvidia-smi -mig 0)",
        )


def imex(gpus: Sequence[str], root: Path = Path("/")) -> Finding:
    """Return the finding about IMEX channels, without which NVLink ends at the host."""
    channels = sorted((root / "dev/nvidia-caps-imex-channels").glob("channel*"))
    usable = [path.name for path in channels if os.access(path, os.R_OK | os.W_OK)]
    if usable:
        return MNNVL.ok(
            f"IMEX {', '.join(usable)}: NVLink reaches hosts of the same IMEX domain, if the cache "
            "was allocated for that (vLLM's --enable-cumem-allocator)"
        )
    if channels:
        return MNNVL.warn(
            f"this process may not open {', '.join(map(str, channels))}",
            "give it the right to read and write an IMEX channel",
        )
    if any(name in gpu for gpu in gpus for name in MULTI_NODE_GPUS):
        return MNNVL.warn(
            "there is no IMEX channel: NVLink ends at this host",
            "start nvidia-imex, and create /dev/nvidia-caps-imex-channels/channel0 (NVIDIA's IMEX "
            "guide), also in the container",
        )
    return MNNVL.ok("no IMEX channel; only GPUs of one NVLink domain of several hosts need one")


def cache_order(environment: Mapping[str, str], *, has_vllm: bool) -> Finding:
    """Return the finding about the order of vLLM's cache, which decides on small copies."""
    order = environment.get(ORDER, "").strip()
    if order.startswith("B"):
        return CACHE_ORDER.ok(f"{ORDER} is {order}: the layers of a page lie together")
    asked = f"is {order}" if order else "is not set: kvferry asks for LBHNC (not with MLA)"
    found = (
        f"{ORDER} {asked}. With layers outermost, each page of each layer is a copy of its own: a "
        "rank of Llama 3 70B with TP 8 reads 8,192 tokens in 40,960 copies of 8 KiB, for which "
        "CUDA IPC takes some 164 ms; with BLHNC in 512 copies of 640 KiB"
    )
    if not has_vllm:
        return CACHE_ORDER.ok(found)
    return CACHE_ORDER.warn(
        found,
        f"set {ORDER}=BLHNC on both engines if their attention backend can use this order "
        "(FLASH_ATTN, FLASHINFER and TRITON_ATTN can). kvferry plan counts a model's copies; it "
        "also names the better order if the engines have different numbers of ranks",
    )
