"""``driver_options`` of nixl, checked against what the installed NIXL offers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from kvferry.core.errors import DriverError
from kvferry.drivers.cuda import find_cuda
from kvferry.drivers.nixl.library import NixlLibrary

Parameter = str | int | float | bool
"""The value of a backend parameter. NIXL gets it as text, a bool as ``true`` or ``false``."""

_NUMBER = "num_threads"

_THREADS = {_NUMBER: "4"}
"""How many threads the UCX backend gets by default. More would take too many of the NIC's doorbell
pages, which other libraries need, too: each thread takes some."""

_SHARED = {"split_batch_size": "8"}
"""From how many copies on the UCX backend's threads share a chunk; with fewer copies, the calling
thread posts all of them. NIXL's default, 1024, suits devices that move the bytes: posting then
costs less than waking threads. Where the CPU moves the bytes, it does so while posting, and sharing
16 blocks of 1 MiB already pays (docs/adr/0020)."""

_GET_ZCOPY = "CUDA_IPC_ENABLE_GET_ZCOPY"

_ENGINE = "engine_config"
"""The parameter of the UCX backend that has UCX's settings, as ``NAME=value,NAME=value``."""

_CUDA = {_ENGINE: f"{_GET_ZCOPY}=y"}
"""From UCX 1.21 on, UCX does not read by CUDA IPC where it detects no NVLink (GPUs on PCIe, many
virtual machines). kvferry only reads, so UCX would move these bytes over tcp, at a hundredth of the
speed. An environment variable ``UCX_CUDA_IPC_ENABLE_GET_ZCOPY`` overrides this setting."""

_RDMA = Path("sys/class/infiniband")

UNLISTED: Mapping[str, frozenset[str]] = {
    "UCX": frozenset(
        {
            "device_list",
            "engine_config",
            "num_threads",
            "split_batch_size",
            "ucx_num_device_channels",
        }
    )
}
"""Parameters that a backend takes although NIXL does not list them."""


class NixlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``driver_options`` of nixl.

    Attributes:
        backend: NIXL's name of the backend, such as "UCX".
        backend_options: parameters of the backend, by NIXL's names; they override those that the
            function ``defaults`` returns.
        telemetry: whether NIXL measures transfers, for ``NixlTransport.telemetry``.
        progress_milliseconds: how long NIXL's progress thread sleeps at most when nothing arrives.
            At 0 it never sleeps, and takes a core.
        progress_thread: whether NIXL has a progress thread. Without one, the UCX backend has no
            other threads either, and this side serves its peers only when kvferry calls NIXL
            (docs/adr/0018).
    """

    backend: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "UCX"
    backend_options: dict[str, Parameter] = {}
    telemetry: bool = False
    progress_milliseconds: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    progress_thread: bool = True


def defaults(backend: str, root: Path = Path("/")) -> dict[str, str]:
    """Return the parameters that a backend is started with unless the user says otherwise.

    Args:
        backend: NIXL's name of the backend.
        root: the folder that contains ``sys``, in which RDMA devices are looked up; only tests
            change it.
    """
    if backend != "UCX":
        return {}
    if find_cuda() is not None:
        return _THREADS | _CUDA
    return _THREADS if any((root / _RDMA).glob("*")) else _THREADS | _SHARED


class Plugins(Protocol):
    """The methods of NIXL's native agent that describe its backends."""

    def getAvailPlugins(self) -> list[str]:
        """Return the names of the backends. A listed backend may still fail to load."""

    def getPluginParams(self, name: str) -> tuple[dict[str, str], list[str]]:
        """Return a backend's parameters with their defaults, and the memory kinds it supports."""


