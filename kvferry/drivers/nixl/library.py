"""Find NIXL's Python package, import it without its log output, and collect its exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvferry.core.errors import DriverError

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The packages to try, in order; ``nixl`` itself imports whichever of the others fits CUDA."""

_LOG_LEVEL = "NIXL_LOG_LEVEL"

_SYSTEMS_OWN = "libnl-route-3.so.200"


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlLibrary:
    """The imported Python package of NIXL, with its version and its module ``_api``."""

    package: str
    version: str
    api: Any
    errors: tuple[type[Exception], ...]  # that NIXL's calls can raise
    lost: type[Exception]  # the peer is gone
    unknown: type[Exception]  # NIXL does not know, or no longer, an agent or some memory

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


def load() -> NixlLibrary:
    """Import NIXL, or raise ``DriverError``, whose text says what to do."""
    reasons = []
    for package in PACKAGES:
        try:
            return _loaded(package)
        except ModuleNotFoundError as exc:
            if exc.name != package:
                reasons.append(f"{package}: {exc}")
        # A native library that cannot be loaded raises ImportError or OSError.
        except (ImportError, OSError) as exc:
            reasons.append(f"{package}: {exc}")
    if reasons:
        raise DriverError(f"NIXL is installed and does not load ({'; '.join(reasons)})")
    raise DriverError(
        "NIXL is not installed: pip install 'kvferry[nixl]', or 'kvferry[nixl-cu12]' beside a "
        "torch for CUDA 12 (without a GPU, either). In an environment without torch, pip install "
        "--no-deps nixl-cu13: pip would fetch torch and CUDA with it, which this driver does not "
        "need"
    )


def _loaded(package: str) -> NixlLibrary:
    with contextlib.suppress(OSError):
        # Before NIXL, whose wheel has another version: the system's RDMA libraries, which UCX
        # loads, load the system's. Loaded second, it would bind to the wheel's functions, and the
        # process would crash when it ends.
        ctypes.CDLL(_SYSTEMS_OWN, os.RTLD_NOW | os.RTLD_LOCAL)
    # NIXL sets logging.raiseExceptions to False for the whole process.
    raising = logging.raiseExceptions
    try:
        api = importlib.import_module(f"{package}._api")
    finally:
        logging.raiseExceptions = raising
    if _LOG_LEVEL not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    package = api.__name__.partition(".")[0]  # ``nixl`` has another package's module
    native: Any = api.nixlBind
    own = [
        value
        for name, value in vars(native).items()
        if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
    ]
    return NixlLibrary(
        package=package,
        version=_version(package),
        api=api,
        # NIXL's own exceptions, and those into which its bindings turn C++ exceptions.
        errors=(*own, RuntimeError, ValueError, IndexError, MemoryError),
        lost=native.nixlRemoteDisconnectError,
        unknown=native.nixlNotFoundError,
    )


def _version(package: str) -> str:
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return "of unknown version"
