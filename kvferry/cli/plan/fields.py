"""The names of fields, for people: ``layers.3.attn/k`` is layer 3's K."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class FieldName(NamedTuple):
    """The parts of a field's key.

    ``model.layers.3.attn/k`` is ``("model.layers", 3, "k")``. For a layer without an index, the
    owner is its whole name.
    """

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
    at = next((n for n, word in enumerate(words) if _is_index(word)), None)
    if at is None:
        return FieldName(name, None, part)
    return FieldName(".".join(words[:at]), int(words[at]), part)


def _is_index(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 10


class FieldParts(NamedTuple):
    """Parts of the same layers, of which the same range of the shard axis is meant."""

    layers: tuple[tuple[str, int | None], ...]
    parts: tuple[str, ...]
    shard: Shard


def parts_of(fields: Iterable[tuple[str, Shard]]) -> list[FieldParts]:
    """Return fields, by key and range, as few parts of many layers."""
    named = ((field_name(key), shard) for key, shard in fields)
    by_part = grouped(named, lambda one: (one[0].part, one[1]))
    layers = {key: tuple(name[:2] for name, _ in own) for key, own in by_part.items()}
    alike = grouped(layers, lambda key: (layers[key], key[1]))
    return [
        FieldParts(of, tuple(part for part, _ in own), shard) for (of, shard), own in alike.items()
    ]


def shape_of(parts: Sequence[FieldParts]) -> tuple[object, ...]:
    """Return what is equal for ranks that have other heads, but as many, of the same layers."""
    return tuple((one.layers, one.parts, one.shard[1] - one.shard[0]) for one in parts)


def text_of(alike: Sequence[Sequence[FieldParts]]) -> str:
    """Return the fields of ranks of one ``shape_of`` as text.

    For one rank ``layers 0-39, heads 0-1``; for several ``layers 0-39, 2 each of heads 0-7``.
    """
    several = len({owner for part in alike[0] for owner, n in part.layers if n is not None}) > 1
    same = zip(*alike, strict=True)
    by_layers = grouped(same, lambda of: _layers(of[0].layers, several=several))
    return "; ".join(
        f"{layers}{': ' if len(of) > 1 else ', '}{', '.join(map(_part, of))}"
        for layers, of in by_layers.items()
    )


def _layers(layers: Sequence[tuple[str, int | None]], *, several: bool) -> str:
    """Return layers by index with the owner if there are ``several``, or by name."""
    numbered = grouped(((owner, n) for owner, n in layers if n is not None), lambda one: one[0])
    said = [
        _listed([n for _, n in known]) + (f" of {owner}" if several else "")
        for owner, known in numbered.items()
    ]
    others = [owner for owner, n in layers if n is None]
    more = ["..."] if others[MAX_NAMED_LAYERS:] else []
    return ", ".join([*said, *others[:MAX_NAMED_LAYERS], *more])


def _listed(layers: Sequence[int]) -> str:
    """Return layers as text: ``layers 0-3``, or ``24 of layers 0-50`` where the list is long."""
    listed = numbers(layers)
    if len(listed) > LONGEST_LIST:
        return f"{len(set(layers))} of layers {min(layers)}-{max(layers)}"
    return f"layer{'s' if len(layers) > 1 else ''} {listed}"


def _part(same: Sequence[FieldParts]) -> str:
    """Return the parts of layers, and their ranges on the ranks that are alike."""
    parts, shards = same[0].parts, {one.shard for one in same}
    names, each = " and ".join(parts), same[0].shard[1] - same[0].shard[0]
    held = numbers(n for shard in shards for n in range(*shard))
    among = f"{each:,} each of " if len(shards) > 1 else ""
    if set(parts) == {"k", "v"}:
        return f"{among}head{'s' if each > 1 or among else ''} {held}"
    if held == "0" and each == 1:
        return names
    return f"{names} {among}{held}"
