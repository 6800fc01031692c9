"""``driver_options`` of nixl, checked against what the installed NIXL offers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvferry.core.errors import DriverError
from kvferry.drivers.cuda import find_cuda
from kvferry.drivers.nixl.library import NixlLibrary

Parameter = str | int | float | bool
"""The value of a backend parameter. NIXL gets it as text, a bool as ``true`` or ``false``."""

_NUMBER = "num_threads"

# Not more: each thread takes some of the NIC's doorbell pages, which other libraries need, too.
_THREADS = {_NUMBER: "4"}

# From how many copies on the threads share a chunk. NIXL's default, 1024, suits devices that move
# the bytes; where the CPU does, while posting, few large copies already pay (docs/adr/0020).
_SHARED = {"split_batch_size": "8"}

_GET_ZCOPY = "CUDA_IPC_ENABLE_GET_ZCOPY"

_ENGINE = "engine_config"
"""The parameter of the UCX backend that has UCX's settings, as ``NAME=value,NAME=value``."""

# From UCX 1.21 on, UCX does not read by CUDA IPC where it detects no NVLink (GPUs on PCIe, many
# virtual machines), and would move what kvferry reads over tcp, a hundred times slower. The
# environment's ``UCX_CUDA_IPC_ENABLE_GET_ZCOPY`` overrides it.
_CUDA = {_ENGINE: f"{_GET_ZCOPY}=y"}

_RDMA = Path("sys/class/infiniband")

UNLISTED = ("device_list", _ENGINE, _NUMBER, "split_batch_size", "ucx_num_device_channels")
"""Parameters that the backend UCX takes although NIXL does not list them."""


class NixlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``driver_options`` of nixl.

    Attributes:
        backend: NIXL's name of the backend, such as "UCX".
        backend_options: parameters of the backend, by NIXL's names; they override those that the
            function ``defaults`` returns.
        telemetry: whether NIXL measures transfers, for its own exporters.
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
    """Return a backend's default parameters; ``root``, for tests, contains ``sys``."""
    if backend != "UCX":
        return {}
    if find_cuda() is not None:
        return _THREADS | _CUDA
    return _THREADS if any((root / _RDMA).glob("*")) else _THREADS | _SHARED


def parameters(options: NixlOptions, library: NixlLibrary, native: Any) -> dict[str, str]:  # noqa: ANN401
    """Return the parameters to start a backend with: the user's, and ``defaults`` for the others.

    Raise ``DriverError`` if a name is unknown, the backend does not load here, or ``num_threads``
    is set without a progress thread.
    """
    offered = sorted(native.getAvailPlugins())  # a listed backend may still fail to load
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
    given = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.backend_options.items()
    }
    named = [setting.partition("=")[0].strip() for setting in given.get(_ENGINE, "").split(",")]
    if _ENGINE in ours and _ENGINE in given and _GET_ZCOPY not in named:
        given[_ENGINE] = ",".join(filter(None, (given[_ENGINE], ours[_ENGINE])))
    if options.progress_thread or _NUMBER not in ours:
        return ours | given
    # NIXL lets UCX lock its workers only if there is a progress thread, but connects the workers of
    # the other threads from the calling thread.
    if threads(given):
        raise DriverError(
            f"driver_options of nixl: {_NUMBER} is {given[_NUMBER]}, but the UCX backend has no "
            "threads without progress_thread: set progress_thread, or num_threads to 0"
        )
    return ours | given | {_NUMBER: "0"}


def threads(started: Mapping[str, str]) -> int:
    """Return how many threads a backend with these parameters has besides its progress thread."""
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


def _known(backend: str, library: NixlLibrary, native: Any) -> dict[str, str]:  # noqa: ANN401
    """Return the parameters that a backend takes, with their defaults, empty if NIXL tells none."""
    try:
        listed, _ = native.getPluginParams(backend)
    except library.errors as exc:
        raise DriverError(
            f"driver_options of nixl: backend {backend} of {library} does not load here ({exc}): a "
            "library that it needs is missing; NIXL_LOG_LEVEL=DEBUG says which"
        ) from exc
    unlisted = dict.fromkeys(UNLISTED if backend == "UCX" else (), "")
    return dict(sorted({**unlisted, **listed, **defaults(backend)}.items()))
