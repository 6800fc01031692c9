"""Engines of different versions of vLLM hand over to each other.

The pair of the oldest and the newest version is among the tests of ``vllm``, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.early import early_loads, hand_over_early, hand_over_preempted
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.engines.steps import eventually, hand_over, idle_blocks, pulled_by, texts
from tests.long.versions.environments import HERE, OTHERS, VERSIONS, interpreter

pytestmark = pytest.mark.timeout(600)

LENGTHS = (2, 5, 31, 33, 63, 65, 79, 95, 97, 111, 129, 161, 200, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint, and what is to be expected of it."""

    left: int = 0
    chunk: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    steady: bool = True


MODELS = {
    "llama": Model(),
    "gemma3": Model(left=1),
    # Before 0.32, vLLM's CPU build has no convolution of float32.
    "granite4": Model(left=1, chunk=192, options={"dtype": "bfloat16"}, steady=False),
}

LOADS_ONE_GROUP_ONLY = OTHERS[0]
"""A version that can load for models with one cache group only."""


class EnginesOf(Protocol):
    """Returns an engine of a version; of several alike, that with a number."""

    def __call__(self, version: str, number: int = 0, *, staged: bool = False) -> Engine: ...


ORDINARY = "ordinary"
"""An engine of this version without the connector."""

_seeds = itertools.count(500)


def role(version: str, model: str) -> str:
    """The role of an engine: both, where its vLLM can load."""
    return "kv_producer" if version == LOADS_ONE_GROUP_ONLY and model != "llama" else "kv_both"


def pairs() -> Iterator[Any]:
    """The pairs of engines, prefill first; the oldest and the newest version of each model first.

    Equal versions in other environments are a check of that version by itself. Windows and states
    go between each version and this one; what two others make of them shows there.
    """
    for model in MODELS:
        ordered = sorted(
            itertools.product(VERSIONS, repeat=2), key=lambda pair: {*pair} != {OTHERS[0], HERE}
        )
        for source, target in ordered:
            if (source == target == HERE) or role(target, model) != "kv_both":
                continue
            if model != "llama" and HERE not in (source, target):
                continue
            yield pytest.param(model, source, target)


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EnginesOf]:
    """Engines of one model, each started when it is first asked for."""
    model: str = request.param
    started: dict[tuple[str, bool], list[Engine]] = {}
    folder = tmp_path_factory.mktemp(model)
    chunks = {"max_num_batched_tokens": MODELS[model].chunk}
    with fleet(checkpoints[model], folder, **MODELS[model].options, **chunks) as launched:

        def start(version: str, staged: bool) -> Engine:
            if version == ORDINARY:
                return launched.launch(version).wait_started()
            return launched.launch(
                f"v{version}-staged" if staged else f"v{version}",
                role(version, model),
                {"staging": staged},
                python=interpreter(version),
            ).wait_started()

        def engine(version: str, number: int = 0, *, staged: bool = False) -> Engine:
            same = started.setdefault((version, staged), [])
            while len(same) <= number:
                same.append(start(version, staged))
            return same[number]

        yield engine


@pytest.mark.parametrize(("engines", "source", "target"), list(pairs()), indirect=["engines"])
def test_pair(request: pytest.FixtureRequest, engines: EnginesOf, source: str, target: str) -> None:
    """Right texts, every token from the other engine, every block free again; early, too."""
    model = MODELS[request.node.callspec.params["engines"]]
    prefill, decode = engines(source), engines(target, 1 if source == target else 0)
    seed = next(_seeds)
    prompts = [prompt(length, seed) for length in LENGTHS]
    expected = right_texts(model, engines, prompts)
    free, before = [idle_blocks(each) for each in (prefill, decode)], pulled_by(decode)
    assert handed_over(model, prefill, decode, prompts) == expected
    assert pulled_by(decode) - before == sum(length - model.left for length in LENGTHS)
    check_early(model, engines, prefill, decode)
    assert [idle_blocks(each) for each in (prefill, decode)] == free


def check_early(model: Model, engines: EnginesOf, prefill: Engine, decode: Engine) -> None:
    """Decode reads the pages of finished chunks, also of some that are computed again."""
    seed = next(_seeds)
    prompts = [prompt(length, seed) for length in (1, 33, 65, 200, 700)]
    expected, begun = right_texts(model, engines, prompts), early_loads(decode)
    early = [hand_over_early(prefill, decode, each, max_tokens=16)[0] for each in prompts]
    assert early == expected
    preempted = hand_over_preempted(prefill, decode, prompts[-1], 2, max_tokens=16)
    assert preempted == expected[-1:]
    assert early_loads(decode) > begun


@pytest.mark.parametrize("engines", ["llama"], indirect=True)
@pytest.mark.parametrize("staged", ["both", "prefill", "decode"])
@pytest.mark.parametrize(("source", "target"), [(OTHERS[0], HERE), (HERE, OTHERS[0])])
def test_staged_pair(engines: EnginesOf, source: str, target: str, staged: str) -> None:
    """By way of host memory on one side or both, also with a room, which waits for the ticket."""
    prefill = engines(source, staged=staged != "decode")
    decode = engines(target, staged=staged != "prefill")
    prompts = [prompt(length, next(_seeds)) for length in (*LENGTHS, 700)]
    expected = texts(engines(ORDINARY), *prompts, max_tokens=16)
    free = [idle_blocks(each) for each in (prefill, decode)]
    before, copied = pulled_by(decode), copies(prefill, decode)
    assert hand_over(prefill, decode, *prompts, max_tokens=16)[0] == expected
    assert hand_over_early(prefill, decode, *prompts, max_tokens=16) == expected
    assert pulled_by(decode) - before == 2 * sum(map(len, prompts))
    assert [idle_blocks(each) for each in (prefill, decode)] == free
    eventually(lambda: prefill.run(probes.host_pages) == decode.run(probes.host_pages) == (0, 0))
    made = [2 * len(prompts) if staged in ("both", each) else 0 for each in ("prefill", "decode")]
    assert [now - then for now, then in zip(copies(prefill, decode), copied, strict=True)] == made


def copies(prefill: Engine, decode: Engine) -> list[float]:
    """How many requests prefill has copied to host pages, and decode from there."""
    return [
        engine.run(probes.exposed).get(
            f'copy_seconds_count{{direction="{direction}",driver="loopback"}}', 0
        )
        for engine, direction in ((prefill, "to_host"), (decode, "to_device"))
    ]


def right_texts(model: Model, engines: EnginesOf, prompts: list[list[int]]) -> list[str]:
    """The texts of an ordinary engine; where they depend on how tokens were computed, those of two
    engines of this version, which ``test_families.py`` compares with ordinary ones.
    """
    if model.steady:
        return texts(engines(ORDINARY), *prompts, max_tokens=16)
    return handed_over(model, engines(HERE), engines(HERE, 1), prompts)


def handed_over(
    model: Model, prefill: Engine, decode: Engine, prompts: list[list[int]]
) -> list[str]:
    """The texts of prompts that are handed over together, or one by one."""
    if model.steady:
        return hand_over(prefill, decode, *prompts, max_tokens=16)[0]
    return [hand_over(prefill, decode, each, max_tokens=16)[0][0] for each in prompts]