def parameters(options: NixlOptions, library: NixlLibrary, native: Plugins) -> dict[str, str]:
    """Return the parameters to start a backend with: the user's, and ``defaults`` for the others.

    Args:
        options: the user's options.
        library: the imported NIXL, for the errors' texts.
        native: NIXL's native agent, which lists the backends.

    Returns:
        The value of each parameter as text, by NIXL's names of parameters.

    Raises:
        DriverError: NIXL has no such backend, the backend does not load here, it has no parameter
            of a name that the user gave (the text lists the names that exist), or the user wants
            ``num_threads`` without a progress thread.
    """
    offered = sorted(native.getAvailPlugins())
    if options.backend not in offered:
        raise DriverError(
            f"driver_options of nixl: no backend {options.backend!r}; {library} offers "
            f"{', '.join(offered)}"
        )
    known = _known(options.backend, library, native)
    for name in options.backend_options:
        if name not in known:
            listed = ", ".join(f"{key} ({value})" if value else key for key, value in known.items())
            raise DriverError(
                f"driver_options of nixl: backend {options.backend} of {library} has no parameter "
                f"{name!r}; it has {listed or 'none'}"
            )
    ours = defaults(options.backend)
    given = {name: _text(value) for name, value in options.backend_options.items()}
    if _ENGINE in ours and _ENGINE in given:
        given[_ENGINE] = _joined(given[_ENGINE], ours[_ENGINE])
    return ours | given if options.progress_thread else _unthreaded(ours, given)


def threads(started: Mapping[str, str]) -> int:
    """Return how many threads a backend has besides its progress thread.

    Args:
        started: the parameters that the backend was or will be started with, by NIXL's names.

    Raises:
        DriverError: ``num_threads`` is not a number.
    """
    found = started.get(_NUMBER, "0")
    try:
        return int(found)
    except ValueError as exc:
        raise DriverError(
            f"driver_options of nixl: backend_options: {_NUMBER} is {found!r}, not a number"
        ) from exc


def without_threads(options: NixlOptions) -> NixlOptions:
    """Return the options, changed so that the backend has only its progress thread."""
    return msgspec.structs.replace(options, backend_options={**options.backend_options, _NUMBER: 0})


def _known(backend: str, library: NixlLibrary, native: Plugins) -> dict[str, str]:
    """Return the parameters that a backend takes, by name, with their defaults.

    Args:
        backend: NIXL's name of the backend.
        library: the imported NIXL, for the error's text.
        native: NIXL's native agent, which lists the parameters.

    Returns:
        The defaults as text; empty where NIXL tells none.

    Raises:
        DriverError: the backend does not load here.
    """
    try:
        listed, _ = native.getPluginParams(backend)
    except library.errors as exc:
        raise DriverError(
            f"driver_options of nixl: backend {backend} of {library} does not load here ({exc}): a "
            "library that it needs is missing; NIXL_LOG_LEVEL=DEBUG says which"
        ) from exc
    unlisted = dict.fromkeys(UNLISTED.get(backend, ()), "")
    return dict(sorted({**unlisted, **listed, **defaults(backend)}.items()))


def _unthreaded(ours: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """Return the parameters to start a backend with if NIXL has no progress thread.

    The UCX backend then gets no other threads. NIXL lets UCX lock its workers only if there is a
    progress thread, but connects the workers of these threads from the calling thread.

    Raises:
        DriverError: the user wants such threads.
    """
    if _NUMBER in ours and threads(given):
        raise DriverError(
            f"driver_options of nixl: {_NUMBER} is {given[_NUMBER]}, but the UCX backend has no "
            "threads without progress_thread: set progress_thread, or num_threads to 0"
        )
    return {**ours, **given, **({_NUMBER: "0"} if _NUMBER in ours else {})}


def _joined(theirs: str, ours: str) -> str:
    """Return the user's ``engine_config`` with this module's setting, unless the user names it."""
    names = [setting.partition("=")[0].strip() for setting in theirs.split(",")]
    return theirs if _GET_ZCOPY in names else ",".join(filter(None, (theirs, ours)))


def _text(value: Parameter) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
