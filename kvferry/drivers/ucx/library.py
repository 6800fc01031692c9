"""Find the libucp to use: the one that the user named, else the system's, else the wheel's.

``devices`` asks a loaded one what it finds on this machine.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from kvferry.core.errors import DriverError
from kvferry.drivers.ucx import dlopen

Version = tuple[int, int, int]
Source = Literal["option library", "the system's", "the wheel libucx"]

LOWEST: Version = (1, 21, 0)
"""The oldest UCX that was tested; the driver asks for its interface. Another major may differ."""

LOWEST_FOR_CUDA: Version = (1, 22, 0)
"""The oldest UCX that may move GPU memory: 1.21 may crash with it (openucx/ucx#11499)."""

SYSTEMS_OWN = "libucp.so.0"
WHEEL = "libucx"
"""The package that the distributions libucx-cu12 and libucx-cu13 install: a UCX in a wheel."""

SECONDS = 60.0
"""How long the process that opens and describes a library may take."""

Devices = dict[str, list[str]]
"""Names of devices by UCX transport, such as ``{"tcp": ["eth0", "lo"]}``."""

_RESOURCE = re.compile(r"^#\s+resource \d+\s.*--\s+(\S+?)/(\S+)\s*$", re.MULTILINE)

REMEDY = (
    "install UCX (libucx0 of Debian and Ubuntu, ucx of Fedora), or pip install 'kvferry[ucx]', or "
    "name one: driver_options: library"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxLibrary:
    """The description of a libucp, which need not be loaded into this process."""

    path: str
    version: Version
    source: Source
    rdma: bool  # a module for it loads here; there need not be a NIC

    def __str__(self) -> str:
        rdma = "with RDMA" if self.rdma else "without RDMA"
        return f"UCX {dotted(self.version)}, {rdma} ({self.source}: {self.path})"


def find(explicit: str | None = None) -> UcxLibrary:
    """Find the libucp to use: the ``explicit`` one, else the system's, else the wheel's.

    Raise ``DriverError`` if none is usable; the text names what was found, what is wrong with it,
    and the remedy.
    """
    if explicit is not None:
        try:
            return _checked(_asked(explicit, "option library"))
        except DriverError as exc:
            raise DriverError(f"driver_options of ucx: library: {exc}") from exc
    reasons = []
    for look in (partial(_asked, SYSTEMS_OWN, "the system's"), _wheels):
        try:
            return _checked(look())
        except DriverError as exc:
            reasons.append(str(exc))
    raise DriverError(f"no UCX that can be used: {'; '.join(reasons)}: {REMEDY}")


def load(library: UcxLibrary) -> ctypes.CDLL:
    """Load a libucp for good; raise ``DriverError`` if another UCX would be mixed with it."""
    path = Path(library.path)
    other = dlopen.loaded_elsewhere(path.parent)
    if other is not None:
        raise DriverError(
            f"this process has loaded another UCX already ({other}), and {path} would get parts "
            f"of it: let both be the same (driver_options: library)"
        )
    try:
        return dlopen.opened(library.path)
    except OSError as exc:
        raise DriverError(f"{path} does not load: {exc}; {REMEDY}") from exc


def dotted(version: Version) -> str:
    """Return a version as text, such as "1.22.0"."""
    return ".".join(map(str, version))


def _wheels() -> UcxLibrary:
    spec = find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise DriverError("the wheel libucx is not installed")
    folder = Path(spec.origin).parent
    path = folder / "lib" / SYSTEMS_OWN
    try:
        # With this file, and no RDMA module to try, the library need not be opened.
        text = (folder / "UCX_WHEEL_VERSION.txt").read_text(encoding="utf-8")
        major, minor, patch = (int(number) for number in text.strip().split(".")[:3])
    except (OSError, ValueError):
        return _asked(str(path), "the wheel libucx")
    if not path.exists() or dlopen.rdma_modules(path):
        return _asked(str(path), "the wheel libucx")
    return UcxLibrary(
        path=str(path), version=(major, minor, patch), source="the wheel libucx", rdma=False
    )


def _asked(name: str, source: Source) -> UcxLibrary:
    """Describe a library, by opening it in another process."""
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", dlopen.__file__, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as exc:
        raise DriverError(f"{name} could not be tried: {exc}") from exc
    if not ran.stdout:
        raise DriverError(f"the process that opened {name} ended with status {ran.returncode}")
    told = json.loads(ran.stdout)
    if "problem" in told:
        problem = str(told["problem"])
        raise DriverError(problem if problem.startswith(name) else f"{name}: {problem}")
    major, minor, patch = told["version"]
    return UcxLibrary(
        path=told["path"], version=(major, minor, patch), source=source, rdma=told["rdma"]
    )


def _checked(library: UcxLibrary) -> UcxLibrary:
    """Return a library of a version that can be used."""
    if library.version[0] != LOWEST[0]:
        raise DriverError(
            f"{library} is of another major version than {LOWEST[0]}, the only one known"
        )
    if library.version < LOWEST:
        raise DriverError(f"{library} is older than {dotted(LOWEST)}, the lowest that was tested")
    return library


def devices(library: Any, context: int) -> Devices:  # noqa: ANN401 - a C library
    """Return what a ``ucp_context_h`` can use, from what UCX prints, for lack of a function."""
    # It prints to the ``FILE *`` that it takes as its second argument.
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, length = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(length)))
    library.ucp_context_print_info(ctypes.c_void_p(context), stream)
    libc.fclose(stream)
    printed = (text.value or b"").decode(errors="replace")
    libc.free(text)
    found: Devices = {}
    for transport, device in _RESOURCE.findall(printed):
        found.setdefault(transport, []).append(device)
    return found


def listed(found: Devices) -> str:
    """Return transports and devices as text, without the entry "memory", which is no device."""
    return ", ".join(
        transport if names == ["memory"] else f"{transport} ({', '.join(names)})"
        for transport, names in found.items()
    )
