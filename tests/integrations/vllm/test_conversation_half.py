"""The two roles of the scheduler half for the second turn of a conversation. Needs no vLLM."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.lifecycle.holds import EndedHold, HoldEnd, RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.metrics import Metrics
from kvferry.core.security import TicketKey
from kvferry.core.security.ticket_proof import check
from kvferry.integrations.vllm.adapter_files import AdapterError
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.consumer import Consumer
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.request_reports import RequestReports
from kvferry.integrations.vllm.side_channel import EngineSideChannel
from kvferry.integrations.vllm.ticket_params import KEY, read_ticket
from tests.integrations.vllm import halves
from tests.integrations.vllm.halves import TICKET_KEY, blocks, image, request

TTL = 480.0
DECODE = EngineSideChannel(engine="decode", incarnation=6, host="10.0.0.2", port=5700)
DECODED = {"do_remote_prefill": True}
STATE = (CacheGroup(index=0, tokens=1 << 20, is_state=True),)
TWO_SIZES = (CacheGroup(index=0, tokens=16), CacheGroup(index=1, tokens=24))


def spoken(each: Any, generated: int = 0) -> Any:
    """A request with ``all_token_ids``, of which some were generated."""
    last = each.prompt_token_ids[-1] if each.prompt_token_ids else 0
    each.all_token_ids = [*each._all_token_ids, *(last + 1 + i for i in range(generated))]
    each.num_tokens = len(each.all_token_ids)
    return each


def answered(
    prompt: int = 40, generated: int = 9, computed: int | None = None, **settings: Any
) -> Any:
    """A request that was prefilled elsewhere and has generated tokens; the last has no KV."""
    computed = prompt + generated - 1 if computed is None else computed
    params = settings.pop("params", DECODED)
    return spoken(request(prompt, dict(params), computed=computed, **settings), generated)


def producer(**settings: Any) -> Producer:
    return halves.producer(
        **({"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": TTL} | settings)
    )


def finished(made: Producer, each: Any, ids: list[list[int]] | None = None) -> Any:
    """The params of an answer that ended; its blocks are as many as it needs."""
    made.take_on(each)
    ids = ids or [list(range(1, 1 + -(-each.num_tokens // 16)))]
    return made.request_finished(each, ids, DECODE)


def conversation_ticket(tokens: int = 64, **settings: Any) -> dict[str, Any]:
    """The params of an answer whose ticket covers some tokens, all in sequence from 0."""
    serving = settings.pop("serving", DECODE)
    mm_features = settings.pop("mm_features", [])
    lora = settings.pop("lora", None)
    each = answered(tokens - 9, 10, tokens)
    each.mm_features, each.lora_request = mm_features, lora
    made = producer(**settings)
    made.take_on(each)
    ids = [list(range(1, 1 + -(-tokens // 16)))]
    params = made.request_finished(each, ids, serving)
    assert params is not None
    return json.loads(json.dumps(params))  # type: ignore[no-any-return]


def counted(metrics: Metrics, name: str) -> dict[str, float]:
    data: dict[str, Any] = metrics.take() or {}
    found: dict[str, float] = data.get(name, {}).get("loopback", {})
    return found


def chunks(digests: bytes) -> list[bytes]:
    return [digests[i : i + 16] for i in range(0, len(digests), 16)]


def unknown(request: Any) -> bytes | None:
    raise AdapterError("not known")


class TestAnswers:
    """The tickets of answers, on the engine that decodes."""

    def test_ticket_covers_the_generated_tokens_and_is_not_computed(self) -> None:
        made = producer()
        each = answered(40, 9)
        params = finished(made, each, [[7, 8, 9, 3]])
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
        assert params["remote_num_tokens"] == 48
        got = read_ticket(params)
        assert (got.tokens, got.pages, got.computed) == (48, ((7, 8, 9),), False)
        assert got.blocks is not None
        assert (got.blocks.tokens, len(got.blocks), len(got.blocks.salt)) == (16, 3, 16)
        check(got.proof, TICKET_KEY.public)
        orders = made.drain()
        [(_, hold)] = orders.take_ons
        assert (orders.ready, orders.ttls) == (((hold, 30.0),), ((hold, TTL),))

    def test_a_request_with_both_flags_is_handed_over_as_a_prompt(self) -> None:
        """Such a request is prefilled here with what another engine has, and decoded elsewhere."""
        made = producer()
        each = answered(40, 1, 40, params=DECODED | {"do_remote_decode": True})
        got = read_ticket(finished(made, each))
        assert (got.blocks, got.tokens) == (None, 40)
        assert made.drain().ttls == ()

    def test_each_ticket_has_a_salt_of_its_own(self) -> None:
        first, second = (read_ticket(finished(producer(), answered())) for _ in range(2))
        assert first.digest == second.digest
        assert first.blocks is not None
        assert second.blocks is not None
        assert first.blocks.salt != second.blocks.salt
        assert not set(chunks(first.blocks.digests)) & set(chunks(second.blocks.digests))

    @pytest.mark.parametrize(
        ("settings", "each", "ids", "tokens", "digests"),
        [
            ({"blocks": 1024}, answered(512 * 16, 2, 512 * 16 + 1), None, 32, 256),
            ({"groups": TWO_SIZES}, answered(), [[1, 2, 3], [4, 5]], 48, 1),
            ({"groups": STATE}, answered(40, 9, 49), [[7]], 0, 0),
        ],
        ids=["a long answer", "whole pages of every group", "a state"],
    )
    def test_blocks_that_have_digests(
        self, settings: dict[str, Any], each: Any, ids: Any, tokens: int, digests: int
    ) -> None:
        got = read_ticket(finished(producer(**settings), each, ids)).blocks
        assert got is not None
        assert (tokens or got.tokens, len(got)) == (got.tokens, digests)

    @pytest.mark.parametrize(
        ("settings", "change", "said"),
        [
            ({"groups": STATE}, {"num_computed_tokens": 50}, "more was computed than its tokens"),
            ({}, {"prompt_embeds": object()}, "its prompt has embeddings"),
            ({"max_held_fraction": 3 / 64}, {}, "it has 4 blocks, and 3 may be held"),
            ({"blocks": 0}, {}, "no slot was free"),
            ({"adapter_content": unknown}, {}, "not known"),
        ],
    )
    def test_answer_that_is_not_held_is_counted(
        self,
        settings: dict[str, Any],
        change: dict[str, Any],
        said: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        metrics = Metrics(driver="loopback")
        each = answered()
        vars(each).update(change)
        with caplog.at_level(logging.DEBUG):
            assert finished(producer(metrics=metrics, **settings), each) is None
        assert "not held for the next turn" in caplog.text
        assert said in caplog.text
        assert metrics.take() == {"conversation_holds": {"loopback": {"refused": 1}}}

    def test_states_are_not_held_where_drafts_are_computed(self) -> None:
        """A drafter, too, advances a state beyond the tokens that are verified."""
        made = producer(lookahead=2, groups=STATE, drafts=True)
        assert finished(made, answered(40, 9, 48), [[7]]) is None

    @pytest.mark.parametrize("end", list(HoldEnd))
    def test_its_end_is_counted_by_itself(self, end: HoldEnd) -> None:
        metrics = Metrics(driver="loopback")
        made = producer(metrics=metrics)
        finished(made, answered())
        made.holds_ended({"r": EndedHold(request=RequestId("r"), end=end)})
        made.sends_finished(["r"])
        assert metrics.take() == {"conversation_holds": {"loopback": {"made": 1, end.value: 1}}}


class Passes(halves.Passes):
    """An engine of one rank that holds four answers and a prompt."""

    def __init__(self) -> None:
        super().__init__(1, producer)
        for number in range(4):
            self.hold(answered(31, 2, 32, name=f"a{number}"), 2 * number + 1)
        self.hold(request(32, halves.PREFILL, name="p"), 9)

    def lack_twice(self, tokens: int) -> bool:
        """Two passes in which a request gets no blocks; whether the ranks are asked."""
        return self.lack(tokens) | self.lack(tokens)


class TestBlocksAreLacking:
    def test_answers_go_at_once_the_oldest_first(self) -> None:
        passes = Passes()
        assert not passes.lack_twice(
            48
        )  # three blocks, but 1/16 of the cache at least, which is four
        assert passes.ended() == ["a0", "a1"]

    def test_no_more_go_before_these_blocks_are_back(self) -> None:
        passes = Passes()
        passes.producer.update_metrics()
        data = passes.metrics.take() or {}
        assert data["held_pages"] == {"loopback": 10}
        assert data["conversation_pages"] == {"loopback": 8}
        assert data["held_fraction"] == {"loopback": 2 / 64}
        passes.lack_twice(48)
        passes.ended()
        for name in ("a0", "a1"):
            assert not passes.lack_twice(48)
            assert passes.ended() == []
            passes.producer.sends_finished([name])
        passes.lack_twice(64 * 16)
        assert passes.ended() == ["a2", "a3"]

    def test_prompts_go_only_if_no_answers_are_left(self) -> None:
        passes = Passes()
        passes.answer({"p": 9.0})
        assert not passes.lack_twice(1000)
        assert passes.ended() == ["a0", "a1", "a2", "a3"]
        passes.producer.sends_finished(["a0", "a1", "a2", "a3"])
        assert passes.lack_twice(1000)
        passes.answer({"p": 9.0})
        passes.lack_twice(1000)
        assert passes.ended() == ["p"]

    def test_nothing_goes_for_a_request_that_waits_once(self) -> None:
        """vLLM may pass over a request for other reasons than blocks."""
        passes = Passes()
        assert not passes.lack(48)
        assert not passes.lack(48, name="another")
        assert not passes.producer.relieve_block_pressure()
        assert not passes.lack(48, name="another")
        assert passes.ended() == []

    def test_running_request_is_not_preempted_while_answers_go(self) -> None:
        passes = Passes()
        assert passes.producer.has_pending_block_frees()
        assert passes.producer.has_pending_block_frees()
        assert passes.ended() == ["a0", "a1"]
        passes.producer.relieve_block_pressure()
        passes.producer.sends_finished(["a0", "a1"])
        assert passes.producer.has_pending_block_frees()
        assert passes.ended() == ["a2", "a3"]
        passes.producer.sends_finished(["a2", "a3"])
        assert not passes.producer.has_pending_block_frees()


def consumer(**settings: Any) -> Consumer:
    common: dict[str, Any] = {
        "engine": "prefill",
        "bidirectional_kv_xfer": True,
        "kv_recompute_threshold": 16,
    }
    return halves.consumer(**(common | settings))


def turn(prompt: int = 80, params: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The next turn of a conversation, which is to be decoded elsewhere."""
    return spoken(request(prompt, params or conversation_ticket(), **settings))


