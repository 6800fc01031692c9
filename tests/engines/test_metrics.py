"""The metrics of a real pair."""

from __future__ import annotations

from typing import Any

import pytest

from examples.tiny_llama import prompt
from kvferry.core.metrics import Stage
from kvferry.core.side_channel import health
from tests.engines import probes
from tests.engines.engines import Engine
from tests.engines.steps import eventually, hand_over, texts

pytestmark = pytest.mark.timeout(300)


def test_a_hand_over_is_counted(reference: Engine, prefill: Engine, decode: Engine) -> None:
    before = decode.run(probes.exposed)
    got, counters = hand_over(prefill, decode, prompt(100, seed=30), prompt(33, seed=30))
    assert got == texts(reference, prompt(100, seed=30), prompt(33, seed=30))
    after = decode.run(probes.exposed)

    def new(name: str) -> float:
        """Over all producers, of which other tests have theirs."""
        values = [after[each] - before.get(each, 0) for each in after if each.startswith(name)]
        return float(sum(values))

    assert new("loads_total") == new("pulls_total") == 2
    assert new("tokens_total") == 133
    assert new("bytes_total") == counters["vllm:kvferry_bytes"] > 0
    assert new("copies_total") > 0
    assert 'path="process_vm"' in next(name for name in after if name.startswith("bytes_total"))
    for stage in set(Stage) - {Stage.HANDSHAKE, Stage.COPY}:
        assert new(f'stage_seconds_count{{driver="loopback",stage="{stage}"}}') == 2
    assert after['stage_seconds_sum{driver="loopback",stage="wait"}'] > 0
    assert after['peers_up{driver="loopback",rank="0"}'] >= 1
    assert new("failed_loads_total") == new("load_failures_total") == new("refused_") == 0


def test_what_is_held_goes_up_and_down(prefill: Engine, decode: Engine) -> None:
    name = 'held_pages{driver="loopback"}'
    [ticket] = prefill.prefill(prompt(100, seed=31))
    eventually(lambda: prefill.run(probes.exposed)[name] == 4)
    decode.generate(prompt(100, seed=31), params=ticket)
    eventually(lambda: prefill.run(probes.exposed)[name] == 0)


def ail(engine: Any, problem: str) -> None:
    """From now on every endpoint here finds this wrong, or nothing if it is empty."""
    from kvferry.core.endpoint import Endpoint

    found = (problem,) if problem else ()
    Endpoint.problems = property(lambda self: found)  # type: ignore[assignment]


def test_what_a_rank_finds_wrong_reaches_a_probe(prefill: Engine) -> None:
    """In the next step after it is found, and as soon as it is over: who is told of it keeps
    requests away, so the engine steps on without any."""
    [ticket] = prefill.prefill(prompt(20, seed=33))

    def told(*problems: str) -> bool:
        condition = health(ticket["remote_host"], ticket["remote_port"], timeout=20.0)
        return condition.problems == list(problems)

    assert not prefill.run(probes.has_to_step)
    prefill.run(ail, "it burns")
    prefill.prefill(prompt(21, seed=33))
    eventually(lambda: told("rank 0: it burns"))
    assert prefill.run(probes.has_to_step)
    prefill.run(ail, "")
    eventually(told)
    assert not prefill.run(probes.has_to_step)
