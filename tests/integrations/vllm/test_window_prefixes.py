"""Loaded pages of sliding windows in a prefix cache, between engines with different block sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.families import WINDOW
from tests.integrations.vllm.fleet import fleet
from tests.integrations.vllm.steps import pulled_by, texts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def changed_at(whole: list[int], position: int) -> list[int]:
    """A prompt that goes on otherwise from a position, and ends soon after."""
    return [*whole[:position], *((token + 1) % 512 for token in whole[position : position + 3])]


@pytest.mark.parametrize(("there", "here", "loads"), [(96, 32, True), (32, 96, False)])
def test_a_shorter_prompt_with_the_same_beginning(
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    there: int,
    here: int,
    loads: bool,
) -> None:
    """Its window begins earlier: decode must not have a part of a page in its cache.

    Prefill with smaller blocks has freed that part, so decode computes the prompt itself.
    """
    with fleet(checkpoints["gemma3"], tmp_path_factory.mktemp("windows")) as engines:
        ordinary = engines.launch("ordinary")
        prefill = engines.launch("prefill", "kv_producer", block_size=there)
        decode = engines.launch(
            "decode",
            "kv_consumer",
            transfer={"kv_load_failure_policy": "recompute"},
            block_size=here,
            enable_prefix_caching=True,
        )
        engines.wait_started()
        assert WINDOW == 80, "so that windows begin where a page is split"
        for seed in range(3):
            whole = prompt(329 + 5 * seed, seed=seed)
            check(ordinary, prefill, decode, whole, loads)
            front = (len(whole) - 1) // here * here
            check(ordinary, prefill, decode, changed_at(whole, front), loads=None)


def check(
    ordinary: Engine, prefill: Engine, decode: Engine, asked: list[int], loads: bool | None
) -> None:
    """Compare texts; ``loads`` says whether decode must load, ``None`` if that does not matter."""
    before = pulled_by(decode)
    [completion] = decode.generate(asked, params=prefill.prefill(asked))
    assert completion.text == texts(ordinary, asked)[0]
    assert loads is None or (pulled_by(decode) > before) == loads
