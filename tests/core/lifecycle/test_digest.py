"""``digest`` and ``chain``: equal for equal prompts, different for different ones."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.core.lifecycle.digest import (
    DIGEST_BYTES,
    MAX_BLOCK_DIGESTS,
    SALT_BYTES,
    BlockDigests,
    chain,
    digest,
    digest_block,
)

SALT, OTHER_SALT = bytes(range(SALT_BYTES)), bytes(SALT_BYTES)


def test_the_digest_is_blake2b_over_little_endian_tokens_and_msgpack() -> None:
    expected = hashlib.blake2b(
        struct.pack("<3q", 1, 2, 1 << 40) + msgspec.msgpack.encode(("lora", None)),
        digest_size=DIGEST_BYTES,
    )
    assert digest([1, 2, 1 << 40], "lora", None) == expected.digest()


@pytest.mark.parametrize("dtype", ["int32", "int64", ">i8", "uint16"])
def test_an_array_has_the_digests_of_a_list(dtype: str) -> None:
    tokens = [1, 300, 65535 // 2, 7]
    array = np.array(tokens, dtype=dtype)
    assert digest(array) == digest(tokens)
    assert chain(array, 2, SALT, None, {}) == chain(tokens, 2, SALT, None, {})


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


Chain = Callable[[Sequence[int], int, bytes, object, Mapping[int, object]], bytes]
Common = Callable[[BlockDigests, bytes], int]


def test_a_chain_is_keyed_blake2b_of_the_digest_before_tokens_and_extras() -> None:
    def keyed(content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=SALT).digest()

    pack = msgspec.msgpack.encode
    root = keyed(pack(("lora", None)))
    first = keyed(root + struct.pack("<2q", 1, 1 << 40) + pack(None))
    second = keyed(first + struct.pack("<2q", 3, 4) + pack(["image"]))
    made = chain([1, 1 << 40, 3, 4, 5], 2, SALT, ("lora", None), {1: ["image"], 2: ["behind"]})
    assert made == first + second


@given(tokens=st.integers(1, 1 << 33), unit=st.integers(1, 1 << 12))
@example(tokens=MAX_BLOCK_DIGESTS * 16, unit=16)
@example(tokens=MAX_BLOCK_DIGESTS * 16 + 1, unit=16)
@example(tokens=1, unit=16)
def test_a_digest_block_is_the_smallest_with_which_the_digests_are_few_enough(
    tokens: int, unit: int
) -> None:
    every = digest_block(tokens, unit)
    assert every % unit == 0
    assert tokens // every <= MAX_BLOCK_DIGESTS
    assert every == unit or -(-tokens // (every - unit)) > MAX_BLOCK_DIGESTS


def test_the_order_of_a_mapping_changes_no_digest() -> None:
    extras = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    first, second = (chain([1], 1, SALT, extra, {0: extra}) for extra in extras)
    assert first == second
    assert digest([1], extras[0]) == digest([1], extras[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Two texts that have a beginning in common, and how they are cut into blocks."""

    one: list[int]
    other: list[int]
    every: int
    extras: dict[int, str]

    @property
    def common(self) -> int:
        """How many whole blocks are equal in both."""
        pairs = enumerate(zip(self.one, self.other, strict=False))
        alike = min(len(self.one), len(self.other))
        first = next((index for index, (a, b) in pairs if a != b), alike)
        return first // self.every * self.every


TOKENS = st.integers(0, 2) | st.integers(0, 1 << 40)
TEXTS = st.builds(
    lambda common, one, other, every, extras: Text(
        one=common + one, other=common + other, every=every, extras=extras
    ),
    st.lists(TOKENS, max_size=20),
    st.lists(TOKENS, max_size=8),
    st.lists(TOKENS, max_size=8),
    st.integers(1, 5),
    st.dictionaries(st.integers(0, 6), st.sampled_from(["image", "video"]), max_size=2),
)


def check_common(text: Text, chain: Chain = chain, common: Common = BlockDigests.common) -> None:
    """Check that as many tokens are found in common as there are, in whole blocks."""
    mine = chain(text.one, text.every, SALT, "root", text.extras)
    other = chain(text.other, text.every, SALT, "root", text.extras)
    blocks = BlockDigests(tokens=text.every, salt=SALT, digests=mine)
    assert len(blocks) == len(text.one) // text.every
    assert common(blocks, other) == text.common
    assert common(replace(blocks, digests=other), mine) == text.common


