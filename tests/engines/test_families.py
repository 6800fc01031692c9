"""Models that keep other caches than Llama's: the text, and the bytes, of an ordinary engine.

Of two families an ordinary engine's text depends on how a token was computed: in a prompt or after
it, alone or with others. Their prompts are handed over one by one, each with the token that an
ordinary engine answered to its front; what is to come is that engine's text from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_llama import prompt
from tests.engines import contents, probes
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.engines.steps import eventually, hand_over, idle_blocks, pulled, texts

pytestmark = pytest.mark.timeout(300)

LENGTHS = (1, 2, 5, 31, 32, 33, 64, 79, 80, 81, 95, 96, 97, 111, 112, 128, 143, 144, 161, 300, 511)
"""Around the ends of blocks of 32, 64 and 96 tokens, of a window, of what it leaves behind."""
UNLIKE = (2, 5, 31, 33, 63, 65, 79, 95, 97, 111, 113, 127, 129, 161, 191, 193, 300, 511)
FEW = (2, 33, 96, 112, 129, 289, 300)
NEARLY_FULL = (30, 31, 62, 63, 94, 95, 126, 127, 190, 287, 318)
"""A token or two below the end of a block, of some size."""

BF16 = {"dtype": "bfloat16"}
PLAIN_MLA = {"attention_backend": "CPU_MLA"}
"""On machines with AMX, vLLM takes another backend, which knows bfloat16 only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One of `families.FAMILIES`.

    Attributes:
        name: its key.
        left: prompt tokens that are left to the engine that decodes.
        blocks: tokens in a block where 32 are asked for, and where 64 are.
        steady: an ordinary engine's text does not depend on how its tokens were computed.
        options: for its engines.
    """

    name: str
    left: int = 0
    blocks: tuple[int, int] = (32, 64)
    steady: bool = True
    options: dict[str, Any] = field(default_factory=dict)


ALL = (
    Family(name="qwen3"),
    Family(name="gemma3", left=1),
    Family(name="mistral", left=1),
    Family(name="gpt_oss", left=1),
    Family(name="granite4", left=1, blocks=(96, 128)),
    Family(name="nemotron_h", left=1, blocks=(96, 128)),
    Family(name="qwen3_next", left=1, blocks=(288, 320), steady=False, options=BF16),
    Family(name="deepseek", blocks=(16, 16), steady=False, options=PLAIN_MLA),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The engines of a family.

    Attributes:
        family: whose.
        ordinary: what the others must agree with; without a ticket, an engine computes all itself.
        one: prefills and decodes.
        wide: does both, with blocks of another size; with the same if there is no choice.
    """

    family: Family
    ordinary: Engine
    one: Engine
    wide: Engine


@pytest.fixture(scope="module", params=ALL, ids=lambda family: str(family.name))
def world(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family.name)
    with fleet(checkpoints[family.name], folder, **family.options) as engines:
        one = engines.launch("one", "kv_both")
        wide = engines.launch("wide", "kv_both", block_size=64)
        engines.wait_started()
        yield World(family=family, ordinary=one, one=one, wide=wide)


def hand_over_all(
    world: World, prefill: Engine, decode: Engine, lengths: Sequence[int], seed: int
) -> None:
    """The text is right, all came from the other engine, and all blocks come back."""
    engines = prefill, decode
    free = [idle_blocks(engine) for engine in engines]
    before = decode.run(probes.metrics)
    prompts = [prompt(length, seed) for length in lengths]
    if world.family.steady:
        got, _ = hand_over(prefill, decode, *prompts, max_tokens=16)
        assert got == texts(world.ordinary, *prompts, max_tokens=16)
        # vLLM counts the only token of a prompt as computed here, also where it was loaded.
        handed = sum(len(each) - max(world.family.left, len(each) == 1) for each in prompts)
    else:
        for each in prompts:
            got_tokens, expected = one_by_one(world, prefill, decode, each, 5)
            assert got_tokens == expected, f"{len(each)} tokens"
        handed = sum(lengths)
    assert pulled(decode.run(probes.metrics)) - pulled(before) == handed
    eventually(lambda: [engine.run(probes.free_blocks) for engine in engines] == free)
    assert prefill.run(probes.statuses) == decode.run(probes.statuses) == []


def one_by_one(
    world: World, prefill: Engine, decode: Engine, tokens: list[int], count: int
) -> tuple[list[int], list[int]]:
    """What one engine answers with another's cache, and what it should."""
    if world.family.steady:
        [expected] = world.ordinary.generate(tokens, max_tokens=count)
        [completion] = decode.generate(tokens, params=prefill.prefill(tokens), max_tokens=count)
        return completion.tokens, expected.tokens
    [expected] = world.ordinary.generate(tokens, max_tokens=count + 1)
    whole = [*tokens, expected.tokens[0]]
    tickets = prefill.prefill(whole if world.family.left else tokens)
    [completion] = decode.generate(whole, params=tickets, max_tokens=count)
    return completion.tokens, expected.tokens[1:]


def test_texts(world: World) -> None:
    """Each way, with lengths that end on a border of one engine and not of the other's."""
    hand_over_all(world, world.one, world.wide, LENGTHS, seed=20)
    hand_over_all(world, world.wide, world.one, UNLIKE, seed=22)


def test_bytes(world: World) -> None:
    """Before anything is computed from it, an engine has what the other one computed."""
    for length in FEW:
        for prefill, decode in ((world.one, world.wide), (world.wide, world.one)):
            tokens = prompt(length, seed=23)
            [ticket] = prefill.prefill(tokens)
            there, here = contents.of_both(prefill, decode, tokens, ticket)
            assert contents.unequal(there, here) == [], f"{length} tokens"


def test_poisoned_cache(world: World) -> None:
    """Nothing that was in a page before its load can be seen.

    Decoding stays inside the loaded pages: see ``test_hand_over.py``.
    """
    unsteady = not world.family.steady
    pairs = (world.wide, world.one), (world.one, world.wide)
    for (prefill, decode), block in zip(pairs, world.family.blocks, strict=True):
        for length in NEARLY_FULL:
            decode.run(contents.fill, float("nan"))
            count = min(-(length + unsteady) % block + 1, 16)
            tokens = prompt(length, seed=24)
            clean = replace(world, ordinary=prefill)
            got, expected = one_by_one(clean, prefill, decode, tokens, count)
            decode.run(contents.fill, 0.0)
            assert got == expected, f"{length} tokens, blocks of {block}"


def test_texts_depend_on_the_whole_prompt(world: World) -> None:
    """Otherwise equal texts would prove nothing: windows aside, every token counts."""
    original = prompt(200, seed=25)
    altered = [[*original[:i], (original[i] + 1) % 512, *original[i + 1 :]] for i in (150, 199)]
    assert len(set(texts(world.ordinary, original, *altered))) == 3


def test_contents_are_told_apart(world: World) -> None:
    """The comparison of bytes sees one other token."""
    length, other = 129, prompt(129, seed=26)
    found = []
    for tokens in (other, [*other[:-3], (other[-3] + 1) % 512, *other[-2:]]):
        [ticket] = world.one.prefill(tokens)
        there, _ = contents.of_both(world.one, world.wide, tokens, ticket)
        found.append(there)
    unequal = contents.unequal(*found)
    assert len(unequal) == len(found[0][0]), f"of {length} tokens only {unequal} differ"
    assert all(np.any(part) for part in found[0][0].values())
