"""Prompts that are more than fresh token ids, between real engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.integrations.vllm import probes
from tests.integrations.vllm.engines import PREFILL, Engine
from tests.integrations.vllm.fleet import fleet
from tests.integrations.vllm.messages import Completion
from tests.integrations.vllm.steps import eventually, hand_over, pulled, texts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def embedding(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, ...]]:
    """Two engines that take embeddings instead of token ids."""
    folder = tmp_path_factory.mktemp("embedding")
    with fleet(checkpoint, folder, enable_prompt_embeds=True) as engines:
        started = engines.launch("prefill", "kv_producer"), engines.launch("decode", "kv_consumer")
        engines.wait_started()
        yield started


def submit_embeddings(
    engine: Any, request: str, ids: Sequence[int], params: dict[str, Any] | None, max_tokens: int
) -> None:
    """Ask with the model's own embeddings of some token ids (`engines.Engine.run`)."""
    from safetensors.torch import load_file
    from vllm import SamplingParams

    weights = load_file(Path(engine.vllm_config.model_config.model) / "model.safetensors")
    rows = weights["model.embed_tokens.weight"][list(ids)]
    extra = {"kv_transfer_params": params}
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
    )
    engine.add_request(request, {"prompt_embeds": rows}, sampling)


def ask(engine: Engine, ids: Sequence[int], params: Any, max_tokens: int = 16) -> Completion:
    request = f"{engine.name}-embeddings"
    engine.run(submit_embeddings, request, ids, params, max_tokens)
    [completion] = engine.results([request])
    return completion


@pytest.mark.parametrize("length", [1, 5, 33, 200])
def test_embeddings(reference: Engine, embedding: tuple[Engine, ...], length: int) -> None:
    """They are handed over like the token ids that they are of, and answered alike."""
    prefill, decode = embedding
    before = decode.run(probes.metrics)
    ticket = ask(prefill, prompt(length, seed=50), PREFILL, max_tokens=1).params
    completion = ask(decode, prompt(length, seed=50), ticket)
    [expected] = reference.generate(prompt(length, seed=50), max_tokens=16)
    assert completion.tokens == expected.tokens
    after = decode.run(probes.metrics)
    assert after["vllm:kvferry_tokens"] - before.get("vllm:kvferry_tokens", 0) == length


def test_a_ticket_for_other_embeddings_is_refused(embedding: tuple[Engine, ...]) -> None:
    prefill, decode = embedding
    original = prompt(40, seed=51)
    ticket = ask(prefill, original, PREFILL, max_tokens=1).params
    completion = ask(decode, [*original[:20], (original[20] + 1) % 512, *original[21:]], ticket)
    assert completion.finish_reason == "error"
    assert "made for another prompt" in decode.log()


@pytest.fixture(scope="module")
def sliding(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, ...]]:
    """Two sliding groups and a full one: an ordinary engine, and two that cache prefixes."""
    with fleet(checkpoints["gemma3"], tmp_path_factory.mktemp("sliding")) as engines:
        options: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 96}
        started = (
            engines.launch("ordinary"),
            engines.launch("prefill", "kv_producer", **options),
            engines.launch("decode", "kv_consumer", block_size=64, **options),
        )
        engines.wait_started()
        yield started


def test_partial_hits_of_windows(sliding: tuple[Engine, ...]) -> None:
    """What is cached here differs from group to group; the rest of each is pulled."""
    ordinary, prefill, decode = sliding
    free = decode.run(probes.free_blocks)
    common = prompt(300, seed=52)
    hand_over(prefill, decode, common, max_tokens=2)
    hits = []
    for shared in (40, 64, 65, 97, 130, 200, 256, 290):
        for more in (1, 28, 60, 150):
            tokens = [*common[:shared], *prompt(more, seed=53)]
            got, counters = hand_over(prefill, decode, tokens, max_tokens=8)
            assert got == texts(ordinary, tokens, max_tokens=8), f"{shared} tokens and {more}"
            hits.append(len(tokens) - 1 - pulled(counters))
    assert len(set(hits)) > 3
    assert max(hits) >= 256
    eventually(lambda: decode.run(probes.free_blocks) == free)