OF_A_PROMPT = halves.ticket() | {"do_remote_decode": True, "do_remote_prefill": False}


def changed(each: Any, position: int) -> Any:
    """A turn with another token at a position."""
    for ids in (each.prompt_token_ids, each._all_token_ids, each.all_token_ids):
        ids[position] += 1000
    return each


def loaded(made: Consumer, each: Any, computed: int = 0) -> int | None:
    """How many tokens a turn is to load, as asked twice."""
    made.on_new_request(each)
    tokens = made.num_matched_tokens(each, computed)
    assert made.num_matched_tokens(each, computed) == tokens
    return tokens


WEIGHTS: dict[str, Any] = {"adapter_content": lambda each: b"weights"}
OTHERS: dict[str, Any] = {"adapter_content": lambda each: b"others"}
LORA = {"lora_request": SimpleNamespace(lora_name="sql")}


def later(*, edited: int | None = None, change: Any = None, **made: Any) -> Any:
    """A turn of 80 tokens with a ticket for 64 that is made so; what differs from that one."""
    each = turn(80, conversation_ticket(**made))
    vars(each).update(change or {})
    return each if edited is None else changed(each, edited)


def pictured(*where: tuple[int, int]) -> Any:
    """A turn with images, and with another token near the end of what is common."""
    images = {"mm_features": [image(*each) for each in where]}
    return later(edited=63, change=images, **images)


