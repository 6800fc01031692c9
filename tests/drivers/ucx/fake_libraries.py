"""Small shared libraries that claim to be UCX."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry.drivers.ucx.library import Version

NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("cc") is None, reason="a C compiler, cc, makes the libraries that are found"
)

VERSION_CODE = """
void ucp_get_version(unsigned *major, unsigned *minor, unsigned *patch) {{
    *major = {0}; *minor = {1}; *patch = {2};
}}
"""
CRASHING_CODE = "__attribute__((constructor)) static void fall(void) {{ __builtin_trap(); }}"
DEPENDENT_CODE = "void ucs_here(void); void needs(void) {{ ucs_here(); }}"
DEPENDENCY_CODE = "void ucs_here(void) {}"


def compile_library(path: Path, code: str, *arguments: str) -> Path:
    """Compile C code into a shared library whose soname is its file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path)]
    command += ["-xc", "-", "-xnone", *arguments]
    subprocess.run(command, input=code, text=True, check=True)
    return path


def ucp(folder: Path, version: Version, code: str = VERSION_CODE) -> Path:
    """Make a libucp of that version."""
    return compile_library(folder / "libucp.so.0", code.format(*version))


def with_rdma(library: Path) -> Path:
    """Put a module for InfiniBand beside the library and return the library."""
    compile_library(library.parent / "ucx" / "libuct_ib.so.0", "")
    return library


def with_dependency(folder: Path, version: Version) -> Path:
    """Make a libucp that needs another library of its folder without naming the folder."""
    needed = compile_library(folder / "libucs.so.0", DEPENDENCY_CODE)
    return compile_library(
        folder / "libucp.so.0", (VERSION_CODE + DEPENDENT_CODE).format(*version), str(needed)
    )


def wheel(folder: Path, version: str = "1.22.0") -> Path:
    """Make the files of the installed wheel libucx that are looked for. Importing it fails."""
    package = folder / "libucx"
    (package / "lib" / "ucx").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it was imported')\n")
    (package / "UCX_WHEEL_VERSION.txt").write_text(f"{version}\n")
    (package / "lib" / "libucp.so.0").touch()
    (package / "lib" / "ucx" / "libuct_cma.so.0").touch()
    return package / "lib" / "libucp.so.0"
