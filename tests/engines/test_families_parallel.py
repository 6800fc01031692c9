"""States and latents between engines that split their model differently, byte for byte.

Each rank has a part of a state, or all of a latent; of a convolution, a part of each of its parts,
but all of what is not split. Put together as vLLM took them apart, they are what one rank has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_llama import prompt
from tests.engines import contents
from tests.engines.contents import Contents
from tests.engines.fleet import fleet
from tests.engines.pairs import DEEPSEEK, GRANITE, NEMOTRON, QWEN3_NEXT, Family, Pair
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import hand_over, pulled, texts

pytestmark = pytest.mark.timeout(300)

LENGTHS = (2, 5, 33, 97, 161, 300)


SPLIT = (GRANITE, NEMOTRON, QWEN3_NEXT, DEEPSEEK)
"""With states, or latents."""


@pytest.fixture(scope="module", params=SPLIT[:1], ids=lambda family: str(family.name))
def world(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    with start_world(request.param, checkpoints, tmp_path_factory) as started:
        yield started


@contextmanager
def start_world(
    family: Family, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """The engines of a family, as long as the block lasts."""
    folder = tmp_path_factory.mktemp(f"{family.name}-parallel")
    with fleet(checkpoints[family.name], folder, **family.options) as engines:
        started = Pair(
            family=family,
            one=engines.launch("one", "kv_both"),
            two=engines.launch("two", "kv_both", tensor_parallel_size=2, block_size=64),
        )
        engines.wait_started()
        yield started


def test_bytes(world: Pair) -> None:
    """Each way; afterwards all ranks have reported, and all blocks are back."""
    rest = at_rest(world.one, world.two)
    for seed, (prefill, decode) in enumerate(
        ((world.one, world.two), (world.two, world.one)), start=60
    ):
        for length in LENGTHS:
            tokens = prompt(length, seed)
            [ticket] = prefill.prefill(tokens)
            there, here = contents.of_both(prefill, decode, tokens, ticket)
            whole = [put_together(world.family, ranks) for ranks in (there, here)]
            assert contents.unequal(whole[:1], whole[1:]) == [], f"{length} tokens"
    come_to(rest, world.one, world.two)


def test_texts(world: Pair) -> None:
    """Where it does not show that two ranks round otherwise than one."""
    prompts = [prompt(length, seed=62) for length in LENGTHS]
    expected = texts(world.one, *prompts)
    for prefill, decode in ((world.one, world.two), (world.two, world.one)):
        got, counters = hand_over(prefill, decode, *prompts)
        assert got == expected
        assert pulled(counters) == sum(LENGTHS) - len(LENGTHS)


def put_together(family: Family, ranks: list[Contents]) -> Contents:
    """What one rank would have."""
    whole = {}
    for key in ranks[0]:
        shares = [rank[key] for rank in ranks]
        if key.endswith("latent"):
            assert all(np.array_equal(shares[0], share) for share in shares)
            whole[key] = shares[0]
        elif key.endswith("conv"):
            whole[key] = _convolution(family, shares)
        else:
            whole[key] = np.concatenate(shares, axis=0 if key.endswith("ssm") else 1)
    return whole


def _convolution(family: Family, shares: list[Any]) -> Any:
    """Part by part: first those of all ranks, or that of the first where it is whole on each."""
    ranks, start, parts = len(shares), 0, []
    for index, channels in enumerate(family.channels):
        copied = index in family.copied
        stop = start + (channels if copied else channels // ranks)
        part = [share[start:stop] for share in shares]
        if copied:
            assert all(np.array_equal(part[0], other) for other in part)
        parts += part[:1] if copied else part
        start = stop
    assert all(start == len(share) for share in shares)
    return np.concatenate(parts)
