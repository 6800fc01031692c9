"""The keys with which a command asks an engine's side channel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.core.errors import SecretError
from kvferry.core.security import Access, KeyPair, listed_keys, read_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What to ask with.

    Attributes:
        access: the command's own keys, and the engine's as the only ones that it asks.
        server: the engine's public key; empty for a side channel that is open.
    """

    access: Access = Access(is_command=True)  # noqa: RUF009 - frozen
    server: bytes = b""


NONE = Keys()


def keys_of(secret_key: str, peer: str, environment: Mapping[str, str] = os.environ) -> Keys:
    """The keys that options name, as ``curve_secret_key`` and ``curve_peers`` of an engine do.

    Args:
        secret_key: where the command's own secret key is, ``file:PATH`` or ``env:NAME``.
        peer: the engine's public key, or where it is.
        environment: of this process.

    Raises:
        SecretError: only one of the two is given, or one is no key.
    """
    if not secret_key and not peer:
        return NONE
    if not (secret_key and peer):
        raise SecretError(
            "a side channel with keys is asked with both --curve-secret-key, where a secret key is "
            "that the engine's curve_peers lists, and --curve-peer, the engine's own public key"
        )
    peers = listed_keys([peer], "--curve-peer", environment)
    if len(peers) != 1:
        raise SecretError(f"--curve-peer names {len(peers)} keys, and an engine has one")
    own = read_secret(secret_key, environment)
    access = Access(own=KeyPair.of(own.text, own.place), peers=peers, is_command=True)
    return Keys(access=access, server=next(iter(peers)))
