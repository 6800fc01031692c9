"""Engines of different versions of vLLM hand over to each other.

The pair of the oldest and the newest version is among the tests of ``vllm``; all are those of
``versions``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.fleet import fleet
from tests.integrations.vllm.steps import hand_over, idle_blocks, pulled, texts
from tests.integrations.vllm.versions.environments import HERE, OTHERS, VERSIONS, interpreter

pytestmark = [pytest.mark.versions, pytest.mark.timeout(600)]

LENGTHS = (2, 5, 31, 33, 63, 65, 79, 95, 97, 111, 129, 161, 200, 300)

LEFT = {"llama": 0, "gemma3": 1, "granite4": 1}
"""Each model, and how many of a prompt's tokens are left to the engine that decodes."""

OPTIONS: dict[str, dict[str, Any]] = {"llama": {}, "gemma3": {}, "granite4": {"dtype": "bfloat16"}}
"""For the engines of each model: before vLLM 0.32, its CPU build has no float32 convolution."""

LOADS_ONE_GROUP_ONLY = OTHERS[0]
"""A version that can load for models with one cache group only."""

EnginesOf = Callable[[str], Engine]

_seeds = itertools.count(500)


def role(version: str, model: str) -> str:
    """The role of an engine: both, where its vLLM can load."""
    return "kv_producer" if version == LOADS_ONE_GROUP_ONLY and LEFT[model] else "kv_both"


def pairs() -> Iterator[Any]:
    """The pairs of engines, prefill first; the oldest and the newest version of each model first.

    Equal versions in other environments are a check of that version by itself.
    """
    for model in LEFT:
        ordered = sorted(
            itertools.product(VERSIONS, repeat=2), key=lambda pair: {*pair} != {OTHERS[0], HERE}
        )
        for source, target in ordered:
            if (source == target == HERE) or role(target, model) != "kv_both":
                continue
            extreme = {source, target} == {OTHERS[0], HERE} and model == "llama"
            marks = [pytest.mark.vllm] if extreme else []
            yield pytest.param(model, source, target, marks=marks)


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EnginesOf]:
    """Engines of one model, by version; ``ordinary`` is one of this version without a connector."""
    model: str = request.param
    started: dict[str, list[Engine]] = {}
    folder = tmp_path_factory.mktemp(model)
    with fleet(checkpoints[model], folder, **OPTIONS[model]) as launched:

        def start(name: str) -> Engine:
            if name == "ordinary":
                return launched.launch(name).wait_started()
            return launched.launch(
                f"v{name}", role(name, model), python=interpreter(name)
            ).wait_started()

        def engine(name: str, number: int = 0) -> Engine:
            same = started.setdefault(name, [])
            while len(same) <= number:
                same.append(start(name))
            return same[number]

        yield engine


@pytest.mark.parametrize(("engines", "source", "target"), list(pairs()), indirect=["engines"])
def test_pair(request: pytest.FixtureRequest, engines: Any, source: str, target: str) -> None:
    """Equal texts, every token from the other engine, every block free again."""
    model = request.node.callspec.params["engines"]
    ordinary = engines("ordinary")
    prefill, decode = engines(source), engines(target, int(source == target))
    seed = next(_seeds)
    prompts = [prompt(length, seed) for length in LENGTHS]
    free = [idle_blocks(each) for each in (prefill, decode)]
    got, counters = hand_over(prefill, decode, *prompts, max_tokens=16)
    assert got == texts(ordinary, *prompts, max_tokens=16)
    assert pulled(counters) == sum(length - LEFT[model] for length in LENGTHS)
    assert counters["vllm:kvferry_loads"] == len(LENGTHS)
    assert [idle_blocks(each) for each in (prefill, decode)] == free
