"""What most tests do with engines: hand prompts over, and compare with an ordinary engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.engines import probes, ranks
from tests.engines.engines import Completion, Engine, Prompt
from tests.waiting import eventually

PULLED = "vllm:prompt_tokens_by_source[external_kv_transfer]"

SAMPLES: dict[str, Any] = {"n": 2, "temperature": 1.0, "top_k": 1}
"""Two samples of a prompt, which both take the likeliest token: vLLM refuses ``n`` where the
temperature is 0."""
OF_BOTH = ("logit_bias", "lora", "trace_headers")
"""The options of a request that prefill needs, too."""


def check_hand_over(
    ordinary: Engine, prefill: Engine, decode: Engine, *prompts: Any, left: int = 0, **options: Any
) -> list[Completion]:
    """Prefill on one engine and decode on another; see that the texts are an ordinary engine's.

    And that every token came from prefill but ``left`` of each prompt, which decode computes, and
    that prefill hears when its pages have been read.
    """
    before, held = pulled_by(decode), prefill.run(ranks.holds)
    tickets = prefill.prefill(*prompts, **_of_both(options))
    completions = decode.generate(*prompts, params=tickets, **options)
    _check_texts(ordinary, completions, prompts, options, f"{decode.log()}\n{prefill.log()}")
    # vLLM counts the only token of a prompt as computed here, also where it was loaded.
    handed = sum(len(each) - max(left, len(each) == 1) for each in prompts)
    assert pulled_by(decode) - before == handed * options.get("n", 1)
    eventually(lambda: prefill.run(ranks.holds) == held)
    return completions


def check_decoded(
    ordinary: Engine, decode: Engine, prompt: Prompt, ticket: Any, **options: Any
) -> Completion:
    """See that decode answers a ticket's prompt as an ordinary engine does."""
    completions = decode.generate(prompt, params=ticket, **options)
    _check_texts(ordinary, completions, [prompt], options, decode.log())
    return completions[0]


def check_refused(
    decode: Engine, prompt: Prompt, ticket: Any, why: str = "", **options: Any
) -> Completion:
    """See that a ticket's request fails without any text, and that a warning says why."""
    [completion] = decode.generate(prompt, params=ticket, **options)
    assert (completion.finish_reason, completion.text) == ("error", "")
    assert why in warning(decode, completion.id)
    return completion


def warning(engine: Engine, request: str) -> str:
    """The warnings of an engine's log about a request."""
    lines = engine.log().splitlines()
    return "\n".join(line for line in lines if request in line and "WARNING" in line)


def pulled_by(engine: Engine) -> int:
    """How many prompt tokens an engine has from others: vLLM's proof that none was recomputed."""
    return int(counted(engine, PULLED))


def counted(engine: Engine, name: str) -> float:
    """The value of one of vLLM's counters (`probes.metrics`); 0 if it is not there yet."""
    counters: dict[str, float] = engine.run(probes.metrics)
    return counters.get(name, 0)


def texts(engine: Engine, *prompts: Prompt, **options: Any) -> list[str]:
    return [completion.text for completion in engine.generate(*prompts, **options)]


def idle_blocks(engine: Engine) -> int:
    """Wait until an engine has no request and holds no pages: how many blocks are free then."""
    eventually(lambda: engine.run(probes.statuses) == [])
    free: int = engine.run(probes.free_blocks)
    return free


def _of_both(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in OF_BOTH}


def _check_texts(
    ordinary: Engine,
    completions: Sequence[Completion],
    prompts: Sequence[Any],
    options: dict[str, Any],
    log: str,
) -> None:
    asked = {name: value for name, value in options.items() if name not in SAMPLES}
    expected = [[text] * options.get("n", 1) for text in texts(ordinary, *prompts, **asked)]
    assert [each.samples for each in completions] == expected, log[-8000:]
