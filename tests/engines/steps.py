"""What most tests do with engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.engines import probes
from tests.engines.engines import Engine

PATIENCE_SECONDS = 110.0
PULLED = "vllm:prompt_tokens_by_source[external_kv_transfer]"

SAMPLES: dict[str, Any] = {"n": 2, "temperature": 1.0, "top_k": 1}
"""Two samples of a prompt, which both take the likeliest token: vLLM refuses ``n`` where the
temperature is 0."""


def hand_over(
    prefill: Engine, decode: Engine, *prompts: Sequence[int], **options: Any
) -> tuple[list[str], dict[str, float]]:
    """Prefill on one engine, decode on another: the texts, and what decode counted meanwhile."""
    before = decode.run(probes.metrics)
    completions = decode.generate(*prompts, params=prefill.prefill(*prompts), **options)
    ended = [c.finish_reason for c in completions]
    assert ended == ["length"] * len(prompts), (
        f"{decode.log()[-4000:]}\nThe engine it loaded from:\n{prefill.log()[-4000:]}"
    )
    after = decode.run(probes.metrics)
    counted = {name: value - before.get(name, 0) for name, value in after.items()}
    return [c.text for c in completions], counted


def pulled(counters: dict[str, float]) -> float:
    """Prompt tokens that came from another engine: vLLM's proof that nothing was recomputed."""
    return counters[PULLED]


def pulled_by(engine: Engine) -> float:
    """What an engine has `pulled` since it started."""
    counters: dict[str, float] = engine.run(probes.metrics)
    return counters.get(PULLED, 0)


def texts(engine: Engine, *prompts: Sequence[int], **options: Any) -> list[str]:
    return [completion.text for completion in engine.generate(*prompts, **options)]


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds; fail if it does not within a long time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.005)


def idle_blocks(engine: Engine) -> int:
    """Wait until an engine has no request and holds no pages: how many blocks are free then."""
    eventually(lambda: engine.run(probes.statuses) == [])
    free: int = engine.run(probes.free_blocks)
    return free
