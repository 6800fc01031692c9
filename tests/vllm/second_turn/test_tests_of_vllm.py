"""vLLM's own tests of the second turn, which are written for NixlConnector, on this connector.

vLLM's file is ``tests/v1/kv_connector/unit/test_bidirectional_kv_transfer.py``. ``VERDICTS`` lists
its tests. A test "as is" is imported from vLLM's source distribution, which is downloaded from the
package index and kept under ``.cache``; without a package index these tests are skipped. Only the
helpers that make engines and requests are replaced: the connector is KVFerryConnector, and tickets
come from two further engines, which have had the first turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.vllm.second_turn import originals, schedulers
from tests.vllm.second_turn.schedulers import BLOCK_TOKENS, SimulatedEngine, Step

AS_IS = "as is"
FAKES = "left out: it drives workers with a fake NIXL; test_conversations.py runs real engines"
HALF = "left out: test_scheduler_half.py and test_conversation_half.py have it"

VERDICTS = {
    "test_multiturn_lifecycle": AS_IS,
    "test_first_turn_no_remote_blocks": AS_IS,
    "test_abort_p_side_during_send": AS_IS,
    "test_abort_p_side_non_length_capped": HALF,
    "test_remote_blocks_exceed_prompt_tokens": "test_ticket_of_more_tokens_than_the_prompt",
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
    "test_no_double_read_blocks_after_reschedule": "test_one_pull_whatever_follows",
    "test_remote_num_tokens_bounded_by_blocks": AS_IS,
    "test_kv_recompute_threshold_skips_small_transfer": AS_IS,
    "test_p_node_finished_holds_blocks_for_d": AS_IS,
    "test_cache_miss_first_turn_no_remote_pull": AS_IS,
    "test_partial_remote_tokens_less_than_prompt": AS_IS,
    "test_remote_blocks_processed_flag_persists": "test_one_pull_whatever_follows",
    # No deadline is compared with a clock: if the hold has ended, the pull fails.
    "test_turn2_deadline_gate": "test_pull_that_fails",
    "test_turn2_full_prefix_hit_with_expired_deadline_skips_gate": HALF,
    # The ticket names no deadline: decode's workers count the time.
    "test_d_node_request_finished_exports_blocks_expiry_time": "test_time_that_blocks_are_held",
    "test_handshake_listener_appends_perf_counter_frame": (
        "left out: the handshake sends no clock, because no deadline is compared with one"
    ),
}
"""What is done with each of vLLM's tests; those that are ported have the name of a test below."""

SETTINGS: dict[str, Any] = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}

WAITS = "WAITING_FOR_REMOTE_KVS"

MakeEngine = Callable[..., SimulatedEngine]
SecondTurn = Callable[..., Any]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Make engines with ``bidirectional_kv_xfer``, and close them."""
    made: list[SimulatedEngine] = []

    def make(engine: str | None = None, **options: Any) -> SimulatedEngine:
        made.append(SimulatedEngine(engine, **SETTINGS | options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def first_turn(make_engine: MakeEngine) -> tuple[SimulatedEngine, SimulatedEngine]:
    """Return the two engines that have conversations' first turns: prefill and decode."""
    return make_engine("first-prefill"), make_engine("decode-engine")


@pytest.fixture
def second_turn(first_turn: tuple[SimulatedEngine, SimulatedEngine]) -> SecondTurn:
    """Return a function that makes a request of so many tokens, with the decode engine's ticket.

    It takes how many tokens the ticket covers, and the number of the conversation.
    """

    def make(name: str, *, prompt: int, covered: int, other: int = 0) -> Any:
        params = schedulers.conversation_ticket(*first_turn, name, tokens(covered, other))
        return schedulers.request(name, tokens(prompt, other), params)

    return make


def tokens(count: int, other: int = 0) -> list[int]:
    """Return the first tokens of a conversation."""
    return list(range(1000 * other, 1000 * other + count))


def waits(each: Any) -> bool:
    """Return whether a request waits for its load."""
    return bool(each.status.name == WAITS)


class TestAsIs:
    @pytest.fixture(scope="class")
    def module(self, vllm_source: Path, pytestconfig: pytest.Config) -> Iterator[ModuleType]:
        """Return vLLM's module."""
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
        ported = {verdict for verdict in VERDICTS.values() if verdict.startswith("test_")}
        assert ported == {name for name in globals() if name.startswith("test_")}


def test_ticket_of_more_tokens_than_the_prompt(
    make_engine: MakeEngine, second_turn: SecondTurn
) -> None:
    """The prompt's whole blocks are pulled, and the tokens after them are computed."""
    engine = make_engine()
    each = second_turn("r", prompt=40, covered=5 * BLOCK_TOKENS)
    engine.add(each)
    engine.step()
    assert waits(each)
    assert each.num_computed_tokens == 2 * BLOCK_TOKENS
    engine.step(received={"r"})
    params = engine.finish(each)
    assert each.status.name == "FINISHED_LENGTH_CAPPED"
    assert params["do_remote_prefill"] is True
    assert params["remote_num_tokens"] == 40
    assert not engine.is_empty
    read(engine)


def read(engine: SimulatedEngine) -> None:
    """Report the blocks of the request "r" as read: the engine is empty."""
    engine.step(sent={"r"})
    engine.step()
    assert engine.is_empty


@pytest.mark.parametrize("preempted", [False, True])
def test_one_pull_whatever_follows(
    make_engine: MakeEngine, second_turn: SecondTurn, preempted: bool
) -> None:
    """A request that is preempted after its pull is computed from its start, without a pull."""
    engine = make_engine()
    engine.add(second_turn("r", prompt=150, covered=48))
    steps = [engine.step(), engine.step(received={"r"}), engine.step()]
    assert computed(steps) == 64
    if preempted:
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    more = [engine.step() for _ in range(3 if preempted else 1)]
    assert computed(more) == (150 if preempted else 150 - 48 - 64)
    assert [len(step.messages.loads) for step in (*steps, *more)] == [1] + [0] * (2 + len(more))
    assert "r" in more[-1].finished
    read(engine)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_pull_that_fails(make_engine: MakeEngine, second_turn: SecondTurn, policy: str) -> None:
    """A pull fails if decode no longer holds the pages; then ``kv_load_failure_policy`` applies."""
    engine = make_engine(policy=policy)
    each = second_turn("r", prompt=56, covered=48)
    engine.add(each)
    engine.step()
    assert waits(each)
    failed = engine.step(received={"r"}, failed={"r"})
    if policy == "fail":
        assert each.status.name == "FINISHED_ERROR"
        assert "r" in failed.finished
        engine.step()
        assert engine.is_empty
    else:
        step = engine.step()
        assert (step.computed, step.messages.loads) == ({"r": 56}, [])
        assert step.finished["r"] is not None


@pytest.mark.parametrize(
    ("settings", "seconds"), [({}, 480.0), ({"decoder_kv_blocks_ttl": 7}, 7.0)]
)
def test_time_that_blocks_are_held(
    make_engine: MakeEngine, settings: dict[str, Any], seconds: float
) -> None:
    prefill, decode = make_engine(), make_engine(**settings)
    params = schedulers.conversation_ticket(prefill, decode, "r", tokens(40))
    assert params["remote_blocks_expiry_time"] is None
    orders = decode.step().messages.orders
    [(hold, _)] = orders.ready
    assert orders.ttls == ((hold, seconds),)


def computed(steps: list[Step]) -> int:
    """Return how many tokens of the request "r" were computed in these steps."""
    return sum(step.computed.get("r", 0) for step in steps)
