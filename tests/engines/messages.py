"""What an engine's process and a test say to each other; no vLLM here, tests do not import it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `engines.Engine` asks for: one prompt, decoded greedily."""

    id: str
    prompt: list[int]
    max_tokens: int
    params: dict[str, Any] | None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How a request ended; of several samples, the text of each."""

    id: str
    text: str
    tokens: list[int]
    finish_reason: str | None
    params: dict[str, Any] | None
    samples: list[str] = field(default_factory=list)
