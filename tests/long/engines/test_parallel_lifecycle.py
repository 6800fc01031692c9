"""When the pages of engines with several ranks may go back: every rank has a say, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from kvferry.integrations.vllm import ticket_params as tickets
from tests.engines import probes, ranks
from tests.engines.engines import PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import (
    eventually,
    hand_over,
    pulled_by,
    texts,
)

pytestmark = pytest.mark.timeout(600)

TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
CHUNKED = {"max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def prefill(start_engine: StartEngine) -> Iterator[Engine]:
    """Two ranks that prefill for others, in chunks."""
    engine = start_engine("prefill-tp2", "kv_producer", **TP2, **CHUNKED)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def decode(start_engine: StartEngine) -> Iterator[Engine]:
    """Two ranks that decode what others prefilled."""
    engine = start_engine("decode-tp2", "kv_consumer", **TP2)
    yield engine
    engine.close()


def test_aborted_while_one_rank_reads(
    reference: Engine, prefill: Engine, decode: Engine, tmp_path: Path
) -> None:
    """The blocks stay until the last rank is over, whatever the first one reported long ago."""
    rest, gate = at_rest(prefill, decode), tmp_path / "gate"
    decode.run(ranks.gate_reads, 1, str(gate))
    [request] = decode.submit(prompt(120), params=prefill.prefill(prompt(120)))
    eventually(gate.with_suffix(".reached").exists)
    decode.abort(request)
    eventually(lambda: decode.run(ranks.half_reported) == [1])
    assert decode.run(probes.statuses) == ["FINISHED_ABORTED"]
    assert at_rest(decode)[0]["free blocks"] < rest[1]["free blocks"]
    gate.touch()
    come_to(rest, prefill, decode)
    assert hand_over(prefill, decode, prompt(120))[0] == texts(reference, prompt(120))


def test_ticket_used_at_once_by_three(
    reference: Engine, prefill: Engine, decode: Engine, tmp_path: Path
) -> None:
    """All load, though one rank is far behind the other, and one is aborted meanwhile."""
    rest, gate, before = at_rest(prefill, decode), tmp_path / "gate", pulled_by(decode)
    one = prompt(130, seed=7)
    [ticket] = prefill.prefill(one)
    decode.run(ranks.gate_reads, 1, str(gate))
    with decode.paused():
        requests = decode.submit(one, one, one, params=ticket)
    eventually(gate.with_suffix(".reached").exists)
    eventually(lambda: decode.run(ranks.half_reported) == [1, 1, 1])
    decode.abort(requests.pop(1))
    gate.touch()
    completions = decode.results(requests)
    assert [c.text for c in completions] == texts(reference, one) * len(requests)
    assert pulled_by(decode) - before == 130 * len(requests)
    come_to(rest, prefill, decode)


def test_one_rank_fails(reference: Engine, prefill: Engine, decode: Engine) -> None:
    """What the other rank has read is worth nothing; the request fails, once, and no other one."""
    rest = at_rest(prefill, decode)
    tickets = prefill.prefill(prompt(100), prompt(101))
    decode.run(ranks.fail_reads, 1, True)
    [failed] = decode.generate(prompt(100), params=tickets[0])
    decode.run(ranks.fail_reads, 1, False)
    [good] = decode.generate(prompt(101), params=tickets[1])
    assert failed.finish_reason == "error"
    assert good.text == texts(reference, prompt(101))[0]
    come_to(rest, prefill, decode)


def test_cache_reset_gives_up_holds_on_every_rank(
    reference: Engine, prefill: Engine, decode: Engine
) -> None:
    """The ticket is worth nothing then, whichever rank is asked."""
    rest = at_rest(prefill, decode)
    [ticket] = prefill.prefill(prompt(200, seed=1))
    assert prefill.run(ranks.holds) == [1, 1]
    assert not prefill.run(probes.reset_prefix_cache)
    eventually(lambda: prefill.run(probes.reset_prefix_cache))
    [completion] = decode.generate(prompt(200, seed=1), params=ticket)
    assert completion.finish_reason == "error"
    come_to(rest, prefill, decode)


@pytest.fixture(scope="module")
def pipeline(start_engine: StartEngine) -> Iterator[Engine]:
    """Two stages, each of which may be in another step; they prefill in chunks, and decode."""
    engine = start_engine(
        "pipeline",
        "kv_both",
        num_gpu_blocks_override=36,
        **PP2,
        **CHUNKED,
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("kind", ["prefill", "pipeline"])
def test_words_stand_before_the_ticket(
    reference: Engine, decode: Engine, request: pytest.FixtureRequest, kind: str
) -> None:
    """On every rank, also where the scheduler is a step ahead of them: decode asks at once."""
    engine: Engine = request.getfixturevalue(kind)
    with engine.paused():
        ids = engine.submit(prompt(200), prompt(33), params=PREFILL, max_tokens=1)
        while len(engine.finished) < 2:
            engine.step()
        params = [completion.params or {} for completion in engine.results(ids)]
        for ticket in map(tickets.read_ticket, params):
            words = engine.run(ranks.words, ticket.hold.slot)
            assert [ticket.hold.stands(word) for word in words] == [True, True]
    completions = decode.generate(prompt(200), prompt(33), params=params)
    assert [c.text for c in completions] == texts(reference, prompt(200), prompt(33))


def test_preempted_in_a_pipeline(reference: Engine, prefill: Engine, pipeline: Engine) -> None:
    """Blocks that a step in flight still writes are not given to a load."""
    rest = at_rest(prefill, pipeline)
    prompts = [prompt(length, seed=12) for length in (310, 311, 312)]
    params = prefill.prefill(*prompts)
    before = pipeline.run(probes.metrics)
    completions = pipeline.generate(*prompts, params=params, max_tokens=60)
    assert [c.text for c in completions] == texts(reference, *prompts, max_tokens=60)
    after = pipeline.run(probes.metrics)
    assert after["vllm:num_preemptions"] > before["vllm:num_preemptions"]
    come_to(rest, prefill, pipeline)
