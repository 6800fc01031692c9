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


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``driver_options`` of nixl.

    Attributes:
        backend: NIXL's name for what moves the bytes.
        backend_options: parameters of that backend, by NIXL's names; beside ``DEFAULTS``.
        telemetry: whether NIXL times transfers, for ``NixlTransport.telemetry``.
    """

    backend: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "UCX"
    backend_options: dict[str, Parameter] = {}
    telemetry: bool = False


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
