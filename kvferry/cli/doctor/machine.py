"""What GPUs and NICs this machine has, and where, as its files and CUDA say."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}  # of GPUs, by their PCI ids
GPU_CLASSES = ("0x03", "0x12")  # of PCI devices: displays, and accelerators
SWITCH, ROOT, NODE, UNKNOWN, FAR = range(5)
"""What a NIC and a GPU have in common, the nearest first."""

_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-9a-f]{1,2})", re.I
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGpu:
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
        text: A GPU's vendor and model, or each port of a NIC: its name, link layer, rate and state.
        route: The root complex and the PCI addresses on the way to it, itself included.
        node: Its NUMA node; -1 if not known.
    """

    name: str
    address: str
    text: str
    route: tuple[str, ...] = ()
    node: int = -1

    @property
    def is_active(self) -> bool:
        """Whether a NIC has an active port."""
        return "ACTIVE" in self.text

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
        cuda: Sequence[CudaGpu] = (),
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
    def gpus(self) -> list[PciDevice]:
        """The GPUs of this machine, by PCI address: those that CUDA sees, if it sees some."""
        found = {}
        for path in self.glob("sys/bus/pci/devices/*"):
            vendor = VENDORS.get(self.text(path / "vendor"))
            if vendor and self.text(path / "class").startswith(GPU_CLASSES):
                found[path.name] = self._device(path, path.name, self._model(path.name, vendor))
        if not self.cuda:
            return list(found.values())
        seen = [pci_address(gpu.address) for gpu in self.cuda]
        others = (PciDevice(name=at, address=at, text=self._model(at, "NVIDIA")) for at in seen)
        return [found.get(other.name, other) for other in others]

    @property
    def nvidia(self) -> list[PciDevice]:
        """NVIDIA's GPUs."""
        return [gpu for gpu in self.gpus if "AMD" not in gpu.text]

    @cached_property
    def nics(self) -> list[PciDevice]:
        """The NICs with RDMA, by name."""
        return [
            self._device(path / "device", path.name, "; ".join(map(self._port, ports)))
            for path in self.glob("sys/class/infiniband/*")
            for ports in [self.glob(f"sys/class/infiniband/{path.name}/ports/*")]
        ]

    @property
    def kernel_module(self) -> str:
        """Kind and version of NVIDIA's kernel module, as ``open 570.86.15``; or empty."""
        said = self.text("proc/driver/nvidia/version").partition("\n")[0]
        kind = "open" if "Open Kernel Module" in said else "proprietary"
        version = re.search(r"\s(\d+\.[\d.]+)\s", f"{said} ")
        return f"{kind} {version[1]}" if version else ""

    def _model(self, address: str, vendor: str) -> str:
        said = self.text(f"proc/driver/nvidia/gpus/{address}/information")
        model = re.search(r"^Model:(.*)", said, re.M)
        return model[1].strip() if model else f"{vendor} GPU at {address}"

    def _port(self, port: Path) -> str:
        facts = (self.text(port / fact) for fact in ("link_layer", "rate", "state"))
        return f"{port.parents[1].name}:{port.name} {', '.join(filter(None, facts))}"

    def _device(self, path: Path, name: str, text: str) -> PciDevice:
        where, top = path.resolve(), (self.root / "sys/devices").resolve()
        node = self.text(where / "numa_node")
        return PciDevice(
            name=name,
            address=where.name,
            text=text,
            route=where.relative_to(top).parts if where.is_relative_to(top) else (),
            node=int(node) if node.isdecimal() else -1,
        )


def pci_address(text: str) -> str:
    """Return a PCI address as the kernel writes it; empty if the text is none."""
    found = _ADDRESS.fullmatch(text.strip())
    if found is None:
        return ""
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"
