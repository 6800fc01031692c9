"""Engines of different versions of vLLM hand over to each other, and lead conversations.

The pair of the oldest and the newest version is among the tests of ``vllm``, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import probes
from tests.engines.conversations import Conversation, check_turns, words
from tests.engines.early import check_early, hand_over_early
from tests.engines.engines import Engine
from tests.engines.fleet import TALKS, fleet
from tests.engines.pairs import BF16, GEMMA, Family, hand_over_all
from tests.engines.steps import check_hand_over, idle_blocks, texts
from tests.long.versions.environments import HERE, OTHERS, VERSIONS, interpreter

pytestmark = pytest.mark.timeout(600)

LENGTHS = (2, 5, 31, 33, 63, 65, 79, 95, 97, 111, 129, 161, 200, 300)
FAMILIES = {
    "llama": Family(name="llama"),
    "gemma3": GEMMA,
    # Before 0.32, vLLM's CPU build has no convolution of float32.
    "granite4": Family(name="granite4", left=1, chunk=192, options=BF16, steady=False),
}
LOADS_ONE_GROUP_ONLY = OTHERS[0]
"""A version that can load for models with one cache group only."""

EngineOf = Callable[..., Engine]
"""Returns the engine of a version, or a second one, or a staged one."""

_seeds = itertools.count(500)


def pairs() -> Iterator[Any]:
    """The pairs of engines, prefill first.

    Equal versions in other environments are a check of that version by itself. Windows and states
    go between each version and this one; what two others make of them shows there.
    """
    for name, (source, target) in itertools.product(
        FAMILIES, itertools.product(VERSIONS, repeat=2)
    ):
        several = name != "llama"
        shown = several and (HERE not in (source, target) or target == LOADS_ONE_GROUP_ONLY)
        if not (source == target == HERE or shown):
            yield pytest.param(name, source, target)


@pytest.fixture(scope="module")
def engine_of(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineOf]:
    """Engines of one family, each started when it is first asked for."""
    family = FAMILIES[request.param]
    started: dict[tuple[str, bool, bool], Engine] = {}
    folder = tmp_path_factory.mktemp(family.name)
    options = {**family.options, "max_num_batched_tokens": family.chunk, "async_scheduling": False}
    with fleet(checkpoints[family.name], folder, **options) as launched:

        def engine(version: str, *, second: bool = False, staged: bool = False) -> Engine:
            key = version, second, staged
            if key not in started:
                launch = dict(TALKS)
                if version == LOADS_ONE_GROUP_ONLY and family.name != "llama":
                    launch = {"role": "kv_producer"}
                if staged:
                    launch["extra"] = {"staging": True}
                python = interpreter(version)
                started[key] = launched.launch(f"v{version}", **launch, python=python)
                started[key].wait_started()
            return started[key]

        yield engine


each_pair = pytest.mark.parametrize(
    ("engine_of", "source", "target"), list(pairs()), indirect=["engine_of"]
)


@each_pair
def test_pair(
    request: pytest.FixtureRequest, engine_of: EngineOf, source: str, target: str
) -> None:
    """Right texts, every token from the other engine, every block free again; early, too.

    With two engines that lead conversations, prefill computes only what is new of a turn.
    """
    family = FAMILIES[request.node.callspec.params["engine_of"]]
    prefill, decode = engine_of(source), engine_of(target, second=source == target)
    free = [idle_blocks(each) for each in (prefill, decode)]
    hand_over_all(family, prefill, decode, LENGTHS, next(_seeds))
    if family.steady:
        check_early(prefill, prefill, decode, family.chunk, next(_seeds))
        if family.name == "llama" or source != LOADS_ONE_GROUP_ONLY:
            talk = Conversation(prefill=prefill, decode=decode)
            check_turns(prefill, talk, left=family.left)
    assert given_up(prefill, decode) == free


def given_up(*engines: Engine) -> list[int]:
    """How many blocks are free once what is held for next turns is given up."""
    for each in engines:
        each.run(probes.end_holds)
    return [idle_blocks(each) for each in engines]


@pytest.mark.parametrize("engine_of", ["llama"], indirect=True)
@pytest.mark.parametrize("staged", ["both", "prefill", "decode"])
@pytest.mark.parametrize(("source", "target"), [(OTHERS[0], HERE), (HERE, OTHERS[0])])
def test_staged_pair(engine_of: EngineOf, source: str, target: str, staged: str) -> None:
    """By way of host memory on one side or both, also with a room, which waits for the ticket."""
    prefill = engine_of(source, staged=staged != "decode")
    decode = engine_of(target, staged=staged != "prefill")
    prompts = [words(length) for length in (*LENGTHS, 700)]
    free = [idle_blocks(each) for each in (prefill, decode)]
    check_hand_over(prefill, prefill, decode, *prompts)
    assert hand_over_early(prefill, decode, *prompts) == texts(prefill, *prompts)
    assert given_up(prefill, decode) == free
