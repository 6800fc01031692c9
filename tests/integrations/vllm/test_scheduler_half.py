"""The two roles of the scheduler half, on requests as vLLM describes them. Needs no vLLM."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.lifecycle.holds import EndedHold, HoldEnd, RequestId
from kvferry.core.lifecycle.silent_holds import ASK_SECONDS
from kvferry.core.metrics import Metrics
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.ticket_params import read_ticket
from tests.integrations.vllm.halves import (
    KEYS,
    PEER,
    PREFILL,
    SECRETS,
    SERVING,
    SIGNS,
    STRANGER,
    Passes,
    allocate,
    arrive,
    blocks,
    consumer,
    finish,
    full,
    image,
    keyed,
    producer,
    request,
    step,
    ticket,
)

TICKET, SIGNED = ticket(), ticket(secrets=SECRETS)
OTHER_TOKENS = {"prompt_token_ids": [*range(39), 99]}
OTHER = "it was made for another prompt than this one of 40 tokens"


def not_made(reason: str, count: int = 1) -> dict[str, Any]:
    """What is counted if no ticket is made."""
    return {
        "holds": {"loopback": {"refused": count}},
        "tickets_not_made": {"loopback": {reason: count}},
    }


def pressed() -> Passes:
    """An engine of two ranks that holds eight requests."""
    passes = Passes(2)
    for number in range(8):
        passes.hold(request(32, PREFILL, name=f"r{number}"), 2 * number + 1)
    return passes


class TestProducer:
    def test_ticket_lists_the_blocks_of_the_prompt_without_holes_in_front(self) -> None:
        made = producer(groups=full(2))
        each = request(40, PREFILL, computed=43)
        made.take_on(each)
        [(_, hold)] = made.drain().take_ons
        params = made.request_finished(each, [[7, 8, 9, 3], [0, 0, 6]], SERVING)
        got = read_ticket(params or {})
        assert (got.tokens, got.pages, got.first_index) == (40, ((7, 8, 9), (6,)), (0, 2))
        assert (got.hold, got.host, got.port) == (hold, "10.0.0.1", 5600)
        assert made.drain().ready == ((hold, 30.0),)

    @pytest.mark.parametrize(
        ("settings", "change", "reason", "words"),
        [
            (
                {"lookahead": 3},
                {"mm_features": [image(30, 10)]},
                "cut_media",
                "end prompts with text",
            ),
            ({}, {"request_id": "cmpl-a-1-89b15765"}, "list", "it is prompt 2 of a completion"),
            ({"role": "kv_consumer"}, {}, "role", 'set "kv_producer" or "kv_both"'),
        ],
        ids=["an image at the end", "a further prompt of a list", "an engine that only loads"],
    )
    def test_no_ticket_is_counted_each_time_and_logged_once(
        self,
        settings: dict[str, Any],
        change: dict[str, Any],
        reason: str,
        words: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Nothing of the prompt is cut off for decode, and nothing is held."""
        metrics = Metrics(driver="loopback")
        made = producer(metrics=metrics, **{"lookahead": 2} | settings)
        for name in ("a", "b"):
            each = request(40, dict(PREFILL), name=name)
            vars(each).update(change)
            made.on_new_request(each)
            assert (each.num_prompt_tokens, len(each._all_token_ids)) == (40, 40)
            assert finish(made, each) is None
        assert not made.drain()
        assert metrics.take() == not_made(reason, 2)
        assert caplog.text.count(words) == 2

    def test_request_without_a_slot_is_counted_once_however_often_it_was_preempted(self) -> None:
        metrics = Metrics(driver="loopback")
        made = producer(blocks=1, metrics=metrics)
        made.take_on(request(40, PREFILL, name="first"))
        each = request(40, PREFILL, name="second")
        for _ in range(3):
            made.take_on(each)
        assert finish(made, each) is None
        assert metrics.take() == not_made("no_hold")

    def test_id_that_is_still_held(self, caplog: pytest.LogCaptureFixture) -> None:
        """The pages of the first request stay its own; the second is served without a ticket."""
        made = producer()
        each = request(40, PREFILL)
        assert finish(made, each)
        assert finish(made, each, 4, 5, 6) is None
        assert "request r: no ticket is made" in caplog.text
        made.sends_finished(["r"])
        assert finish(made, each, 4, 5, 6)

    def test_answer_is_not_held_in_place_of_a_prompt(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        metrics = Metrics(driver="loopback")
        made = producer(max_held_fraction=4 / 64, metrics=metrics, conversation_ttl=480.0)
        answer = request(32, {"do_remote_prefill": True}, name="a")
        answer.all_token_ids = answer.prompt_token_ids
        assert finish(made, request(40, PREFILL))
        with caplog.at_level(logging.DEBUG):
            assert finish(made, answer, 4, 5) is None
        assert "it has 2 blocks, and with those held for prompts" in caplog.text
        counted = metrics.take() or {}
        assert counted["conversation_holds"] == {"loopback": {"refused": 1}}
        assert made.drain().ends == ()

    def test_clients_cannot_pin_the_whole_cache(self, caplog: pytest.LogCaptureFixture) -> None:
        metrics = Metrics(driver="loopback")
        made = producer(max_held_fraction=4 / 64, metrics=metrics)
        assert finish(made, request(40, PREFILL, name="old"))
        assert finish(made, request(40, PREFILL, name="new"), 4, 5, 6)
        orders = made.drain()
        assert orders.ends == (orders.take_ons[0][1],)
        made.update_metrics()
        assert metrics.take() == {
            "holds": {"loopback": {"made": 2}},
            "held_pages": {"loopback": 3},
            "held_fraction": {"loopback": 0.75},
        }
        made.sends_finished(["old"])
        assert metrics.take() == {"holds": {"loopback": {"evicted": 1}}}
        made.update_metrics()
        assert metrics.take() is None
        assert "max_held_fraction" in caplog.text
        large = request(90, PREFILL, name="large")
        assert finish(made, large, 0, 7, 8, 9, 10, 11) is None
        assert "it has 5 blocks, and 4 may be held" in caplog.text
        assert metrics.take() == not_made("too_large")

    def test_requests_with_one_prompt_and_params_together(self) -> None:
        """As vLLM makes them for several samples, in an engine without a process of its own."""
        made, params, ids = producer(lookahead=2), dict(PREFILL), list(range(40))
        for name in ("0_r", "1_r"):
            each = request(40, params, name=name)
            each.prompt_token_ids = ids
            made.on_new_request(each)
            assert (each.num_prompt_tokens, len(each.prompt_token_ids)) == (39, 39)
        assert params == PREFILL
        assert len(ids) == 40

    def test_samples_have_one_hold(self) -> None:
        """vLLM answers with the ticket of one, so the pages of the others would be held in vain."""
        metrics = Metrics(driver="loopback")
        made = producer(metrics=metrics)
        samples = [request(40, PREFILL, name=f"{index}_cmpl-a-0-89b15765") for index in range(3)]
        tickets = []
        for index in (1, 0, 2):
            made.take_on(samples[index])
            tickets.append(made.request_finished(samples[index], [[index, 8, 9]], SERVING))
            assert made.holds(samples[index].request_id) == (index == 1)
        assert tickets[0] is not None
        assert tickets == [tickets[0]] * 3
        assert metrics.take() == {"holds": {"loopback": {"made": 1}}}
        orders = made.drain()
        assert [hold for hold, _ in orders.ready] == [read_ticket(tickets[0]).hold]
        made.sends_finished([samples[1].request_id])
        made.take_on(late := request(40, PREFILL, name="3_cmpl-a-0-89b15765"))
        assert made.request_finished(late, [[1, 2, 3]], SERVING) not in (None, tickets[0])

    @pytest.mark.parametrize("why", ["prompt", "old", "given up", "ended", "room"])
    def test_sample_that_has_its_own_hold(self, why: str) -> None:
        now = [0.0]
        made = producer(clock=lambda: now[0])
        params = PREFILL | ({"transfer_id": "room"} if why == "room" else {})
        first, second = (request(40, params, name=f"{index}_a") for index in range(2))
        for each in (first, second):
            made.on_new_request(each)
            made.take_on(each)
        ticketed = made.request_finished(first, [[1, 2, 3]], SERVING)
        if why == "prompt":
            second.prompt_token_ids = [7] * 40
        elif why == "old":
            now[0] = 15.0
        elif why == "given up":
            made.revoke(["0_a"])
        elif why == "ended":
            ended = EndedHold(request=RequestId("0_a"), end=HoldEnd.EXPIRED, engine="")
            made.holds_ended({"0_a": ended})
        own = made.request_finished(second, [[4, 5, 6]], SERVING)
        assert own is not None
        assert own != ticketed
        assert made.holds("1_a")


class TestBlocksAreLacking:
    def test_ranks_are_asked_while_a_request_waits_and_not_too_often(self) -> None:
        passes = pressed()
        assert not passes.producer.relieve_block_pressure()
        assert passes.lack()
        assert not passes.lack()
        passes.now += ASK_SECONDS
        each = request(40, name="new")
        passes.producer.allocation_attempted(each, 0)
        passes.producer.take_on(each)
        passes.answer({"r1": 9.0}, {"r1": 9.0})
        assert not passes.producer.relieve_block_pressure(), "it has its blocks"
        assert passes.producer.relieve_block_pressure(request_waits=True)
        assert passes.ended() == [], "an answer counts for one pass"

    def test_as_many_go_as_are_waited_for_the_oldest_first(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        passes = pressed()
        passes.lack()
        ages = {f"r{number}": 3.0 + number for number in range(6)}
        passes.answer(ages | {"r7": 9.0}, ages, engines=("decode-7",))  # one rank hears of r7
        passes.lack(tokens=40 + 48)
        assert passes.ended() == ["r5", "r4", "r3"]
        [line] = [each for each in caplog.messages if "cause orphaned" in each]
        assert "the pages of 3 requests" in line
        assert "engine decode-7 gave no sign of life for 6.0 s" in line

    def test_running_requests_are_not_preempted_while_blocks_come_back(self) -> None:
        passes = pressed()
        assert not passes.producer.has_pending_block_frees()
        assert passes.producer.relieve_block_pressure()
        passes.answer({"r1": 9.0}, {"r1": 9.0})
        passes.producer.has_pending_block_frees()
        passes.producer.relieve_block_pressure()
        assert passes.ended() == ["r1"]
        assert passes.producer.has_pending_block_frees()
        passes.producer.sends_finished(["r1"])
        assert not passes.producer.has_pending_block_frees()


class TestConsumer:
    def test_load_of_what_is_not_cached_here(self) -> None:
        made = consumer()
        each = arrive(made)
        assert made.num_matched_tokens(each, 16) == made.num_matched_tokens(each, 16) == 24
        made.blocks_allocated(each, blocks(21, 22, 23, cached=1), 24)
        [load] = made.drain().loads
        assert load.ranges == ((16, 40),)
        assert (load.local[0].ids.tolist(), load.local[0].first_index) == ([22, 23], 1)
        assert load.report

    def test_state_past_the_last_token_is_not_loaded(self) -> None:
        """Prefill leaves two tokens out, and of a prompt of two it cannot."""
        state = (CacheGroup(index=0, tokens=1 << 20, is_state=True),)
        each = request(2, dict(PREFILL))
        there = producer(lookahead=3, groups=state)
        there.on_new_request(each)
        params = finish(there, each, 7)
        assert params["remote_num_tokens"] == 2
        made = consumer(state, lookahead=3)
        each = arrive(made, params, 2)
        assert made.num_matched_tokens(each, 0) == 0
        made.blocks_allocated(each, blocks(21), 0)
        [load] = made.drain().loads
        assert (load.reads, load.report) == (False, False)

    @pytest.mark.parametrize(
        ("settings", "params", "change", "reason"),
        [
            ({"role": "kv_producer"}, TICKET, {}, 'this engine\'s kv_role is "kv_producer"'),
            ({"engine": "prefill"}, TICKET, {}, "it was made by this very engine"),
            (SIGNS, TICKET, {}, "not signed"),
            ({}, SIGNED, {}, "no ticket_secrets to check it with"),
            (SIGNS, SIGNED | {"remote_block_ids": [[9, 2, 3]]}, {}, "altered"),
            (KEYS, TICKET, {}, "its tickets name no key, and this engine has keys"),
            ({}, keyed(PEER), {}, "its side channel is encrypted, and this engine has no keys"),
            (KEYS, keyed(STRANGER), {}, f"its key is {STRANGER.hex()}, which is not listed here"),
            ({}, TICKET, OTHER_TOKENS, OTHER),
            (SIGNS, SIGNED, OTHER_TOKENS, OTHER),
            ({}, TICKET, {"cache_salt": "salt"}, OTHER),
            ({}, TICKET, {"mm_features": [image(3)]}, OTHER),
            (
                {},
                TICKET,
                OTHER_TOKENS,
                OTHER,
            ),
            (
                {},
                TICKET,
                {"lora_request": SimpleNamespace(lora_name="mine")},
                OTHER,
            ),
        ],
    )
    def test_refused(
        self,
        settings: dict[str, Any],
        params: dict[str, Any],
        change: dict[str, Any],
        reason: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Nothing is raised, asked for or read; vLLM waits for a load that fails."""
        made = consumer(**settings)
        each = arrive(made, params, **change)
        assert "request r: ticket refused: " in caplog.text
        assert reason in caplog.text
        assert made.num_matched_tokens(each, 16) == 24
        made.blocks_allocated(each, blocks(21, 22, 23), 24)
        arrivals = made.drain()
        assert (arrivals.prepare, arrivals.loads) == ([], [])
        [(_, why)] = arrivals.refused
        assert reason in why

    @pytest.mark.parametrize(
        ("settings", "params", "key"),
        [(SIGNS, SIGNED, b""), (KEYS, keyed(PEER), PEER)],
        ids=["signed", "listed"],
    )
    def test_accepted(self, settings: dict[str, Any], params: dict[str, Any], key: bytes) -> None:
        made = consumer(**settings)
        arrive(made, params)
        [prepared] = made.drain().prepare
        assert prepared.key == key

    def test_text_of_a_client_s_other_values_is_not_made_for_the_log(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It could be large, and the scheduler would wait for it."""
        params = {"do_remote_prefill": True, "remote_request_id": [7], "remote_engine_id": {"a": 1}}
        arrive(consumer(), params)
        assert caplog.messages[0].endswith("of engine (dict), request (list))")

    def test_loads_are_counted_once(self) -> None:
        metrics = Metrics(driver="loopback")
        made = consumer(metrics=metrics)
        allocate(made, *(arrive(made, name=name) for name in ("good", "bad")))
        made.loads_finished(["good", "bad", "another connector's"], failed={"bad"})
        once = {"loopback": 1}
        counted = {"loads": once, "tokens": {"loopback": 40}, "failed_loads": once}
        assert metrics.take() == counted
        assert metrics.take() is None

    def test_request_that_was_loaded_and_is_not_computed_waits_for_blocks(self) -> None:
        """If another request is computed meanwhile, the loaded one may wait for its turn only."""
        made = consumer()
        names = "waits", "aborted", "ends"
        requests = [arrive(made, tokens=48, name=name) for name in names]
        allocate(made, *requests)
        made.request_finished(requests[1])
        assert not made.loaded_request_waits(step())
        made.loads_finished(names)
        assert not made.loaded_request_waits(step(another=1))
        assert made.loaded_request_waits(step())
        made.request_finished(request(48, name="ends"))
        assert made.loaded_request_waits(step())
        assert not made.loaded_request_waits(step(waits=8))
        assert not made.loaded_request_waits(step())

    def test_further_prompt_of_a_list_is_refused_with_what_helps(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It comes with the first prompt's ticket; a router that passes tickets on is right."""
        metrics = Metrics(driver="loopback")
        made = consumer(metrics=metrics)
        arrive(made, tokens=41, name="cmpl-a-1-89b15765", prompt_token_ids=[7] * 41)
        assert "this is prompt 2 of it" in caplog.text
        assert "send each prompt in a request of its own" in caplog.text
        assert "as they are" not in caplog.text
        assert metrics.take() == {"refused_tickets": {"loopback": {"list": 1}}}
        arrive(made, name="cmpl-a-1-89b15765")
        assert len(made.drain().prepare) == 1
