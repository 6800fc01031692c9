"""Reports of a step that failed on some workers, which vLLM 0.33 adds to those of the next step.

With ``enable_fault_tolerance``, ``KVOutputAggregator.ft_defer_kv_connector_outputs`` keeps what the
other workers reported, and ``aggregate`` puts it in front of the next step's reports. This vLLM's
aggregator takes any number of reports, so the kept ones are passed on as further workers'.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.silent_holds import Silence
from tests.integrations.vllm.halves import PREFILL, blocks, request
from tests.integrations.vllm.test_scheduler_hooks import OUTPUT, RANKS, configured, serving


@pytest.fixture
def vllm() -> Any:
    """Our modules with the classes of the installed vLLM."""
    from kvferry.integrations.vllm import adapter_contents, engine_facts, metadata, scheduler

    return SimpleNamespace(
        adapter_contents=adapter_contents,
        engine_facts=engine_facts,
        metadata=metadata,
        scheduler=scheduler,
    )


@pytest.fixture
def half(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scheduler half of an engine of three ranks, and an aggregator of their reports."""
    from kvferry.integrations.vllm.cache_groups import CacheGroup

    groups = (CacheGroup(index=0, tokens=16),)
    monkeypatch.setattr(vllm.engine_facts, "cache_groups", lambda *_: groups)
    made = vllm.scheduler.FerryScheduler(configured(), SimpleNamespace(num_blocks=100))
    serving(vllm, made, *RANKS)
    yield made
    made.shutdown()


def reported(sent: set[str] | None = None, report: Any = None) -> Any:
    """What one worker's connector says in a step."""
    from vllm.v1.outputs import KVConnectorOutput

    return KVConnectorOutput(finished_sending=sent, kv_connector_worker_meta=report)


def merged(aggregator: Any, *reports: Any) -> Any:
    """What the scheduler hears of these reports."""
    from vllm.v1.outputs import ModelRunnerOutput

    outputs = [ModelRunnerOutput.with_kv_conn_output_only(each) for each in reports]
    return aggregator.aggregate(outputs).kv_connector_output


def aggregator() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    return KVOutputAggregator(len(RANKS))


def held(half: Any) -> Any:
    """Let the half hold the pages of one request; return the hold."""
    each = request(40, dict(PREFILL))
    half.update_state_after_alloc(each, blocks(1, 2, 3), 0)
    half.request_finished_all_groups(each, [[1, 2, 3]])
    [(_, hold)] = half.build_connector_meta(OUTPUT).orders.take_ons
    return hold


def pages_held(half: Any) -> int:
    held_pages: int = half.get_kv_connector_stats().data["held_pages"]["loopback"]
    return held_pages


def test_a_request_is_sent_when_every_rank_has_said_so_in_either_step(half: Any) -> None:
    held(half)
    merging, first, last = aggregator(), reported({"r"}), reported({"r"})
    half.update_connector_output(merged(merging, first, first, reported()))
    assert pages_held(half) == 3
    half.update_connector_output(merged(merging, last, reported(), reported()))
    assert pages_held(half) == 0


def test_the_newest_problems_of_a_rank_count(vllm: Any, half: Any) -> None:
    kept, newer = (
        reported(report=vllm.metadata.RankReport(problems=problems))
        for problems in ({0: ("it burns",), 1: ("it smokes",)}, {0: ()})
    )
    half.update_connector_output(merged(aggregator(), kept, newer, reported(), reported()))
    assert half._current_problems() == ["rank 1: it smokes"]


@pytest.mark.parametrize(("late", "given_up"), [((), 0), ((2,), 1)])
def test_silence_counts_only_if_every_rank_reported_it(
    vllm: Any, half: Any, late: tuple[int, ...], given_up: int
) -> None:
    """One rank's report was lost with its step; the next step's may complete the others'."""
    hold = held(half)
    half.get_num_new_matched_tokens(request(40, name="waits"), 0)
    assert half.build_connector_meta(OUTPUT).asks_silent
    silence = (Silence(request=RequestId("r"), hold=hold, age=4.0),)
    reports = [
        reported(report=vllm.metadata.RankReport(silent={rank: silence})) for rank in (0, 1, *late)
    ]
    half.update_connector_output(merged(aggregator(), *reports))
    half.get_num_new_matched_tokens(request(40, name="waits"), 0)
    assert len(half.build_connector_meta(OUTPUT).orders.ends) == given_up


def test_an_old_answer_about_adapters_is_none_for_a_new_request(vllm: Any, half: Any) -> None:
    """A fault ends all requests. Those that come afterwards wait for an answer of their own."""

    def adapted(name: str) -> Any:
        each = request(40, dict(PREFILL), name=name)
        each.lora_request = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/nowhere")
        half.on_new_request(each)
        assert half.get_num_new_matched_tokens(each, 0) == (None, False)
        return each

    def answer(step: int) -> Any:
        adapters = vllm.adapter_contents.AdapterReport(step=step)
        return reported(report=vllm.metadata.RankReport(adapters=adapters))

    ended = adapted("ended")
    asked = half.build_connector_meta(OUTPUT).asks_adapters
    half.request_finished_all_groups(ended, [[]])
    waits = adapted("waits")
    half.update_connector_output(
        merged(aggregator(), answer(asked), reported(), reported(), reported())
    )
    assert half.get_num_new_matched_tokens(waits, 0) == (None, False)
    asked = half.build_connector_meta(OUTPUT).asks_adapters
    half.update_connector_output(merged(aggregator(), *[answer(asked)] * len(RANKS)))
    assert half.get_num_new_matched_tokens(waits, 0) != (None, False)
