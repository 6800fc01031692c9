"""Run all checks of this machine in a child process, and report what it finds.

``probe`` starts this module as that process, because transport libraries print, start threads, and
may crash in their exit handlers, or when they are loaded.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvferry.cli.doctor import software
from kvferry.cli.doctor.finding import Check, Finding, FindingLevel
from kvferry.cli.doctor.hardware import hardware, nics_and_memory
from kvferry.cli.doctor.machine import CudaGpu, Machine
from kvferry.core.errors import DriverError, TransportError
from kvferry.core.side_channel.sockets import own_address
from kvferry.core.transport.registry import describe, installed
from kvferry.drivers.cuda import CudaDriver, find_cuda
from kvferry.drivers.loopback.process_memory import IOVEC, allow_readers, vm_read, why_forbidden
from kvferry.drivers.ucx import dlopen
from kvferry.drivers.ucx.library import Devices, devices

SECONDS = 60.0  # seconds that all checks together may take
REACH_SECONDS = 5.0
LOOPBACK = "127.0.0.1"

_RMA = 1 << 1  # UCX's feature flag for one-sided transfers


def probe() -> list[Finding]:
    """Run all checks in a child process; return what it found until its end."""
    word = np.random.default_rng().integers(1, 1 << 62, 1, np.uint64)
    command = [sys.executable, "-m", __name__, *map(str, (os.getpid(), word.ctypes.data, word[0]))]
    # Where the kernel's Yama module restricts reading, a child cannot read its parent unless the
    # parent allows readers, as engines do. Why it cannot, the child says.
    with suppress(DriverError):
        allow_readers()
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False
        )
        said, why = run.stdout, b" ".join(run.stderr.splitlines()[-1:]).decode(errors="replace")
        trouble = run.returncode and f"their process ended with status {run.returncode}: {why}"
    except subprocess.TimeoutExpired as exc:
        said, trouble = exc.stdout or b"", f"they have not started within {SECONDS:.0f} s"
    found = [msgspec.json.decode(line, type=Finding) for line in said.splitlines()]
    if trouble:
        found.append(Check("drivers").bad(trouble, "uninstall drivers that are not needed"))
    return found


def main() -> None:
    """Write the findings as lines of JSON, and end without running exit handlers."""
    sys.stdout.flush()
    answer = os.dup(1)
    os.dup2(2, 1)  # libraries print to stdout; keep that out of the report
    for finding in findings(*map(int, sys.argv[1:4])):
        os.write(answer, msgspec.json.encode(finding) + b"\n")  # at once, so no line is cut off
    os._exit(0)


def findings(pid: int, address: int, word: int) -> Iterator[Finding]:
    """Yield all findings about this machine, those about what may crash the process last."""
    yield from software.software()
    yield reading(pid, address, word)
    yield reached(LOOPBACK, "the default of side_channel_host: only engines on this host reach it")
    if own := own_address():
        yield reached(own, "for engines on several hosts, set side_channel_host to it")
    yield from nics_and_memory(Machine([]))
    drivers: list[Finding] = []
    owners: dict[str, str] = {}
    for info in installed():
        drivers.append(software.driver(describe(info)))
        yield drivers[-1]
        owners = dict.fromkeys(map(str, dlopen.mapped("libucp")), info.name) | owners
    if not any(one.verdict is FindingLevel.OK for one in drivers):
        yield Check("drivers").bad("none of them works here", "follow one of the remedies above")
    machine = Machine(gpus(find_cuda()))
    yield from hardware(machine, has_vllm=software.has_vllm())
    for path, driver in owners.items():
        yield _ucx(path, driver, machine)


def reading(pid: int, address: int, word: int) -> Finding:
    """Return the finding about reading another process's memory, in which this word is."""
    check, found = Check("reading processes"), np.zeros(1, np.uint64)
    try:
        vm_read(pid, IOVEC.pack(found.ctypes.data, 8), IOVEC.pack(address, 8))
    except OSError as exc:
        problem, _, remedy = why_forbidden(exc.errno or 0, pid).rpartition(": ")
        return check.bad(problem, remedy)
    except DriverError as exc:
        return check.bad(str(exc), "use another driver than loopback")
    if found[0] != word:
        return check.bad("process_vm_readv reads other bytes", "use another driver than loopback")
    return check.ok("process_vm_readv: a process read this one, which is not its child")


def reached(host: str, use: str) -> Finding:
    """Return the finding about a side channel's address: whether it can be bound and reached."""
    check = Check(f"side channel at {host}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with (
            socket.create_server((host, 0), family=family) as server,
            socket.create_connection(server.getsockname()[:2], REACH_SECONDS),
        ):
            return check.ok(f"bound, and reached from here; {use}")
    except OSError as exc:
        return check.bad(
            str(exc),
            "let this host reach its own ports by TCP at that address, or set side_channel_host to "
            "another",
        )


def gpus(cuda: CudaDriver | None) -> list[CudaGpu]:
    """Return what CUDA says about each GPU; nothing if CUDA does not answer."""
    if cuda is None:
        return []
    with suppress(TransportError):
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
    return []


def _ucx(path: str, driver: str, machine: Machine) -> Finding:
    library = ctypes.CDLL(path)
    library.ucp_get_version_string.restype = ctypes.c_char_p
    rdma = any(map(dlopen.loads, dlopen.rdma_modules(Path(path))))
    version = library.ucp_get_version_string().decode()
    return software.ucx(
        driver,
        f"{version}, {'with' if rdma else 'without'} RDMA ({path})",
        _transports(library),
        nics=[nic.name for nic in machine.nics if nic.is_active],
        cuda=bool(machine.cuda),
    )


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
