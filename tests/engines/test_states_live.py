"""Recurrent states between real engines: what is special about them, beside `test_families.py`."""

from __future__ import annotations

from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import contents
from tests.engines.engines import PREFILL
from tests.engines.fleet import DOES_BOTH, Engines, cast
from tests.engines.steps import check_decoded, check_hand_over

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

engines = cast(
    "granite4",
    drafting=DOES_BOTH | N_GRAM,
    # Without a ticket, it is an ordinary engine, which the other must agree with.
    decode=DOES_BOTH,
)


def test_prefill_ends_after_one_token(engines: Engines) -> None:
    """Whatever a router asks for: a state that went on would not be the prompt's any more."""
    [completion] = engines["drafting"].generate(prompt(50, seed=36), params=PREFILL, max_tokens=5)
    assert len(completion.tokens) == 1
    decode = engines["decode"]
    check_decoded(decode, decode, prompt(50, seed=36), completion.params)


def test_prefilled_by_a_drafting_engine(engines: Engines) -> None:
    """Its states have scratch columns, and scratch slots, which stay behind."""
    prompts = [prompt(length, seed=37) for length in (1, 2, 33, 96, 97)]
    drafting, decode = engines["drafting"], engines["decode"]
    check_hand_over(decode, drafting, decode, *prompts, left=1)
    # Not by texts: drafting on top of states is wrong on this build of vLLM, without a connector,
    # too.
    contents.check_crossing(decode, drafting, *prompts[1:])
