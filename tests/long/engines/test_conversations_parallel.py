"""Conversations between one rank and two, each way, of a model with a KV head per query head."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_llama import build
from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    same_answer,
    stop_token,
    words,
)
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.engines.ranks import at_rest, come_to

pytestmark = pytest.mark.timeout(600)

HEADS = {"num_key_value_heads": 4}
"""As many as query heads; the checkpoint of most tests has two."""


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """An engine of one rank and one of two; the second schedules asynchronously."""
    model = tmp_path_factory.mktemp("heads")
    context = multiprocessing.get_context("forkserver")  # prepared by the fixture checkpoint
    builder = context.Process(target=build, args=(model,), kwargs=HEADS)
    builder.start()
    builder.join()
    assert builder.exitcode == 0
    with fleet(model, tmp_path_factory.mktemp("parallel")) as started:
        pair = [
            started.launch(
                f"tp{ranks}",
                ROLE,
                extra=TWO_WAY,
                transfer=RECOMPUTE,
                tensor_parallel_size=ranks,
                async_scheduling=ranks == 2,
            )
            for ranks in (1, 2)
        ]
        started.wait_started()
        yield pair


@pytest.mark.parametrize("prefill_ranks", [1, 2])
def test_turns(engines: list[Engine], prefill_ranks: int) -> None:
    """Every rank pulls its part of an answer; then every rank is at rest again."""
    prefill, decode = engines if prefill_ranks == 1 else reversed(engines)
    rest = at_rest(prefill, decode)
    conversation = Conversation(prefill=prefill, decode=decode)
    for spoken, at_least in ((40, 50), (5, 3), (60, 20)):
        known, said = len(conversation.tokens), words(spoken)
        stop = [stop_token(engines[0], [*conversation.tokens, *said], at_least)]
        turn = conversation.say(said, max_tokens=100, stop_token_ids=stop)
        assert same_answer(engines[0], turn, max_tokens=100, stop_token_ids=stop)
        left = 0 if prefill_ranks == 1 else 1  # two ranks have computed the stop token, too
        assert turn.computed == (spoken + left if known else spoken)
        assert turn.pulled == (known - left if known else 0)
    conversation.end()
    come_to(rest, prefill, decode)
