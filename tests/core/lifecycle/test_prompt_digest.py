"""``digest`` and ``chain``, byte by byte, and how much of two chains is common."""

from __future__ import annotations

import hashlib
import struct

import msgspec
import numpy as np
import pytest

from kvferry.core.lifecycle.prompt_digest import (
    DIGEST_BYTES,
    MAX_BLOCK_DIGESTS,
    SALT_BYTES,
    BlockDigests,
    chain,
    digest,
    digest_block,
)

SALT = bytes(range(SALT_BYTES))


def test_the_digest_is_blake2b_over_little_endian_tokens_and_msgpack() -> None:
    for tokens, extra in (([1, 2, 1 << 40], ("lora", None)), ([], ()), ([7], (["b", "a"],))):
        expected = hashlib.blake2b(
            struct.pack(f"<{len(tokens)}q", *tokens) + msgspec.msgpack.encode(extra),
            digest_size=DIGEST_BYTES,
        )
        assert digest(tokens, *extra) == expected.digest()


def test_a_chain_is_keyed_blake2b_of_the_digest_before_tokens_and_extras() -> None:
    def keyed(content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=SALT).digest()

    pack = msgspec.msgpack.encode
    root = keyed(pack(("lora", None)))
    first = keyed(root + struct.pack("<2q", 1, 1 << 40) + pack(None))
    second = keyed(first + struct.pack("<2q", 3, 4) + pack(["image"]))
    made = chain([1, 1 << 40, 3, 4, 5], 2, SALT, ("lora", None), {1: ["image"], 2: ["behind"]})
    assert made == first + second
    assert chain([1], 2, SALT, None, {}) == b""


@pytest.mark.parametrize("dtype", ["int32", "int64", ">i8", "uint16"])
def test_an_array_has_the_digests_of_a_list(dtype: str) -> None:
    tokens = [1, 300, 65535 // 2, 7]
    array = np.array(tokens, dtype=dtype)
    assert digest(array) == digest(tokens)
    assert chain(array, 2, SALT, None, {}) == chain(tokens, 2, SALT, None, {})


def test_the_order_of_a_mapping_changes_no_digest() -> None:
    extras = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    first, second = (chain([1], 1, SALT, extra, {0: extra}) for extra in extras)
    assert first == second
    assert digest([1], extras[0]) == digest([1], extras[1])


@pytest.mark.parametrize(
    ("tokens", "unit", "every"),
    [
        (1, 16, 16),
        (MAX_BLOCK_DIGESTS * 16, 16, 16),
        (MAX_BLOCK_DIGESTS * 16 + 1, 16, 32),
        (MAX_BLOCK_DIGESTS * 48, 16, 48),
        (1 << 33, 1, 1 << 24),
    ],
)
def test_a_digest_block_is_the_smallest_with_which_the_digests_are_few_enough(
    tokens: int, unit: int, every: int
) -> None:
    assert digest_block(tokens, unit) == every


@pytest.mark.parametrize(
    ("length", "differs", "common"),
    [
        (12, None, 12),
        (12, 0, 0),
        # Digests behind it are equal, as in a ticket that somebody has altered.
        (12, 1, 4),
        (12, 2, 8),
        (8, None, 8),
        (8, 1, 4),
        (0, None, 0),
        (16, None, 12),
    ],
)
def test_chains_have_the_blocks_before_the_first_digest_that_differs_in_common(
    length: int, differs: int | None, common: int
) -> None:
    mine = chain(range(12), 4, SALT, None, {})
    other = bytearray(chain(range(length), 4, SALT, None, {}))
    if differs is not None:
        other[differs * DIGEST_BYTES + 4] ^= 1
    blocks = BlockDigests(tokens=4, salt=SALT, digests=mine)
    assert len(blocks) == 3
    assert blocks.common(bytes(other)) == common
