"""Engines that split their model differently hand over to each other, both ways."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import build, prompt
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import hand_over, pulled, texts

pytestmark = pytest.mark.timeout(600)

LENGTHS = (5, 65, 200)
VOCABULARY = 384
"""What 2, 3 and 4 ranks can share, and vLLM pads no further."""

TWELVE = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 12,
    "vocab_size": VOCABULARY,
}
CHECKPOINTS: dict[str, dict[str, int]] = {
    "2 KV heads": {"vocab_size": VOCABULARY},
    "1 KV head": TWELVE | {"num_key_value_heads": 1},
    "12 KV heads": TWELVE | {"num_key_value_heads": 12},
}

TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
CHUNKED = {"enable_prefix_caching": True, "max_num_batched_tokens": 96}
AHEAD = CHUNKED | {"async_scheduling": True}
"""Schedules a step before its ranks have reported the last one. A pipeline does so by itself, and
vLLM's CPU build does not have the two together."""

ENGINES: dict[str, dict[str, int]] = {
    "plain": {},
    "tp2": TP2,
    "tp3": {"tensor_parallel_size": 3},
    "tp4": {"tensor_parallel_size": 4},
    "pp2": PP2,
    "pp3": {"pipeline_parallel_size": 3},
    "tp2-pp2": TP2 | PP2,
    "tp2-block64": TP2 | {"block_size": 64, "num_gpu_blocks_override": 256},
    "block96": {"block_size": 96, "num_gpu_blocks_override": 180},
    "tp2-ahead": TP2 | AHEAD,
    "pp2-chunked": PP2 | CHUNKED,
}

HUBS = [("2 KV heads", "plain", ["tp2-ahead", "pp2-chunked"])]
"""A checkpoint, an engine, and those that it exchanges prompts with in both directions."""


def pairs(hubs: Sequence[tuple[str, str, Sequence[str]]]) -> list[Any]:
    return [
        pytest.param((checkpoint, hub), other, id=f"{checkpoint.replace(' ', '')}-{hub}-{other}")
        for checkpoint, hub, others in hubs
        for other in others
    ]


Checkpoints = Callable[[str], Path]
References = Callable[[Path], Engine]

_seeds = itertools.count(100)


def prompts() -> list[list[int]]:
    """New ones: what an earlier test left in a page must not help."""
    seed = next(_seeds)
    return [[token % VOCABULARY for token in prompt(length, seed)] for length in LENGTHS]


@pytest.fixture(scope="module")
def checkpoints(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Llamas of the shapes in ``CHECKPOINTS``, each made when it is first asked for."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("shape")
            context = multiprocessing.get_context("forkserver")
            builder = context.Process(target=build, args=(made[name],), kwargs=CHECKPOINTS[name])
            builder.start()
            builder.join()
            assert builder.exitcode == 0
        return made[name]

    return make


@pytest.fixture(scope="module")
def references(start_engine: StartEngine) -> Iterator[References]:
    """Ordinary engines, one per checkpoint."""
    started: dict[Path, Engine] = {}

    def start(checkpoint: Path) -> Engine:
        if checkpoint not in started:
            started[checkpoint] = start_engine("ordinary", model=checkpoint)
        return started[checkpoint]

    yield start
    for engine in started.values():
        engine.close()


@pytest.fixture(scope="module")
def hub(
    request: pytest.FixtureRequest, start_engine: StartEngine, checkpoints: Checkpoints
) -> Iterator[Engine]:
    """The first engine of a pair; the next pairs with the same one use it again."""
    checkpoint, name = request.param
    engine = start_engine(name, "kv_both", model=checkpoints(checkpoint), **ENGINES[name])
    yield engine
    engine.close()


@pytest.fixture
def other(
    request: pytest.FixtureRequest, start_engine: StartEngine, hub: Engine
) -> Iterator[Engine]:
    engine = start_engine(request.param, "kv_both", model=hub.model, **ENGINES[request.param])
    yield engine
    engine.close()


@pytest.mark.parametrize(("hub", "other"), pairs(HUBS), indirect=True)
def test_pair(hub: Engine, other: Engine, references: References) -> None:
    check_pair(hub, other, references)


def check_pair(hub: Engine, other: Engine, references: References) -> None:
    """Equal texts, all of them pulled; then every rank is at rest again, with every block free."""
    reference = references(hub.model)
    for source, target in ((hub, other), (other, hub)):
        given = prompts()
        rest = at_rest(source, target)
        got, counters = hand_over(source, target, *given)
        assert got == texts(reference, *given)
        assert pulled(counters) == counters["vllm:kvferry_tokens"] == sum(LENGTHS)
        assert counters["vllm:kvferry_loads"] == len(LENGTHS)
        assert not counters.get("vllm:kvferry_ignored_releases")
        come_to(rest, source, target)
