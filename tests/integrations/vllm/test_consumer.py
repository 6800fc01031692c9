"""The tickets with which requests come, and their loads. Needs no vLLM."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.metrics import Metrics
from kvferry.integrations.vllm.consumer import Consumer, LoadMessages
from kvferry.integrations.vllm.request_reports import RequestReports, is_followed
from tests.integrations.vllm.halves import (
    HEADERS,
    KEYS,
    NOT_KNOWN,
    PEER,
    PREFILL,
    RECORD,
    SECRETS,
    SERVING,
    SIGNS,
    STATE,
    STRANGER,
    TALKS,
    WINDOW,
    Spans,
    Users,
    answered,
    arrive,
    blocks,
    consumer,
    finish,
    full,
    host_pages,
    image,
    keyed,
    listed,
    producer,
    request,
    spoken,
    step,
    ticket,
)

TICKET, SIGNED = ticket(), ticket(secrets=SECRETS)
OTHER_TOKENS = {"prompt_token_ids": [*range(39), 99]}
OTHER = "it was made for another prompt than this one of 40 tokens, or with other media"


def allocate(made: Consumer, *requests: Any, external: int = 40) -> LoadMessages:
    """Give requests blocks of which nothing is cached; the messages of the step."""
    for one in requests:
        made.blocks_allocated(one, blocks(21, 22, 23, 24, 25), external)
    return made.drain()


def counted(made: Consumer) -> dict[str, Any]:
    """What was counted; each metric has one label besides the driver, or none."""
    return {name: data["loopback"] for name, data in (made._facts.metrics.take() or {}).items()}


class TestTickets:
    def test_an_id_that_comes_again_is_another_request(self) -> None:
        """vLLM did not say how the first has ended, so its ticket is given back."""
        made = consumer(directory=(users := Users()))
        arrive(made)
        [first] = made.drain().prepare
        each = arrive(made)
        messages = made.drain()
        assert [(load.ticket, load.reads) for load in messages.loads] == [(first, False)]
        assert users.names == {"r"}
        assert made.num_matched_tokens(each, 0) == 40
        [load] = allocate(made, each).loads
        assert ([load.ticket], load.reads) == (messages.prepare, True)

    def test_state_past_the_last_token_is_not_loaded(self) -> None:
        """Prefill leaves two tokens out, and of a prompt of two it cannot."""
        each = request(2, dict(PREFILL))
        there = producer((STATE,), lookahead=3)
        there.on_new_request(each)
        params = finish(there, each, 7)
        assert params["remote_num_tokens"] == 2
        made = consumer((STATE,), lookahead=3)
        each = arrive(made, params, 2)
        assert made.num_matched_tokens(each, 0) == 0
        [load] = allocate(made, each, external=0).loads
        assert (load.reads, load.report) == (False, False)

    @pytest.mark.parametrize(
        ("scored", "refused"), [(False, ["tokens"]), (True, [])], ids=["plain", "prompt_logprobs"]
    )
    def test_states_are_those_after_the_tokens_that_are_needed(
        self, scored: bool, refused: list[str]
    ) -> None:
        """A request that vLLM computes whole needs no state, so its ticket is given back."""
        made = consumer((STATE,), lookahead=3)
        each = arrive(made, skip_reading_prefix_cache=scored)
        assert list(counted(made).get("refused_tickets", {})) == refused
        allocate(made, each, external=0)
        assert made._pulls == {}

    @pytest.mark.parametrize(
        ("settings", "params", "change", "reason", "words"),
        [
            ({"role": "kv_producer"}, TICKET, {}, "role", "kv_role is"),
            ({"engine": "prefill"}, TICKET, {}, "own", "it was made by this very engine"),
            (SIGNS, TICKET, {}, "signature", "not signed"),
            ({}, SIGNED, {}, "signature", "no ticket_secrets to check it with"),
            (SIGNS, SIGNED | {"remote_block_ids": [[9, 2, 3]]}, {}, "signature", "altered"),
            (KEYS, TICKET, {}, "admission", "its tickets name no key, and this engine has keys"),
            ({}, keyed(PEER), {}, "admission", "its side channel is encrypted, and this engine"),
            (KEYS, keyed(STRANGER), {}, "admission", f"its key is {STRANGER.hex()}, which is not"),
            ({}, TICKET, OTHER_TOKENS, "prompt", OTHER),
            (SIGNS, SIGNED, OTHER_TOKENS, "prompt", OTHER),
            ({}, TICKET, {"cache_salt": "salt"}, "prompt", OTHER),
            ({}, TICKET, {"mm_features": [image(3)]}, "prompt", OTHER),
            (NOT_KNOWN, TICKET, {}, "adapter", "not known"),
            (
                {},
                TICKET,
                OTHER_TOKENS | {"request_id": "cmpl-a-1-89b15765"},
                "list",
                "this is prompt 2 of it: vLLM answers",
            ),
        ],
    )
    def test_refused(
        self,
        settings: dict[str, Any],
        params: dict[str, Any],
        change: dict[str, Any],
        reason: str,
        words: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Nothing is raised, asked for or read; vLLM waits for a load that fails."""
        made = consumer(**settings)
        each = arrive(made, params, **change)
        assert f"request {each.request_id}: ticket refused: " in caplog.text
        assert f"cause {reason}, of engine prefill, request r)" in caplog.text
        assert words in caplog.text
        assert made.num_matched_tokens(each, 16) == 24
        messages = allocate(made, each, external=24)
        assert (messages.prepare, messages.loads) == ([], [])
        [(_, why)] = messages.refused
        assert words in why
        assert counted(made) == {"refused_tickets": {reason: 1}}

    @pytest.mark.parametrize(
        ("settings", "params", "change"),
        [
            (SIGNS, SIGNED, {}),
            (KEYS, keyed(PEER), {}),
            ({}, TICKET, {"request_id": "cmpl-a-1-89b15765"}),
            ({"verify_prompt": False}, TICKET, OTHER_TOKENS),
        ],
        ids=["signed", "listed", "a prompt of a list that is equal", "not verified"],
    )
    def test_accepted(self, settings: Any, params: Any, change: Any) -> None:
        made = consumer(**settings)
        arrive(made, params, **change)
        assert len(made.drain().prepare) == 1

    def test_text_of_a_client_s_other_values_is_not_made_for_the_log(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It could be large, and the scheduler would wait for it."""
        params = {"do_remote_prefill": True, "remote_request_id": [7], "remote_engine_id": "a\nb"}
        arrive(consumer(), params)
        assert caplog.messages[0].endswith("of engine a b, request (list))")


class TestLoads:
    def test_done_for_a_shared_hold_is_said_with_the_ticket_that_was_loaded(self) -> None:
        """A client may have altered the other one, and the producer has to be asked again."""
        directory = Users()
        made = consumer(directory=directory)
        altered = TICKET | {"remote_request_id": "altered"}
        first, second = arrive(made, TICKET, name="first"), arrive(made, altered, name="second")
        assert [load.shared for load in allocate(made, first, second).loads] == [True, True]
        made.loads_finished(["first"])
        made.loads_finished(["second"], failed=["second"])
        [done] = made.drain().loads
        assert (done.reads, done.shared, done.ticket.request) == (False, False, "r")
        assert directory.asked == [done.ticket]

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
        made.request_finished(requests[2])
        assert made.loaded_request_waits(step())
        assert not made.loaded_request_waits(step(waits=8))
        assert not made.loaded_request_waits(step())

    def test_first_tokens_of_pages_that_are_not_whole(self) -> None:
        """They are known until the request ends."""
        groups = *full(), WINDOW
        there, prefilled = producer(groups), request(40, dict(PREFILL), computed=39)
        there.on_new_request(prefilled)
        there.take_on(prefilled)
        params = there.request_finished(prefilled, [[1, 2, 3], [0, 2, 3]])
        made = consumer(groups)
        each = arrive(made, params)
        given = SimpleNamespace(blocks=[listed(1, 2, 3), listed(0, 5, 6)])
        made.blocks_allocated(each, given, 39)
        for token in (37, 35):
            record = replace(RECORD, first_tokens=(0, token))
            made.loads_reported({"r": record, "another": record})
        made.loads_finished(["r"])
        assert made.first_tokens("r") == (0, 37)
        made.request_finished(each)
        assert made.first_tokens("r") == ()

    @pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
    @pytest.mark.parametrize("early", [False, True])
    def test_a_load_is_logged_with_what_it_waited(
        self, caplog: pytest.LogCaptureFixture, level: int, early: bool
    ) -> None:
        caplog.set_level(level, "kvferry.requests")
        is_debug = level == logging.DEBUG
        assert (is_followed(log=not is_debug), is_followed(log=False)) == (True, is_debug)
        spans: Any = Spans()
        made = consumer(reports=RequestReports(log=not is_debug, spans=spans))
        allocate(made, arrive(made, name="d", trace_headers=HEADERS))
        made._pulls["d"].is_early = early
        for _ in range(2):  # another rank, in a later step
            made.loads_reported({"d": replace(RECORD, early_nbytes=3 << 20)})
        for _ in range(2):
            made.loads_finished(["d"])
        some = " (6.0 early)" if early else ""
        assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
            (
                level,
                f"request r (here d): loaded 40 tokens, 8.0 MiB{some}, from prefill: waited "
                "8.5 ms, read in 12.1 ms",
            )
        ]
        attributes = OF_A_LOAD | {"bytes": 8 << 20} | ({"early_bytes": 6 << 20} if early else {})
        assert spans.made == [("load", HEADERS, attributes)]

    def test_a_load_that_failed_has_a_span_and_no_line_beside_its_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        spans: Any = Spans()
        made = consumer(reports=RequestReports(log=True, spans=spans))
        allocate(made, arrive(made, name="d", trace_headers=HEADERS))
        made.loads_reported({"d": RECORD})
        made.loads_finished(["d"], failed=["d"])
        assert caplog.records == []
        assert spans.made == [("failed", HEADERS, OF_A_LOAD)]


OF_A_LOAD = {"request": "d", "prefill_request": "r", "prefill_engine": "prefill", "tokens": 40}
FULL = full()
DECODE = replace(SERVING, engine="decode", incarnation=6, host="10.0.0.2", port=5700)


def conversation_ticket(
    tokens: int = 64, groups: Any = FULL, change: Any = None, **settings: Any
) -> dict[str, Any]:
    """The params of an answer whose ticket covers some tokens, all in sequence from 0."""
    each = answered(tokens - 9, 10, tokens)
    vars(each).update(change or {})
    made = producer(groups, serving=DECODE, **TALKS, **settings)
    made.take_on(each)
    ids = [list(range(1, 1 + -(-tokens // 16)))]
    params: dict[str, Any] = json.loads(json.dumps(made.request_finished(each, ids)))
    return params


def talker(groups: Any = FULL, **settings: Any) -> Consumer:
    common: dict[str, Any] = {"engine": "prefill", "kv_recompute_threshold": 16}
    return consumer(groups, **(TALKS | common | settings))


def turn(
    prompt: int = 80, params: Any = None, *, edited: int | None = None, change: Any = None
) -> Any:
    """The next turn of a conversation, with another token at a position."""
    each = spoken(request(prompt, conversation_ticket() if params is None else params))
    if edited is not None:
        for ids in (each.prompt_token_ids, each._all_token_ids, each.all_token_ids):
            ids[edited] += 1000
    vars(each).update(change or {})
    return each


def pictured(*where: tuple[int, int], edited: int = 63) -> Any:
    """A turn with images, and with another token near the end of what is common."""
    images = {"mm_features": [image(*each) for each in where]}
    return turn(80, conversation_ticket(change=images), edited=edited, change=images)


def loaded(made: Consumer, each: Any, computed: int = 0) -> int | None:
    """How many tokens a turn is to load, as asked twice."""
    made.on_new_request(each)
    tokens = made.num_matched_tokens(each, computed)
    assert made.num_matched_tokens(each, computed) == tokens
    return tokens


LORA = {"lora_request": SimpleNamespace(lora_name="sql")}
WEIGHTS: dict[str, Any] = {"adapter_content": lambda each: b"weights"}
OTHERS: dict[str, Any] = {"adapter_content": lambda each: b"others"}
OF_STATES = conversation_ticket(57, (STATE,))
ENDS = ((80, 57), (57, 0), (56, 0))
WITH_LORA = turn(80, conversation_ticket(change=LORA, **WEIGHTS), change=LORA)


class TestTurns:
    """Requests that go on with a conversation, on the engine that prefills."""

    @pytest.mark.parametrize(
        ("tokens", "each", "settings"),
        [
            (57, turn(57, conversation_ticket(57)), {}),
            (48, turn(50), {}),  # a shortened history
            # Up to the last block before a changed token.
            (48, turn(edited=63), {}),
            (48, turn(edited=48), {}),
            (32, turn(edited=47), {}),
            (64, turn(edited=79), {}),
            (16, turn(edited=20), {"verify_prompt": False}),
            (0, turn(edited=60), {"groups": (STATE,)}),
            # States are loaded whole or not at all; the last token of a prompt is computed here.
            *((n, turn(prompt, OF_STATES), {"groups": (STATE,)}) for prompt, n in ENDS),
            # No image is cut; without its second, the first of two would be.
            (32, pictured((40, 20)), {}),
            (48, pictured((40, 8)), {}),
            (48, pictured((48, 4)), {}),
            (16, pictured((20, 15), (34, 20)), {}),
            # Nothing is common with another prompt.
            (0, turn(change={"cache_salt": "another"}), {}),
            (0, turn(change={"mm_features": [image(3)]}), {}),
            (0, turn(change={"prompt_embeds": object()}), {}),
            (0, turn(change=LORA), {}),
            (64, WITH_LORA, WEIGHTS),
            (0, WITH_LORA, OTHERS),
        ],
    )
    def test_what_is_common_is_loaded(
        self, tokens: int, each: Any, settings: dict[str, Any]
    ) -> None:
        assert loaded(talker(**settings), each) == tokens

    @pytest.mark.parametrize(
        ("each", "settings"),
        [
            (turn(80, PREFILL), {}),  # without a ticket
            (turn(80, {}), {}),
            (turn(80, conversation_ticket() | {"do_remote_decode": False}), {}),
            (turn(80), {"bidirectional_kv_xfer": False}),
            (turn(change={"abort_immediately": True}), {}),
            (turn(80, ticket() | PREFILL | {"do_remote_prefill": False}), {"engine": "another"}),
        ],
    )
    def test_nothing_is_loaded(self, each: Any, settings: dict[str, Any]) -> None:
        made = talker(**settings)
        assert loaded(made, each) == 0
        assert not made.pending

    def test_other_weights_are_loaded_for_its_adapter(self) -> None:
        """All is computed, with the new weights."""
        made = talker()
        each = turn()
        assert loaded(made, each) == 64
        assert not made.adapter_changed("r")
        assert made.num_matched_tokens(each, 0) == 0
        messages = made.drain()
        assert [load.reads for load in messages.loads] == [False]
        assert messages.refused == []

    def test_edited_history_is_counted_and_computed(self) -> None:
        made = talker()
        each = turn(edited=3)
        assert loaded(made, each) == 0
        assert allocate(made, each, external=0).loads == []
        assert counted(made) == {"edited_histories": 1}

    @pytest.mark.parametrize(("threshold", "tokens"), [(0, 9), (9, 9), (10, 0)])
    def test_few_tokens_are_computed(self, threshold: int, tokens: int) -> None:
        """Then "done" is sent, since nobody else will load them."""
        made = talker(kv_recompute_threshold=threshold)
        each = turn(80, conversation_ticket(57))
        assert loaded(made, each, 48) == tokens
        [load] = allocate(made, each, external=tokens).loads
        assert (load.reads, load.report) == (bool(tokens), bool(tokens))
        assert (load.ticket.tokens, load.ticket.computed) == (57, False)

    def test_request_with_both_flags_is_no_turn(self) -> None:
        """It comes with the ticket of a prompt, which it needs, and is decoded elsewhere."""
        made = talker(engine="another", kv_recompute_threshold=1000)
        params = ticket() | {"do_remote_decode": True}
        assert loaded(made, turn(40, params)) == 40
        made = talker(engine="another")
        made.on_new_request(other := turn(41, params, edited=3))
        assert allocate(made, other).refused

    @pytest.mark.parametrize(
        ("settings", "reason"), [({"engine": "decode"}, "own"), (NOT_KNOWN, "adapter")]
    )
    def test_refused_ticket_is_computed_and_nothing_fails(
        self, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        made = talker(**settings)
        each = turn()
        assert loaded(made, each) == 0
        assert allocate(made, each, external=0) == LoadMessages()
        made.request_finished(each)
        assert made.drain() == LoadMessages()
        assert "the whole prompt is computed" in caplog.text
        assert f"cause {reason}, of engine decode" in caplog.text
        assert counted(made) == {"refused_tickets": {reason: 1}}


def test_more_blocks_than_host_pages_fail_the_load() -> None:
    """vLLM may give a request more than its tokens need. ``test_consumer_model`` has the rest."""
    made = consumer(is_staged=True, metrics=Metrics(driver="loopback"))
    made.pages.host = host_pages(4, lambda: 0.0)
    first, second = arrive(made, name="first"), arrive(made, name="second")
    assert (made.num_matched_tokens(first, 0), made.num_matched_tokens(second, 0)) == (40, None)
    messages = allocate(made, first)
    assert [request for request, _ in messages.refused] == ["first"]
    assert [(load.report, load.copy) for load in messages.loads] == [(False, None)]
    assert counted(made)["refused_tickets"] == {"host_pages": 1}
    made.loads_finished(["first"], ["first"])
    assert made.num_matched_tokens(second, 0) == 40
