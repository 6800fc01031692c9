"""Hashes of all that decides the content of a request's pages: tokens, LoRA, media, cache salt.

``chain`` has one for every block of tokens, to find the common beginning of two requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

DIGEST_BYTES = 16
SALT_BYTES = 16
MAX_BLOCK_DIGESTS = 512
"""The most digests of blocks in one ticket; they have 16 KiB there, as hexadecimal text."""


def digest(token_ids: Sequence[int] | np.ndarray, *extra: object) -> bytes:
    """Return 16 bytes of BLAKE2b over token ids (little-endian int64) and ``extra`` (as msgpack).

    ``extra`` is all else that the content depends on, in the same order on both engines; ``None``
    if absent.
    """
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    state.update(np.asarray(token_ids, dtype="<i8").tobytes())
    state.update(msgspec.msgpack.encode(extra, order="deterministic"))
    return state.digest()


def digest_block(tokens: int, unit: int) -> int:
    """Return how many tokens a digest covers: the least multiple of ``unit`` that suffices."""
    return unit * max(1, -(-tokens // (unit * MAX_BLOCK_DIGESTS)))


def chain(
    token_ids: Sequence[int] | np.ndarray,
    every: int,
    salt: bytes,
    root: object,
    extras: Mapping[int, object],
) -> bytes:
    """Return a digest for each whole block of ``every`` tokens, 16 bytes each, concatenated.

    Each is BLAKE2b, keyed with 16 bytes of salt, of the digest before, the block's token ids
    (little-endian int64) and its ``extras`` (as msgpack; by block index, such as media that begin
    in it). ``root`` is what changes all pages (LoRA, cache salt).
    """
    ids = np.asarray(token_ids, dtype="<i8")
    blocks = memoryview(ids[: len(ids) // every * every].tobytes())
    size = every * ids.itemsize
    # The salt is random and new for each chain: nobody can prepare two texts whose digests collide.
    last = _keyed(salt, msgspec.msgpack.encode(root, order="deterministic"))
    digests = []
    for index in range(len(blocks) // size):
        extra = msgspec.msgpack.encode(extras.get(index), order="deterministic")
        last = _keyed(salt, last, blocks[index * size : (index + 1) * size], extra)
        digests.append(last)
    return b"".join(digests)


def _keyed(salt: bytes, *parts: bytes | memoryview) -> bytes:
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=salt)
    for part in parts:
        state.update(part)
    return state.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDigests:
    """The chain of digests in a conversation's ticket, for blocks of ``tokens`` tokens each."""

    tokens: int
    salt: bytes
    digests: bytes

    def __len__(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    def common(self, digests: bytes) -> int:
        """Return how many tokens, in whole blocks, a chain made alike has in common."""
        mine, other = (
            np.frombuffer(some, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
            for some in (self.digests, digests)
        )
        both = min(len(mine), len(other))
        differ = (mine[:both] != other[:both]).any(axis=1)
        return self.tokens * int(differ.argmax() if differ.any() else both)
