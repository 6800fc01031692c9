"""Pin the bytes of samples that are new: ``python -m tests.pinned.write``.

Samples that are pinned already stay as they are, even if this build makes other bytes. To pin those
bytes, remove the sample from ``bytes.txt`` by hand first. That file has the name of each sample,
and then its bytes as Python literals.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from tests.pinned.samples import SAMPLES

FILE = Path(__file__).with_name("bytes.txt")
WIDTH = 60
"""Bytes in a line of the file."""


def load(path: Path = FILE) -> dict[str, bytes]:
    """Return the pinned bytes by name."""
    found: dict[str, bytes] = {}
    name = ""
    for line in path.read_text("ascii").splitlines():
        if line.startswith("    "):
            found[name] += ast.literal_eval(line.strip())
        else:
            name = line
            found[name] = b""
    return found


def save(pinned: Mapping[str, bytes], path: Path = FILE) -> None:
    """Write pinned bytes, in the order in which they are given."""
    lines = []
    for name, data in pinned.items():
        starts = range(0, len(data), WIDTH)
        lines += [name, *(f"    {data[start : start + WIDTH]!r}" for start in starts)]
    path.write_text("".join(f"{line}\n" for line in lines), "ascii")


def main() -> None:
    pinned = load()
    made = {name: sample.make() for name, sample in SAMPLES.items()}
    save({name: pinned.get(name, data) for name, data in made.items()} | pinned)


if __name__ == "__main__":
    main()
