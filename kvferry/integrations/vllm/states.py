"""How recurrent layers keep their state inside a page: one table, ``STATES``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry.core.layout import Field
from kvferry.integrations.vllm.pages import Page

State = Callable[[Page], tuple[Field, ...]]

STATES: Mapping[str, State] = {}
"""What is known about the inside of a state, by vLLM's name of its kind (``mamba_type``)."""


def whole(page: Page) -> tuple[Field, ...]:
    """A state whose inside is unknown: it moves as a whole, between engines that split it alike."""
    place = page.place
    replicated = page.spec.tp_replicated
    return (
        page.field(
            "state",
            unit=page.spec.state_content_size_bytes,
            shard=(0, 1) if replicated else (place.tp, place.tp + 1),
            dtype="uint8",
        ),
    )
