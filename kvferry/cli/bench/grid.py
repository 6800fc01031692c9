"""The cases that ``kvferry bench`` measures, and the parser of the options that choose them."""

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

LARGEST = 1 << 36
"""Largest size of a transfer or block, in bytes."""
COPIES_LIMIT = 1 << 24
"""Largest number of copies of a case; preparing more would take too long."""

_SIZE = re.compile(r"(\d{1,12})\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class BenchError(KVFerryError):
    """A benchmark cannot be run, or moved wrong bytes; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A read of ``size`` bytes, a multiple of ``block``, in random or ascending order."""

    size: int
    block: int
    scattered: bool

    def __str__(self) -> str:
        return f"read of {size(self.size)} in blocks of {size(self.block)}, {self.order}"

    @property
    def copies(self) -> int:
        """The number of copies in the transfer, one per block."""
        return self.size // self.block

    @property
    def order(self) -> str:
        """The order of the blocks as text: ``scattered`` (random) or ``in a row`` (ascending)."""
        return "scattered" if self.scattered else "in a row"

    def block_indices(self) -> tuple[I64Array, I64Array]:
        """Return the local and the remote block of each copy; a random order is always the same."""
        rows = np.arange(self.copies)
        if not self.scattered:
            return rows, rows
        rng = np.random.default_rng(0)
        return rng.permutation(rows), rng.permutation(rows)

    def batch(self, local: Region, remote: Region) -> Copies:
        """Return the copies between two regions, whose blocks lie without gaps from the start."""
        here, there = (
            index.astype(np.uint64) * np.uint64(self.block) for index in self.block_indices()
        )
        return Copies(
            local=here + np.uint64(local.address),
            remote=there + np.uint64(remote.address),
            nbytes=np.full(self.copies, self.block, np.uint64),
            segments=(Segment(start=0, stop=self.copies, local=local, remote=remote),),
        )


def cases(sizes: Sequence[int], blocks: Sequence[int]) -> list[Case]:
    """Return all combinations, with sizes rounded down to whole blocks.

    Raises:
        BenchError: No case is left, or a case would have too many copies.
    """
    result = [
        Case(size=total // block * block, block=block, scattered=scattered)
        for total in sizes
        for block in blocks
        for scattered in (True, False)
        if total // block > scattered
    ]
    if not result:
        raise BenchError(
            f"no size is as large as a block: sizes up to {size(max(sizes))}, blocks from "
            f"{size(min(blocks))}; enlarge --size, or make --block smaller"
        )
    most = max(result, key=lambda case: case.copies)
    if most.copies > COPIES_LIMIT:
        raise BenchError(
            f"a {most} has {most.copies:,} copies; at most {COPIES_LIMIT:,} are measured: make "
            "--block larger, or --size smaller"
        )
    return result


def sizes_of(text: str, option: str) -> list[int]:
    """Return the sizes in bytes that a text such as ``4K,64KiB,1M,4096`` names, ascending."""
    sizes = set()
    for part in map(str.strip, text.split(",")):
        match = _SIZE.fullmatch(part)
        nbytes = int(match[1]) * _UNITS[match[2].upper()] if match else 0
        if not 0 < nbytes <= LARGEST:
            raise BenchError(
                f"{option}: {part!r} is no size from 1 to {size(LARGEST)}; write such as 4096, 64K "
                "or 1M, with commas between"
            )
        sizes.add(nbytes)
    return sorted(sizes)


def options_of(pairs: Sequence[str]) -> dict[str, object]:
    """Return ``driver_options`` from ``KEY=VALUE`` pairs; what is no JSON is taken as text."""
    result: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise BenchError(f"--option {pair!r}: write KEY=VALUE, such as --option threads=4")
        try:
            result[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            result[key] = value
    return result
