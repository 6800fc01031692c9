"""What GPUs and NICs this machine has, and where, as its files and CUDA say."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from msgspec import Struct

SMI_SECONDS = 10.0
SMI = "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
NVIDIA, AMD = "0x10de", "0x1002"  # PCI vendors of GPUs
DISPLAY = "0x03"  # the class of GPUs among PCI devices
OPEN = "open"  # the kind of NVIDIA's kernel module that exports GPU memory as dmabuf

SWITCH, ROOT, NODE, UNKNOWN, FAR = range(5)
"""What a NIC and a GPU have in common, the nearest first."""

_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-9a-f]{1,2})", re.I
)


class CudaGpu(Struct, frozen=True, kw_only=True):
    """A GPU that CUDA sees, by its index and PCI address.

    Attributes:
        dmabuf: Whether a NIC's driver can get the GPU's memory as a dmabuf.
        needs_flush, can_flush: Whether what a NIC has written must, and can, be flushed before the
            GPU sees it.
    """

    index: int
    address: str
    dmabuf: bool
    needs_flush: bool
    can_flush: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A GPU, named by its PCI address, or a NIC, by its RDMA name.

    Attributes:
        route: The root complex and the PCI addresses on the way to it, itself included.
        node: Its NUMA node; -1 if not known.
        ports: A text for each port of a NIC: its name, link layer, rate and state.
    """

    name: str
    address: str
    route: tuple[str, ...]
    node: int
    ports: tuple[str, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether a NIC has an active port."""
        return any("ACTIVE" in port for port in self.ports)

    def distance(self, other: PciDevice) -> int:
        """Return how near another device is: one of ``SWITCH`` to ``FAR``."""
        both = zip(self.route, other.route, strict=False)
        if shared := len(list(takewhile(lambda pair: pair[0] == pair[1], both))):
            return SWITCH if shared > 1 else ROOT
        if min(self.node, other.node) < 0:
            return UNKNOWN
        return NODE if self.node == other.node else FAR


class Machine:
    """This machine: its files below ``root``, and the GPUs that CUDA sees, if it could be asked.

    A container sees all devices of its host in sysfs; CUDA says which are its own.
    """

    def __init__(
        self,
        cuda: Sequence[CudaGpu] | None = None,
        environment: Mapping[str, str] = os.environ,
        root: Path = Path("/"),
    ) -> None:
        self.cuda, self.root = cuda, root
        self._environment = environment

    def variable(self, name: str) -> str:
        """Return a variable of the environment; empty if it is not set."""
        return self._environment.get(name, "").strip()

    def glob(self, pattern: str) -> list[Path]:
        """Return the paths below the root that match, ascending."""
        return sorted(self.root.glob(pattern))

    def text(self, path: str | Path) -> str:
        """Return a file's text without white space around it; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    @cached_property
    def gpus(self) -> list[str]:
        """A description of each GPU, with less detail if the GPU's driver is not installed."""
        return self._from_smi() or self._from_proc() or self._from_bus()

    @property
    def nvidia(self) -> list[str]:
        """The descriptions of NVIDIA's GPUs."""
        return [gpu for gpu in self.gpus if "AMD" not in gpu]

    @cached_property
    def nics(self) -> list[PciDevice]:
        """The NICs with RDMA, by name."""
        return [
            self._device(path / "device", path.name) for path in self.glob("sys/class/infiniband/*")
        ]

    @cached_property
    def pci_gpus(self) -> list[PciDevice]:
        """NVIDIA's GPUs that this process may use, by PCI address."""
        found = [
            self._device(path, path.name)
            for path in self.glob("sys/bus/pci/devices/*")
            if self.text(path / "vendor") == NVIDIA
            and self.text(path / "class").startswith(DISPLAY)
        ]
        if self.cuda is None:
            return found
        allowed = {pci_address(gpu.address) for gpu in self.cuda}
        return [card for card in found if pci_address(card.address) in allowed]

    @property
    def pid_namespace(self) -> str:
        """This process's PID namespace, as the kernel names it; empty if it cannot be told."""
        try:
            return os.readlink(self.root / "proc/self/ns/pid")
        except OSError:
            return ""

    @property
    def release(self) -> str:
        """The version of Linux."""
        return self.text("proc/sys/kernel/osrelease")

    @property
    def kernel_module(self) -> str:
        """Kind and version of NVIDIA's kernel module, as ``open 570.86.15``; or empty."""
        said = self.text("proc/driver/nvidia/version").partition("\n")[0]
        if not said:
            return ""
        kind = OPEN if "Open Kernel Module" in said else "proprietary"
        version = re.search(r"\s(\d+\.[\d.]+)\s", f"{said} ")
        return f"{kind} {version[1]}" if version else kind

    def _from_smi(self) -> list[str]:
        try:
            said = subprocess.run(
                SMI, capture_output=True, check=True, text=True, timeout=SMI_SECONDS
            )
        except (OSError, subprocess.SubprocessError):
            return []
        return [f"{line.strip()} (driver)" for line in said.stdout.splitlines() if line.strip()]

    def _from_proc(self) -> list[str]:
        texts = map(self.text, self.glob("proc/driver/nvidia/gpus/*/information"))
        models = (re.search(r"^Model:(.*)", text, re.M) for text in texts)
        return [model[1].strip() if model else "NVIDIA GPU" for model in models]

    def _from_bus(self) -> list[str]:
        cards = {
            path.parent.resolve(): path
            for path in self.glob("sys/class/drm/card[0-9]*/device/vendor")
        }
        vendors = {NVIDIA: "NVIDIA", AMD: "AMD"}
        found = {at.name: vendors.get(self.text(path)) for at, path in cards.items()}
        return [f"{vendor} GPU at {at}" for at, vendor in found.items() if vendor]

    def _device(self, path: Path, name: str) -> PciDevice:
        where, top = path.resolve(), (self.root / "sys/devices").resolve()
        node = self.text(where / "numa_node")
        ports = []
        for port in self.glob(f"sys/class/infiniband/{name}/ports/*"):
            facts = (self.text(port / fact) for fact in ("link_layer", "rate", "state"))
            ports.append(f"{name}:{port.name} {', '.join(filter(None, facts))}")
        return PciDevice(
            name=name,
            address=where.name,
            route=where.relative_to(top).parts if where.is_relative_to(top) else (),
            node=int(node) if re.fullmatch(r"\d+", node) else -1,
            ports=tuple(ports),
        )


def pci_address(text: str) -> str:
    """Return a PCI address as the kernel writes it; empty if the text is none."""
    found = _ADDRESS.fullmatch(text.strip())
    if found is None:
        return ""
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"
