"""Check what engines need of GPUs, NICs and the kernel."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from kvferry.cli.doctor.finding import Check, Finding
from kvferry.cli.doctor.machine import FAR, OPEN, Machine, pci_address
from kvferry.cli.formatting import numbers, size
from kvferry.drivers.ucx.dlopen import loads

RDMA, GPU = Check("RDMA"), Check("GPU")
DIRECT = Check("GPU memory over RDMA")
VISIBILITY = Check("RDMA writes to GPU memory")
IPC = Check("CUDA IPC")
MNNVL = Check("NVLink between hosts")
CACHE_ORDER = Check("cache order")
NEAR, BINDING = Check("NICs near GPUs"), Check("NIC of each GPU")
UCX_DEVICES = Check("UCX_NET_DEVICES")
MAPPING, SELECTION = "VLLM_GPU_NIC_PCIE_MAPPING", "VLLM_NIC_SELECTION_VARS"
ORDER = "VLLM_KV_CACHE_LAYOUT"

LIBCUDA = "libcuda.so.1"
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
"""Kernel modules with which a NIC's driver reaches GPU memory. UCX looks for the same."""
DMABUF_KERNEL = (5, 12)
"""The first version of Linux with which RDMA takes memory as dmabuf (UCX's FAQ)."""
FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Number of the PID namespace of the host itself (``PROC_PID_INIT_INO`` in Linux)."""
MULTI_NODE_GPUS = ("GB200", "GB300")  # in the names of GPUs whose NVLink may lead to other hosts
SHARED_ENOUGH = 1 << 30  # free bytes of /dev/shm that suffice for engines and UCX
DISTANCES = (
    "same PCIe switch",  # behind one PCIe root port
    "same PCIe root complex",
    "same NUMA node",
    "how near is not known",
    "another NUMA node",
)


def hardware(machine: Machine, *, cuda_answers: bool, has_vllm: bool) -> Iterator[Finding]:
    """Yield the findings about GPUs, NICs and pinned memory."""
    yield gpu(machine, cuda_answers=cuda_answers)
    if machine.nvidia:
        yield ipc(machine)
        yield from mig(machine)
        yield imex(machine)
        yield cache_order(machine, has_vllm=has_vllm)
    yield rdma(machine)
    if machine.nvidia and machine.nics:
        yield direct(machine)
        yield from near(machine)
    if machine.cuda and machine.nics:
        yield visibility(machine)
    yield from bound(machine)
    yield locked_memory(rdma=bool(machine.nics))


# GPUs.


def gpu(machine: Machine, *, cuda_answers: bool = True, library: str = LIBCUDA) -> Finding:
    """Return the finding about GPUs, and whether CUDA can use them."""
    text, module = "; ".join(machine.gpus) or "none", machine.kernel_module
    if not machine.gpus or "AMD" in text:
        return GPU.ok(text)
    if module:
        text = f"{text}; kernel module {module}"
    if not loads(Path(library)):
        return GPU.warn(
            f"{text}; but {library} does not load, so that no driver can offer cuda memory",
            "give the container the GPU with CUDA's library (--gpus all, with compute in "
            "NVIDIA_DRIVER_CAPABILITIES), or install NVIDIA's driver",
        )
    if not cuda_answers:
        return GPU.warn(
            f"{text}; but CUDA finds no GPU when it starts",
            "see what nvidia-smi says, and whether CUDA_VISIBLE_DEVICES hides the GPUs: "
            f"{library} and the kernel module must be of one version",
        )
    return GPU.ok(text)


def ipc(machine: Machine) -> Finding:
    """Return the finding about CUDA IPC, by which engines on one host use NVLink.

    Legacy handles of CUDA IPC are only valid within a PID namespace (UCX's ``cuda_ipc_iface.c``).
    """
    number = re.search(r"\[(\d+)\]", machine.pid_namespace)
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
    usable = [path.name for path in channels if os.access(path, os.R_OK | os.W_OK)]
    if usable:
        return MNNVL.ok(
            f"IMEX {', '.join(usable)}: NVLink reaches hosts of the same IMEX domain, if the cache "
            "was allocated for that (vLLM's --enable-cumem-allocator)"
        )
    if channels or any(name in one for one in machine.gpus for name in MULTI_NODE_GPUS):
        lacks = "this process may not open an" if channels else "there is no"
        return MNNVL.warn(
            f"{lacks} IMEX channel: NVLink ends at this host",
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
    found = (
        f"{ORDER} {asked}. With layers outermost, each page of each layer is a copy of its own: a "
        "rank of Llama 3 70B with TP 8 reads 8,192 tokens in 40,960 copies of 8 KiB, and with "
        "BLHNC in 512 of 640 KiB"
    )
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
    ports = [port for nic in machine.nics for port in nic.ports]
    text = "; ".join(ports) or ", ".join(nic.name for nic in machine.nics)
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
    lacking = list(_lacking_for_dmabuf(machine))
    if lacking:
        return DIRECT.warn(
            f"none of the kernel modules {', '.join(PEER_MODULES)} is loaded, and dmabuf is not "
            f"known to work: {'; '.join(lacking)}",
            "modprobe nvidia_peermem; or, for dmabuf, Linux 5.12 or later with NVIDIA's open "
            "kernel modules and CUDA 11.7 or later",
        )
    asked = "CUDA exports GPU memory" if machine.cuda else "the kernel module is open"
    return DIRECT.ok(
        f"dmabuf: Linux {machine.release}, and {asked}; UCX_LOG_LEVEL=debug shows whether the "
        "NIC's driver takes it ('dmabuf is supported')"
    )


def _lacking_for_dmabuf(machine: Machine) -> Iterator[str]:
    release, module = machine.release, machine.kernel_module
    version = re.match(r"(\d+)\.(\d+)", release)
    if version is None:
        yield "the version of Linux cannot be told"
    elif tuple(map(int, version.groups())) < DMABUF_KERNEL:
        yield f"Linux {release} is older than {'.'.join(map(str, DMABUF_KERNEL))}"
    if machine.cuda:
        without = [one.index for one in machine.cuda if not one.dmabuf]
        if without:
            yield f"CUDA does not export memory of GPU {numbers(without)}"
    elif not module:
        yield "which of NVIDIA's kernel modules is loaded cannot be told, nor does CUDA answer"
    elif not module.startswith(OPEN):
        yield f"the kernel module is {module}"


def visibility(machine: Machine) -> Finding:
    """Return the finding about the order in which GPUs see what NICs have written."""
    flushed = [one for one in machine.cuda or () if one.needs_flush]
    blind = [one.index for one in flushed if not one.can_flush]
    if blind:
        return VISIBILITY.warn(
            f"GPU {numbers(blind)} may not see at once what a NIC has written, and cannot be told "
            "to: kvferry refuses such reads",
            "use NVLink, or keep the cache in CPU memory",
        )
    if flushed:
        which = numbers(one.index for one in flushed)
        return VISIBILITY.ok(f"before a read is done, kvferry flushes GPU {which}")
    return VISIBILITY.ok("each GPU sees them in order")


def near(machine: Machine) -> Iterator[Finding]:
    """Yield the finding about the nearest NICs of each GPU, if there are GPUs and NICs."""
    nics = [nic for nic in machine.nics if pci_address(nic.address)]
    if not machine.pci_gpus or not nics:
        return
    texts, far = [], []
    for card in machine.pci_gpus:
        best = min(map(card.distance, nics))
        names = ", ".join(nic.name for nic in nics if card.distance(nic) == best)
        texts.append(f"GPU {card.name}: {names} ({DISTANCES[best]})")
        far += [card.name] * (best == FAR)
    if far:
        yield NEAR.warn(
            "; ".join(texts),
            f"let engines that exchange pages with other hosts use other GPUs than {', '.join(far)}"
            ": their bytes cross the link between the processors",
        )
    else:
        yield NEAR.ok("; ".join(texts))


def bound(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the variables that bind GPUs to NICs, as far as they are set."""
    mapping, selection = map(machine.variable, (MAPPING, SELECTION))
    if mapping or selection:
        yield _binding(machine, mapping, selection)
    if listed := machine.variable(UCX_DEVICES):
        yield _ucx_devices(machine, listed)


def _binding(machine: Machine, mapping: str, selection: str) -> Finding:
    remedy = (
        f"set both: {MAPPING}=GPU=NIC,... with PCI addresses (0000:1b:00.0=0000:1c:00.0), one pair "
        f"for each GPU that an engine uses, and {SELECTION}={UCX_DEVICES}:1"
    )
    pairs = [tuple(map(pci_address, pair.split("=", 1))) for pair in mapping.split(",") if pair]
    known = {nic.address: nic.name for nic in machine.nics}
    if not mapping or not selection:
        return BINDING.bad(f"{MAPPING if mapping else SELECTION} is set alone", remedy)
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        return BINDING.bad(f"{MAPPING}={mapping} is no list of GPU=NIC", remedy)
    if missing := [nic for _, nic in pairs if nic not in known]:
        return BINDING.bad(f"{MAPPING} names {', '.join(missing)}, where no NIC is", remedy)
    wanted = {card: known[nic] for card, nic in pairs}
    if unbound := [card.name for card in machine.pci_gpus if card.address not in wanted]:
        return BINDING.warn(f"{MAPPING} has no entry for GPU {', '.join(unbound)}", remedy)
    if UCX_DEVICES not in [name.partition(":")[0].strip() for name in selection.split(",")]:
        return BINDING.warn(f"{SELECTION}={selection} does not set {UCX_DEVICES}", remedy)
    return BINDING.ok(", ".join(f"{card}: {nic}" for card, nic in wanted.items()))


def _ucx_devices(machine: Machine, listed: str) -> Finding:
    known = {nic.name for nic in machine.nics}
    known |= {path.name for path in machine.glob("sys/class/net/*")} | {"all", ""}
    named = [name.strip().partition(":")[0] for name in listed.removeprefix("^").split(",")]
    missing = [name for name in named if name not in known and "*" not in name]
    if missing:
        return UCX_DEVICES.warn(
            f"{listed}: there is no {', '.join(missing)} here",
            "correct it, or unset it: UCX then uses the NICs near the memory",
        )
    return UCX_DEVICES.ok(f"{listed}; UCX uses no other network device")


# The kernel.


def reading(problem: str | None) -> Finding:
    """Return the finding about reading another process's memory, of ``Probed.reading``."""
    check = Check("reading processes")
    if problem is None:
        return check.warn("not known: the process that should read did not answer", "try again")
    if not problem:
        return check.ok("process_vm_readv: a process read this one, which is not its child")
    found, _, remedy = problem.rpartition(": ")
    return check.bad(found, remedy)


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
    try:
        found = os.statvfs(folder)
    except OSError as exc:
        return check.warn(f"{folder}: {exc.strerror}", f"mount a tmpfs at {folder}")
    total, free = (blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail))
    said = f"{folder}: {size(free)} of {size(total)} free"
    if free >= SHARED_ENOUGH:
        return check.ok(said)
    return check.warn(
        said,
        f"enlarge or empty {folder} (--shm-size or --ipc=host for a container): vLLM's workers "
        "and UCX's shared-memory transports keep their buffers there",
    )