def check_change(
    text: Text, place: int, what: str, chain: Chain = chain, common: Common = BlockDigests.common
) -> None:
    """Check that all digests from a change on differ, and none before it."""
    tokens, every = text.one, text.every
    mine = chain(tokens, every, SALT, "root", text.extras)
    blocks = len(mine) // DIGEST_BYTES
    if not blocks:
        return
    block = place % blocks
    changed = [*tokens]
    changed[place % (blocks * every)] += 1
    medium = {block: text.extras.get(block, "") + "another"}
    first, other = {
        "token": (
            place % (blocks * every) // every,
            chain(changed, every, SALT, "root", text.extras),
        ),
        "medium": (block, chain(tokens, every, SALT, "root", text.extras | medium)),
        "root": (0, chain(tokens, every, SALT, "another", text.extras)),
        "salt": (0, chain(tokens, every, OTHER_SALT, "root", text.extras)),
    }[what]
    pairs = [
        mine[i : i + DIGEST_BYTES] == other[i : i + DIGEST_BYTES]
        for i in range(0, len(mine), DIGEST_BYTES)
    ]
    assert pairs == [True] * first + [False] * (blocks - first)
    found = common(BlockDigests(tokens=every, salt=SALT, digests=mine), other)
    assert found == first * every


CHANGES = st.sampled_from(["token", "medium", "root", "salt"])


@given(text=TEXTS)
@example(text=Text(one=[], other=[], every=4, extras={}))
@example(text=Text(one=[1, 2], other=[1, 2, 3], every=2, extras={}))
def test_common_is_the_longest_common_beginning_in_whole_blocks(text: Text) -> None:
    check_common(text)


@given(text=TEXTS, place=st.integers(0, 99), what=CHANGES)
def test_a_change_changes_all_digests_from_its_block_on(text: Text, place: int, what: str) -> None:
    check_change(text, place, what)


def test_one_digest_that_differs_ends_what_is_common() -> None:
    """Digests behind it may be equal, as in a ticket that somebody has altered."""
    digests = chain(range(12), 4, SALT, None, {})
    altered = digests[:20] + bytes([digests[20] ^ 1]) + digests[21:]
    blocks = BlockDigests(tokens=4, salt=SALT, digests=digests)
    assert (blocks.common(altered), blocks.common(digests[:32]), blocks.common(b"")) == (4, 8, 0)


def not_chained(
    tokens: Sequence[int], every: int, salt: bytes, root: object, extras: Mapping[int, object]
) -> bytes:
    """Return digests that do not cover the blocks before."""
    starts = range(0, len(tokens) - every + 1, every)
    return b"".join(
        chain(tokens[i : i + every], every, salt, root, {0: extras.get(i // every)}) for i in starts
    )


def without(**left_out: Any) -> Chain:
    """Return a chain that does not cover some of its arguments."""

    def wrong(
        tokens: Sequence[int], every: int, salt: bytes, root: object, extras: Mapping[int, object]
    ) -> bytes:
        covered: dict[str, Any] = {"salt": salt, "root": root, "extras": extras} | left_out
        return chain(tokens, every, **covered)

    return wrong


def with_the_last_part(
    tokens: Sequence[int], every: int, salt: bytes, root: object, extras: Mapping[int, object]
) -> bytes:
    """Return a digest of the tokens behind the last whole block, too."""
    return chain([*tokens, *[0] * (-len(tokens) % every)], every, salt, root, extras)


def without_the_last(blocks: BlockDigests, digests: bytes) -> int:
    """Leave the last digest out of the comparison."""
    whole = len(digests) - DIGEST_BYTES
    if len(blocks.digests) == len(digests) and blocks.digests[:whole] == digests[:whole]:
        return len(blocks) * blocks.tokens
    return blocks.common(digests)


def first_bytes_only(blocks: BlockDigests, digests: bytes) -> int:
    """Compare how many digests there are, but not what they are."""
    return blocks.tokens * min(len(blocks), len(digests) // DIGEST_BYTES)


def check_fixed(what: str, chain: Chain = chain, common: Common = BlockDigests.common) -> None:
    """Check one text, or one change of it, which each fault of one kind gets wrong."""
    text = Text(one=[1, 2, 3, 4, 5], other=[1, 2, 3, 9, 5], every=2, extras={})
    if what == "common":
        check_common(text, chain, common)
    else:
        check_change(text, 0, what, chain, common)


@pytest.mark.parametrize(
    ("what", "wrong", "common"),
    [
        ("token", not_chained, BlockDigests.common),
        ("medium", without(extras={}), BlockDigests.common),
        ("root", without(root=None), BlockDigests.common),
        ("salt", without(salt=SALT), BlockDigests.common),
        ("common", with_the_last_part, BlockDigests.common),
        ("common", chain, without_the_last),
        ("common", chain, first_bytes_only),
    ],
)
def test_a_planted_fault_is_found(what: str, wrong: Chain, common: Common) -> None:
    check_fixed(what)
    with pytest.raises(AssertionError):
        check_fixed(what, wrong, common)
