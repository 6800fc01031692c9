"""Hashes of all that decides the content of a request's pages: tokens, LoRA, media, cache salt.

``digest`` covers all tokens at once. ``chain`` has a digest for every block of tokens, so that the
common beginning of two requests can be found (``BlockDigests``). See docs/protocol.md,
"Identities".
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
    """Return one BLAKE2b digest of token ids (as little-endian int64) and ``extra`` (as msgpack).

    Args:
        token_ids: ids of the prompt's tokens that the pages cover, in order.
        extra: everything else that changes the pages' content (LoRA, multimodal hashes, cache
            salt), in the same order on both engines. Pass ``None`` for a value that is absent.

    Returns:
        16 bytes.
    """
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    state.update(np.asarray(token_ids, dtype="<i8").tobytes())
    state.update(msgspec.msgpack.encode(extra, order="deterministic"))
    return state.digest()


def digest_block(tokens: int, unit: int) -> int:
    """Return how many tokens one digest of a chain covers.

    Args:
        tokens: number of tokens that the chain covers.
        unit: number of tokens of a page.

    Returns:
        The smallest multiple of ``unit`` with which the chain has at most ``MAX_BLOCK_DIGESTS``
        digests.
    """
    return unit * max(1, -(-tokens // (unit * MAX_BLOCK_DIGESTS)))


def chain(
    token_ids: Sequence[int] | np.ndarray,
    every: int,
    salt: bytes,
    root: object,
    extras: Mapping[int, object],
) -> bytes:
    """Return a digest for each whole block of tokens, each of which covers all blocks before, too.

    Each is a BLAKE2b digest, keyed with ``salt``, of the digest before, the block's token ids (as
    little-endian int64), and its ``extras`` (as msgpack). The salt is random and new for each
    chain, so nobody can prepare two texts whose digests collide.

    Args:
        token_ids: ids of the request's tokens, in order. Tokens behind the last whole block are
            left out.
        every: number of tokens of a block.
        salt: 16 bytes.
        root: everything that changes the content of all pages (LoRA, cache salt).
        extras: what else changes the pages from a block on (the media that begin in it), by the
            index of the block.

    Returns:
        The digests, 16 bytes each, concatenated.
    """
    ids = np.asarray(token_ids, dtype="<i8")
    blocks = memoryview(ids[: len(ids) // every * every].tobytes())
    size = every * ids.itemsize
    last = _keyed(salt, msgspec.msgpack.encode(root, order="deterministic"))
    digests = []
    for index in range(len(blocks) // size):
        extra = msgspec.msgpack.encode(extras.get(index), order="deterministic")
        last = _keyed(salt, last, blocks[index * size : (index + 1) * size], extra)
        digests.append(last)
    return b"".join(digests)


def _keyed(salt: bytes, *parts: bytes | memoryview) -> bytes:
    """Return the BLAKE2b digest of some bytes, keyed with ``salt``."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=salt)
    for part in parts:
        state.update(part)
    return state.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDigests:
    """The chain of digests in a conversation's ticket.

    Attributes:
        tokens: number of tokens of a block.
        salt: the key of the digests, 16 random bytes.
        digests: the digests of the whole blocks, 16 bytes each, concatenated (``chain``).
    """

    tokens: int
    salt: bytes
    digests: bytes

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.digests) // DIGEST_BYTES

    def common(self, digests: bytes) -> int:
        """Return how many tokens, in whole blocks, another chain has in common with this one.

        Args:
            digests: the other chain, made with the same block size and salt.
        """
        mine, other = (
            np.frombuffer(some, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
            for some in (self.digests, digests)
        )
        both = min(len(mine), len(other))
        differ = (mine[:both] != other[:both]).any(axis=1)
        return self.tokens * int(differ.argmax() if differ.any() else both)
