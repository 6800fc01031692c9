"""``digest``: equal for equal prompts, different for different ones."""

from __future__ import annotations

import hashlib
import struct

import msgspec
import numpy as np
import pytest

from kvferry.core.lifecycle.digest import DIGEST_BYTES, digest


def test_the_digest_is_blake2b_over_little_endian_tokens_and_msgpack() -> None:
    expected = hashlib.blake2b(
        struct.pack("<3q", 1, 2, 1 << 40) + msgspec.msgpack.encode(("lora", None)),
        digest_size=DIGEST_BYTES,
    )
    assert digest([1, 2, 1 << 40], "lora", None) == expected.digest()


@pytest.mark.parametrize("dtype", ["int32", "int64", ">i8", "uint16"])
def test_an_array_has_the_same_digest_as_a_list(dtype: str) -> None:
    tokens = [1, 300, 65535 // 2]
    assert digest(np.array(tokens, dtype=dtype)) == digest(tokens)


def test_every_token_and_every_extra_value_changes_the_digest() -> None:
    all_different = [
        digest([]),
        digest([0]),
        digest([0, 0]),
        digest([1, 2]),
        digest([2, 1]),
        digest([1, 2], None),
        digest([1, 2], None, None),
        digest([1, 2], "salt"),
        digest([1, 2], None, "salt"),
        digest([1, 2], ["image-1", "image-2"]),
        digest([1, 2], ["image-2", "image-1"]),
    ]
    assert len(set(all_different)) == len(all_different)
    assert {len(d) for d in all_different} == {DIGEST_BYTES}


def test_the_order_of_a_mapping_does_not_change_the_digest() -> None:
    assert digest([1], {"a": 1, "b": 2}) == digest([1], {"b": 2, "a": 1})
