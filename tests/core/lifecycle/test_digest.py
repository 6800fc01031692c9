"""The digest: what two engines compute of one prompt, and only of that one."""

from __future__ import annotations

import hashlib
import struct

import msgspec
import numpy as np
import pytest

from kvferry.core.lifecycle.digest import DIGEST_BYTES, digest


def test_it_is_blake2b_over_little_endian_tokens_and_msgpack() -> None:
    expected = hashlib.blake2b(
        struct.pack("<3q", 1, 2, 1 << 40) + msgspec.msgpack.encode(("lora", None)),
        digest_size=DIGEST_BYTES,
    )
    assert digest([1, 2, 1 << 40], "lora", None) == expected.digest()


@pytest.mark.parametrize("dtype", ["int32", "int64", ">i8", "uint16"])
def test_an_array_is_as_good_as_a_list(dtype: str) -> None:
    tokens = [1, 300, 65535 // 2]
    assert digest(np.array(tokens, dtype=dtype)) == digest(tokens)


def test_every_token_counts_and_so_do_the_others() -> None:
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


def test_the_order_of_a_mapping_does_not_count() -> None:
    assert digest([1], {"a": 1, "b": 2}) == digest([1], {"b": 2, "a": 1})
