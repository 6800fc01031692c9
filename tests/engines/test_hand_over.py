"""Prompts prefilled by one real engine and decoded by another give an ordinary engine's text.

``test_families.py`` has other lengths and sizes of blocks, and the bytes.
"""

from __future__ import annotations

import pytest

from examples.tiny_llama import prompt
from tests.engines import ranks
from tests.engines.engines import PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import check_decoded, counted, pulled_by, texts
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)


def test_among_ordinary_requests(reference: Engine, prefill: Engine, decode: Engine) -> None:
    """One engine serves prompts with and without a ticket in the same steps."""
    prompts = [prompt(length, seed=2) for length in (40, 200, 41, 201)]
    [first, second] = prefill.prefill(*prompts[:2])
    completions = decode.generate(*prompts, params=[first, second, None, None])
    assert [c.text for c in completions] == texts(reference, *prompts)


def test_producer_that_went_on_generating(
    reference: Engine, prefill: Engine, decode: Engine
) -> None:
    """A router that lets it generate more than one token gets a ticket for the prompt alone."""
    [completion] = prefill.generate(prompt(64), params=PREFILL, max_tokens=5)
    check_decoded(reference, decode, prompt(64), completion.params)


def test_prompt_that_goes_on(reference: Engine, prefill: Engine, decode: Engine) -> None:
    """A ticket covers the front of a longer prompt: the rest is computed here."""
    [ticket] = prefill.prefill(prompt(100))
    before = pulled_by(decode)
    check_decoded(reference, decode, [*prompt(100), *prompt(30, seed=3)], ticket)
    assert pulled_by(decode) - before == 100


def test_prompt_logprobs_read_nothing(reference: Engine, prefill: Engine, decode: Engine) -> None:
    """vLLM computes such a prompt itself; the producer is told, and lets its pages go."""
    [ticket] = prefill.prefill(prompt(80))
    check_decoded(reference, decode, prompt(80), ticket, prompt_logprobs=1)
    eventually(lambda: prefill.run(ranks.holds) == [0])


def test_same_prompt_at_once(reference: Engine, start_engine: StartEngine) -> None:
    """No request takes blocks from the prefix cache that another one is still filling."""
    prefill, decode = (
        start_engine(
            role,
            role,
            async_scheduling=True,
            enable_prefix_caching=True,
            max_num_batched_tokens=96,
        )
        for role in ("kv_producer", "kv_consumer")
    )
    tickets = prefill.prefill(*[prompt(257, seed=8)] * 4)
    got = texts(decode, *[prompt(257, seed=8)] * 4, params=tickets)
    assert got == texts(reference, prompt(257, seed=8)) * 4


def test_swapped_caches(reference: Engine, prefill: Engine, start_engine: StartEngine) -> None:
    """The control: an engine that verifies nothing decodes X from Y's cache, and gives Y's text.

    So the texts of all other tests can only come from the pages that were pulled. The engine has
    the connector by its name alone: installed, that needs no module path.
    """
    credulous = start_engine(
        "credulous",
        "kv_consumer",
        extra={"verify_prompt": False},
        transfer={"kv_connector_module_path": None},
    )
    x, y = prompt(200, seed=10), prompt(200, seed=11)
    # What the decode engine computes itself, the last token, is the same in both.
    y[-1] = x[-1]
    [completion] = credulous.generate(x, params=prefill.prefill(y))
    assert completion.text == texts(reference, y)[0] != texts(reference, x)[0]


def test_preempted_on_decode(reference: Engine, prefill: Engine, start_engine: StartEngine) -> None:
    """A request that was preempted after its load is computed here, and goes on where it was."""
    decode = start_engine("small-decode", "kv_consumer", num_gpu_blocks_override=36)
    prompts = [prompt(length, seed=12) for length in (310, 311, 312)]
    tickets = prefill.prefill(*prompts)
    got = texts(decode, *prompts, params=tickets, max_tokens=60)
    assert got == texts(reference, *prompts, max_tokens=60)
    assert counted(decode, "vllm:num_preemptions") > 0
