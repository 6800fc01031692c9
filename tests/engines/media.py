"""Prompts with images (`families.build_idefics3`), for engines in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engines.families import IMAGE, IMAGE_TOKENS

NO_IMAGE: dict[str, Any] = {"logit_bias": {IMAGE: -100}}
"""Options of requests: an answer with this token would be an image more in the next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPrompt:
    """Token ids with ``IMAGE`` where an image is, and a seed for each image; an `engines.Prompt`.

    ``options`` are other parts of vLLM's prompt: names that a client gives to images, and settings
    of the image processor.
    """

    ids: list[int]
    images: Sequence[int] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many tokens there are once each image has its own."""
        return len(self.ids) + (IMAGE_TOKENS - 1) * self.ids.count(IMAGE)

    def __call__(self, engine: Any) -> dict[str, Any]:
        taken: dict[str, Any] = {"prompt_token_ids": self.ids, **self.options}
        if self.images:
            taken["multi_modal_data"] = {"image": [_image(seed) for seed in self.images]}
        return taken


def _image(seed: int) -> Any:
    """Noise, of a size that depends on the seed."""
    import numpy as np
    from PIL import Image

    shape = (40 + seed % 7 * 10, 90, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))
