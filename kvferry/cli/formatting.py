"""Format numbers, sizes, counts and groups for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float) -> str:
    """Return a size with a binary unit and three significant digits, such as ``1.25 GiB``."""
    for unit in UNITS[:-1]:
        if nbytes < 1024:
            return f"{number(nbytes)} {unit}"
        nbytes /= 1024
    return f"{number(nbytes)} {UNITS[-1]}"


def number(value: float) -> str:
    """Return a number with about three significant digits, such as ``3,408`` and ``0.87``."""
    if value and not 0.1 <= abs(value) < 1e6:
        return f"{value:.3g}" if abs(value) > 1 else f"{value:.2g}"
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def duration(seconds: float) -> str:
    """Return a duration with three significant digits, such as ``1.25 s`` or ``104 ms``."""
    if seconds >= 1 or not seconds:
        return f"{number(seconds)} s"
    return f"{number(seconds * 1e3)} ms"


def numbers(values: Iterable[int]) -> str:
    """Return numbers as text, consecutive numbers as a range, such as ``0-4, 6``."""
    runs: list[tuple[int, int]] = []
    for n in sorted(set(values)):
        if runs and n == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], n
        else:
            runs.append((n, n))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def counted(count: int, what: str) -> str:
    """Return a count with its noun, such as ``1 copy`` and ``1,024 copies``."""
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return items by their key, in the order of the first of each."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
