"""``driver_options`` of nixl, checked against what the installed NIXL offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Protocol

import msgspec

from kvferry.core.errors import DriverError
from kvferry.drivers.nixl.library import Library

Parameter = str | int | float | bool
"""Of a backend. NIXL takes all of them as text; ``true`` and ``false`` for a bool."""

DEFAULTS: Mapping[str, Mapping[str, str]] = {"UCX": {"num_threads": "4"}}
"""Each thread of UCX takes pages of a NIC's doorbells, which other libraries need, too."""

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
"""What a backend takes although NIXL does not list it."""


_SPLIT = 1024
"""From so many rows on, those threads share a transfer, unless ``split_batch_size`` differs."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``driver_options`` of nixl.

    Attributes:
        backend: NIXL's name for what moves the bytes.
        backend_options: parameters of that backend, by NIXL's names; beside ``DEFAULTS``.
        telemetry: whether NIXL times transfers, for ``NixlTransport.telemetry``.
        progress_milliseconds: how long NIXL's progress thread sleeps at most when nothing arrives.
            At 0 it never sleeps, and takes a core.
    """

    backend: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "UCX"
    backend_options: dict[str, Parameter] = {}
    telemetry: bool = False
    progress_milliseconds: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1


class Plugins(Protocol):
    """What NIXL's native agent says about its backends."""

    def getAvailPlugins(self) -> list[str]:
        """Their names; one that is listed need not load."""

    def getPluginParams(self, name: str) -> tuple[dict[str, str], list[str]]:
        """The parameters of one with their defaults, and its memory kinds."""


def parameters(options: Options, library: Library, native: Plugins) -> dict[str, str]:
    """What the backend is started with.

    Args:
        options: the user's.
        library: to name in errors.
        native: NIXL's agent, which knows the plugins.

    Raises:
        DriverError: this NIXL has no such backend, it does not load here, or it has no such
            parameter; says what there is.
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
    given = {name: _text(value) for name, value in options.backend_options.items()}
    return {**DEFAULTS.get(options.backend, {}), **given}


def few_rows(started: Mapping[str, str]) -> int | None:
    """How many rows keep a transfer from the threads that UCX has beside its progress thread.

    Args:
        started: what the backend was started with.

    Returns:
        ``None`` where there are no such threads.

    Raises:
        DriverError: a number is none.
    """
    if _count(started, "num_threads", 0) == 0:
        return None
    return max(1, _count(started, "split_batch_size", _SPLIT) - 1)


def _count(started: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(started.get(name, default))
    except ValueError as exc:
        raise DriverError(
            f"driver_options of nixl: backend_options: {name} is {started[name]!r}, not a number"
        ) from exc


def _known(backend: str, library: Library, native: Plugins) -> dict[str, str]:
    """The parameters of a backend, with their defaults."""
    try:
        listed, _ = native.getPluginParams(backend)
    except library.errors as exc:
        raise DriverError(
            f"driver_options of nixl: backend {backend} of {library} does not load here ({exc}): a "
            "library that it needs is missing; NIXL_LOG_LEVEL=DEBUG says which"
        ) from exc
    unlisted = dict.fromkeys(UNLISTED.get(backend, ()), "")
    return dict(sorted({**unlisted, **listed, **DEFAULTS.get(backend, {})}.items()))


def _text(value: Parameter) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
