"""vLLM's own tests of the second turn, which are written for NixlConnector, on this connector.

vLLM's file is ``tests/v1/kv_connector/unit/test_bidirectional_kv_transfer.py``. ``VERDICTS`` lists
its tests. A test "as is" is imported from vLLM's source distribution, which is downloaded from the
package index and kept under ``.cache``; without a package index these tests are skipped. Only the
helpers that make engines and requests are replaced: the connector is KVFerryConnector, and tickets
come from two further engines, which have had the first turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.vllm.second_turn import originals, schedulers
from tests.vllm.second_turn.schedulers import SimulatedEngine

AS_IS = "as is"
FAKES = "left out: it drives workers with a fake NIXL; test_conversations.py runs real engines"
HALF = "left out: test_producer.py and test_consumer.py have it"
MODEL = "left out: in test_consumer_model.py, no request loads twice"

VERDICTS = {
    "test_multiturn_lifecycle": AS_IS,
    "test_first_turn_no_remote_blocks": AS_IS,
    "test_abort_p_side_during_send": AS_IS,
    "test_abort_p_side_non_length_capped": HALF,
    "test_remote_blocks_exceed_prompt_tokens": HALF,
    "test_p_node_pulls_partial_last_block_from_d": AS_IS,
    "test_add_new_req_to_recv_populates_remote_meta": HALF,
    "test_build_connector_meta_recv_entries": HALF,
    "test_build_connector_meta_clears_reqs_need_recv": HALF,
    "test_build_connector_meta_multiple_requests": HALF,
    "test_p_node_pull_kv_from_d": FAKES,
    "test_p_node_pull_then_send_kv": FAKES,
    "test_p_node_deferred_pull_on_no_handshake": FAKES,
    "test_d_node_request_finished_returns_kv_params": AS_IS,
    "test_d_node_request_finished_delays_block_free": HALF,
    "test_d_node_request_finished_remote_num_tokens": AS_IS,
    "test_d_node_partial_last_block_remote_num_tokens": AS_IS,
    "test_no_double_read_blocks_after_reschedule": MODEL,
    "test_remote_num_tokens_bounded_by_blocks": AS_IS,
    "test_kv_recompute_threshold_skips_small_transfer": AS_IS,
    "test_p_node_finished_holds_blocks_for_d": AS_IS,
    "test_cache_miss_first_turn_no_remote_pull": AS_IS,
    "test_partial_remote_tokens_less_than_prompt": AS_IS,
    "test_remote_blocks_processed_flag_persists": MODEL,
    "test_turn2_deadline_gate": (
        "left out: no deadline is compared with a clock; if the hold has ended, the pull fails"
    ),
    "test_turn2_full_prefix_hit_with_expired_deadline_skips_gate": HALF,
    "test_d_node_request_finished_exports_blocks_expiry_time": (
        "left out: the ticket names no deadline, decode's workers count the time"
    ),
    "test_handshake_listener_appends_perf_counter_frame": (
        "left out: the handshake sends no clock, because no deadline is compared with one"
    ),
}
"""What is done with each of vLLM's tests."""

SETTINGS: dict[str, Any] = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}


@pytest.fixture
def first_turn() -> Iterator[tuple[SimulatedEngine, SimulatedEngine]]:
    """The two engines that have conversations' first turns: prefill and decode."""
    made = [SimulatedEngine(name, **SETTINGS) for name in ("first-prefill", "decode-engine")]
    yield made[0], made[1]
    for each in made:
        each.close()


class TestAsIs:
    @pytest.fixture(scope="class")
    def module(self, vllm_source: Path, pytestconfig: pytest.Config) -> Iterator[ModuleType]:
        pytestconfig.addinivalue_line("markers", "cpu_test: a marker of vLLM's own tests")
        with pytest.MonkeyPatch.context() as patch:
            yield originals.load(vllm_source, patch)

    @pytest.mark.parametrize("name", [name for name in VERDICTS if VERDICTS[name] == AS_IS])
    def test_original(
        self,
        name: str,
        module: ModuleType,
        first_turn: tuple[SimulatedEngine, SimulatedEngine],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        made: list[Any] = []
        prefill, decode = first_turn

        def scheduler(config: Any) -> Any:
            made.append(schedulers.scheduler_of(config))
            return made[-1]

        originals.replace_helpers(
            module,
            monkeypatch,
            configuration=schedulers.configuration,
            scheduler=scheduler,
            first_ticket=lambda prompt: schedulers.first_ticket(prefill, "first", prompt),
            conversation_ticket=lambda covered: schedulers.conversation_ticket(
                prefill, decode, "first", covered
            ),
        )
        try:
            getattr(module, name)()
        finally:
            for each in made:
                each.shutdown()

    def test_every_original_has_a_verdict(self, module: ModuleType) -> None:
        assert {name for name in vars(module) if name.startswith("test_")} == set(VERDICTS)
