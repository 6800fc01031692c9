"""The names of fields, for people: ``layers.3.attn/k`` is layer 3's K."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from kvferry.cli.formatting import grouped, numbers

MAX_NAMED_LAYERS = 3
"""How many layers without an index are named; three dots stand for the others."""
LONGEST_LIST = 24
"""The most characters in which layers are listed one by one."""
CONVOLUTION = "/conv"
"""What follows a layer's name in the keys of its convolution's inputs, before the channels."""

Shard = tuple[int, int]
"""The range [first, last) of a field's shard axis: for K and V, heads."""
Layer = tuple[str, int | None]
"""Owner and index of a layer; an owner that has no index is the whole name."""
Held = tuple[tuple[str, ...], Shard | None]
"""What is stored of a layer: its parts but K and V, and the heads of these."""
Contents = dict[Held, list[Layer]]
"""The layers of which the same is stored."""


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


def contents_of(fields: Iterable[tuple[str, Shard]]) -> Contents:
    """Return what fields, by key and range, store of which layers."""
    named = grouped(((field_name(key), shard) for key, shard in fields), lambda one: one[0][:2])
    held: dict[Layer, Held] = {
        layer: (
            tuple(name.part for name, _ in own if name.part not in ("k", "v")),
            next((shard for name, shard in own if name.part in ("k", "v")), None),
        )
        for layer, own in named.items()
    }
    return grouped(held, held.__getitem__)


def shape_of(contents: Contents) -> object:
    """Return what is equal for ranks that have other heads, but as many, of the same layers."""
    return tuple(
        (tuple(layers), parts, heads and heads[1] - heads[0])
        for (parts, heads), layers in contents.items()
    )


def text_of(alike: Sequence[Contents]) -> str:
    """Return the contents of ranks of one ``shape_of``: ``layers 0-39, 2 each of heads 0-7``."""
    texts = []
    for same in zip(*(contents.items() for contents in alike), strict=True):
        (parts, _), layers = same[0]
        heads = {heads for (_, heads), _ in same if heads is not None}
        texts.append(", ".join((_layers(layers), *_heads(heads), *parts)))
    return "; ".join(texts)


def _layers(layers: Sequence[Layer]) -> str:
    """Return layers by index, with their owners if there are several, or by name."""
    indexes = grouped((one for one in layers if one[1] is not None), lambda one: one[0])
    texts = []
    for owner, own in indexes.items():
        listed = numbers(n for _, n in own if n is not None)
        if len(listed) > LONGEST_LIST:
            first, *_, last = sorted(n for _, n in own if n is not None)
            listed = f"{len(own)} of layers {first}-{last}"
        else:
            listed = f"layer{'s' if len(own) > 1 else ''} {listed}"
        texts.append(f"{listed} of {owner}" if len(indexes) > 1 else listed)
    others = [owner for owner, n in layers if n is None]
    more = ["..."] if others[MAX_NAMED_LAYERS:] else []
    return ", ".join([*texts, *others[:MAX_NAMED_LAYERS], *more])


def _heads(ranges: Set[Shard]) -> list[str]:
    """Return the heads of each of some ranks as text; nothing for parts without heads."""
    if not ranges:
        return []
    each = next(stop - start for start, stop in ranges)
    among = f"{each:,} each of " if len(ranges) > 1 else ""
    held = numbers(n for each_range in ranges for n in range(*each_range))
    return [f"{among}head{'s' if each > 1 or among else ''} {held}"]
