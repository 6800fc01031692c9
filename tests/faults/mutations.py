"""Make malformed inputs by changing valid ones; the same seed gives the same inputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

NUMBERS = (
    *(-1, 0, 1, 2, 7, 8, 255, 256, 4096),
    *((1 << bits) + more for bits in (15, 16, 31, 32, 40, 62, 63) for more in (-1, 0, 1)),
)
TEXTS = ("", "a", "\0", "\ud7ff", "x" * 600, "float32", "..", "ask", "0" * 16, "f" * 64)
FLOATS = (0.0, -1.5, 1e308, float("nan"), float("inf"))
BOMBS = (
    b"\x91" * 4000,
    b"\x81\xa1x" * 1500,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc7\xff\x01" + bytes(255),
    b"\xd9\x01\xff",
)
"""msgpack that is deeply nested, or claims to be longer than it is."""


class Mutator:
    """Makes malformed inputs from valid ones."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def raw(self, right: bytes) -> bytes:
        """Return bytes that differ from the valid ones in places, in length, or altogether."""
        rng, flipped = self.random, bytearray(right)
        for _ in range(rng.choice([1, 1, 2, 8]) if right else 0):
            flipped[rng.randrange(len(right))] = rng.randrange(256)
        one, other = sorted(rng.randrange(len(right) + 1) for _ in range(2))
        added = rng.choice([*BOMBS, rng.randbytes(rng.randrange(64))])
        return rng.choice(
            [
                bytes(flipped),
                bytes(flipped),
                right[:one],
                right[:one] + added + right[one:],
                right[other:] + right[one:other] + right[:one],
                rng.randbytes(rng.randrange(len(right) + 64)),
            ]
        )

    def tree(self, right: Any) -> Any:
        """Return a copy of a tree with some nodes replaced, removed, repeated or added."""
        wrong = copy.deepcopy(right)
        for _ in range(self.random.choice([1, 1, 1, 2, 5])):
            wrong = self._changed(wrong)
        return wrong

    def packed(self, right: bytes) -> bytes:
        """Return msgpack with some values changed, some bytes changed, or both."""
        if self.random.random() < 0.3:
            return self.raw(right)
        wrong = msgspec.msgpack.encode(self.tree(msgspec.msgpack.decode(right)))
        return self.raw(wrong) if self.random.random() < 0.1 else wrong

    def value(self) -> Any:
        pick = self.random.choice
        plain = [pick(NUMBERS), pick(TEXTS), pick(FLOATS), None, True, False, b"\xff" * 9]
        kind = self.random.random()
        if kind < 0.1:
            return [pick(plain)] * pick([0, 1, 3, 300])
        if kind < 0.2:
            return {pick(TEXTS): pick(plain), "address": pick(NUMBERS)}
        return pick(plain)

    def _changed(self, tree: Any) -> Any:
        node = tree
        while True:
            keys = _keys(node)
            if not keys:
                return self.value() if node is tree else tree
            key = self.random.choice(keys)
            if _keys(node[key]) and self.random.random() < 0.8:
                node = node[key]
                continue
            self._change(node, key)
            return tree

    def _change(self, node: Any, key: Any) -> None:
        kind = self.random.random()
        if kind < 0.1:
            del node[key]
        elif kind < 0.2 and isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        elif kind < 0.2:
            node[self.random.choice(TEXTS)] = self.value()
        elif kind < 0.5 and isinstance(node[key], int):
            node[key] += self.random.choice([-1, 1, 8, -8, 1 << 12, 1 << 40])
        else:
            node[key] = self.value()


def _keys(node: Any) -> Sequence[Any]:
    if isinstance(node, dict):
        return list(node)
    return range(len(node)) if isinstance(node, list) else ()
