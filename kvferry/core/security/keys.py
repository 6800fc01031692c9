"""CURVE keys as text: 32 bytes in hexadecimal, one key per line."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvferry.core.errors import SecretError

KEY_BYTES = 32
"""The length of a CURVE key."""
MAX_KEYS = 1 << 12
"""The most public keys of peers that one engine can list."""

_HEX = re.compile(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """An engine's own CURVE keys, 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, text: str, source: str) -> KeyPair:
        """Return the key pair of a secret key in hexadecimal.

        Raises ``SecretError`` for other text; its message shows ``source``, never the text.
        """
        if not _HEX.fullmatch(text):
            raise SecretError(
                f"{source} holds {len(text)} characters, and a secret key is {2 * KEY_BYTES} "
                "hexadecimal digits: let 'kvferry keygen' make one"
            )
        secret = bytes.fromhex(text)
        return cls(public=_public(secret), secret=secret)


class PeerKeys(AbstractSet[bytes]):
    """A set of peers' public keys that can be replaced while other threads use it."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._keys = frozenset(keys)

    def replace(self, keys: Iterable[bytes]) -> str:
        """Have the set contain other keys from now on; return how many, for the log."""
        self._keys = frozenset(keys)
        return f"{len(self)} key(s)"

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def generate() -> KeyPair:
    """Return a new key pair; ``SecretError`` if this libzmq was built without CURVE."""
    secret = secrets.token_bytes(KEY_BYTES)
    return KeyPair(public=_public(secret), secret=secret)


def public_keys(texts: Iterable[str], source: str) -> frozenset[bytes]:
    """Return the keys in hexadecimal lines, without empty ones and comments, or ``SecretError``."""
    found: set[bytes] = set()
    for number, text in enumerate(texts, 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        if not _HEX.fullmatch(line):
            raise SecretError(
                f"line {number} of {source} is no public key: it has {len(line)} characters, and "
                f"a key is {2 * KEY_BYTES} hexadecimal digits, as 'kvferry keygen' prints them"
            )
        found.add(bytes.fromhex(line))
    if len(found) > MAX_KEYS:
        raise SecretError(f"{source} lists {len(found)} keys; {MAX_KEYS} are allowed")
    return frozenset(found)


def _public(secret: bytes) -> bytes:
    import zmq
    from zmq.utils import z85

    try:
        return bytes(z85.decode(zmq.curve_public(z85.encode(secret))))
    except zmq.ZMQError as exc:
        raise SecretError("this libzmq was built without CURVE: install pyzmq's own wheel") from exc
