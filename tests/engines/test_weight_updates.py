"""Servers that are paused while others have their tickets.

``tests/long/engines/test_training.py`` gives them other weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conversations import words
from tests.engines.training import MODES, Trained, pair

pytestmark = pytest.mark.timeout(300)

Servers = tuple[Trained, Trained]


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with pair(checkpoint, tmp_path_factory.mktemp("trained")) as found:
        yield found


def prefilled(prefill: Trained) -> tuple[list[int], dict[str, Any]]:
    """A new prompt, and its ticket."""
    asked = words(100)
    return asked, prefill.prefill(asked)


def check(decode: Trained, asked: list[int], ticket: Any, *, loads: bool) -> dict[str, Any]:
    """See that decode's answer is its own, and whether it had the prompt from prefill.

    Returns:
        The answer.
    """
    before = decode.pulled()
    answer = decode.answer(asked, ticket)
    assert (decode.pulled() > before) == loads, decode.log()[-3000:]
    assert answer["text"] == decode.answer(asked, cache_salt="own")["text"]
    return answer


def check_turn(prefill: Trained, decode: Trained, answer: dict[str, Any], *, loads: bool) -> None:
    """See whether prefill has the beginning of the next turn from decode, and hand that over."""
    before, turn = prefill.pulled(), [*answer["tokens"], *words(40)]
    ticket = prefill.prefill(turn, **answer["ticket"])
    assert (prefill.pulled() > before) == loads, prefill.log()[-3000:]
    check(decode, turn, ticket, loads=True)


def hand_over(servers: Servers) -> None:
    """Hand over a prompt and the next turn, and load all of them."""
    check_turn(*servers, check(servers[1], *prefilled(servers[0]), loads=True), loads=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clears", [True, False])
def test_a_pause(servers: Servers, mode: str, clears: bool) -> None:
    """It waits for no lease. Where it clears the caches, tickets of before load nothing."""
    prefill, decode = servers
    answer = check(decode, *prefilled(prefill), loads=True)
    unread = prefilled(prefill)
    for server in servers:
        server.pause(mode, clears=clears)
    for server in servers:
        server.resume()
    check(decode, *unread, loads=not clears)
    check_turn(prefill, decode, answer, loads=not clears)
    hand_over(servers)
