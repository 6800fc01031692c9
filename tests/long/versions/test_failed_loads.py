"""Failed loads on the oldest version: it takes the ids of blocks where later ones take requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import Engine, EngineError
from tests.engines.fleet import fleet
from tests.engines.steps import PULLED, hand_over, idle_blocks, pulled_by, texts
from tests.long.versions.environments import OTHERS, interpreter

pytestmark = pytest.mark.timeout(300)

OLDEST = OTHERS[0]
LENGTHS = (5, 65, 200)


@pytest.fixture(scope="module")
def prefill(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with fleet(checkpoint, tmp_path_factory.mktemp("prefill")) as engines:
        yield engines.launch("prefill", "kv_both").wait_started()


@pytest.fixture(scope="module", params=["fail", "recompute", "recompute-staged"])
def decode(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    name: str = request.param
    with fleet(checkpoint, tmp_path_factory.mktemp(name)) as engines:
        yield engines.launch(
            f"decode-{name}",
            "kv_both",
            {"staging": name.endswith("staged")},
            {"kv_load_failure_policy": name.removesuffix("-staged")},
            python=interpreter(OLDEST),
        ).wait_started()


def check_failed(decode: Engine, prefill: Engine, seed: int, tickets: list[Any]) -> None:
    """What decode makes of tickets that it cannot load: an error, or its own text."""
    prompts = [prompt(length, seed) for length in LENGTHS]
    free, before = idle_blocks(decode), pulled_by(decode)
    completions = decode.generate(*prompts, params=tickets, max_tokens=8)
    if "fail" in decode.name:
        assert [each.finish_reason for each in completions] == ["error"] * len(LENGTHS)
    else:
        assert [each.text for each in completions] == texts(prefill, *prompts, max_tokens=8)
    assert pulled_by(decode) == before, PULLED
    assert idle_blocks(decode) == free
    counted = decode.run(probes.metrics)
    got, _ = hand_over(prefill, decode, *(prompt(length, seed + 1) for length in LENGTHS))
    assert len(set(got)) == len(LENGTHS)
    assert decode.run(probes.metrics)["vllm:kvferry_loads"] == counted.get(
        "vllm:kvferry_loads", 0
    ) + len(LENGTHS)


def test_tickets_of_other_prompts(prefill: Engine, decode: Engine) -> None:
    """They are refused in the scheduler half."""
    tickets = prefill.prefill(*(prompt(length, seed=602) for length in LENGTHS))
    check_failed(decode, prefill, 600, tickets)


def test_pages_that_were_given_up(prefill: Engine, decode: Engine) -> None:
    """They are read, and fail in the worker half."""
    tickets = prefill.prefill(*(prompt(length, seed=610) for length in LENGTHS))
    prefill.run(probes.reset_prefix_cache)  # ends the holds in the next step
    idle_blocks(prefill)
    check_failed(decode, prefill, 610, tickets)


def test_it_does_not_load_for_a_model_with_several_groups(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Its scheduler cannot be told of failed loads there; the error says what can be done."""
    with fleet(checkpoints["gemma3"], tmp_path) as engines:
        engine = engines.launch("refused", "kv_both", python=interpreter(OLDEST))
        with pytest.raises(EngineError, match=r"vLLM 0\.29.* cache groups.*set kv_role"):
            engine.wait_started()
