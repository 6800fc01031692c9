"""Conversations where kvferry and an offloading connector are children of MultiConnector."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines import probes
from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    check_turns,
    idle,
    same_answer,
    words,
)
from tests.engines.engines import Engine
from tests.engines.fixtures import CONNECTOR, PATIENT, StartEngine
from tests.engines.steps import eventually
from tests.engines.test_multi_connector import OFFLOADING

pytestmark = pytest.mark.timeout(300)

FERRY = CONNECTOR | {"kv_role": ROLE, "kv_connector_extra_config": PATIENT | TWO_WAY}


def start_with(start_engine: StartEngine, name: str, *children: dict[str, Any]) -> Engine:
    """An engine with several connectors, in this order."""
    transfer = RECOMPUTE | {
        "kv_connector": "MultiConnector",
        "kv_role": ROLE,
        "kv_connector_extra_config": {"connectors": list(children)},
    }
    return start_engine(name, kv_transfer_config=transfer, enable_prefix_caching=True)


def test_turns(reference: Engine, start_engine: StartEngine) -> None:
    """Prefill computes as little as with kvferry alone, wherever the other connector stands."""
    first = start_with(start_engine, "first", FERRY, OFFLOADING)
    second = start_with(start_engine, "second", OFFLOADING, FERRY)
    for prefill, decode in ((first, second), (second, first)):
        check_turns(reference, Conversation(prefill=prefill, decode=decode), block=32)


def test_the_other_connector_has_the_turns_before(
    reference: Engine, start_engine: StartEngine
) -> None:
    """Of several connectors, vLLM lets one load: the first that has anything.

    If that is the other one, prefill computes the answers again, and decode's pages are free.
    """
    prefill = start_with(start_engine, "forgetful", OFFLOADING, FERRY)
    decode = start_engine("decode", ROLE, extra=TWO_WAY)
    [free] = idle(decode)
    conversation = Conversation(prefill=prefill, decode=decode)
    conversation.say(words(70), max_tokens=50)
    eventually(lambda: prefill.run(probes.forget_prefixes))
    asked = conversation.ask(words(30))
    assert (asked.pulled, asked.computed) == (64, len(asked.prompt) - 64)
    eventually(lambda: decode.run(probes.free_blocks) == free)
    turn = conversation.answer(asked, max_tokens=50)
    assert same_answer(reference, turn, max_tokens=50)
