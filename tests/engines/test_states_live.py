"""Recurrent states between real engines: what is special about them, beside `test_families.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import contents, probes
from tests.engines.engines import PREFILL, Engine
from tests.engines.fleet import fleet
from tests.engines.steps import eventually, hand_over, idle_blocks, pulled, texts

pytestmark = pytest.mark.timeout(300)

N_GRAM: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}
"""Drafts from the prompt itself: no cache of its own, but wider convolution states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """Engines of a model with states and attention."""

    drafting: Engine  # drafts, and so has room for more columns; prefills and decodes
    # decodes, and believes any ticket; prefills. Without a ticket, it is an ordinary engine, which
    # the others must agree with.
    decode: Engine


@pytest.fixture(scope="module")
def hybrid(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hybrid]:
    with fleet(checkpoints["granite4"], tmp_path_factory.mktemp("hybrid")) as engines:
        started = Hybrid(
            drafting=engines.launch("drafting", "kv_both", **N_GRAM),
            decode=engines.launch("decode", "kv_both", extra={"verify_prompt": False}),
        )
        engines.wait_started()
        yield started


def test_swapped_states(hybrid: Hybrid) -> None:
    """The control: X, decoded from the states and pages of Y, is Y's text."""
    x, y = prompt(200, seed=32), prompt(200, seed=33)
    # What the decode engine computes itself, the last token, is the same in both.
    y[-1] = x[-1]
    [completion] = hybrid.decode.generate(x, params=hybrid.drafting.prefill(y))
    assert completion.text == texts(hybrid.decode, y)[0] != texts(hybrid.decode, x)[0]


def test_prompt_logprobs_on_prefill(hybrid: Hybrid) -> None:
    """They need the state after the last token, and decode the one before: it computes the prompt
    itself."""
    tokens = prompt(90, seed=36)
    free = idle_blocks(hybrid.drafting)
    [params] = hybrid.drafting.prefill(tokens, prompt_logprobs=1)
    assert params == {}
    [completion] = hybrid.decode.generate(tokens, params=params)
    assert completion.text == texts(hybrid.decode, tokens)[0]
    assert "asked for prompt_logprobs" in hybrid.drafting.log()
    eventually(lambda: hybrid.drafting.run(probes.free_blocks) == free)


def test_a_state_of_other_tokens_is_refused(hybrid: Hybrid) -> None:
    """A state serves the prompt that it was computed for, and no longer one."""
    front, whole = prompt(100, seed=34), [*prompt(100, seed=34), *prompt(30, seed=35)]
    free = idle_blocks(hybrid.drafting)
    [completion] = hybrid.decode.generate(whole, params=hybrid.drafting.prefill(front))
    assert completion.finish_reason == "error"
    assert "states" in hybrid.decode.log()
    hybrid.drafting.run(probes.reset_prefix_cache)  # a refused ticket says nothing to anybody
    eventually(lambda: hybrid.drafting.run(probes.free_blocks) == free)


def test_prefill_ends_after_one_token(hybrid: Hybrid) -> None:
    """Whatever a router asks for: a state that went on would not be the prompt's any more."""
    free = idle_blocks(hybrid.drafting)
    [completion] = hybrid.drafting.generate(prompt(50, seed=36), params=PREFILL, max_tokens=5)
    assert len(completion.tokens) == 1
    [decoded] = hybrid.decode.generate(prompt(50, seed=36), params=completion.params)
    assert decoded.text == texts(hybrid.decode, prompt(50, seed=36))[0]
    eventually(lambda: hybrid.drafting.run(probes.free_blocks) == free)


def test_prefilled_by_a_drafting_engine(hybrid: Hybrid) -> None:
    """Its states have scratch columns, and scratch slots, which stay behind."""
    prompts = [prompt(length, seed=37) for length in (1, 2, 33, 96, 97)]
    got, counters = hand_over(hybrid.drafting, hybrid.decode, *prompts)
    assert got == texts(hybrid.decode, *prompts)
    assert pulled(counters) == sum(map(len, prompts)) - len(prompts)


def test_states_of_engines_that_draft_and_do_not(hybrid: Hybrid) -> None:
    """Byte for byte, each way. Not by their texts: drafting on top of states is wrong on this build
    of vLLM, without a connector, too."""
    for length in (2, 33, 97):
        tokens = prompt(length, seed=38)
        for source, target in (
            (hybrid.decode, hybrid.drafting),
            (hybrid.drafting, hybrid.decode),
        ):
            [ticket] = source.prefill(tokens)
            assert contents.unequal(*contents.of_both(source, target, tokens, ticket)) == []
