"""Check what engines need of GPUs, NICs and the kernel."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvferry.cli.doctor.finding import Check, Finding
from kvferry.cli.doctor.machine import FAR, Machine, pci_address
from kvferry.cli.formatting import numbers, size

RDMA, GPU = Check("RDMA"), Check("GPU")
DIRECT = Check("GPU memory over RDMA")
VISIBILITY = Check("RDMA writes to GPU memory")
IPC = Check("CUDA IPC")
MNNVL = Check("NVLink between hosts")
CACHE_ORDER = Check("cache order")
NEAR, BINDING = Check("NICs near GPUs"), Check("NIC of each GPU")
MAPPING = "VLLM_GPU_NIC_PCIE_MAPPING"
ORDER = "VLLM_KV_CACHE_LAYOUT"

PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
"""Kernel modules with which a NIC's driver reaches GPU memory. UCX looks for the same."""
DMABUF_KERNEL = (5, 12)
"""The first version of Linux with which RDMA takes memory as dmabuf (UCX's FAQ)."""
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # that of the host itself (``PROC_PID_INIT_INO`` in Linux)
MULTI_NODE_GPUS = ("GB200", "GB300")  # in the names of GPUs whose NVLink may lead to other hosts
SHARED_ENOUGH = 1 << 30  # free bytes of /dev/shm that suffice for engines and UCX
DISTANCES = (
    "same PCIe switch",  # behind one PCIe root port
    "same PCIe root complex",
    "same NUMA node",
    "how near is not known",
    "another NUMA node",
)


def hardware(machine: Machine, *, has_vllm: bool) -> Iterator[Finding]:
    """Yield the findings about GPUs, and NICs beside them."""
    yield gpu(machine)
    if machine.nvidia:
        yield ipc(machine)
        yield from mig(machine)
        yield imex(machine)
        yield cache_order(machine, has_vllm=has_vllm)
    if machine.nvidia and machine.nics:
        yield direct(machine)
        yield near(machine)
    if machine.cuda and machine.nics:
        yield visibility(machine)
    if machine.variable(MAPPING):
        yield binding(machine)


def nics_and_memory(machine: Machine) -> Iterator[Finding]:
    """Yield the findings about NICs and memory, for which only files are read."""
    yield rdma(machine)
    yield locked_memory(rdma=bool(machine.nics))
    yield shared_memory()


# GPUs.


def gpu(machine: Machine) -> Finding:
    """Return the finding about GPUs, and whether CUDA can use them."""
    text, module = "; ".join(one.text for one in machine.gpus) or "none", machine.kernel_module
    if module:
        text = f"{text}; kernel module {module}"
    if machine.cuda or not machine.nvidia:
        return GPU.ok(text)
    return GPU.warn(
        f"{text}; but CUDA's libcuda.so.1 is not there or finds no GPU, so that no driver can "
        "offer cuda memory",
        "see what nvidia-smi says. Give the container the GPU with CUDA's library (--gpus all, "
        "with compute in NVIDIA_DRIVER_CAPABILITIES), of the kernel module's version; "
        "CUDA_VISIBLE_DEVICES may hide the GPU",
    )


def ipc(machine: Machine) -> Finding:
    """Return the finding about CUDA IPC, by which engines on one host use NVLink.

    Legacy handles of CUDA IPC are only valid within a PID namespace (UCX's ``cuda_ipc_iface.c``).
    """
    with suppress(OSError):
        if os.readlink(machine.root / "proc/self/ns/pid") == FIRST_PID_NAMESPACE:
            return IPC.ok("this process is in the host's PID namespace, which engines must share")
    return IPC.warn(
        "this process is in a PID namespace of a container: to engines of other containers on this "
        "host, bytes go without NVLink, and by tcp if there is no RDMA",
        "run both engines in one container, or in containers that share a PID and an IPC namespace "
        "(--pid, --ipc; shareProcessNamespace in Kubernetes) and see the GPUs of both",
    )


