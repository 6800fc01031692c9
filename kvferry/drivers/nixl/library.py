"""Find NIXL's Python package, import it without its log output, and collect its exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvferry.core.errors import DriverError

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The packages to try, in order; ``nixl`` itself imports whichever of the other two fits the
installed CUDA. The extras bring one of the other two."""

_LOG_LEVEL = "NIXL_LOG_LEVEL"

_SYSTEMS_OWN = "libnl-route-3.so.200"
"""The system's libnl-route, of which NIXL's wheel has a copy of another version. UCX loads the
system's RDMA libraries, if there are any, and these load the system's libnl-route. If the wheel's
copy was loaded before, the system's copy binds to the functions of the wheel's copy, and the
process crashes when it ends. So the system's copy is loaded before NIXL."""

_patience = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlLibrary:
    """The imported Python package of NIXL.

    Attributes:
        package: the package's name.
        version: the version of the package's distribution.
        api: the package's module ``_api``, which has the agent class.
        errors: the exceptions that NIXL's calls can raise.
        lost: the exception that means that the peer is gone.
        unknown: the exception that means that NIXL does not know, or no longer knows, an agent or
            some memory.
    """

    package: str
    version: str
    api: Any
    errors: tuple[type[Exception], ...]
    lost: type[Exception]
    unknown: type[Exception]

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    @contextlib.contextmanager
    def patient(self, milliseconds: int) -> Iterator[None]:
        """Within the context, give each new agent a progress thread that sleeps while it is idle.

        NIXL's Python API has no argument for the length of the sleep and passes 0, with which the
        thread never sleeps and takes a core.

        Args:
            milliseconds: how long the thread sleeps at most when nothing arrives.
        """
        with _patience:
            native = self.api.nixlBind
            self.api.nixlBind = _Patient(native, milliseconds)
            try:
                yield
            finally:
                self.api.nixlBind = native


class _Patient:
    """NIXL's bindings, with one change: a new agent's progress thread sleeps while it is idle.

    Args:
        native: NIXL's bindings.
        milliseconds: how long the thread sleeps at most when nothing arrives.
    """

    def __init__(self, native: Any, milliseconds: int) -> None:  # noqa: ANN401
        self._native = native
        self._microseconds = milliseconds * 1000

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._native, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: ANN401
        if hasattr(config, "pthrDelay"):
            config.pthrDelay = self._microseconds
        return self._native.nixlAgent(name, config)


def load() -> NixlLibrary:
    """Import NIXL.

    Raises:
        DriverError: NIXL is not installed, or does not load; the text says what to do.
    """
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
