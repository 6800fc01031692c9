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

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def embedding(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, ...]]:
    """Two engines that take embeddings instead of token ids."""
    folder = tmp_path_factory.mktemp("embedding")
    with fleet(checkpoint, folder, enable_prompt_embeds=True) as engines:
        started = (
            engines.launch("prefill", "kv_producer"),
            engines.launch("decode", "kv_consumer"),
        )
        engines.wait_started()
        yield started


Mixed = tuple[Sequence[int], Sequence[int], Sequence[bool]]
"""Token ids, other ones whose embeddings are taken, and which of the two counts where."""


def submit(
    engine: Any, request: str, mixed: Mixed, params: dict[str, Any] | None, max_tokens: int
) -> None:
    """Ask with token ids and the model's own embeddings of others (`engines.Engine.run`)."""
    from safetensors.torch import load_file
    from vllm import SamplingParams

    ids, embedded, mask = mixed
    weights = load_file(Path(engine.vllm_config.model_config.model) / "model.safetensors")
    asked: dict[str, Any] = {"prompt_embeds": weights["model.embed_tokens.weight"][list(embedded)]}
    if ids:
        asked |= {"prompt_token_ids": list(ids), "prompt_is_token_ids": mask}
    sampling = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args={"kv_transfer_params": params},
    )
    engine.add_request(request, asked, sampling)


def ask_mixed(engine: Engine, mixed: Mixed, params: Any, max_tokens: int = 16) -> Completion:
    request = f"{engine.name}-mixed"
    engine.run(submit, request, mixed, params, max_tokens)
    [completion] = engine.results([request])
    return completion


def ask(engine: Engine, ids: Sequence[int], params: Any, max_tokens: int = 16) -> Completion:
    """By embeddings alone."""
    return ask_mixed(engine, ([], ids, []), params, max_tokens)


@pytest.mark.parametrize("length", [1, 200])
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
    prefill, decode = embedding
    ticket = ask_mixed(prefill, (IDS, EMBEDDED, mask), PREFILL, max_tokens=1).params
    completion = ask_mixed(decode, (IDS, EMBEDDED, mask), ticket)
    [expected] = reference.generate(meant(mask), max_tokens=16)
    assert completion.tokens == expected.tokens
