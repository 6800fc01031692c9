"""The file of pinned bytes: the name of each sample, then its bytes as Python literals."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("bytes.txt")
WIDTH = 60
"""Bytes in a line of the file."""


def load(path: Path = FILE) -> dict[str, bytes]:
    """Return the pinned bytes by name; an empty dict if there is no file yet."""
    found: dict[str, bytes] = {}
    name = ""
    for line in path.read_text("ascii").splitlines() if path.exists() else ():
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
