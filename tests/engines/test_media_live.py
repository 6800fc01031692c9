"""Prompts that are more than token ids, between real engines: with images, and with embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.engines import Engine
from tests.engines.families import IMAGE
from tests.engines.fleet import DECODES, DOES_BOTH, PREFILLS, TALKS, Engines, cast
from tests.engines.media import NO_IMAGE, MediaPrompt
from tests.engines.steps import check_hand_over, check_refused, counted

pytestmark = pytest.mark.timeout(300)

CACHING: dict[str, Any] = {"enable_prefix_caching": True}

engines = cast(
    "idefics3",
    # Computes a prompt with an image in several steps
    chunking=DOES_BOTH | CACHING | {"max_num_batched_tokens": 48},
    plain=TALKS | {"block_size": 64},
    two=TALKS | CACHING | {"tensor_parallel_size": 2},
    # Loads with any ticket. Without one, it is what the others must agree with.
    believing=DECODES | {"extra": {"verify_prompt": False}},
)

_seeds = itertools.count(1)


def with_image(image: int, **options: Any) -> MediaPrompt:
    """Text, an image, and text."""
    ids = [*prompt(20, seed=80), IMAGE, *prompt(9, seed=81)]
    return MediaPrompt(ids=ids, images=[image], options=options)


def fresh_prompts() -> list[MediaPrompt]:
    """Images at all places; no two calls return prompts with a common prefix of a block's size."""
    seed = next(_seeds) * 1000
    text = [prompt(40, seed + number) for number in range(8)]
    shapes: list[tuple[list[int], list[int]]] = [
        (text[0], []),
        ([IMAGE, *text[1]], [0]),
        ([*text[2], IMAGE, *text[2]], [1]),
        ([*text[3], IMAGE], [2]),
        ([IMAGE], [3]),
        ([*text[4], IMAGE, *text[5][:3], IMAGE, IMAGE, *text[5]], [4, 5, 4]),
        ([*text[6], IMAGE, *text[7]], [6]),
        ([*text[6], IMAGE, *text[7]], [7]),
    ]
    return [MediaPrompt(ids=ids, images=[seed + one for one in images]) for ids, images in shapes]


@pytest.mark.parametrize(
    ("source", "target"), [("chunking", "two"), ("plain", "chunking"), ("two", "plain")]
)
def test_images(engines: Engines, source: str, target: str) -> None:
    """Every token of every prompt comes from the other engine, and the answers are equal."""
    prompts, decode = fresh_prompts(), engines[target]
    got = check_hand_over(engines["believing"], engines[source], decode, *prompts, **NO_IMAGE)
    assert len({each.text for each in got}) == len(prompts)


@pytest.mark.parametrize(
    "other",
    [
        with_image(103),
        with_image(102, mm_processor_kwargs={"do_normalize": False}),
        with_image(102, media_io_kwargs={"image": {"image_mode": "L"}}),
    ],
    ids=["image", "processor", "mode"],
)
def test_another_image_is_refused(engines: Engines, other: MediaPrompt) -> None:
    [ticket] = engines["plain"].prefill(with_image(102))
    check_refused(engines["chunking"], other, ticket, "made for another prompt")


# Embeddings.

embedding = cast("llama", {"enable_prompt_embeds": True}, prefill=PREFILLS, decode=DECODES)


@dataclass(frozen=True)
class Embedded:
    """A prompt of the model's own embeddings of token ids."""

    ids: Sequence[int]

    def __call__(self, engine: Any) -> dict[str, Any]:
        from safetensors.torch import load_file

        weights = load_file(Path(engine.vllm_config.model_config.model) / "model.safetensors")
        return {"prompt_embeds": weights["model.embed_tokens.weight"][list(self.ids)]}


@pytest.mark.parametrize("length", [1, 200])
def test_embeddings(reference: Engine, embedding: Engines, length: int) -> None:
    """They are handed over like the token ids that they are of, and answered alike."""
    prefill, decode = embedding["prefill"], embedding["decode"]
    asked, before = Embedded(prompt(length, seed=55)), counted(decode, TOKENS)
    [completion] = decode.generate(asked, params=prefill.prefill(asked))
    assert completion.tokens == reference.generate(asked.ids)[0].tokens
    assert counted(decode, TOKENS) - before == length


TOKENS = "vllm:kvferry_tokens"
