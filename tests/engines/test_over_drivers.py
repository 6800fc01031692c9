"""The hand-over between real engines again: over nixl, over ucx, and by way of host memory.

``geometry/test_staged.py`` has the other kinds of cache, staged, without a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.conversations import Conversation, check_turns
from tests.engines.early import check_early
from tests.engines.engines import Engine
from tests.engines.fleet import TALKS, TWO_WAY, fleet
from tests.engines.steps import check_hand_over

pytestmark = pytest.mark.timeout(600)

LENGTHS = (2, 5, 31, 32, 33, 65, 256, 511)
CHUNK = 64
WAYS: dict[str, dict[str, Any]] = {
    "nixl": TWO_WAY | {"driver": "nixl"},
    # Where UCX has shared memory, it moves bytes by that, and connects and talks by tcp.
    "ucx": TWO_WAY | {"driver": "ucx", "driver_options": {"transports": ["self", "sm", "tcp"]}},
    "ucx over tcp": TWO_WAY | {"driver": "ucx", "driver_options": {"transports": ["self", "tcp"]}},
    "staged": {"staging": True},
}

Pair = tuple[Engine, Engine]


DIRECT = ["nixl", "ucx", pytest.param("ucx over tcp", marks=pytest.mark.slow)]
# A staged engine publishes no parts, and leads no conversations.
direct = pytest.mark.parametrize("engines", DIRECT, indirect=True)


@pytest.fixture(scope="module", params=[*DIRECT, "staged"])
def engines(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """One rank, and two that compute prompts in chunks; both prefill and decode."""
    options = TALKS | {"extra": WAYS[request.param], "enable_prefix_caching": True}
    with fleet(checkpoint, tmp_path_factory.mktemp("drivers")) as started:
        one = started.launch("one", **options, async_scheduling=True)
        two = started.launch("two", **options, tensor_parallel_size=2, max_num_batched_tokens=CHUNK)
        started.wait_started()
        yield one, two


def test_hand_over(reference: Engine, engines: Pair) -> None:
    """Each way: every token is pulled; and prompts that have their beginning from a load."""
    for seed, (source, target) in enumerate((engines, engines[::-1]), start=10):
        prompts = [prompt(length, seed) for length in LENGTHS]
        check_hand_over(reference, source, target, *prompts)
        longer = [*prompts[-1], *prompt(150, seed)]
        [ticket] = source.prefill(longer)
        [completion] = target.generate(longer, params=ticket)
        assert completion.text == reference.generate(longer)[0].text


@direct
def test_early(reference: Engine, engines: Pair) -> None:
    """In chunks, with one preemption."""
    one, two = engines
    check_early(reference, two, one, CHUNK)


@direct
def test_conversation(reference: Engine, engines: Pair) -> None:
    """Prefill pulls the turns before from decode, answers included."""
    one, two = engines
    check_turns(reference, Conversation(prefill=one, decode=two), 32)
