"""Small libraries that say of themselves that they are a UCX."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry.drivers.ucx.library import Version

NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("cc") is None, reason="a C compiler, cc, makes the libraries that are found"
)

SAYS = """
void ucp_get_version(unsigned *major, unsigned *minor, unsigned *patch) {{
    *major = {0}; *minor = {1}; *patch = {2};
}}
"""
CRASHES = "__attribute__((constructor)) static void fall(void) {{ __builtin_trap(); }}"
NEEDS = "void ucs_here(void); void needs(void) {{ ucs_here(); }}"
NEEDED = "void ucs_here(void) {}"


def compiled(path: Path, code: str, *arguments: str) -> Path:
    """A shared library of some C; under its own name for whoever needs it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            "cc",
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{path.name}",
            "-o",
            path,
            "-xc",
            "-",
            "-xnone",
            *arguments,
        ],
        input=code,
        text=True,
        check=True,
    )
    return path


def ucp(folder: Path, version: Version, code: str = SAYS) -> Path:
    """A libucp of that version."""
    return compiled(folder / "libucp.so.0", code.format(*version))


def with_rdma(library: Path) -> Path:
    """The library, with a module for InfiniBand beside it."""
    compiled(library.parent / "ucx" / "libuct_ib.so.0", "")
    return library


def in_halves(folder: Path, version: Version) -> Path:
    """A libucp that needs another library of its folder, and does not say where that is."""
    needed = compiled(folder / "libucs.so.0", NEEDED)
    return compiled(folder / "libucp.so.0", (SAYS + NEEDS).format(*version), str(needed))


def wheel(folder: Path, version: str = "1.22.0") -> Path:
    """What pip makes of the wheel libucx, as far as finding it goes. Importing it is a failure."""
    package = folder / "libucx"
    (package / "lib" / "ucx").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it was imported')\n")
    (package / "UCX_WHEEL_VERSION.txt").write_text(f"{version}\n")
    (package / "lib" / "libucp.so.0").touch()
    (package / "lib" / "ucx" / "libuct_cma.so.0").touch()
    return package / "lib" / "libucp.so.0"
