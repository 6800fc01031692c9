"""Conversations between two engines that both prefill and decode, and what each turn cost them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.tiny_llama import prompt
from tests.engines.engines import PREFILL, Completion, Engine, Prompt
from tests.engines.steps import PULLED, counted

COMPUTED = "vllm:prompt_tokens_by_source[local_compute]"

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

    def prompt(self, tokens: list[int]) -> Prompt:
        """What an engine is asked for a turn of these tokens."""
        return tokens

    def say(self, words: Sequence[int], **options: Any) -> Turn:
        """Ask for the next answer, which then belongs to the conversation."""
        return self.answer(self.ask(words), **options)

    def ask(self, words: Sequence[int]) -> Asked:
        """Prefill the next turn."""
        asked = [*self.tokens, *words]
        before = [counted(self.prefill, name) for name in (COMPUTED, PULLED)]
        [prefilled] = self.prefill.generate(
            self.prompt(asked), max_tokens=1, params=self.ticket or PREFILL, **self.options
        )
        after = [counted(self.prefill, name) for name in (COMPUTED, PULLED)]
        assert prefilled.params, self.prefill.log()[-4000:]
        computed, pulled = (int(now - then) for now, then in zip(after, before, strict=True))
        return Asked(prompt=asked, ticket=prefilled.params, computed=computed, pulled=pulled)

    def answer(self, asked: Asked, **options: Any) -> Turn:
        """Decode the answer to what was prefilled."""
        [completion] = self.decode.generate(
            self.prompt(asked.prompt), params=asked.ticket, **self.options, **options
        )
        self.ticket = completion.params
        self.tokens = [*asked.prompt, *completion.tokens]
        return Turn(**dataclasses.asdict(asked) | {"completion": completion})

    def check(self, ordinary: Engine, turn: Turn, **options: Any) -> None:
        """See that a turn's answer is that of an ordinary engine to the same prompt."""
        [expected] = ordinary.generate(self.prompt(turn.prompt), **self.options, **options)
        got = turn.completion
        assert (got.tokens, got.finish_reason) == (expected.tokens, expected.finish_reason)

    def check_turn(
        self, ordinary: Engine, words: Sequence[int], computed: int, pulled: int, **options: Any
    ) -> Turn:
        """Lead a turn; see that its answer is right, and what prefill computed and pulled."""
        turn = self.say(words, **options)
        self.check(ordinary, turn, **options)
        assert (turn.computed, turn.pulled) == (computed, pulled)
        return turn


def check_turns(
    ordinary: Engine,
    talk: Conversation,
    block: int = 0,
    *,
    left: int = 0,
    said: Sequence[tuple[int, int]] = ((60, 20), (5, 1), (70, 20)),
) -> None:
    """Lead turns: right texts, and prefill computes only what is new.

    That is what the user says, and the token that decode sampled last. No answer ends with a stop
    token.

    Args:
        ordinary: An engine that gives the texts.
        talk: The conversation.
        block: If prefill caches prefixes, how many tokens a block has there: what it has in its
            cache, the whole blocks of the prompt before, it does not pull.
        left: How many tokens of a prompt are left to decode.
        said: How many tokens the user says and decode answers.
    """
    local = 0
    for spoken, answered in said:
        known = len(talk.tokens)
        computed, pulled = spoken + bool(known) - left, max(known - 1 - local, 0)
        turn = talk.check_turn(ordinary, words(spoken), computed, pulled, max_tokens=answered)
        local = len(turn.prompt) // block * block if block else 0


def stop_token(ordinary: Engine, asked: Sequence[int], at_least: int, **options: Any) -> int:
    """Return a token with which an ordinary engine's answer can be made to stop."""
    [answer] = ordinary.generate(asked, max_tokens=at_least + 40, **options)
    for index in range(at_least, len(answer.tokens)):
        if answer.tokens[index] not in answer.tokens[:index]:
            return answer.tokens[index]
    raise AssertionError("the answer repeats itself")
