"""Convert the user's ``driver_options`` to the struct in which a driver declares its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from kvferry.core.errors import DriverError

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


def parse_options(driver: str, kind: type[OptionsT], options: Mapping[str, object]) -> OptionsT:
    """Return a user's options as a driver's struct, with defaults for those not given.

    Args:
        driver: the driver's name, for the error.
        kind: a struct with ``forbid_unknown_fields`` and a default for every field.
        options: the options as the user wrote them.

    Raises:
        DriverError: an option is unknown, of a wrong type or out of range; the message lists the
            driver's options.
    """
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as exc:
        known = ", ".join(f"{name} ({getattr(kind(), name)})" for name in kind.__struct_fields__)
        raise DriverError(
            f"driver_options of {driver}: {exc}; it has, with their defaults: {known}"
        ) from exc
