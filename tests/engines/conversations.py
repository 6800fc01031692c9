"""Conversations between two engines that both prefill and decode, and what each turn cost them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import PREFILL, Engine
from tests.engines.messages import Completion
from tests.engines.ranks import holds
from tests.engines.steps import PULLED, eventually, idle_blocks

TWO_WAY: dict[str, Any] = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
"""What both engines' ``kv_connector_extra_config`` needs; every token that can be pulled is."""
ROLE = "kv_both"
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
COMPUTED = "vllm:prompt_tokens_by_source[local_compute]"
EDITED = 'edited_histories_total{driver="loopback"}'

_seeds = itertools.count(5000)


def words(count: int) -> list[int]:
    """Return new tokens: no two calls return the same, so that no engine has them in its cache."""
    return prompt(count, seed=next(_seeds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What prefill made of a turn."""

    prompt: list[int]  # The whole prompt, with the turns before
    ticket: dict[str, Any]  # The ``kv_transfer_params`` for decode
    computed: int  # How many tokens of the prompt prefill computed
    pulled: int  # How many tokens of the prompt prefill loaded from decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Asked):
    """What a turn gave and cost; ``completion`` is decode's answer."""

    completion: Completion


@dataclass(kw_only=True)
class Conversation:
    """A conversation through two engines, as a router leads it."""

    prefill: Engine
    decode: Engine
    # Options of the requests to both engines, such as a LoRA adapter
    options: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)  # All tokens so far, answers included
    # The ``kv_transfer_params`` of decode's last answer, for the next turn
    ticket: dict[str, Any] | None = None

    @property
    def covered(self) -> int:
        """How many tokens the ticket of the last answer covers; 0 without a ticket."""
        return self.ticket["kvferry"]["tokens"] if self.ticket else 0

    def say(self, words: Sequence[int], **options: Any) -> Turn:
        """Ask for the next answer, which then belongs to the conversation."""
        return self.answer(self.ask(words), **options)

    def ask(self, words: Sequence[int]) -> Asked:
        """Prefill the next turn."""
        asked = [*self.tokens, *words]
        before = self.prefill.run(probes.metrics)
        [prefilled] = self.prefill.generate(
            asked, max_tokens=1, params=self.ticket or PREFILL, **self.options
        )
        after = self.prefill.run(probes.metrics)
        assert prefilled.params, self.prefill.log()[-4000:]
        return Asked(
            prompt=asked,
            ticket=prefilled.params,
            computed=int(after.get(COMPUTED, 0) - before.get(COMPUTED, 0)),
            pulled=int(after.get(PULLED, 0) - before.get(PULLED, 0)),
        )

    def answer(self, asked: Asked, **options: Any) -> Turn:
        """Decode the answer to what was prefilled."""
        [completion] = self.decode.generate(
            asked.prompt, params=asked.ticket, **self.options, **options
        )
        self.ticket = completion.params
        self.tokens = [*asked.prompt, *completion.tokens]
        return Turn(**dataclasses.asdict(asked), completion=completion)

    def end(self) -> None:
        """Leave the conversation: decode forgets the last answer, for which no turn comes."""
        self.ticket = None
        eventually(lambda: self.decode.run(probes.reset_prefix_cache))


def same_answer(ordinary: Engine, turn: Turn, **options: Any) -> bool:
    """Return whether a turn's answer is that of an ordinary engine to the same prompt."""
    [expected] = ordinary.generate(turn.prompt, **options)
    got = turn.completion
    return (got.tokens, got.finish_reason) == (expected.tokens, expected.finish_reason)


def check_turns(
    ordinary: Engine, conversation: Conversation, block: int = 0, *, left: int = 0
) -> None:
    """Lead three turns: right texts, and prefill computes only what is new.

    That is what the user says, and the token that decode sampled last. Neither engine schedules
    asynchronously, and no answer ends with a stop token.
    """
    local, options = 0, conversation.options
    for spoken in (60, 50, 70):
        known = len(conversation.tokens)
        turn = conversation.say(words(spoken), max_tokens=20)
        assert same_answer(ordinary, turn, max_tokens=20, **options)
        assert turn.computed == spoken + bool(known) - left
        assert turn.pulled == (known - 1 - local if known else 0)
        local = len(turn.prompt) // block * block if block else 0
    conversation.end()


def stop_token(ordinary: Engine, asked: Sequence[int], at_least: int, **options: Any) -> int:
    """Return a token with which an ordinary engine's answer can be made to stop."""
    [answer] = ordinary.generate(asked, max_tokens=at_least + 40, **options)
    for index in range(at_least, len(answer.tokens)):
        if answer.tokens[index] not in answer.tokens[:index]:
            return answer.tokens[index]
    raise AssertionError("the answer repeats itself")


def idle(*engines: Engine) -> list[int]:
    """Return how many blocks of each engine are free when none has a request or holds pages."""
    return [idle_blocks(engine) for engine in engines]


def edited_histories(engine: Engine) -> float:
    """Return how many turns loaded nothing of the last one; it may be counted a step later."""
    exposed: dict[str, float] = engine.run(probes.exposed)
    return exposed.get(EDITED, 0)


def forget(*engines: Engine) -> None:
    """Wait until only conversations hold blocks, and have them forgotten."""
    eventually(lambda: all(engine.run(_only_conversations) for engine in engines))
    for engine in engines:
        engine.run(probes.end_holds)


def held(engine: Any) -> int:
    """How many holds the rank has."""
    return holds(engine)[0]


def kept(engine: Any) -> int:
    """How many conversations the scheduler half holds."""
    half = probes.connector(engine)._scheduler_half()
    return len(half._producer._holds._conversations)


def only_holds(engine: Any) -> bool:
    """Whether no request is left, but for those whose blocks are held for other engines."""
    statuses = probes.statuses(engine)
    ended = all(status.startswith("FINISHED") for status in statuses)
    return ended and len(statuses) == held(engine)


def _only_conversations(engine: Any) -> bool:
    return only_holds(engine) and held(engine) == kept(engine)
