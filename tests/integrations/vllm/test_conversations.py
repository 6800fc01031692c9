"""Conversations of several turns: prefill pulls back what decode has computed, answers included."""

from __future__ import annotations

import pytest

from examples.tiny_llama import prompt
from tests.integrations.vllm.conftest import StartEngine
from tests.integrations.vllm.conversations import RECOMPUTE, ROLE, TWO_WAY, Conversation
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.steps import texts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_three_turns(reference: Engine, start_engine: StartEngine, asynchronous: bool) -> None:
    """Prefill computes what the user says, and the token that decode sampled last."""
    options = {"transfer": RECOMPUTE, "async_scheduling": asynchronous}
    prefill, decode = (
        start_engine(name, ROLE, extra=TWO_WAY, **options) for name in ("prefill", "decode")
    )
    conversation = Conversation(prefill=prefill, decode=decode)
    for number in range(3):
        known = len(conversation.tokens)
        turn = conversation.say(prompt(40, seed=number), max_tokens=70)
        assert turn.completion.text == texts(reference, turn.prompt, max_tokens=70)[0]
        assert (turn.computed, turn.pulled) == ((41, known - 1) if known else (40, 0))
