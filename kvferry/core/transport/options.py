"""Convert the user's ``driver_options`` to the struct in which a driver declares its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from kvferry.core.errors import DriverError

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


def parse_options(driver: str, kind: type[OptionsT], options: Mapping[str, object]) -> OptionsT:
    """Return a user's options as a driver's struct, or raise ``DriverError``, which lists them.

    ``kind`` is a struct with ``forbid_unknown_fields`` and a default for every field.
    """
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as exc:
        known = ", ".join(f"{name} ({getattr(kind(), name)})" for name in kind.__struct_fields__)
        raise DriverError(
            f"driver_options of {driver}: {exc}; it has, with their defaults: {known}"
        ) from exc
