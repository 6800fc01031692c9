"""Open a libucp together with the libraries in its folder; as a script, describe a libucp.

    python -I -S dlopen.py PATH

prints one JSON object: ``path`` (of the library's file), ``version`` (three numbers) and ``rdma``
(whether a module of UCX for RDMA loads), or ``problem`` (why the library does not load). It has a
process of its own, since a library cannot be closed again, opening a libucp takes half a second,
and an unsuitable one may crash. Only the standard library is imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from pathlib import Path

_NEIGHBOURS = ("libucm.so.0", "libucs.so.0", "libuct.so.0")
"""The libraries that libucp needs, by the names under which the dynamic linker looks for them."""

_UNDISGUISED = re.compile(r"libuc[mpst]\.so[.\d]*")
"""UCX's file names; NIXL's copies have others, so the linker never mixes the two."""


def opened(path: str) -> ctypes.CDLL:
    """Return a libucp (path or name to look up), whose symbols other libraries do not see."""
    # First those libraries that it needs and that lie in its folder. libucm and libucs need each
    # other, and so RTLD_LAZY; ctypes always adds RTLD_NOW.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    for neighbour in (Path(path).parent / name for name in _NEIGHBOURS):
        if neighbour.is_absolute() and neighbour.exists():
            dlopen(os.fsencode(neighbour), os.RTLD_LAZY | os.RTLD_LOCAL)
    return ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_LOCAL)


def version(library: ctypes.CDLL) -> tuple[int, ...]:
    """Return the version of a loaded libucp: three numbers."""
    numbers = [ctypes.c_uint() for _ in range(3)]
    library.ucp_get_version(*map(ctypes.byref, numbers))
    return tuple(number.value for number in numbers)


def loaded_elsewhere(folder: Path) -> str | None:
    """Return a UCX library loaded from another folder, which the linker would mix with this one."""
    for path in mapped("libuc"):
        if _UNDISGUISED.fullmatch(path.name) and path.parent.resolve() != folder.resolve():
            return str(path)
    return None


def mapped(prefix: str) -> list[Path]:
    """Return the files in this process's memory, each once, whose names begin so."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = {Path(line[line.find("/") :]) for line in lines if f"/{prefix}" in line}
    return sorted(path for path in found if path.name.startswith(prefix))


def rdma_modules(path: Path) -> list[Path]:
    """Return the files of a libucp's modules (plugins) for InfiniBand, RoCE or EFA."""
    return sorted((path.resolve().parent / "ucx").glob("libuct_ib*.so*"))


def loads(module: Path) -> bool:
    """Return whether a shared library loads; for a module, the caller has opened its libucp."""
    try:
        ctypes.CDLL(str(module), os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError:
        return False
    return True


def _describe(name: str) -> dict[str, object]:
    try:
        numbers = version(opened(name))
    except (OSError, AttributeError) as exc:
        return {"problem": str(exc)}
    path = next(iter(mapped("libucp")), Path(name).absolute())
    return {"path": str(path), "version": numbers, "rdma": any(map(loads, rdma_modules(path)))}


if __name__ == "__main__":
    # Whatever the libraries print goes to standard error, and their exit handlers, which may crash,
    # are not run.
    _answer = os.dup(1)
    os.dup2(2, 1)
    os.write(_answer, json.dumps(_describe(sys.argv[1])).encode())
    os._exit(0)
