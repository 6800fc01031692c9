"""Opening a libucp together with its own neighbours; and, run as a script, saying what one is.

    python -I -S opening.py PATH

prints a line of JSON: ``path``, ``version`` and whether what moves bytes by RDMA loads (``rdma``);
or ``problem``. A process of its own: a library that was opened cannot be closed again, opening one
takes up to half a second (UCX measures the clock), and one that does not fit may crash.

Needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_NEIGHBOURS = ("libucm.so.0", "libucs.so.0", "libuct.so.0")
"""What libucp needs, by the names under which it does."""

_UNDISGUISED = re.compile(r"libuc[mpst]\.so[.\d]*")
"""Files of a UCX under its own names; those in NIXL's wheels have others, and are in nobody's way.
"""


def opened(path: str) -> ctypes.CDLL:
    """The library, whose symbols nobody else sees.

    Args:
        path: of a file; or a bare name, for the dynamic linker to look up.

    Raises:
        OSError: it cannot be opened; says what is missing.
    """
    _open_neighbours(Path(path))
    return ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_LOCAL)


def loaded_elsewhere(folder: Path) -> str | None:
    """A file of a UCX in this process that lies in another folder than this one.

    What libucp needs is found by name: with two of that name in a process, it gets the first.
    """
    home = folder.resolve()
    others = (path for path in _mapped() if path.parent.resolve() != home)
    return next((str(path) for path in others), None)


def modules(path: Path) -> list[Path]:
    """The files of what a UCX would load beside what is built in, one for each module."""
    files = sorted((path.resolve().parent / "ucx").glob("libuct_*.so*"))
    return list({file.name.partition(".so")[0]: file for file in files}.values())


def for_rdma(module: Path) -> bool:
    """Whether a module is for InfiniBand, RoCE or EFA."""
    return module.name.startswith("libuct_ib")


def _open_neighbours(path: Path) -> None:
    """Open what a libucp needs beside it, where its file does not say so itself.

    Lazily, which ctypes cannot: libucm and libucs need each other.
    """
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    for name in _NEIGHBOURS:
        neighbour = path.parent / name
        if path.is_absolute() and neighbour.exists():
            dlopen(os.fsencode(neighbour), os.RTLD_LAZY | os.RTLD_LOCAL)


def _mapped() -> Iterator[Path]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for text in sorted({line[line.find("/") :] for line in lines if "/libuc" in line}):
        if _UNDISGUISED.fullmatch(Path(text).name):
            yield Path(text)


def _version(library: ctypes.CDLL) -> tuple[int, ...]:
    numbers = [ctypes.c_uint() for _ in range(3)]
    library.ucp_get_version(*map(ctypes.byref, numbers))
    return tuple(number.value for number in numbers)


def loads(module: Path) -> bool:
    """Whether everything is there that a module needs. Its UCX has been loaded."""
    try:
        ctypes.CDLL(str(module), os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError:
        return False
    return True


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _path_of(library: ctypes.CDLL) -> Path:
    """Of its file, as the dynamic linker found it."""
    info = _DlInfo()
    if not ctypes.CDLL(None).dladdr(library.ucp_get_version, ctypes.byref(info)):
        raise OSError("the dynamic linker does not know its file")
    return Path(os.fsdecode(info.file)).absolute()


def _told(name: str) -> dict[str, object]:
    try:
        library = opened(name)
        version, path = _version(library), _path_of(library)
    except (OSError, AttributeError) as exc:
        return {"problem": str(exc)}
    rdma = any(loads(module) for module in modules(path) if for_rdma(module))
    return {"path": str(path), "version": version, "rdma": rdma}


if __name__ == "__main__":
    # Only the answer goes where answers go; and exit handlers of UCX's libraries may crash.
    _answer = os.dup(1)
    os.dup2(2, 1)
    os.write(_answer, json.dumps(_told(sys.argv[1])).encode())
    os._exit(0)
