"""Collect what ``make gpu`` needs on a machine without a network, beside torch and numpy.

    python -m tests.long.gpu.bundle FOLDER NIXL_VERSION

It downloads wheels for CPython 3.12 on Linux x86-64, and writes ``FOLDER/site.zip``: what kvferry
and its conformance suite depend on, NIXL for CUDA 13 with its UCX plugin only, and UCX for CUDA 13.
``make gpu`` unpacks it. kvferry itself comes with the repository; its entry points are in the
bundle. It needs pip, a package index, and ``readelf``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tests.upgrade.trees import write_metadata

ROOT = Path(__file__).parents[3]

PYTHON_VERSION = "3.12"
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17))
NIXL, UCX = "nixl-cu13", "libucx-cu13>=1.22,<2"
"""Wheels that are trimmed, and downloaded without what they depend on."""

CUDA_RUNTIME, CUDART = "nvidia-cuda-runtime==13.0.*", "nvidia/cu13/lib/libcudart.so.13"
"""What NIXL's UCX needs. torch has it as well, but perhaps not loaded yet; a driver of any CUDA 13
runs the oldest one."""

MOST_BYTES = 60_000_000

LEFT_OUT = "numpy"  # how the names of folders begin that are left out: where torch is, numpy is

USELESS = (".a", ".la", ".h", ".hpp", ".pc", ".pyi", ".cmake")
USELESS_FOLDERS = frozenset({"tests", "include", "bin", "share", "__pycache__"})

OF_THE_SYSTEM = re.compile(
    r"(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libz|libssl|libcrypto"
    r"|libcuda|libnvidia-ml)\.so(\.\d+)*"
)
"""Libraries that the machine has: glibc, GCC's, zlib, OpenSSL 3 and the GPU driver."""

NIXL_FILES = (
    "nixl_cu13/**/*",
    ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so",
    "nixl_cu13.libs/ucx/libuc[mt]_cuda.so*",
    "nixl_cu13.libs/ucx/libuct_cma.so*",
    "*.dist-info/METADATA",
)
UCX_FILES = (
    "libucx/*.py",
    "libucx/lib/libuc[mpst].so.0",
    "libucx/lib/ucx/libuc[mt]_c*.so.0",
    "*.dist-info/METADATA",
)
"""What is kept of the two wheels; the libraries that these files need are kept, too."""


def main(folder: Path, nixl_version: str) -> None:
    """Make the bundle, check it, and print its size; ``SystemExit`` says what is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "site.zip"
    with tempfile.TemporaryDirectory() as temporary:
        wheels, site = Path(temporary) / "wheels", Path(temporary) / "site"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        _download([*project["dependencies"], *project["optional-dependencies"]["testing"]], wheels)
        _unpack(wheels, site)
        _copy_needed(_alone(f"{NIXL}=={nixl_version}", Path(temporary)), NIXL_FILES, site)
        _copy_needed(_alone(UCX, Path(temporary)), UCX_FILES, site)
        shutil.copy2(_alone(CUDA_RUNTIME, Path(temporary)) / CUDART, site / "nixl_cu13.libs")
        write_metadata(project, site)  # by which its drivers are found
        _check_needs(site)
        _zip(site, file)
        unpacked = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    nbytes = file.stat().st_size
    sys.stdout.write(f"{file}: {nbytes / 1e6:.1f} MB, unpacked {unpacked / 1e6:.0f} MB\n")
    if nbytes > MOST_BYTES:
        raise SystemExit(f"the bundle may have {MOST_BYTES / 1e6:g} MB at most")


def _alone(requirement: str, temporary: Path) -> Path:
    """Unpack one wheel, without what it depends on, into a folder of its own."""
    folder = temporary / requirement.partition("=")[0]
    _download([requirement, "--no-deps"], folder / "wheels")
    _unpack(folder / "wheels", folder / "all")
    return folder / "all"


def _download(what: Sequence[str], to: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(to)]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON_VERSION}"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    if subprocess.run([*command, *what], check=False).returncode:
        raise SystemExit("pip could not download what the bundle needs; it says why above")


def _unpack(wheels: Path, to: Path) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to, [name for name in archive.namelist() if _is_kept(Path(name))])


def _is_kept(path: Path) -> bool:
    return (
        not path.parts[0].startswith(LEFT_OUT)
        and path.suffix not in USELESS
        and USELESS_FOLDERS.isdisjoint(path.parts)
    )


def _copy_needed(source: Path, kept: Iterable[str], site: Path) -> None:
    """Copy some files of an unpacked wheel, and all libraries in the wheel that these need."""
    named = {path.name: path for path in source.rglob("*.so*")}
    waiting = [path for pattern in kept for path in source.glob(pattern) if path.is_file()]
    copied: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in copied:
            continue
        copied.add(path)
        target = site / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        waiting += [named[name] for name in _needs(path) if name in named]


@cache
def _needs(path: Path) -> tuple[str, ...]:
    """Return the libraries that a library names."""
    if ".so" not in path.name:
        return ()
    said = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True)
    return tuple(re.findall(r"\(NEEDED\).*\[(.+)\]", said.stdout))


def _check_needs(site: Path) -> None:
    """Refuse a bundle whose libraries need one that is neither in it nor the system's."""
    libraries = [path for path in site.rglob("*.so*") if path.is_file()]
    there = {path.name for path in libraries}
    missing = {
        f"{path.name} needs {name}"
        for path in libraries
        for name in _needs(path)
        if name not in there and not OF_THE_SYSTEM.fullmatch(name)
    }
    if missing:
        raise SystemExit("not in the bundle: " + "; ".join(sorted(missing)))


def _zip(site: Path, file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(site.rglob("*")):
            archive.write(path, path.relative_to(site))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
