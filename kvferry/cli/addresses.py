"""Addresses of side channels in options of the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvferry.core.errors import KVFerryError

ADDRESS = re.compile(r"(?P<host>\[[^][]+\]|[^][:]+):(?P<port>[0-9]{1,5})")
MAX_PORT = 65535


class AddressError(KVFerryError):
    """An option's value is not ``HOST:PORT``."""


def host_and_port(option: str, address: str) -> tuple[str, int]:
    """Return the host and the port of a side channel's address."""
    found = ADDRESS.fullmatch(address)
    if found is None or not 1 <= int(found["port"]) <= MAX_PORT:
        raise AddressError(
            f"{option} {address!r} is not HOST:PORT, such as 10.0.0.5:5600 or [fd00::5]:5600, with "
            f"a port in 1 to {MAX_PORT}: name the engine's side_channel_host and side_channel_port"
        )
    return found["host"].strip("[]"), int(found["port"])


def engine_address(words: Sequence[str]) -> tuple[str, int]:
    """Return the host and the port of an engine: of ``HOST:PORT``, or of two words."""
    text = words[0] if len(words) == 1 else f"[{words[0]}]:{' '.join(words[1:])}"
    return host_and_port("the engine", text)
