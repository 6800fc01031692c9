"""Servers that are paused, or get other weights in place, while others have their tickets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conversations import words
from tests.engines.training import MODES, Trained, checkpoints, pair

pytestmark = pytest.mark.timeout(300)

Servers = tuple[Trained, Trained]


@pytest.fixture(scope="module")
def weights(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return checkpoints(tmp_path_factory.mktemp("weights"), 3)


@pytest.fixture(scope="module")
def servers(weights: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with pair(weights[0], tmp_path_factory.mktemp("trained")) as found:
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


@pytest.mark.parametrize("version", [None, "second"])
def test_other_weights(servers: Servers, weights: list[Path], version: str | None) -> None:
    """Of engines with unlike weights, none loads what the other has computed."""
    hand_over(servers)
    prefill, decode = servers if version else servers[::-1]
    answer = check(decode, *prefilled(prefill), loads=True)
    asked, unread = prefilled(prefill)
    other = weights[1 + bool(version)]
    before = decode.answer(asked)["text"]
    prefill.update(other, version)
    check(decode, asked, unread, loads=False)
    check(decode, *prefilled(prefill), loads=False)
    check(prefill, *prefilled(decode), loads=False)
    decode.update(other, version, "keep")
    check_turn(prefill, decode, answer, loads=False)
    check(decode, asked, unread, loads=False)
    hand_over(servers)
    assert before != decode.answer(asked)["text"] == prefill.answer(asked)["text"]
