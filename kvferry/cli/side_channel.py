"""The side channel that a command asks: its address and its keys, as options name them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TypedDict

from kvferry.core.errors import KVFerryError, SecretError
from kvferry.core.security import OPEN, Access, KeyPair, listed_keys, read_secret

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


class Keys(TypedDict):
    """A command's own keys with the only key that it trusts, and that key, if any."""

    access: Access
    key: bytes


def keys_of(secret_key: str, peer: str, environment: Mapping[str, str] = os.environ) -> Keys:
    """Return the keys that a command's options name, as ``health`` and others take them."""
    if not secret_key and not peer:
        return Keys(access=OPEN, key=b"")
    own = read_secret(secret_key, environment) if secret_key else None
    peers = listed_keys([peer], "--curve-peer", environment) if peer else frozenset()
    if own is None or not peer:
        raise SecretError(
            "a side channel with keys is asked with both --curve-secret-key, where a secret key is "
            "that the engine's curve_peers lists, and --curve-peer, the engine's own public key"
        )
    if len(peers) != 1:
        raise SecretError(f"--curve-peer names {len(peers)} keys, and an engine has one")
    access = Access(own=KeyPair.of(own.text, own.source), peers=peers)
    return Keys(access=access, key=next(iter(peers)))
