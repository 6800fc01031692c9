"""The names of fields, for people: ``layers.3.attn/k`` is layer 3's K."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvferry.cli.formatting import counted, grouped, numbers

MAX_NAMED_LAYERS = 3  # how many layers without an index are named; three dots stand for the others
LONGEST_LIST = 24  # the most characters in which layers are listed one by one
CONVOLUTION = "/conv"
"""What follows a layer's name in the keys of its convolution's inputs, before the channels."""

Layer = tuple[str, int | None]
"""Owner and index of a layer; an owner that has no index is the whole name."""


class FieldName(NamedTuple):
    """The parts of a key, as ``("model.layers", 3, "k")``; without an index, the whole name."""

    owner: str
    layer: int | None
    part: str


def field_name(key: str) -> FieldName:
    """Return the parts of a field's key."""
    name, _, part = key.rpartition("/")
    if name.endswith(CONVOLUTION):
        name, part = name.removesuffix(CONVOLUTION), f"{CONVOLUTION[1:]}/{part}"
    words = name.split(".")
    if "indexer" in words:
        part = f"index {part}"  # a layer's latents have the same names
    for n, word in enumerate(words):
        if word.isascii() and word.isdecimal() and len(word) < 10:
            return FieldName(".".join(words[:n]), int(word), part)
    return FieldName(name, None, part)


def contents_of(fields: Iterable[tuple[str, tuple[int, int]]]) -> str:
    """Return what fields, by key and range of heads, store: ``layers 0-39, 2 heads``."""
    stored: dict[Layer, dict[str, None]] = {}
    for key, (start, stop) in fields:
        owner, layer, part = field_name(key)
        what = counted(stop - start, "head") if part in ("k", "v") else part
        stored.setdefault((owner, layer), {})[what] = None
    alike = grouped(stored, lambda layer: tuple(stored[layer]))
    return "; ".join(", ".join((_layers(layers), *what)) for what, layers in alike.items())


def _layers(layers: Sequence[Layer]) -> str:
    """Return layers by index, with their owners if there are several, or by name."""
    indexed = [(owner, n) for owner, n in layers if n is not None]
    owners = grouped(indexed, lambda one: one[0])
    texts = []
    for owner, own in owners.items():
        indexes = sorted(n for _, n in own)
        listed = numbers(indexes)
        if len(listed) > LONGEST_LIST:
            text = f"{len(indexes)} of layers {indexes[0]}-{indexes[-1]}"
        else:
            text = f"layer{'s' if len(indexes) > 1 else ''} {listed}"
        texts.append(f"{text} of {owner}" if len(owners) > 1 else text)
    named = [owner for owner, n in layers if n is None]
    return ", ".join([*texts, *named[:MAX_NAMED_LAYERS], *["..."] * bool(named[MAX_NAMED_LAYERS:])])
