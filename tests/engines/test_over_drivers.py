"""The hand-over between real engines again, over nixl and over ucx."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    check_turns,
    forget,
)
from tests.engines.early import check_early
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import hand_over, pulled, texts

pytestmark = pytest.mark.timeout(600)

LENGTHS = (2, 5, 31, 32, 33, 65, 256, 511)
CHUNK = 64
DRIVERS: dict[str, dict[str, Any]] = {
    "nixl": {"driver": "nixl"},
    # Where UCX has shared memory, it moves bytes by that, and connects and talks by tcp.
    "ucx": {"driver": "ucx", "driver_options": {"transports": ["self", "sm", "tcp"]}},
    "ucx over tcp": {"driver": "ucx", "driver_options": {"transports": ["self", "tcp"]}},
}

Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module", params=["nixl", "ucx"])
def engines(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """One rank, and two that compute prompts in chunks; both prefill and decode."""
    options: dict[str, Any] = {"extra": DRIVERS[request.param] | TWO_WAY, "transfer": RECOMPUTE}
    with fleet(checkpoint, tmp_path_factory.mktemp("drivers")) as started:
        one = started.launch("one", ROLE, **options)
        two = started.launch(
            "two", ROLE, **options, tensor_parallel_size=2, max_num_batched_tokens=CHUNK
        )
        started.wait_started()
        yield one, two


def test_hand_over(reference: Engine, engines: Pair) -> None:
    """Each way: every token is pulled."""
    for seed, (source, target) in enumerate((engines, engines[::-1]), start=10):
        prompts = [prompt(length, seed) for length in LENGTHS]
        rest = at_rest(source, target)
        got, counters = hand_over(source, target, *prompts)
        assert got == texts(reference, *prompts)
        assert pulled(counters) == counters["vllm:kvferry_tokens"] == sum(LENGTHS)
        forget(source, target)
        come_to(rest, source, target)


def test_early(reference: Engine, engines: Pair) -> None:
    """In chunks, with one preemption."""
    one, two = engines
    check_early(reference, two, one, CHUNK)


def test_conversation(reference: Engine, engines: Pair) -> None:
    """Prefill pulls the turns before from decode, answers included."""
    one, two = engines
    check_turns(reference, Conversation(prefill=one, decode=two))
