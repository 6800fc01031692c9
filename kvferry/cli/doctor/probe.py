"""A process that loads every driver and says what came of it, as JSON.

A process of its own: transport libraries print, start threads, and may crash in their exit
handlers; and the UCX that one of them has loaded can be asked for what it found.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvferry.core.errors import DriverError
from kvferry.core.transport.registry import DriverReport, describe, installed
from kvferry.drivers.ucx import dlopen as opening
from kvferry.drivers.ucx.devices import Devices, devices
from kvferry.drivers.ucx.library import find

SECONDS = 60.0
"""How long all drivers may take to start."""

_RMA = 1 << 1
"""Of UCX's features."""


class Driver(Struct, frozen=True, kw_only=True):
    """An installed driver: what it can do here, or why nothing."""

    name: str
    distribution: str
    library: str
    ops: list[str]
    memory: list[str]
    reason: str | None


class Ucx(Struct, frozen=True, kw_only=True):
    """A UCX that a driver has loaded: which, and the devices of each transport.

    Attributes:
        driver: whose it is.
        path: of its libucp, and ``version``: its own word.
        rdma: whether it has a module for RDMA, which loads.
        transports: those that find a device here, and which.
        advice: which other one would be better; empty where none is there.
    """

    driver: str
    path: str
    version: str
    rdma: bool
    transports: dict[str, list[str]]
    advice: str = ""


class Probed(Struct, frozen=True, kw_only=True):
    """All that the process found; ``trouble`` is why it found less."""

    drivers: list[Driver] = []
    ucx: list[Ucx] = []
    trouble: str = ""


def probe() -> Probed:
    """Start the process, and wait for what it says. Never raises for what happens there."""
    try:
        run = subprocess.run(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        lines = run.stdout.splitlines()
        heard = Probed()
        for line in lines:  # first without UCX, then with it: asking it may end the process
            heard = msgspec.json.decode(line, type=Probed)
    except subprocess.TimeoutExpired:
        return Probed(trouble=f"the drivers have not started within {SECONDS:.0f} s")
    except (OSError, msgspec.DecodeError) as exc:
        return Probed(trouble=f"the drivers could not be asked: {exc}")
    if lines:
        return heard
    said = run.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return Probed(trouble=f"the process ended with status {run.returncode}: {' '.join(said)}")


def main() -> None:
    """What the process does; it ends without exit handlers."""
    sys.stdout.flush()
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print is no answer
    drivers: list[Driver] = []
    owners: dict[str, str] = {}
    for info in installed():
        drivers.append(_driver(describe(info)))
        owners = dict.fromkeys(_loaded("libucp"), info.name) | owners
    found: list[Ucx] = []
    _say(answer, Probed(drivers=drivers))
    for path, driver in owners.items():
        found.append(ucx(path, driver))
        _say(answer, Probed(drivers=drivers, ucx=found))
    os._exit(0)


def _say(descriptor: int, probed: Probed) -> None:
    os.write(descriptor, msgspec.json.encode(probed) + b"\n")


def _driver(report: DriverReport) -> Driver:
    info, can = report.info, report.capabilities
    return Driver(
        name=info.name,
        distribution=f"{info.distribution} {info.version}",
        library=report.library,
        ops=sorted(can.ops) if can else [],
        memory=sorted(can.memory) if can else [],
        reason=report.reason,
    )


def ucx(path: str, driver: str) -> Ucx:
    """What a UCX that is loaded into this process finds here.

    Args:
        path: of its libucp.
        driver: who has loaded it.
    """
    library = ctypes.CDLL(path)
    library.ucp_get_version_string.restype = ctypes.c_char_p
    modules = filter(opening.for_rdma, opening.modules(Path(path)))
    return Ucx(
        driver=driver,
        path=path,
        version=library.ucp_get_version_string().decode(),
        rdma=any(map(opening.loads, modules)),
        transports=_transports(library),
        advice=_advice() if driver == "ucx" else "",
    )


def _advice() -> str:
    try:
        return find().advice
    except DriverError:  # the driver says so itself
        return ""


def _loaded(name: str) -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith(name):
            yield f"/{path}"


def _transports(library: Any) -> Devices:  # noqa: ANN401 - a C library
    """What a context that does one-sided transfers can use; nothing if none can be made."""
    major, minor, release = (ctypes.c_uint() for _ in range(3))
    library.ucp_get_version(*map(ctypes.byref, (major, minor, release)))
    params = (ctypes.c_uint64 * 64)(1, _RMA)  # of ucp_params_t, the mask and the features
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if library.ucp_config_read(None, None, ctypes.byref(config)):
        return {}
    made = ctypes.byref(params), config, ctypes.byref(context)
    if library.ucp_init_version(major, minor, *made):
        return {}
    return devices(library, context.value or 0)


if __name__ == "__main__":
    main()
