"""Figures through vLLM's own hooks: its log line, its Prometheus metrics, and a real pair's."""

from __future__ import annotations

import pytest

from examples.tiny_llama import prompt
from kvferry.core.metrics import MAX_PEERS, Stage
from kvferry.core.side_channel import health
from tests.engines import metering, probes
from tests.engines.engines import Engine
from tests.engines.steps import eventually, hand_over, texts

pytestmark = pytest.mark.timeout(300)


def test_the_log_line_is_short_and_says_what_is_wrong(reference: Engine) -> None:
    assert reference.run(metering.logged, [0, 0, 0]) == [
        "KV Transfer metrics: loads=3, tokens=27, MB=0.018, GB/s=0.003, waited ms median=0.0, "
        "waited ms longest=0.0, read ms median=1.1, read ms longest=1.1, held pages=7, "
        "stale reads=6, refused tickets=3, peers down=1, evicted holds=6"
    ]


def test_metrics_add_up_over_ranks_and_steps(reference: Engine) -> None:
    start, _, after = reference.run(metering.exposed_after, [0, 0])
    assert after['bytes_total{driver="nixl",path="UCX",peer="prefill-0"}'] == 12000
    assert after['copies_total{driver="nixl",path="UCX",peer="prefill-0"}'] == 12
    failure = 'load_failures_total{cause="stale",driver="nixl",peer="prefill-0",stage="fence"}'
    assert after[failure] == 4
    assert after['refused_tickets_total{driver="nixl",reason="prompt"}'] == 2
    assert after['stage_seconds_count{driver="nixl",stage="transfer"}'] == 4
    assert after['stage_seconds_sum{driver="nixl",stage="transfer"}'] == pytest.approx(0.0044)
    seconds = 'peer_seconds_total{driver="nixl",peer="prefill-0",stage="transfer"}'
    assert after[seconds] == pytest.approx(0.0044)
    assert after['peers_up{driver="nixl",rank="1"}'] == 2, "the later one counts"
    assert after['held_pages{driver="nixl"}'] == 7
    assert after['holds_total{driver="nixl",outcome="evicted"}'] == 4
    assert start['loads_total{driver="nixl"}'] == 0


def test_what_may_never_happen_is_0_from_the_start(reference: Engine) -> None:
    """A counter that appears with its first failure hides it from a rate."""
    [start] = reference.run(metering.exposed_after, [])
    assert set(start.values()) == {0}
    assert 'refused_tickets_total{driver="nixl",reason="signature"}' in start
    assert 'done_after_expiry_total{driver="nixl"}' in start
    assert 'holds_total{driver="nixl",outcome="expired"}' in start


def test_peers_are_bounded(reference: Engine) -> None:
    after = reference.run(metering.exposed_after, list(range(3 * MAX_PEERS)))[-1]
    pulls = {name: value for name, value in after.items() if name.startswith("pulls_total")}
    assert len(pulls) == MAX_PEERS + 1
    assert pulls['pulls_total{driver="nixl",path="UCX",peer="other"}'] == 2 * 2 * MAX_PEERS


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


def test_a_refused_ticket_is_counted_by_reason(prefill: Engine, decode: Engine) -> None:
    name = 'refused_tickets_total{driver="loopback",reason="prompt"}'
    before = decode.run(probes.exposed)[name]
    [ticket] = prefill.prefill(prompt(40, seed=32))
    [completion] = decode.generate(prompt(41, seed=32), params=ticket)
    assert completion.finish_reason == "error"
    assert decode.run(probes.exposed)[name] == before + 1
    lines = [line for line in decode.log().splitlines() if f"request {completion.id}" in line]
    [line] = [line for line in lines if "ticket refused: " in line]
    assert "(stage ticket, cause prompt, of engine" in line


def test_what_a_rank_finds_wrong_reaches_a_probe(prefill: Engine) -> None:
    """In the next step after it is found, and as soon as it is over: who is told of it keeps
    requests away, so the engine steps on without any."""
    [ticket] = prefill.prefill(prompt(20, seed=33))

    def told(*problems: str) -> bool:
        condition = health(ticket["remote_host"], ticket["remote_port"], timeout=20.0)
        return condition.problems == list(problems)

    assert not prefill.run(probes.has_to_step)
    prefill.run(metering.ail, "it burns")
    prefill.prefill(prompt(21, seed=33))
    eventually(lambda: told("rank 0: it burns"))
    assert prefill.run(probes.has_to_step)
    prefill.run(metering.ail, "")
    eventually(told)
    assert not prefill.run(probes.has_to_step)
