"""The metrics of a real pair."""

from __future__ import annotations

import pytest

from examples.tiny_llama import prompt
from kvferry.core.metrics import Stage
from tests.engines import probes
from tests.engines.engines import Engine
from tests.engines.steps import check_hand_over
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)


def new(engine: Engine, before: dict[str, float], name: str) -> float:
    """How much samples have grown whose names begin so, over all producers."""
    after: dict[str, float] = engine.run(probes.exposed)
    return sum(after[each] - before.get(each, 0) for each in after if each.startswith(name))


def test_a_hand_over_is_counted(reference: Engine, prefill: Engine, decode: Engine) -> None:
    there, here = prefill.run(probes.exposed), decode.run(probes.exposed)
    check_hand_over(reference, prefill, decode, prompt(100, seed=30), prompt(33, seed=30))
    for name in ("loads_total", "pulls_total"):
        assert new(decode, here, name) == 2
    assert new(decode, here, "tokens_total") == 133
    assert new(decode, here, "bytes_total") > 0
    assert new(decode, here, "copies_total") > 0
    for stage in set(Stage) - {Stage.HANDSHAKE, Stage.COPY}:
        name = f'stage_seconds_count{{driver="loopback",stage="{stage}"}}'
        assert new(decode, here, name) == 2
    after = decode.run(probes.exposed)
    assert 'path="process_vm"' in next(name for name in after if name.startswith("bytes_total"))
    assert after['stage_seconds_sum{driver="loopback",stage="wait"}'] > 0
    assert after['peers_up{driver="loopback",rank="0"}'] >= 1
    for name in ("failed_loads_total", "load_failures_total", "refused_"):
        assert new(decode, here, name) == 0
    for outcome in ("made", "read"):
        name = f'holds_total{{driver="loopback",outcome="{outcome}"}}'
        eventually(lambda name=name: new(prefill, there, name) == 2)  # type: ignore[misc]
