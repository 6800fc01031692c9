"""Prompts with images (`families.build_idefics3`), for engines in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engines import probes
from tests.engines.engines import PREFILL, Engine
from tests.engines.families import IMAGE, IMAGE_TOKENS
from tests.engines.messages import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids with ``IMAGE`` where an image is, and a seed for each image.

    ``options`` are other parts of vLLM's prompt: names that a client gives to images, and settings
    of the image processor.
    """

    ids: list[int]
    images: Sequence[int] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """How many tokens there are once each image has its own."""
        return len(self.ids) + (IMAGE_TOKENS - 1) * self.ids.count(IMAGE)


def answers(
    engine: Engine, *prompts: Prompt, params: Any = None, max_tokens: int = 16
) -> list[Completion]:
    """What an engine answers to prompts that come together.

    ``params`` are the ``kv_transfer_params`` of all, or a list of each one's.
    """
    each = params if isinstance(params, list) else [params] * len(prompts)
    ids: list[str] = engine.run(_submit, engine.name, prompts, each, max_tokens)
    return engine.results(ids)


def prefill(engine: Engine, *prompts: Prompt) -> list[dict[str, Any]]:
    """Prefill for another engine; return the tickets."""
    return [each.params or {} for each in answers(engine, *prompts, params=PREFILL, max_tokens=1)]


def hand_over(
    source: Engine, target: Engine, *prompts: Prompt
) -> tuple[list[list[int]], dict[str, float]]:
    """Prefill on one engine, decode on another: the tokens, and what the other counted."""
    before = target.run(probes.metrics)
    completions = answers(target, *prompts, params=prefill(source, *prompts))
    ended = [each.finish_reason for each in completions]
    assert ended == ["length"] * len(prompts), target.log()[-4000:]
    after = target.run(probes.metrics)
    counted = {name: value - before.get(name, 0) for name, value in after.items()}
    return [each.tokens for each in completions], counted


def tokens(engine: Engine, *prompts: Prompt) -> list[list[int]]:
    """The tokens of an engine's answers without a ticket."""
    return [each.tokens for each in answers(engine, *prompts)]


def _submit(
    engine: Any, name: str, prompts: Sequence[Prompt], params: Sequence[Any], max_tokens: int
) -> list[str]:
    from vllm import SamplingParams

    ids = []
    for prompt, each in zip(prompts, params, strict=True):
        _submit.number += 1  # type: ignore[attr-defined]
        ids.append(f"{name}-media{_submit.number}")  # type: ignore[attr-defined]
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            # An answer with it would be an image more in the next turn.
            logit_bias={IMAGE: -100},
            extra_args={"kv_transfer_params": each},
        )
        engine.add_request(ids[-1], _as_vllm_takes_it(prompt), sampling)
    return ids


_submit.number = 0  # type: ignore[attr-defined]


def _as_vllm_takes_it(prompt: Prompt) -> dict[str, Any]:
    taken: dict[str, Any] = {"prompt_token_ids": prompt.ids, **prompt.options}
    if prompt.images:
        taken.setdefault("multi_modal_data", {"image": [_image(seed) for seed in prompt.images]})
    return taken


def _image(seed: int) -> Any:
    """Noise, of a size that depends on the seed."""
    import numpy as np
    from PIL import Image

    shape = (40 + seed % 7 * 10, 90, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))
