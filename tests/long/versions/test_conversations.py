"""Conversations between engines of different versions of vLLM: answers are pulled back, too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    check_turns,
)
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.long.versions.environments import HERE, OTHERS, VERSIONS, interpreter

pytestmark = pytest.mark.timeout(600)

EngineOf = Callable[[str], Engine]
"""Returns an engine of a version."""

LEFT = {"llama": 0, "gemma3": 1}
"""How many tokens of a prompt each model leaves to decode."""

ORDINARY = "ordinary"
"""An engine of this version without the connector."""


def pairs() -> Iterator[object]:
    """The pairs of versions, prefill first. What two older ones make of a turn shows in these."""
    for model in LEFT:
        for source, target in itertools.permutations(VERSIONS, 2):
            if HERE not in (source, target):
                continue
            # The oldest version loads for models with one cache group only.
            if model == "llama" or OTHERS[0] not in (source, target):
                yield pytest.param(model, source, target)


@pytest.fixture(scope="module")
def engine_of(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineOf]:
    """Engines of one model, each started when it is first asked for."""
    model: str = request.param
    started: dict[str, Engine] = {}
    folder = tmp_path_factory.mktemp(f"conversations-{model}")
    with fleet(checkpoints[model], folder, async_scheduling=False) as launched:

        def engine(version: str) -> Engine:
            if version not in started:
                engine = (
                    launched.launch(version)
                    if version == ORDINARY
                    else launched.launch(
                        f"v{version}", ROLE, TWO_WAY, RECOMPUTE, python=interpreter(version)
                    )
                )
                started[version] = engine.wait_started()
            return started[version]

        yield engine


@pytest.mark.parametrize(("engine_of", "source", "target"), list(pairs()), indirect=["engine_of"])
def test_three_turns(
    request: pytest.FixtureRequest, engine_of: EngineOf, source: str, target: str
) -> None:
    """Right texts, and prefill computes only what is new."""
    prefill, decode = engine_of(source), engine_of(target)
    left = LEFT[request.node.callspec.params["engine_of"]]
    conversation = Conversation(prefill=prefill, decode=decode)
    check_turns(engine_of(ORDINARY), conversation, left=left)
