"""What ``kvferry bench`` measures: cases, and how people write sizes and options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvferry.cli.formatting import size
from kvferry.core.errors import KVFerryError
from kvferry.core.memory import I64Array, Region
from kvferry.core.transport.copies import Copies, Segment

SIZES, BLOCKS = "1M,16M,64M", "4K,64K,1M"
"""What is measured unless said otherwise."""

LARGEST = 1 << 36
COPIES_LIMIT = 1 << 24
"""Copies of a case: more of them would take longer to lay out than anybody waits."""

_SIZE = re.compile(r"(\d{1,12})\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class BenchError(KVFerryError):
    """A benchmark cannot be run, or what it moved is not right; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One transfer to measure.

    Attributes:
        op: ``read`` or ``write``.
        size: bytes that it moves, a multiple of ``block``.
        block: bytes of each copy.
        scattered: whether the blocks lie in random order on both sides; otherwise in a row.
    """

    op: str
    size: int
    block: int
    scattered: bool

    def __str__(self) -> str:
        return f"{self.op} of {size(self.size)} in blocks of {size(self.block)}, {self.order}"

    @property
    def copies(self) -> int:
        """How many."""
        return self.size // self.block

    @property
    def order(self) -> str:
        """For people."""
        return "scattered" if self.scattered else "in a row"

    def places(self) -> tuple[I64Array, I64Array]:
        """The block of the local and of the remote side that each copy has; the same every time."""
        rows = np.arange(self.copies)
        if not self.scattered:
            return rows, rows
        rng = np.random.default_rng(0)
        return rng.permutation(rows), rng.permutation(rows)

    def batch(self, local: Region, remote: Region) -> Copies:
        """The copies, between the beginnings of two regions."""
        here, there = (place.astype(np.uint64) * np.uint64(self.block) for place in self.places())
        return Copies(
            local=here + np.uint64(local.address),
            remote=there + np.uint64(remote.address),
            nbytes=np.full(self.copies, self.block, np.uint64),
            segments=(Segment(start=0, stop=self.copies, local=local, remote=remote),),
        )


def cases(sizes: Sequence[int], blocks: Sequence[int], ops: Sequence[str]) -> list[Case]:
    """The grid. Blocks larger than a size are left out, and so is the order of a single one.

    Raises:
        BenchError: nothing is left, or a case would have too many copies.
    """
    found = [
        Case(op=op, size=total // block * block, block=block, scattered=scattered)
        for op in ops
        for total in sizes
        for block in blocks
        for scattered in (True, False)
        if total // block > scattered
    ]
    if not found:
        raise BenchError(
            f"no size is as large as a block: sizes up to {size(max(sizes))}, blocks from "
            f"{size(min(blocks))}; enlarge --size, or make --block smaller"
        )
    most = max(found, key=lambda case: case.copies)
    if most.copies > COPIES_LIMIT:
        raise BenchError(
            f"a {most} has {most.copies:,} copies; at most {COPIES_LIMIT:,} are measured: make "
            "--block larger, or --size smaller"
        )
    return found


def sizes_of(said: str, option: str) -> list[int]:
    """Bytes, from such as ``4K,64KiB,1M,4096``: units are powers of 1024.

    Raises:
        BenchError: a part is no size, or too large; names the option.
    """
    return sorted({_size_of(part.strip(), option) for part in said.split(",")})


def _size_of(said: str, option: str) -> int:
    match = _SIZE.fullmatch(said)
    nbytes = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < nbytes <= LARGEST:
        raise BenchError(
            f"{option}: {said!r} is no size from 1 to {size(LARGEST)}; write such as 4096, 64K or "
            "1M, with commas between"
        )
    return nbytes


def options_of(said: Sequence[str]) -> dict[str, object]:
    """``driver_options`` from ``KEY=VALUE`` pairs, whose values are JSON, or else text.

    Raises:
        BenchError: one is no pair.
    """
    found: dict[str, object] = {}
    for pair in said:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise BenchError(f"--option {pair!r}: write KEY=VALUE, such as --option threads=4")
        found[key] = _value(value)
    return found


def _value(said: str) -> object:
    try:
        value: object = msgspec.json.decode(said)
    except msgspec.DecodeError:
        return said
    return value
