"""Prompts prefilled by one real engine and decoded by another give an ordinary engine's text."""

from __future__ import annotations

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import eventually, hand_over, idle_blocks, pulled, texts

pytestmark = pytest.mark.timeout(300)

LENGTHS = (2, 5, 31, 32, 33, 64, 65, 255, 300, 511)


def test_all_at_once(reference: Engine, prefill: Engine, decode: Engine) -> None:
    prompts = [prompt(length, seed=1) for length in LENGTHS]
    got, counters = hand_over(prefill, decode, *prompts)
    assert got == texts(reference, *prompts)
    assert pulled(counters) == sum(LENGTHS)
    assert counters["vllm:kvferry_tokens"] == sum(LENGTHS)
    assert counters["vllm:kvferry_loads"] == len(LENGTHS)


def test_a_prompt_of_one_token(reference: Engine, prefill: Engine, decode: Engine) -> None:
    """vLLM counts its only token as computed here, as it must be to go on from it."""
    got, counters = hand_over(prefill, decode, prompt(1))
    assert got == texts(reference, prompt(1))
    assert counters["vllm:kvferry_tokens"] == 1


def test_texts_depend_on_the_whole_prompt(reference: Engine) -> None:
    """Otherwise equal texts would prove nothing."""
    original = prompt(511)
    altered = [[*original[:i], (original[i] + 1) % 512, *original[i + 1 :]] for i in (0, 250, 510)]
    assert len(set(texts(reference, original, *altered))) == 4


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
    tickets = [c.params for c in prefill.generate(prompt(64), params=PREFILL, max_tokens=5)]
    [completion] = decode.generate(prompt(64), params=tickets)
    assert completion.text == texts(reference, prompt(64))[0]


def test_prompt_that_goes_on(reference: Engine, prefill: Engine, decode: Engine) -> None:
    """A ticket covers the front of a longer prompt: the rest is computed here."""
    front, whole = prompt(100), [*prompt(100), *prompt(30, seed=3)]
    before = decode.run(probes.metrics)
    [completion] = decode.generate(whole, params=prefill.prefill(front))
    assert completion.text == texts(reference, whole)[0]
    after = decode.run(probes.metrics)
    assert pulled(after) - pulled(before) == 100


def test_prompt_logprobs_read_nothing(reference: Engine, prefill: Engine, decode: Engine) -> None:
    """vLLM computes such a prompt itself; the producer is told, and lets its pages go."""
    free = idle_blocks(prefill)
    [completion] = decode.generate(
        prompt(80), params=prefill.prefill(prompt(80)), prompt_logprobs=1
    )
    assert completion.text == texts(reference, prompt(80))[0]
    eventually(lambda: prefill.run(probes.free_blocks) == free)


@pytest.fixture(scope="module")
def overlapping(start_engine: StartEngine) -> tuple[Engine, Engine]:
    """Engines that schedule a step ahead, prefill in chunks, and cache prefixes."""
    options = {
        "async_scheduling": True,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 96,
    }
    return (
        start_engine("overlapping-prefill", "kv_producer", **options),
        start_engine("overlapping-decode", "kv_consumer", **options),
    )


def test_async_scheduling_and_chunks(reference: Engine, overlapping: tuple[Engine, Engine]) -> None:
    prompts = [prompt(length, seed=4) for length in LENGTHS]
    got, counters = hand_over(*overlapping, *prompts)
    assert got == texts(reference, *prompts)
    assert pulled(counters) == sum(LENGTHS)


def test_same_prompt_at_once(reference: Engine, overlapping: tuple[Engine, Engine]) -> None:
    """No request takes blocks from the prefix cache that another one is still filling."""
    prompts = [prompt(257, seed=8)] * 4
    got, _ = hand_over(*overlapping, *prompts)
    assert got == texts(reference, *prompts)


def test_swapped_caches(reference: Engine, prefill: Engine, start_engine: StartEngine) -> None:
    """The control: an engine that verifies nothing decodes X from Y's cache, and gives Y's text.

    So the texts of all other tests can only come from the pages that were pulled.
    """
    credulous = start_engine("credulous", "kv_consumer", extra={"verify_prompt": False})
    x, y = prompt(200, seed=10), prompt(200, seed=11)
    # What the decode engine computes itself, the last token, is the same in both.
    y[-1] = x[-1]
    [completion] = credulous.generate(x, params=prefill.prefill(y))
    assert completion.text == texts(reference, y)[0] != texts(reference, x)[0]
    assert "verify_prompt is false" in credulous.log()


def test_preempted_on_decode(reference: Engine, prefill: Engine, start_engine: StartEngine) -> None:
    """A request that was preempted after its load is computed here, and goes on where it was."""
    decode = start_engine("small-decode", "kv_consumer", num_gpu_blocks_override=36)
    prompts = [prompt(length, seed=12) for length in (310, 311, 312)]
    tickets = prefill.prefill(*prompts)
    before = decode.run(probes.metrics)
    completions = decode.generate(*prompts, params=tickets, max_tokens=60)
    assert [c.text for c in completions] == texts(reference, *prompts, max_tokens=60)
    after = decode.run(probes.metrics)
    assert after["vllm:num_preemptions"] > before["vllm:num_preemptions"]


@pytest.fixture(scope="module")
def wide(start_engine: StartEngine) -> Engine:
    """Decodes with blocks of 64 tokens what others prefill with blocks of 32, and prefills, too.

    It has the connector by its name alone: installed, that needs no module path.
    """
    named = {"kv_connector_module_path": None}
    return start_engine(
        "wide", "kv_both", transfer=named, block_size=64, num_gpu_blocks_override=256
    )


def test_other_block_size(reference: Engine, prefill: Engine, decode: Engine, wide: Engine) -> None:
    prompts = [prompt(length, seed=14) for length in LENGTHS]
    for source, target in ((prefill, wide), (wide, decode)):
        got, counters = hand_over(source, target, *prompts)
        assert got == texts(reference, *prompts)
        assert pulled(counters) == sum(LENGTHS)


@pytest.mark.parametrize("length", [30, 64, 250])
def test_poisoned_cache(
    reference: Engine, prefill: Engine, decode: Engine, wide: Engine, length: int
) -> None:
    """Every byte of a loaded page is written or zeroed, whatever was there before.

    Decoding stays inside the loaded pages: vLLM's kernels read the unwritten end of a page, so NaN
    in a fresh one, which is vLLM's own, makes an ordinary engine's text wrong as well.
    """
    for engine, block in ((decode, 32), (wide, 64)):
        tokens = -length % block + 1
        engine.run(probes.fill_caches, float("nan"))
        got, _ = hand_over(prefill, engine, prompt(length, seed=15), max_tokens=tokens)
        engine.run(probes.fill_caches, 0.0)
        assert got == texts(reference, prompt(length, seed=15), max_tokens=tokens)
