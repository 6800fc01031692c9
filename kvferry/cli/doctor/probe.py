"""A process that loads every driver and says what came of it, as JSON.

A process of its own: transport libraries print, start threads, and may crash in their exit
handlers; and the UCX that one of them has loaded can be asked for what it found.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvferry.core.registry import DriverReport, describe, installed

SECONDS = 60.0
"""How long all drivers may take to start."""

_RESOURCE = re.compile(r"^#\s+resource \d+\s.*--\s+(\S+?)/(\S+)\s*$", re.MULTILINE)
_RMA = 1 << 1


class Driver(Struct, frozen=True, kw_only=True):
    """An installed driver: what it can do here, or why nothing."""

    name: str
    distribution: str
    library: str
    ops: list[str]
    memory: list[str]
    reason: str | None


class Ucx(Struct, frozen=True, kw_only=True):
    """The UCX that drivers have loaded: which, and the devices of each transport."""

    path: str
    version: str
    transports: dict[str, list[str]]


class Probed(Struct, frozen=True, kw_only=True):
    """All that the process found; ``trouble`` is why it found less."""

    drivers: list[Driver] = []
    ucx: Ucx | None = None
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
    drivers = [_driver(describe(info)) for info in installed()]
    _say(answer, Probed(drivers=drivers))
    found = ucx()
    if found is not None:
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


def ucx() -> Ucx | None:
    """What the UCX that is loaded into this process finds here; ``None`` if there is none."""
    path = next(_loaded("libucp"), None)
    if path is None:
        return None
    library = ctypes.CDLL(path)
    library.ucp_get_version_string.restype = ctypes.c_char_p
    found: dict[str, list[str]] = {}
    for transport, device in _RESOURCE.findall(_context_info(library)):
        found.setdefault(transport, []).append(device)
    return Ucx(path=path, version=library.ucp_get_version_string().decode(), transports=found)


def _loaded(name: str) -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith(name):
            yield f"/{path}"


def _context_info(library: Any) -> str:  # noqa: ANN401 - a C library
    """What UCX prints of a context that does one-sided transfers; empty if it makes none."""
    major, minor, release = (ctypes.c_uint() for _ in range(3))
    library.ucp_get_version(*map(ctypes.byref, (major, minor, release)))
    params = (ctypes.c_uint64 * 64)(1, _RMA)  # of ucp_params_t, the mask and the features
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if library.ucp_config_read(None, None, ctypes.byref(config)):
        return ""
    made = ctypes.byref(params), config, ctypes.byref(context)
    if library.ucp_init_version(major, minor, *made):
        return ""
    return _printed(library.ucp_context_print_info, context)


def _printed(function: Any, context: ctypes.c_void_p) -> str:  # noqa: ANN401 - of a C library
    """What a C function prints to the file that is its second argument."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, length = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(length)))
    function(context, stream)
    libc.fclose(stream)
    return (text.value or b"").decode(errors="replace")


if __name__ == "__main__":
    main()
