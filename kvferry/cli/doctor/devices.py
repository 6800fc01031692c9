"""Find NICs with RDMA and GPUs, and check whether this process may use them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.cli.doctor.finding import Check, Finding
from kvferry.drivers.ucx.dlopen import loads

RDMA, GPU = Check("RDMA"), Check("GPU")
ACTIVE = "ACTIVE"
OPEN = "open"
"""The kind of NVIDIA's kernel module that exports GPU memory as dmabuf."""
SMI_SECONDS = 10.0
SMI = "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}


def file_text(path: Path) -> str:
    """Return a file's text without white space around it; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def nics(root: Path = Path("/")) -> list[str]:
    """Return the names of the NICs with RDMA, ascending."""
    return sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))


def active_nics(root: Path = Path("/")) -> list[str]:
    """Return the names of the NICs with RDMA that have an active port, ascending."""
    return [nic for nic in nics(root) if any(ACTIVE in port for port in _ports(root, nic))]


def rdma(root: Path = Path("/")) -> Finding:
    """Return the finding about NICs with RDMA, and whether this process may use them."""
    names = nics(root)
    if not names:
        return RDMA.ok("no NIC with RDMA: between hosts bytes go by TCP")
    ports = [port for nic in names for port in _ports(root, nic)]
    text = "; ".join(ports) or ", ".join(names)
    if not any(ACTIVE in port for port in ports):
        return RDMA.warn(text, "no port is active: check the cable and the switch")
    verbs = sorted((root / "dev/infiniband").glob("uverbs*"))
    if not any(os.access(path, os.R_OK | os.W_OK) for path in verbs):
        return RDMA.warn(
            f"{text}; but this process may not use /dev/infiniband/uverbs*",
            "give it the devices (--device=/dev/infiniband for a container), and the right to open "
            "them",
        )
    return RDMA.ok(text)


def _ports(root: Path, nic: str) -> Iterator[str]:
    """Yield a text for each port of a NIC: its name, link layer, rate and state."""
    for port in sorted((root / "sys/class/infiniband" / nic / "ports").glob("*")):
        facts = (file_text(port / name) for name in ("link_layer", "rate", "state"))
        yield f"{nic}:{port.name} {', '.join(fact for fact in facts if fact)}"


def gpus(root: Path = Path("/")) -> list[str]:
    """Return a description of each GPU, with less detail if the GPU's driver is not installed."""
    return _from_smi() or _from_proc(root) or _from_bus(root)


def gpu(
    found: Sequence[str],
    cuda_answers: bool = True,
    *,
    root: Path = Path("/"),
    library: str = "libcuda.so.1",
) -> Finding:
    """Return the finding about GPUs, and whether CUDA can use them."""
    if not found:
        return GPU.ok("none")
    text = "; ".join(found)
    if "AMD" in text:
        return GPU.ok(text)
    module = kernel_module(root)
    if module:
        text = f"{text}; kernel module {module}"
    if not loads(Path(library)):
        return GPU.warn(
            f"{text}; but {library} does not load, so that no driver can offer cuda memory",
            "give the container the GPU with CUDA's library (--gpus all, with compute in "
            "NVIDIA_DRIVER_CAPABILITIES)"
            if module
            else "install NVIDIA's driver, or give the container the GPU (--gpus all)",
        )
    if not cuda_answers:
        return GPU.warn(
            f"{text}; but CUDA finds no GPU when it starts",
            "see what nvidia-smi says, and whether CUDA_VISIBLE_DEVICES hides the GPUs: "
            f"{library} and the kernel module must be of one version",
        )
    return GPU.ok(text)


def kernel_module(root: Path = Path("/")) -> str:
    """Return kind and version of NVIDIA's kernel module, such as ``open 570.86.15``.

    Empty if the module is not loaded, or if this process cannot see it.
    """
    said = file_text(root / "proc/driver/nvidia/version").partition("\n")[0]
    if not said:
        return ""
    kind = OPEN if "Open Kernel Module" in said else "proprietary"
    version = re.search(r"\s(\d+\.[\d.]+)\s", f"{said} ")
    return f"{kind} {version[1]}" if version else kind


def _from_smi() -> list[str]:
    """Return a description of each GPU that nvidia-smi lists; empty if the program fails."""
    try:
        said = subprocess.check_output(
            SMI, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, timeout=SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"{line.strip()} (driver)" for line in said.splitlines() if line.strip()]


def _from_proc(root: Path) -> list[str]:
    """Return the models of the GPUs that NVIDIA's kernel module lists under the root."""
    models = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = file_text(path).splitlines()
        model = next((line for line in lines if line.startswith("Model:")), "Model: NVIDIA GPU")
        models.append(model.partition(":")[2].strip())
    return models


def _from_bus(root: Path) -> list[str]:
    """Return the vendor and bus address of each GPU among the kernel's graphics devices."""
    cards = sorted((root / "sys/class/drm").glob("card[0-9]*/device/vendor"))
    vendors = {str(path.parent.resolve()): VENDORS.get(file_text(path)) for path in cards}
    return [f"{vendor} GPU at {Path(at).name}" for at, vendor in vendors.items() if vendor]
