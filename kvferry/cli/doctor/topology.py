"""Check which NICs are near each GPU, and which NICs the environment binds the GPUs to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from kvferry.cli.doctor import devices
from kvferry.cli.doctor.finding import Check, Finding
from kvferry.cli.doctor.probe import Gpu

NEAR, BINDING = Check("NICs near GPUs"), Check("NIC of each GPU")
UCX_DEVICES = Check("UCX_NET_DEVICES")
MAPPING, SELECTION = "VLLM_GPU_NIC_PCIE_MAPPING", "VLLM_NIC_SELECTION_VARS"
NVIDIA, DISPLAY = "0x10de", "0x03"
"""Vendor of GPUs, and the class that their PCI devices have."""

Address = tuple[int, ...]
"""Domain, bus, device and function of a PCI device."""

_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-9a-f]{1,2})", re.I
)


SWITCH, ROOT, NODE, UNKNOWN, FAR = range(5)
"""What a NIC and a GPU have in common, the nearest first."""
DISTANCES = (
    "same PCIe switch",  # behind one PCIe root port
    "same PCIe root complex",
    "same NUMA node",
    "how near is not known",
    "another NUMA node",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A PCI device.

    Attributes:
        name: The PCI address of a GPU, the RDMA name of a NIC.
        route: The root complex and the PCI addresses on the way to it, itself included.
        node: Its NUMA node; -1 if not known.
    """

    name: str
    bus: str
    route: tuple[str, ...]
    node: int


def gpus(seen: Sequence[Gpu] | None, root: Path = Path("/")) -> list[PciDevice]:
    """Return those of NVIDIA's GPUs that this process may use, by PCI address.

    A container sees all devices of its host in sysfs, so CUDA says which are the container's.
    """
    paths = sorted((root / "sys/bus/pci/devices").glob("*"))
    found = [_device(root, path, path.name) for path in paths if _is_gpu(path)]
    if seen is None:
        return found
    allowed = {_address(gpu.address) for gpu in seen}
    return [card for card in found if _address(card.bus) in allowed]


def nics(root: Path = Path("/")) -> list[PciDevice]:
    """Return the NICs with RDMA that are PCI devices, by name."""
    folder = root / "sys/class/infiniband"
    found = [_device(root, folder / name / "device", name) for name in devices.nics(root)]
    return [nic for nic in found if _address(nic.bus)]


def _is_gpu(path: Path) -> bool:
    kind = devices.file_text(path / "class")
    return devices.file_text(path / "vendor") == NVIDIA and kind.startswith(DISPLAY)


def near(seen: Sequence[Gpu] | None, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield the finding about the nearest NICs of each GPU, if there are GPUs and NICs."""
    cards, network = gpus(seen, root), nics(root)
    if not cards or not network:
        return
    texts, far = [], []
    for card in cards:
        best = min(_distance(card, nic) for nic in network)
        names = ", ".join(nic.name for nic in network if _distance(card, nic) == best)
        texts.append(f"GPU {card.name}: {names} ({DISTANCES[best]})")
        far += [card.name] * (best == FAR)
    text = "; ".join(texts)
    if far:
        yield NEAR.warn(
            text,
            f"let engines that exchange pages with other hosts use other GPUs than {', '.join(far)}"
            ": their bytes cross the link between the processors",
        )
    else:
        yield NEAR.ok(text)


def bound(
    environment: Mapping[str, str], seen: Sequence[Gpu] | None, root: Path = Path("/")
) -> Iterator[Finding]:
    """Yield findings about the variables that bind GPUs to NICs, as far as they are set."""
    mapping, selection = (environment.get(name, "").strip() for name in (MAPPING, SELECTION))
    if mapping or selection:
        yield _binding(mapping, selection, gpus(seen, root), nics(root))
    listed = environment.get(UCX_DEVICES, "").strip()
    if listed:
        yield _ucx_devices(listed, root)


def _binding(
    mapping: str, selection: str, cards: Sequence[PciDevice], network: Sequence[PciDevice]
) -> Finding:
    """Return the finding about the variables by which vLLM's workers bind GPUs to NICs."""
    remedy = (
        f"set both: {MAPPING}=GPU=NIC,... with PCI addresses (0000:1b:00.0=0000:1c:00.0), one pair "
        f"for each GPU that an engine uses, and {SELECTION}={UCX_DEVICES}:1"
    )
    pairs = [tuple(map(_address, pair.split("=", 1))) for pair in mapping.split(",") if pair]
    known = {_address(nic.bus): nic.name for nic in network}
    if not mapping or not selection:
        return BINDING.bad(f"{MAPPING if mapping else SELECTION} is set alone", remedy)
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        return BINDING.bad(f"{MAPPING}={mapping} is no list of GPU=NIC", remedy)
    if missing := [_written(pair[1]) for pair in pairs if pair[1] not in known]:
        return BINDING.bad(f"{MAPPING} names {', '.join(missing)}, where no NIC is", remedy)
    wanted = {pair[0]: known[pair[1]] for pair in pairs}
    if unbound := [card.name for card in cards if _address(card.bus) not in wanted]:
        return BINDING.warn(f"{MAPPING} has no entry for GPU {', '.join(unbound)}", remedy)
    if UCX_DEVICES not in [name.partition(":")[0].strip() for name in selection.split(",")]:
        return BINDING.warn(f"{SELECTION}={selection} does not set {UCX_DEVICES}", remedy)
    return BINDING.ok(", ".join(f"{_written(gpu)}: {nic}" for gpu, nic in wanted.items()))


def _ucx_devices(listed: str, root: Path) -> Finding:
    known = {*devices.nics(root)}
    known |= {path.name for path in (root / "sys/class/net").glob("*")}
    named = [name.strip().partition(":")[0] for name in listed.removeprefix("^").split(",")]
    missing = [name for name in named if name not in known | {"all", ""} and "*" not in name]
    if missing:
        return UCX_DEVICES.warn(
            f"{listed}: there is no {', '.join(missing)} here",
            "correct it, or unset it: UCX then uses the NICs near the memory",
        )
    return UCX_DEVICES.ok(f"{listed}; UCX uses no other network device")


def _distance(gpu: PciDevice, nic: PciDevice) -> int:
    both = zip(gpu.route, nic.route, strict=False)
    if shared := len(list(takewhile(lambda pair: pair[0] == pair[1], both))):
        return SWITCH if shared > 1 else ROOT
    if min(gpu.node, nic.node) < 0:
        return UNKNOWN
    return NODE if gpu.node == nic.node else FAR


def _device(root: Path, path: Path, name: str) -> PciDevice:
    where = path.resolve()
    top = (root / "sys/devices").resolve()
    route = where.relative_to(top).parts if where.is_relative_to(top) else ()
    node = devices.file_text(where / "numa_node")
    return PciDevice(
        name=name, bus=where.name, route=route, node=int(node) if re.fullmatch(r"\d+", node) else -1
    )


def _address(text: str) -> Address:
    """Return a PCI address as numbers; the domain may be left out. Empty if it is no address."""
    found = _ADDRESS.fullmatch(text.strip())
    return tuple(int(part or "0", 16) for part in found.groups()) if found else ()


def _written(address: Address) -> str:
    domain, bus, device, function = address
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"
