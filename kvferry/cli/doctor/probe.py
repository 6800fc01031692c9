"""Load every driver in a child process, and report whether each works.

``probe`` starts this module as that process, because transport libraries print, start threads, and
may crash in their exit handlers.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from kvferry.cli.doctor import software
from kvferry.cli.doctor.finding import Finding
from kvferry.cli.doctor.machine import CudaGpu, Machine
from kvferry.core.errors import DriverError, TransportError
from kvferry.core.transport.registry import describe, installed
from kvferry.drivers.cuda import CudaDriver, find_cuda
from kvferry.drivers.loopback.process_memory import IOVEC, allow_readers, vm_read, why_forbidden
from kvferry.drivers.ucx import dlopen
from kvferry.drivers.ucx.library import Devices, devices

SECONDS = 60.0  # seconds that all drivers together may take to start

_RMA = 1 << 1  # UCX's feature flag for one-sided transfers


class Probed(Struct, frozen=True, kw_only=True):
    """The report of the process that ``probe`` starts.

    Attributes:
        gpus: ``None`` if CUDA could not be asked.
        ucx: A finding about each UCX that a driver has loaded, until the process crashed.
        reading: Why a process cannot read another's memory; empty if it can, ``None`` if unknown.
        trouble: Why there is no report on the drivers; empty if there is one.
    """

    drivers: list[Finding] = []
    gpus: list[CudaGpu] | None = None
    ucx: list[Finding] = []
    reading: str | None = None
    trouble: str = ""


def probe() -> Probed:
    """Load every driver in a child process, and return the process's report."""
    word = np.random.default_rng().integers(1, 1 << 62, 1, np.uint64)
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(word.ctypes.data)]
    # Where the kernel's Yama module restricts reading, a child cannot read its parent unless the
    # parent allows readers, as engines do. Why it cannot, the child says.
    with suppress(DriverError):
        allow_readers()
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False
        )
        lines, last_line = run.stdout.splitlines(), run.stderr.splitlines()[-1:]
        why = b" ".join(last_line).decode(errors="replace").strip()
        trouble = f"the process ended with status {run.returncode}: {why}"
    except subprocess.TimeoutExpired as exc:
        lines = (exc.stdout or b"").splitlines()
        trouble = f"the drivers have not started within {SECONDS:.0f} s"
    except OSError as exc:
        return Probed(trouble=f"the drivers could not be asked: {exc}")
    found: dict[str, Any] = {}
    for line in lines:
        with suppress(msgspec.DecodeError):  # a line that a crash has cut off
            found |= msgspec.json.decode(line, type=dict[str, Any])
    if found.get("reading") == str(word[0]):
        found["reading"] = ""
    return msgspec.convert(found | {"trouble": "" if "drivers" in found else trouble}, Probed)


def main() -> None:
    """Write the report as lines of JSON, and end without running exit handlers.

    CUDA or a UCX may crash the process when it is asked, so each part has a line of its own.
    """
    sys.stdout.flush()
    answer = os.dup(1)
    os.dup2(2, 1)  # libraries print to stdout; keep that out of the report

    def send(**parts: object) -> None:
        os.write(answer, msgspec.json.encode(parts) + b"\n")

    send(reading=_read(*map(int, sys.argv[1:3])))
    drivers: list[Finding] = []
    owners: dict[str, str] = {}
    for info in installed():
        drivers.append(software.driver(describe(info)))
        owners = dict.fromkeys(map(str, dlopen.mapped("libucp")), info.name) | owners
    send(drivers=drivers)
    seen = gpus(find_cuda())
    send(gpus=seen)
    found: list[Finding] = []
    for path, driver in owners.items():
        found.append(_ucx(path, driver, cuda=bool(seen)))
        send(ucx=found)
    os._exit(0)


def _read(pid: int, address: int) -> str:
    """Read a word of another process; return the word as text, or why it cannot be read."""
    word = np.zeros(1, np.uint64)
    try:
        vm_read(pid, IOVEC.pack(word.ctypes.data, word.nbytes), IOVEC.pack(address, word.nbytes))
    except OSError as exc:
        return why_forbidden(exc.errno or 0, pid)
    except DriverError as exc:
        return f"{exc}: use another driver than loopback"
    return str(word[0])


def gpus(cuda: CudaDriver | None) -> list[CudaGpu] | None:
    """Return what CUDA says about each GPU; ``None`` if CUDA does not answer."""
    if cuda is None:
        return None
    try:
        return [
            CudaGpu(
                index=index,
                address=cuda.pci_address(index),
                dmabuf=cuda.exports_dmabuf(index),
                needs_flush=cuda.needs_flush(index),
                can_flush=cuda.can_flush(index),
            )
            for index in range(cuda.count())
        ]
    except TransportError:
        return None


def _ucx(path: str, driver: str, *, cuda: bool) -> Finding:
    library = ctypes.CDLL(path)
    library.ucp_get_version_string.restype = ctypes.c_char_p
    loaded = software.LoadedUcx(
        driver=driver,
        version=library.ucp_get_version_string().decode(),
        path=path,
        transports=_transports(library),
        rdma=any(map(dlopen.loads, dlopen.rdma_modules(Path(path)))),
    )
    return software.ucx(loaded, [nic.name for nic in Machine().nics if nic.is_active], cuda=cuda)


def _transports(library: Any) -> Devices:  # noqa: ANN401 - a C library
    """Return the devices of each UCX transport for one-sided access."""
    major, minor, release = (ctypes.c_uint() for _ in range(3))
    library.ucp_get_version(*map(ctypes.byref, (major, minor, release)))
    params = (ctypes.c_uint64 * 64)(1, _RMA)  # of ucp_params_t, the mask and the features
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if library.ucp_config_read(None, None, ctypes.byref(config)):
        return {}
    arguments = ctypes.byref(params), config, ctypes.byref(context)
    if library.ucp_init_version(major, minor, *arguments):
        return {}
    return devices(library, context.value or 0)


if __name__ == "__main__":
    main()
