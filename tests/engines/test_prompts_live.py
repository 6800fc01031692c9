"""Prompts that are more than fresh token ids, between real engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import PREFILL, Engine
from tests.engines.fleet import fleet
from tests.engines.messages import Completion
from tests.engines.steps import eventually, hand_over, idle_blocks, pulled, texts

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def embedding(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, ...]]:
    """Three engines that take embeddings instead of token ids; the last one believes any ticket,
    and caches prefixes."""
    folder = tmp_path_factory.mktemp("embedding")
    with fleet(checkpoint, folder, enable_prompt_embeds=True) as engines:
        started = (
            engines.launch("prefill", "kv_producer"),
            engines.launch("decode", "kv_consumer"),
            engines.launch(
                "believing",
                "kv_consumer",
                extra={"verify_prompt": False},
                enable_prefix_caching=True,
            ),
        )
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
    prefill, decode, _ = embedding
    before = decode.run(probes.metrics)
    ticket = ask(prefill, prompt(length, seed=50), PREFILL, max_tokens=1).params
    completion = ask(decode, prompt(length, seed=50), ticket)
    [expected] = reference.generate(prompt(length, seed=50), max_tokens=16)
    assert completion.tokens == expected.tokens
    after = decode.run(probes.metrics)
    assert after["vllm:kvferry_tokens"] - before.get("vllm:kvferry_tokens", 0) == length


def test_a_ticket_for_other_embeddings_is_refused(embedding: tuple[Engine, ...]) -> None:
    prefill, decode, _ = embedding
    original = prompt(40, seed=51)
    ticket = ask(prefill, original, PREFILL, max_tokens=1).params
    completion = ask(decode, [*original[:20], (original[20] + 1) % 512, *original[21:]], ticket)
    assert completion.finish_reason == "error"
    assert "made for another prompt" in decode.log()


def submit_mixed(
    engine: Any,
    request: str,
    mixed: tuple[Sequence[int], Sequence[int], Sequence[bool]],
    params: dict[str, Any] | None,
    max_tokens: int,
) -> None:
    """Ask with token ids, the embeddings of other ones, and which of them is used where."""
    from safetensors.torch import load_file
    from vllm import SamplingParams

    ids, embedded, mask = mixed
    weights = load_file(Path(engine.vllm_config.model_config.model) / "model.safetensors")
    rows = weights["model.embed_tokens.weight"][list(embedded)]
    extra = {"kv_transfer_params": params}
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
    )
    asked = {"prompt_token_ids": list(ids), "prompt_embeds": rows, "prompt_is_token_ids": mask}
    engine.add_request(request, asked, sampling)


def ask_mixed(engine: Engine, mixed: Any, params: Any, max_tokens: int = 16) -> Completion:
    request = f"{engine.name}-mixed"
    engine.run(submit_mixed, request, mixed, params, max_tokens)
    [completion] = engine.results([request])
    return completion


IDS, EMBEDDED = prompt(70, seed=54), prompt(70, seed=55)
IDS_FIRST = [True] * 40 + [False] * 30
IDS_LAST = [False] * 30 + [True] * 40


def meant(mask: Sequence[bool]) -> list[int]:
    """The token ids that a mixed prompt stands for."""
    return [one if is_id else other for one, other, is_id in zip(IDS, EMBEDDED, mask, strict=True)]


@pytest.mark.parametrize("mask", [IDS_FIRST, IDS_LAST])
def test_mixed_prompt(
    reference: Engine, embedding: tuple[Engine, ...], mask: Sequence[bool]
) -> None:
    """Token ids and embeddings in one prompt are handed over, too."""
    prefill, decode, _ = embedding
    ticket = ask_mixed(prefill, (IDS, EMBEDDED, mask), PREFILL, max_tokens=1).params
    completion = ask_mixed(decode, (IDS, EMBEDDED, mask), ticket)
    [expected] = reference.generate(meant(mask), max_tokens=16)
    assert completion.tokens == expected.tokens


def test_a_ticket_for_other_positions_is_refused(embedding: tuple[Engine, ...]) -> None:
    """The same ids and embeddings, used elsewhere, are another prompt."""
    prefill, decode, _ = embedding
    ticket = ask_mixed(prefill, (IDS, EMBEDDED, IDS_FIRST), PREFILL, max_tokens=1).params
    before = decode.log().count("made for another prompt")
    completion = ask_mixed(decode, (IDS, EMBEDDED, IDS_LAST), ticket)
    assert completion.finish_reason == "error"
    assert decode.log().count("made for another prompt") == before + 1


def test_swapped_positions(reference: Engine, embedding: tuple[Engine, ...]) -> None:
    """The control: an engine that does not look answers the next request without a ticket, too,
    from pages of another prompt."""
    prefill, _, believing = embedding
    ticket = ask_mixed(prefill, (IDS, EMBEDDED, IDS_FIRST), PREFILL, max_tokens=1).params
    ask_mixed(believing, (IDS, EMBEDDED, IDS_LAST), ticket)
    completion = ask_mixed(believing, (IDS, EMBEDDED, IDS_LAST), None)
    [expected] = reference.generate(meant(IDS_LAST), max_tokens=16)
    assert completion.tokens != expected.tokens


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
    free = idle_blocks(decode)
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