def mig(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if a GPU is split into MIG instances."""
    found = machine.glob("proc/driver/nvidia/capabilities/gpu*/mig/gi*")
    if found:
        instances = ", ".join(f"{path.parents[1].name} {path.name}" for path in found)
        yield Check("MIG").warn(
            f"instances {instances}: there is no CUDA IPC between MIG instances, and no NVLink",
            "give engines that exchange pages on this host whole GPUs (nvidia-smi -mig 0)",
        )


def imex(machine: Machine) -> Finding:
    """Return the finding about IMEX channels, without which NVLink ends at the host."""
    channels = machine.glob("dev/nvidia-caps-imex-channels/channel*")
    if any(os.access(path, os.R_OK | os.W_OK) for path in channels):
        return MNNVL.ok(
            "by an IMEX channel, NVLink reaches hosts of the same IMEX domain, if the cache was "
            "allocated for that (vLLM's --enable-cumem-allocator)"
        )
    if channels or any(name in one.text for one in machine.gpus for name in MULTI_NODE_GPUS):
        return MNNVL.warn(
            "this process has no IMEX channel that it may open: NVLink ends at this host",
            "start nvidia-imex, and let this process, also in a container, read and write "
            "/dev/nvidia-caps-imex-channels/channel0 (NVIDIA's IMEX guide)",
        )
    return MNNVL.ok("no IMEX channel; only GPUs of one NVLink domain of several hosts need one")


def cache_order(machine: Machine, *, has_vllm: bool) -> Finding:
    """Return the finding about the order of vLLM's cache, which decides on small copies."""
    order = machine.variable(ORDER)
    if order.startswith("B"):
        return CACHE_ORDER.ok(f"{ORDER} is {order}: the layers of a page lie together")
    asked = f"is {order}" if order else "is not set: kvferry asks for LBHNC (not with MLA)"
    found = f"{ORDER} {asked}. With layers outermost, each page of each layer is a copy of its own"
    if not has_vllm:
        return CACHE_ORDER.ok(found)
    return CACHE_ORDER.warn(
        found,
        f"set {ORDER}=BLHNC on both engines if their attention backend can use this order "
        "(FLASH_ATTN, FLASHINFER and TRITON_ATTN can); kvferry plan counts a model's copies, and "
        "names the better order for engines of different numbers of ranks",
    )


# NICs.


def rdma(machine: Machine) -> Finding:
    """Return the finding about NICs with RDMA, and whether this process may use them."""
    if not machine.nics:
        return RDMA.ok("no NIC with RDMA: between hosts bytes go by TCP")
    text = "; ".join(nic.text or nic.name for nic in machine.nics)
    if not any(nic.is_active for nic in machine.nics):
        return RDMA.warn(text, "no port is active: check the cable and the switch")
    verbs = machine.glob("dev/infiniband/uverbs*")
    if not any(os.access(path, os.R_OK | os.W_OK) for path in verbs):
        return RDMA.warn(
            f"{text}; but this process may not use /dev/infiniband/uverbs*",
            "give it the devices (--device=/dev/infiniband for a container), and the right to open "
            "them",
        )
    return RDMA.ok(text)


def direct(machine: Machine) -> Finding:
    """Return the finding about the two ways in which a NIC can reach GPU memory."""
    loaded = [name for name in PEER_MODULES if (machine.root / "sys/module" / name).exists()]
    if loaded:
        return DIRECT.ok(f"kernel module {loaded[0]} is loaded")
    release = machine.text("proc/sys/kernel/osrelease")
    version = tuple(map(int, re.findall(r"\d+", release)[:2]))
    without = [one.index for one in machine.cuda if not one.dmabuf]
    if version >= DMABUF_KERNEL and machine.cuda and not without:
        return DIRECT.ok(
            f"dmabuf: Linux {release}, and CUDA exports GPU memory; UCX_LOG_LEVEL=debug shows "
            "whether the NIC's driver takes it ('dmabuf is supported')"
        )
    exports = f"CUDA exports no memory of GPU {numbers(without)}" if without else "CUDA exports it"
    return DIRECT.warn(
        f"none of the kernel modules {', '.join(PEER_MODULES)} is loaded, and dmabuf is not known "
        f"to work: Linux is {release}, and {exports if machine.cuda else 'CUDA does not answer'}",
        "modprobe nvidia_peermem; or, for dmabuf, Linux 5.12 or later with NVIDIA's open kernel "
        "modules and CUDA 11.7 or later",
    )


def visibility(machine: Machine) -> Finding:
    """Return the finding about the order in which GPUs see what NICs have written."""
    flushed = [one for one in machine.cuda if one.needs_flush]
    if blind := [one.index for one in flushed if not one.can_flush]:
        return VISIBILITY.warn(
            f"GPU {numbers(blind)} may not see at once what a NIC has written, and cannot be told "
            "to: kvferry refuses such reads",
            "use NVLink, or keep the cache in CPU memory",
        )
    which = numbers(one.index for one in flushed)
    return VISIBILITY.ok(
        f"before a read is done, kvferry flushes GPU {which}"
        if flushed
        else "each GPU sees them in order"
    )


def near(machine: Machine) -> Finding:
    """Return the finding about the nearest NICs of each GPU, where there are GPUs and NICs."""
    texts, far = [], []
    for card in machine.nvidia:
        best = min(map(card.distance, machine.nics))
        names = ", ".join(nic.name for nic in machine.nics if card.distance(nic) == best)
        texts.append(f"GPU {card.name}: {names} ({DISTANCES[best]})")
        far += [card.name] * (best == FAR)
    if not far:
        return NEAR.ok("; ".join(texts))
    return NEAR.warn(
        "; ".join(texts),
        f"let engines that exchange pages with other hosts use other GPUs than {', '.join(far)}: "
        "their bytes cross the link between the processors",
    )


def binding(machine: Machine) -> Finding:
    """Return the finding about the variable that binds GPUs to NICs, which is set."""
    mapping = machine.variable(MAPPING)
    pairs = (pair.partition("=") for pair in mapping.split(","))
    bound = {pci_address(card): pci_address(nic) for card, _, nic in pairs}
    known = {nic.address: nic.name for nic in machine.nics}
    missing = [nic for nic in bound.values() if nic not in known]
    unbound = [card.name for card in machine.nvidia if card.address not in bound]
    if not missing and not unbound:
        return BINDING.ok(", ".join(f"{card}: {known[nic]}" for card, nic in bound.items()))
    wrong = "names a NIC that is not there" if missing else f"lacks GPU {', '.join(unbound)}"
    return BINDING.bad(
        f"{MAPPING}={mapping} {wrong}: a worker would end with an error",
        "set it to GPU=NIC,... with PCI addresses (0000:1b:00.0=0000:1c:00.0), one pair for each "
        "GPU that an engine uses, and VLLM_NIC_SELECTION_VARS to UCX_NET_DEVICES:1",
    )


# The kernel.


def locked_memory(*, rdma: bool, limit: int | None = None) -> Finding:
    """Return the finding about how much memory a process may pin for a NIC."""
    check = Check("locked memory")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return check.ok("unlimited")
    if not rdma:
        return check.ok(f"{size(soft)} (matters only with RDMA)")
    return check.warn(
        f"{size(soft)}: registering a KV cache with a NIC will fail",
        "ulimit -l unlimited before the engine starts (LimitMEMLOCK=infinity in systemd, "
        "--ulimit memlock=-1 for a container)",
    )


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Return the finding about how much shared memory is free."""
    check = Check("shared memory")
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    said = f"{folder}: {size(free)} free"
    if free >= SHARED_ENOUGH:
        return check.ok(said)
    return check.warn(
        said,
        f"enlarge or empty {folder} (--shm-size or --ipc=host for a container): vLLM's workers "
        "and UCX's shared-memory transports keep their buffers there",
    )