class TestTurns:
    """Requests that go on with a conversation, on the engine that prefills."""

    @pytest.mark.parametrize(
        ("tokens", "each", "settings"),
        [
            (57, turn(57, conversation_ticket(57)), {}),
            (48, turn(50), {}),  # a shortened history
            # Up to the last block before a changed token.
            (48, later(edited=63), {}),
            (48, later(edited=48), {}),
            (32, later(edited=47), {}),
            (16, later(edited=16), {}),
            (64, later(edited=79), {}),
            (16, later(edited=20), {"verify_prompt": False}),
            (0, later(edited=60), {"groups": STATE}),  # the producer's groups are no states
            # No image is cut; without its second, the first of two would be.
            (32, pictured((40, 20)), {}),
            (48, pictured((40, 8)), {}),
            (48, pictured((48, 4)), {}),
            (16, pictured((20, 15), (34, 20)), {}),
            (0, pictured((2, 50)), {}),
            (32, later(change={"mm_features": [image(33)]}, mm_features=[image(33, 3)]), {}),
            # Nothing is common with another prompt.
            (0, later(change={"cache_salt": "another"}), {}),
            (0, later(change=LORA), {}),
            (0, later(change={"prompt_embeds": object()}), {}),
            (64, later(change=LORA, lora=LORA["lora_request"], **WEIGHTS), WEIGHTS),
            (0, later(change=LORA, lora=LORA["lora_request"], **WEIGHTS), OTHERS),
        ],
    )
    def test_what_is_common_is_loaded(
        self, tokens: int, each: Any, settings: dict[str, Any]
    ) -> None:
        assert loaded(consumer(**settings), each) == tokens

    @pytest.mark.parametrize(
        ("each", "settings"),
        [
            (spoken(request(80, {"do_remote_decode": True})), {}),  # without a ticket
            (spoken(request(80, None)), {}),
            (turn(80, {**conversation_ticket(), "do_remote_decode": None}), {}),
            (turn(80, {**conversation_ticket(), "do_remote_decode": False}), {}),
            (turn(80), {"bidirectional_kv_xfer": False}),
            (later(change={"abort_immediately": True}), {}),
            (turn(80, OF_A_PROMPT), {"engine": "another"}),
        ],
    )
    def test_nothing_is_loaded(self, each: Any, settings: dict[str, Any]) -> None:
        made = consumer(**settings)
        assert loaded(made, each) == 0
        assert not made.pending

    def test_all_that_the_ticket_covers_is_loaded(self) -> None:
        made = consumer()
        each = turn(80, conversation_ticket(57))
        assert loaded(made, each) == 57
        made.blocks_allocated(each, blocks(21, 22, 23, 24), 57)
        messages = made.drain()
        [load] = messages.loads
        assert load.ranges == ((0, 57),)
        assert load.local[0].ids.tolist() == [21, 22, 23, 24]
        assert (load.report, load.shared) == (True, False)
        assert [prepared.tokens for prepared in messages.prepare] == [57]
        assert not load.ticket.computed

    def test_other_weights_are_loaded_for_its_adapter(self) -> None:
        """All is computed, with the new weights."""
        made = consumer()
        each = turn(80)
        assert loaded(made, each) == 64
        assert not made.weights_changed("r")
        assert made.num_matched_tokens(each, 0) == 0
        messages = made.drain()
        assert [load.reads for load in messages.loads] == [False]
        assert messages.refused == []

    def test_edited_history_is_counted_and_computed(self, caplog: pytest.LogCaptureFixture) -> None:
        metrics = Metrics(driver="loopback")
        made = consumer(metrics=metrics, reports=RequestReports(log=True))
        each = changed(turn(80), 3)
        with caplog.at_level(logging.INFO):
            assert loaded(made, each) == 0
        assert "the prompt does not begin with its 64 tokens" in caplog.text
        made.blocks_allocated(each, blocks(21, 22, 23, 24, 25), 0)
        assert made.drain().loads == []
        assert metrics.take() == {"edited_histories": {"loopback": 1}}

    @pytest.mark.parametrize(("threshold", "tokens"), [(0, 9), (9, 9), (10, 0)])
    def test_few_tokens_are_computed(self, threshold: int, tokens: int) -> None:
        """Then "done" is sent, since nobody else will load them."""
        made = consumer(kv_recompute_threshold=threshold)
        each = turn(80, conversation_ticket(57))
        assert loaded(made, each, 48) == tokens
        made.blocks_allocated(each, blocks(21, 22, 23, 24, 25), tokens)
        [load] = made.drain().loads
        assert (load.reads, load.report) == (bool(tokens), bool(tokens))

    def test_states_are_loaded_whole_or_not_at_all(self) -> None:
        params = conversation_ticket(57, groups=STATE)
        metrics = Metrics(driver="loopback")
        made = consumer(groups=STATE, metrics=metrics)
        assert loaded(made, turn(80, params, name="longer")) == 57
        assert loaded(made, turn(57, params, name="same")) == 0  # its last token is computed here
        assert loaded(made, changed(turn(80, params, name="other"), 56)) == 0
        assert loaded(made, turn(56, params, name="shorter")) == 0
        assert metrics.take() == {"edited_histories": {"loopback": 2}}

    def test_request_with_both_flags_is_no_turn(self) -> None:
        """It comes with the ticket of a prompt, which it needs, and is decoded elsewhere."""
        made = consumer(engine="another", kv_recompute_threshold=1000)
        params = halves.ticket() | {"do_remote_decode": True}
        assert loaded(made, turn(40, params)) == 40
        other = changed(turn(41, params, name="other"), 3)
        made.on_new_request(other)
        made.blocks_allocated(other, blocks(21, 22, 23), 40)
        assert made.drain().refused


