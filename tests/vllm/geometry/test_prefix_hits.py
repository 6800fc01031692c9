"""What a load leaves in a prefix cache: later prompts that hit it are computed from right pages.

Decode loads a prompt, and is then asked alone for others: shorter and longer ones, such that branch
off, and the same again. The reference checks every token that kernels would read (``scheduled``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.geometry.engine_of_ranks import Shape
from tests.vllm.geometry.model import (
    Attention,
    Layer,
    attention,
    compressed,
    hybrid,
    latents,
    recurrent,
    windows,
)
from tests.vllm.geometry.scheduled import PREFILL, Server, Text, hand_over, serving, wait
from tests.vllm.geometry.test_early import CHUNK, both_at_once, slow_but

KINDS: dict[str, list[Layer]] = {
    "full attention": attention(2, size=8),
    "latents": latents(2),
    "windows": windows(40, 40),
    "windows beside full attention": hybrid(),
    "windows of two sizes": windows(20, 0, 70, 20, 0, 70),
    "windows a token longer than a page": hybrid(window=33),
    "windows shorter than a page": hybrid(window=9),
    # Chunks are a multiple of all blocks: where one begins inside a block, vLLM's own prefix cache
    # gives hits whose pages are missing, without any load.
    "chunks": [Attention(name="model.layers.0.attn", size=8, chunk=192), *windows(0, 0)[1:]],
    "windows over generated tokens": attention(2, size=8, generated=20),
    "rings and compressed entries": compressed(window=40),
    "a drafter's windows": [
        *hybrid(),
        Attention(name="draft.layers.0.attn", size=8, window=70, draft=True),
    ],
    "states": recurrent(),
    "states beside windows": recurrent(window=40),
}
GAPS = [
    "windows beside full attention",
    "windows a token longer than a page",
    "windows shorter than a page",
    "chunks",
    "states beside windows",
]
"""The kinds whose loaded pages may not be whole."""
PLAIN = ["full attention", "latents", "windows", "windows of two sizes"]
"""The kinds that are slow only; others have their pages, too."""
UNLIKE = ["twice", "four times", "larger"]
"""The sizes with which they are not."""
MIXED = ["windows beside full attention", "states beside windows"]
WAYS = ["early", "staged", "not cached"]
SIZES = {
    "equal": (32, 32),
    "twice": (16, 32),
    "half": (32, 16),
    "four times": (16, 64),
    "a fourth": (64, 16),
    "larger": (32, 48),
    "smaller": (48, 32),
}
"""Of prefill's blocks and decode's, in tokens: what decode's are of prefill's."""

LENGTHS = (210, 190)
"""Of loaded prompts, in turn: windows begin in different places of a page."""


def shape_of(layers: list[Layer], block: int, *, caches: bool = True) -> Shape:
    """An engine with blocks of this size, for states as for attention."""
    shape = Shape(block=block, blocks=120, caches=caches)
    if any(layer.name.endswith("mixer") for layer in layers):
        return replace(shape, mode="align", state_block=block)
    has_ring = any(layer.name.endswith("compressor.state_cache") for layer in layers)
    return replace(shape, order="BLHNC") if has_ring else shape


def later() -> Iterator[tuple[Text, int, int]]:
    """A text, each of a family of its own; how many tokens of its family are loaded; and how many
    a later prompt has, which begins like the loaded one."""
    lengths, numbers = itertools.cycle(LENGTHS), itertools.count()
    for less in (1, 2, 14, 20, 30, 30, 44, 44, 62, 0, -1, -60):
        loaded = next(lengths)
        yield Text(next(numbers)), loaded, loaded - less
    for back, less in ((3, -5), (25, 0), (60, 8)):
        loaded = next(lengths)
        yield Text(next(numbers), loaded - back), loaded, loaded - less


def ask(server: Server, text: Text, length: int) -> None:
    """A prompt of which nothing is loaded."""
    run(server, server.add(text, length, most=3))


def run(server: Server, name: str, *others: Server) -> dict[str, Any] | None:
    """Step until a request has ended; return what it left for another engine."""
    wait(lambda: name in server.params, server, *others)
    return server.params[name]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    slow_but(
        *((kind, "four times") for kind in KINDS if kind not in PLAIN),
        *((kind, "larger") for kind in MIXED),
    )(itertools.product(KINDS, SIZES)),
)
def test_prompts_after_a_load(kind: str, sizes: str) -> None:
    """Ask decode for prompts that begin as one that it has loaded."""
    layers, (there, here) = KINDS[kind], SIZES[sizes]
    with (
        serving("prefill", layers, shape_of(layers, there)) as prefill,
        serving("decode", layers, shape_of(layers, here)) as decode,
    ):
        for text, loaded, length in later():
            hand_over(prefill, decode, (text.family, loaded))
            ask(decode, text, length)
            hand_over(prefill, decode, (text.family, loaded + 7))


HYBRID = KINDS["windows beside full attention"]


@pytest.mark.parametrize(
    ("layers", "there", "here"),
    [
        # Each of several ranks says what it has written of a page.
        (HYBRID, Shape(), Shape(block=64, tp=2, pp=2)),
        (latents(2), Shape(tp=2), Shape(tp=2, dcp=2, interleave=4)),
    ],
)
def test_several_ranks(layers: list[Layer], there: Shape, here: Shape) -> None:
    with (
        serving("prefill", layers, replace(there, blocks=120)) as prefill,
        serving("decode", layers, replace(here, blocks=120)) as decode,
    ):
        for text, loaded, length in later():
            hand_over(prefill, decode, (text.family, loaded))
            ask(decode, text, length)


@pytest.mark.parametrize(
    ("way", "kind", "sizes"),
    slow_but(*((way, "states beside windows", "twice") for way in WAYS))(
        itertools.product(WAYS, MIXED, UNLIKE)
    ),
)
def test_other_loads(way: str, kind: str, sizes: str) -> None:
    """Make early loads, loads by way of host memory, or loads where nothing is cached."""
    layers = KINDS[kind]
    there, here = (
        replace(
            shape_of(layers, block),
            host_pages=120 if way == "staged" else 0,
            caches=way != "not cached",
        )
        for block in SIZES[sizes]
    )
    load = both_at_once if way == "early" else hand_over
    with (
        serving("prefill", layers, there, batch=CHUNK) as prefill,
        serving("decode", layers, here) as decode,
    ):
        for text, loaded, length in later():
            load(prefill, decode, (text.family, loaded))
            ask(decode, text, length)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    slow_but(*((kind, "larger") for kind in MIXED))(itertools.product(GAPS, ["half", *UNLIKE])),
)
def test_turns(kind: str, sizes: str) -> None:
    """A turn is prefilled by the engine that prefilled the first, and by one with decode's blocks.

    What decode hands over for it may have begun in a page that decode's own load has not filled
    whole; so prefill has one likewise, of which it makes the next ticket.
    """
    layers, (there, here) = KINDS[kind], SIZES[sizes]
    first, same = shape_of(layers, there), shape_of(layers, here)
    loaded_turns = 0
    with (
        serving("prefill", layers, first, two_way=True) as prefill,
        serving("decode", layers, same, two_way=True) as decode,
        serving("other", layers, same, two_way=True) as other,
    ):
        for i, (text, loaded, length) in enumerate(later()):
            spoken, answered = Text(text.family), (1, 20, 45)[i % 3]
            params = run(prefill, prefill.add(spoken, loaded, dict(PREFILL)))
            name = decode.add(spoken, loaded, params, answered)
            params = run(decode, name, prefill)
            next_prefill = (prefill, other)[i % 2]
            turn = loaded + answered + 3
            name = next_prefill.add(spoken, turn, PREFILL | (params or {}))
            params = run(next_prefill, name, decode)
            loaded_turns += name in next_prefill.pulled
            run(decode, decode.add(spoken, turn, params, 3), next_prefill)
            for server in (next_prefill, decode):
                ask(server, text, length)
                ask(server, Text(text.family, 1 + length // 2), turn)
            for server in (prefill, decode, other):
                server.scheduler.connector.reset_cache()
                server.run_dry()
    assert loaded_turns
