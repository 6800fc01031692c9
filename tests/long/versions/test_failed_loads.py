"""Failed loads on the oldest version: it takes the ids of blocks where later ones take requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import Engine, EngineError
from tests.engines.fixtures import StartEngine
from tests.engines.fleet import fleet
from tests.engines.steps import (
    check_decoded,
    check_hand_over,
    check_refused,
    idle_blocks,
    pulled_by,
)
from tests.long.versions.environments import OTHERS, interpreter

pytestmark = pytest.mark.timeout(300)

OLDEST = OTHERS[0]
LENGTHS = (5, 65, 200)


@pytest.fixture(scope="module", params=["fail", "recompute", "recompute-staged"])
def decode(request: pytest.FixtureRequest, start_engine: StartEngine) -> Iterator[Engine]:
    name: str = request.param
    engine = start_engine(
        f"decode-{name}",
        "kv_both",
        extra={"staging": name.endswith("staged")},
        transfer={"kv_load_failure_policy": name.removesuffix("-staged")},
        python=interpreter(OLDEST),
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("why", ["another prompt", "given up"])
def test_failed_loads(reference: Engine, prefill: Engine, decode: Engine, why: str) -> None:
    """They are refused in the scheduler half, or are read, and fail in the worker half."""
    free, before = idle_blocks(decode), pulled_by(decode)
    for length in LENGTHS:
        asked = prompt(length, seed=600)
        [ticket] = prefill.prefill(prompt(length, seed=602) if why == "another prompt" else asked)
        if why == "given up":
            prefill.run(probes.end_holds)  # in the next step
            idle_blocks(prefill)
        if "decode-fail" in decode.name:
            check_refused(decode, asked, ticket)
        else:
            check_decoded(reference, decode, asked, ticket)
    assert (pulled_by(decode), idle_blocks(decode)) == (before, free)
    check_hand_over(reference, prefill, decode, *(prompt(each, seed=601) for each in LENGTHS))


def test_it_does_not_load_for_a_model_with_several_groups(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Its scheduler cannot be told of failed loads there; the error says what can be done."""
    with fleet(checkpoints["gemma3"], tmp_path) as engines:
        engine = engines.launch("refused", "kv_both", python=interpreter(OLDEST))
        with pytest.raises(EngineError, match=r"vLLM 0\.29.* cache groups.*set kv_role"):
            engine.wait_started()
