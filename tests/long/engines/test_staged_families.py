"""Engines of every family that hand pages over by way of host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines import contents, probes
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.engines.pairs import ALL, Family, hand_over_all, nearly_full, one_by_one
from tests.engines.steps import eventually
from tests.engines.test_families import FEW, LENGTHS, UNLIKE
from tests.engines.test_staging import STAGED

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWorld:
    """Engines of a family."""

    family: Family  # whose
    prefill: Engine  # prefills for others, and stages
    decode: Engine  # decodes with blocks of the same size, and stages
    wide: Engine  # does both, with larger blocks, and stages
    direct: Engine  # does both, and does not stage


@pytest.fixture(scope="module", params=ALL, ids=lambda family: str(family.name))
def world(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StagedWorld]:
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family.name)
    with fleet(checkpoints[family.name], folder, **family.options) as engines:
        started = StagedWorld(
            family=family,
            prefill=engines.launch("prefill", "kv_producer", extra=STAGED),
            decode=engines.launch("decode", "kv_consumer", extra=STAGED),
            wide=engines.launch("wide", "kv_both", extra=STAGED, block_size=64),
            direct=engines.launch("direct", "kv_both"),
        )
        engines.wait_started()
        yield started


def test_families(world: StagedWorld) -> None:
    """Between two that stage, and where only one of the two does."""
    lengths = LENGTHS if world.family.steady else FEW
    hand_over_all(world.family, world.prefill, world.decode, lengths, seed=40)
    hand_over_all(world.family, world.prefill, world.direct, lengths[::2], seed=41)
    hand_over_all(world.family, world.direct, world.decode, lengths[1::2], seed=42)
    for engine in (world.prefill, world.decode):
        eventually(lambda engine=engine: engine.run(probes.host_pages) == (0, 0))  # type: ignore[misc]


def test_families_with_other_blocks(world: StagedWorld) -> None:
    lengths = UNLIKE if world.family.steady else FEW
    hand_over_all(world.family, world.prefill, world.wide, lengths, seed=43)
    hand_over_all(world.family, world.wide, world.decode, lengths, seed=44)
    hand_over_all(world.family, world.wide, world.direct, lengths[::2], seed=45)
    eventually(lambda: world.wide.run(probes.host_pages) == (0, 0))


def test_poisoned_caches(world: StagedWorld) -> None:
    """Nothing that was in a block before its load can be seen."""
    for length in nearly_full(world.family.blocks[0]):
        world.decode.run(contents.fill, float("nan"))
        count = 3 if world.family.steady else 2
        tokens = prompt(length, seed=46)
        got, expected = one_by_one(world.family, world.prefill, world.decode, tokens, count)
        world.decode.run(contents.fill, 0.0)
        assert got == expected, f"{length} tokens"
