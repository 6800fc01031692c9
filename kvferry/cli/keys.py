"""The keys with which a command authenticates at an engine's side channel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.core.errors import SecretError
from kvferry.core.security import Access, KeyPair, listed_keys, read_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A command's keys.

    Attributes:
        access: The command's own keys, and the public key of the only engine that it trusts.
        server: The engine's public key; empty if its side channel is not encrypted.
    """

    access: Access = Access(is_command=True)  # noqa: RUF009 - frozen
    server: bytes = b""


NONE = Keys()


def keys_of(secret_key: str, peer: str, environment: Mapping[str, str] = os.environ) -> Keys:
    """Return the keys that a command's options name."""
    if not secret_key and not peer:
        return NONE
    own = read_secret(secret_key, environment) if secret_key else None
    peers = listed_keys([peer], "--curve-peer", environment) if peer else frozenset()
    if own is None or not peer:
        raise SecretError(
            "a side channel with keys is asked with both --curve-secret-key, where a secret key is "
            "that the engine's curve_peers lists, and --curve-peer, the engine's own public key"
        )
    if len(peers) != 1:
        raise SecretError(f"--curve-peer names {len(peers)} keys, and an engine has one")
    access = Access(own=KeyPair.of(own.text, own.source), peers=peers, is_command=True)
    return Keys(access=access, server=next(iter(peers)))