class TestRefused:
    """Tickets of which a turn can make no use. The whole prompt is computed, and nothing fails."""

    def refused(self, made: Consumer, each: Any, metrics: Metrics) -> dict[str, float]:
        """Why a turn's ticket was refused; asserts that vLLM computes the turn."""
        assert loaded(made, each) == 0
        made.blocks_allocated(each, blocks(21, 22, 23, 24, 25), 0)
        made.request_finished(each)
        messages = made.drain()
        assert messages == type(messages)()
        return counted(metrics, "refused_tickets")

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"engine": "decode"}, "own"),
            ({"role": "kv_producer"}, "role"),
            (halves.SIGNS, "signature"),
            (halves.KEYS, "admission"),
            ({"adapter_content": unknown}, "adapter"),
        ],
        ids=["own", "role", "signature", "admission", "adapter"],
    )
    def test_what_this_engine_may_not_load(
        self, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        metrics = Metrics(driver="loopback")
        made = consumer(metrics=metrics, **settings)
        assert self.refused(made, turn(80), metrics) == {reason: 1}
        assert "the whole prompt is computed" in caplog.text
        assert f"cause {reason}, of engine decode" in caplog.text

    def test_forged_digests_are_found_by_the_proof(self) -> None:
        """The scheduler half cannot know, so the ranks check the proof before they read."""
        params = conversation_ticket()
        other = conversation_ticket()
        params[KEY]["blocks"] = other[KEY]["blocks"]
        made = consumer()
        each = turn(80, params)
        assert loaded(made, each) == 64
        made.blocks_allocated(each, blocks(21, 22, 23, 24, 25), 64)
        [load] = made.drain().loads
        with pytest.raises(Exception, match="altered"):
            check(load.ticket.proof, TICKET_KEY.public)


def test_ticket_is_that_of_the_last_answer_only() -> None:
    """A ticket proves what one engine has held; another engine's key does not prove it."""
    made = consumer()
    each = turn(80, conversation_ticket(ticket_key=TicketKey()))
    assert loaded(made, each) == 64
    [prepared] = made.drain().prepare
    assert isinstance(prepared, Ticket)
    with pytest.raises(Exception, match="key"):
        check(prepared.proof, TICKET_KEY.public)
