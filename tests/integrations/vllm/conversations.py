"""Conversations between two engines that both prefill and decode, and what each turn cost them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.integrations.vllm import probes
from tests.integrations.vllm.engines import PREFILL, Engine
from tests.integrations.vllm.messages import Completion
from tests.integrations.vllm.steps import PULLED

TWO_WAY: dict[str, Any] = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
"""What both engines' ``kv_connector_extra_config`` needs; every token that can be pulled is."""
ROLE = "kv_both"
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
COMPUTED = "vllm:prompt_tokens_by_source[local_compute]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn gave and cost.

    Attributes:
        prompt: The whole prompt, with the turns before.
        completion: Decode's answer.
        computed: How many tokens of the prompt prefill computed.
        pulled: How many tokens of the prompt prefill loaded from decode.
    """

    prompt: list[int]
    completion: Completion
    computed: int
    pulled: int


@dataclass(kw_only=True)
class Conversation:
    """A conversation through two engines, as a router leads it."""

    prefill: Engine
    decode: Engine
    tokens: list[int] = field(default_factory=list)
    ticket: dict[str, Any] | None = None
    """What decode's last answer carried, for the next turn."""

    def say(self, words: Sequence[int], **options: Any) -> Turn:
        """Ask for the next answer, which then belongs to the conversation."""
        prompt = [*self.tokens, *words]
        before = self.prefill.run(probes.metrics)
        [prefilled] = self.prefill.generate(
            prompt, max_tokens=1, params=PREFILL if self.ticket is None else self.ticket
        )
        after = self.prefill.run(probes.metrics)
        assert prefilled.params, self.prefill.log()[-4000:]
        [completion] = self.decode.generate(prompt, params=prefilled.params, **options)
        self.ticket = completion.params
        self.tokens = [*prompt, *completion.tokens]
        return Turn(
            prompt=prompt,
            completion=completion,
            computed=int(after.get(COMPUTED, 0) - before.get(COMPUTED, 0)),
            pulled=int(after.get(PULLED, 0) - before.get(PULLED, 0)),
        )
