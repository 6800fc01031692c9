"""The tickets of prompts and answers, and their holds. Needs no vLLM."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest

from kvferry.core.lifecycle.holds import EndedHold, HoldEnd, RequestId
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS, Silence
from kvferry.core.metrics import Metrics
from kvferry.core.security.ticket_proof import check
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.request_reports import RequestReports
from kvferry.integrations.vllm.ticket_format import read_ticket
from tests.integrations.vllm.halves import (
    HEADERS,
    NOT_KNOWN,
    PREFILL,
    STATE,
    TALKS,
    TICKET_KEY,
    TTL,
    WINDOW,
    Spans,
    answered,
    finish,
    full,
    host_pages,
    image,
    producer,
    request,
    step,
)

SAMPLE = "cmpl-a-0-89b15765"


class TestTickets:
    def test_blocks_of_the_prompt_without_holes_in_front(self) -> None:
        made = producer((*full(), WINDOW))
        each = request(40, PREFILL)
        made.take_on(each)
        [(_, hold)] = made.drain().take_ons
        params = made.request_finished(each, [[7, 8, 9, 3], [0, 0, 6]], (0, 37))
        got = read_ticket(params or {})
        assert (got.tokens, got.pages, got.first_index) == (40, ((7, 8, 9), (6,)), (0, 2))
        assert (got.hold, got.host, got.port) == (hold, "10.0.0.1", 5600)
        assert (got.computed, got.missing) == (True, (0, 5))
        assert [(each.hold, each.lease) for each in made.drain().tickets] == [(hold, 30.0)]

    @pytest.mark.parametrize("settings", [{"drafts": True}, {"is_staged": True}])
    def test_pages_that_are_written_after_the_last_token(self, settings: dict[str, Any]) -> None:
        made = producer(**settings)
        made.set_ranks(1, host_pages(8, lambda: 0.0) if "is_staged" in settings else None)
        made.waits_for_host_pages(each := request(40, PREFILL))
        assert not read_ticket(finish(made, each)).computed

    @pytest.mark.parametrize(
        ("settings", "change", "reason", "words"),
        [
            ({"lookahead": 3}, {"mm_features": [image(30, 10)]}, "cut_media", "end prompts with"),
            ({}, {"request_id": f"{SAMPLE[:-11]}-1-89b15765"}, "list", "it is prompt 2 of a"),
            ({"role": "kv_consumer"}, {}, "role", 'set "kv_producer" or "kv_both"'),
            ({"max_held_fraction": 2 / 64}, {}, "too_large", "it has 3 blocks, and 2 may be held"),
            (NOT_KNOWN, {}, "adapter", "not known"),
        ],
        ids=["image at the end", "list", "role", "too large", "adapter"],
    )
    def test_no_ticket_is_counted_and_logged(
        self,
        settings: dict[str, Any],
        change: dict[str, Any],
        reason: str,
        words: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Nothing of the prompt is cut off for decode, and nothing is held."""
        made = producer(**settings)
        each = request(40, dict(PREFILL))
        vars(each).update(change)
        made.on_new_request(each)
        assert (each.num_prompt_tokens, len(each._all_token_ids)) == (40, 40)
        assert finish(made, each) is None
        assert not made.drain()
        assert made._facts.metrics.take() == {
            "holds": {"loopback": {"refused": 1}},
            "tickets_not_made": {"loopback": {reason: 1}},
        }
        assert words in caplog.text

    def test_what_settings_cause_is_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        for settings, lines in (({"role": "kv_consumer"}, 1), ({"max_held_fraction": 2 / 64}, 2)):
            made = producer(**settings)
            for name in "ab":
                made.on_new_request(each := request(40, PREFILL, name=name))
                assert finish(made, each) is None
            assert len([each for each in caplog.records if each.levelname == "WARNING"]) == lines
            caplog.clear()

    def test_id_that_is_still_held(self) -> None:
        """The pages of the first request stay its own; the second is served without a ticket."""
        made = producer()
        each = request(40, PREFILL)
        assert finish(made, each)
        assert finish(made, each, 4, 5, 6) is None
        counted = made._facts.metrics.take() or {}
        assert counted["tickets_not_made"] == {"loopback": {"no_hold": 1}}
        made.sends_finished(["r"])
        assert finish(made, each, 4, 5, 6)

    def test_clients_cannot_pin_the_whole_cache(self, caplog: pytest.LogCaptureFixture) -> None:
        made = producer(max_held_fraction=4 / 64)
        assert finish(made, request(40, PREFILL, name="old"))
        assert finish(made, request(40, PREFILL, name="new"), 4, 5, 6)
        orders = made.drain()
        assert orders.ends == (orders.take_ons[0][1],)
        made.sends_finished(["old"])
        made.update_metrics()
        assert made._facts.metrics.take() == {
            "holds": {"loopback": {"made": 2, "evicted": 1}},
            "held_pages": {"loopback": 3},
            "held_fraction": {"loopback": 3 / 4},
        }
        assert "request old: its ticket was given up" in caplog.text
        assert "max_held_fraction" in caplog.text

    def test_requests_with_one_prompt_and_params_together(self) -> None:
        """As vLLM makes them for several samples, in an engine without a process of its own."""
        made, params, ids = producer(lookahead=2), dict(PREFILL), list(range(40))
        for name in ("0_r", "1_r"):
            each = request(40, params, name=name)
            each.prompt_token_ids = ids
            made.on_new_request(each)
            assert (each.num_prompt_tokens, len(each.prompt_token_ids)) == (39, 39)
        assert (params, len(ids)) == (PREFILL, 40)

    def test_samples_have_one_hold(self) -> None:
        """vLLM answers with the ticket of one, so the pages of the others would be held in vain."""
        made = producer()
        samples = [request(40, PREFILL, name=f"{index}_{SAMPLE}") for index in range(3)]
        tickets = []
        for index in (1, 0, 2):
            tickets.append(finish(made, samples[index], index, 8, 9))
            assert made.holds(samples[index].request_id) == (index == 1)
        assert tickets == [tickets[0]] * 3
        hold = made.drain().tickets[0].hold
        assert hold == read_ticket(tickets[0]).hold
        made.sends_finished([samples[1].request_id])
        late = finish(made, request(40, PREFILL, name=f"3_{SAMPLE}"))
        assert late not in (None, tickets[0])

    @pytest.mark.parametrize("why", ["prompt", "old", "given up", "ended", "room"])
    def test_sample_that_has_its_own_hold(self, why: str) -> None:
        now = [0.0]
        made = producer(clock=lambda: now[0])
        params = PREFILL | ({"transfer_id": "room"} if why == "room" else {})
        first, second = (request(40, params, name=f"{index}_a") for index in range(2))
        made.on_new_request(first)
        ticketed = finish(made, first)
        if why == "prompt":
            second.prompt_token_ids = [7] * 40
        elif why == "old":
            now[0] = 15.0
        elif why == "given up":
            made.revoke(["0_a"])
        elif why == "ended":
            made.holds_ended({"0_a": EndedHold(request=RequestId("0_a"), end=HoldEnd.EXPIRED)})
        assert finish(made, second, 4, 5, 6) not in (None, ticketed)
        assert made.holds("1_a")
        made.sends_finished(["1_a"])
        made.sends_finished(["0_a"])
        assert not made.holds("0_a")


class TestAnswers:
    """The tickets of answers, on the engine that decodes."""

    def test_ticket_covers_the_generated_tokens_and_is_not_computed(self) -> None:
        made = producer(**TALKS)
        params = finish(made, answered(40, 9), 7, 8, 9, 3)
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
        got, again = (
            read_ticket(each) for each in (params, finish(producer(**TALKS), answered(40, 9)))
        )
        assert (got.tokens, got.pages, got.computed) == (48, ((7, 8, 9),), False)
        assert got.blocks is not None
        assert again.blocks is not None
        assert (got.blocks.tokens, len(got.blocks), len(got.blocks.salt)) == (16, 3, 16)
        assert got.digest == again.digest
        assert got.blocks.salt != again.blocks.salt
        assert got.blocks.digests[:16] != again.blocks.digests[:16]
        check(got.proof, TICKET_KEY.public)
        orders = made.drain()
        [(_, hold)] = orders.take_ons
        [made_ticket] = orders.tickets
        assert (made_ticket.hold, made_ticket.lease, made_ticket.ttl) == (hold, 30.0, TTL)

    @pytest.mark.parametrize(
        ("groups", "each", "ids", "tokens", "digests"),
        [
            (full(), answered(512 * 16, 2, 512 * 16 + 1), [[*range(1, 514)]], 32, 256),
            ((*full(), CacheGroup(index=1, tokens=24)), answered(40), [[1, 2, 3], [4, 5]], 48, 1),
            ((STATE,), answered(40, 9, 49), [[7]], 1, 0),
        ],
        ids=["a long answer", "whole pages of every group", "a state"],
    )
    def test_blocks_that_have_digests(
        self, groups: Any, each: Any, ids: Any, tokens: int, digests: int
    ) -> None:
        made = producer(groups, blocks=1024, **TALKS)
        made.take_on(each)
        got = read_ticket(made.request_finished(each, ids) or {}).blocks
        assert got is not None
        assert (got.tokens, len(got)) == (tokens, digests)

    @pytest.mark.parametrize(
        ("settings", "change", "said"),
        [
            ({"groups": (STATE,)}, {"num_computed_tokens": 50}, "more was computed than its"),
            ({}, {"prompt_embeds": object()}, "its prompt has embeddings"),
            ({"max_held_fraction": 2 / 64}, {}, "it has 3 blocks, and 2 may be held"),
            ({"max_held_fraction": 5 / 64}, {}, "it has 3 blocks, and with those held for prompts"),
            (NOT_KNOWN, {}, "not known"),
        ],
        ids=["drafts", "embeddings", "too large", "prompts go first", "adapter"],
    )
    def test_answer_that_is_not_held_is_counted(
        self,
        settings: dict[str, Any],
        change: dict[str, Any],
        said: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        made = producer(**TALKS, **settings)
        finish(made, request(40, PREFILL, name="prompt"), 1, 2, 3)
        made._facts.metrics.take()
        made.drain()
        each = answered()
        vars(each).update(change)
        with caplog.at_level(logging.DEBUG):
            assert finish(made, each, 4, 5, 6) is None
        assert "no ticket is made" in caplog.text
        assert said in caplog.text
        counted = made._facts.metrics.take() or {}
        assert counted["conversation_holds"] == {"loopback": {"refused": 1}}
        assert made.drain().ends == ()

    def test_states_are_not_held_where_drafts_are_computed(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A drafter, too, advances a state beyond the tokens that are verified."""
        made = producer((STATE,), drafts=True, **TALKS)
        assert "answers get no tickets, because drafts take the states" in caplog.text
        assert finish(made, answered(40, 9, 48), 7) is None


TURNED = {"do_remote_prefill": True}
READ, ABANDONED = (HoldEnd.READ, "decode"), (HoldEnd.ABANDONED, "decode")


@pytest.mark.parametrize(
    ("ends", "outcome", "said"),
    [
        ((READ, READ), "read", "read by decode"),
        ((), "read", "read"),
        ((READ, ABANDONED), "abandoned", "abandoned by decode"),
        (((HoldEnd.EXPIRED, ""), READ), "expired", "expired"),
        ((("read", "a\rb"),), "read", "read by a b"),
    ],
)
@pytest.mark.parametrize("is_answer", [False, True])
def test_a_hold_that_ended_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture, ends: Any, outcome: str, said: str, is_answer: bool
) -> None:
    caplog.set_level(logging.INFO, "kvferry.requests")
    now = [100.0]
    spans: Any = Spans()
    reports = RequestReports(log=True, spans=spans)
    made = producer(clock=lambda: now[0], reports=reports, **TALKS)
    each = answered(32, 9, name="p\nq") if is_answer else request(40, PREFILL, name="p\nq")
    each.trace_headers = HEADERS
    finish(made, each)
    now[0] += 0.84
    for end, engine in ends:
        hold = EndedHold(request=RequestId("p\nq"), end=HoldEnd(end), engine=engine)
        made.holds_ended({"p\nq": hold})
    for _ in range(2):
        made.sends_finished(["p\nq"])
    metric = "conversation_holds" if is_answer else "holds"
    assert made._facts.metrics.take() == {metric: {"loopback": {"made": 1, outcome: 1}}}
    [line] = [each.getMessage() for each in caplog.records if each.name == "kvferry.requests"]
    assert line == f"request p q: 40 tokens, 3 blocks, {said} after 0.84 s"
    facts = {"request": "p\nq", "tokens": 40, "blocks": 3, "outcome": outcome, "seconds": 0.84}
    assert spans.made == [("hold", HEADERS, facts)]


class Passes:
    """Scheduling passes of an engine of 64 blocks, whose requests have two blocks each, held."""

    def __init__(self, ranks: int, *requests: Any) -> None:
        self.now = 100.0
        self.producer: Producer = producer(clock=lambda: self.now, **TALKS)
        self.producer.set_ranks(ranks)
        for each, block in zip(requests, itertools.count(1, 2), strict=False):
            assert finish(self.producer, each, block, block + 1)
        self.holds = dict(self.producer.drain().take_ons)

    def lack(self, tokens: int = 40, name: str = "new") -> bool:
        """A pass in which a request gets no blocks; whether the ranks are asked."""
        self.producer.allocation_attempted(request(tokens, name=name), 0)
        return self.producer.relieve_block_pressure()

    def lack_twice(self, tokens: int) -> bool:
        return self.lack(tokens) | self.lack(tokens)

    def answer(self, *reports: dict[str, float], engines: tuple[str, ...] = ()) -> None:
        """Each rank says which requests are silent, and for how long."""
        self.producer.silence_reported(
            {
                rank: [
                    Silence(
                        request=RequestId(name),
                        hold=self.holds[RequestId(name)],
                        age=age,
                        engines=engines,
                    )
                    for name, age in report.items()
                ]
                for rank, report in enumerate(reports)
            }
        )

    def ended(self) -> list[str]:
        """Whose holds the workers are to end."""
        names = {hold: name for name, hold in self.holds.items()}
        return [names[hold] for hold in self.producer.drain().ends]


def pressed() -> Passes:
    """An engine of two ranks that holds eight prompts."""
    return Passes(2, *(request(32, PREFILL, name=f"r{number}") for number in range(8)))


def talking() -> Passes:
    """An engine of one rank that holds four answers and a prompt."""
    answers = [answered(31, 2, 32, name=f"a{number}") for number in range(4)]
    return Passes(1, *answers, request(32, PREFILL, name="p"))


class TestBlocksAreLacking:
    @pytest.mark.parametrize(
        ("engines", "who"), [(("decode-7",), "engine decode-7"), ((), "decode")]
    )
    def test_as_many_go_as_are_waited_for_the_oldest_first(
        self, caplog: pytest.LogCaptureFixture, engines: tuple[str, ...], who: str
    ) -> None:
        passes = pressed()
        passes.lack()
        ages = {f"r{number}": 3.0 + number for number in range(6)}
        passes.answer(ages | {"r7": 9.0}, ages, engines=engines)  # one rank hears of r7
        passes.lack(tokens=40 + 48)
        assert passes.ended() == ["r5", "r4", "r3"]
        [line] = [each for each in caplog.messages if "cause orphaned" in each]
        assert "the pages of 3 requests" in line
        assert f": {who} gave no sign of life for 6.0 s" in line

    def test_answers_go_at_once_and_no_more_before_their_blocks_are_back(self) -> None:
        passes = talking()
        passes.producer.update_metrics()
        data = passes.producer._facts.metrics.take() or {}
        assert data["held_pages"] == {"loopback": 10}
        assert data["conversation_pages"] == {"loopback": 8}
        assert data["held_fraction"] == {"loopback": 2 / 64}
        assert not passes.lack_twice(48)  # three blocks, but 1/16 of the cache at least: four
        assert passes.ended() == ["a0", "a1"]
        for name in ("a0", "a1"):
            assert not passes.lack_twice(48)
            assert passes.ended() == []
            passes.producer.sends_finished([name])
        passes.lack_twice(64 * 16)
        assert passes.ended() == ["a2", "a3"]

    def test_prompts_go_only_if_no_answers_are_left(self) -> None:
        passes = talking()
        passes.answer({"p": 9.0})
        assert not passes.lack_twice(1000)
        assert passes.ended() == ["a0", "a1", "a2", "a3"]
        passes.producer.sends_finished(["a0", "a1", "a2", "a3"])
        assert passes.lack_twice(1000)
        passes.answer({"p": 9.0})
        passes.lack_twice(1000)
        assert passes.ended() == ["p"]

    def test_no_answers_go_for_a_request_that_waits_once(self) -> None:
        """vLLM may pass over a request for other reasons than blocks."""
        passes = talking()
        assert not passes.lack(48)
        assert not passes.lack(48, name="another")
        assert not passes.producer.relieve_block_pressure()
        assert not passes.lack(48, name="another")
        assert passes.ended() == []

    def test_running_request_is_not_preempted_while_answers_go(self) -> None:
        passes = talking()
        for _ in range(2):
            assert passes.producer.has_pending_block_frees()
        assert passes.ended() == ["a0", "a1"]
        passes.producer.relieve_block_pressure()
        passes.producer.sends_finished(["a0", "a1"])
        assert passes.producer.has_pending_block_frees()
        assert passes.ended() == ["a2", "a3"]
        passes.producer.sends_finished(["a2", "a3"])
        assert not passes.producer.has_pending_block_frees()


class Staged:
    """A producer with so many host pages."""

    def __init__(self, count: int, ranks: int = 1, **settings: Any) -> None:
        self.now = 0.0
        self.metrics = Metrics(driver="loopback")
        self.producer: Producer = producer(is_staged=True, metrics=self.metrics, **settings)
        host = host_pages(count, lambda: self.now)
        host.ranks = ranks
        self.producer.set_ranks(ranks, host)

    def waits(self, name: str, tokens: int = 40) -> bool:
        return self.producer.waits_for_host_pages(request(tokens, PREFILL, name=name))

    def prefill(self, name: str, *ids: int, tokens: int = 40, **changes: Any) -> Any:
        """Prefill a request in these blocks; its ticket."""
        assert not self.waits(name, tokens)
        return finish(self.producer, request(tokens, PREFILL, name=name, **changes), *ids)


class TestStaged:
    def test_a_hole_among_the_blocks_stays_one(self) -> None:
        staged = Staged(8)
        got = read_ticket(staged.prefill("a", 7, 0, 9))
        [made] = staged.producer.drain().tickets
        assert made.copy is not None
        assert (made.copy.blocks, got.pages) == ((7, 9), ((1, 0, 2),))
        assert (got.computed, made.lease) == (False, 30.0)

    def test_host_pages_slot_and_id_return_when_all_ranks_say_over(self) -> None:
        staged = Staged(4, ranks=2)
        staged.prefill("a", 7, 3, 9)
        assert staged.waits("b")
        assert staged.producer.has_pending_block_frees()
        staged.producer.sends_finished(["a"])
        assert not staged.producer.has_pending_block_frees()
        assert staged.prefill("a", 4, 5, 6) is None
        for rank in (0, 1):
            assert staged.producer.pending
            assert staged.waits("b")
            staged.producer.holds_over({rank: ["a"]})
        assert not staged.producer.pending
        assert not staged.waits("b")

    def test_a_wait_ends_without_a_ticket(self, caplog: pytest.LogCaptureFixture) -> None:
        staged = Staged(4)
        staged.prefill("a", 1, 2, 3)
        assert staged.waits("late")
        staged.now = 10.0
        assert staged.prefill("late", 4, 5, 6) is None
        assert "did not get the 3 host pages that it may need, of 4, within 10 s" in caplog.text
        assert "cause host_pages" in caplog.text
        assert staged.prefill("large", *range(7, 20), tokens=200) is None  # it never fits
        assert staged.prefill("small", 21, tokens=16) is not None
        staged.producer.update_metrics()
        found = staged.metrics.take() or {}
        assert found["tickets_not_made"] == {"loopback": {"host_pages": 2}}
        assert found["host_pages"] == {"loopback": {"holds": 4}}
        assert found["host_pages_used"] == {"loopback": {"holds": 4}}
        waits = found["host_page_wait_seconds"]["loopback"]["holds"]
        assert waits == {"granted": [0.0, 0.0], "refused": [10.0, 0.0]}

    def test_a_request_that_ends_early_gives_its_host_pages_back(self) -> None:
        staged = Staged(4)
        for status in ("FINISHED_ABORTED", "FINISHED_ERROR"):
            assert staged.prefill(status, 1, 2, 3, status=status) is None
        assert staged.prefill("a", 1, 2, 3) is not None

    def test_silent_holds_go_when_requests_wait_for_host_pages(self) -> None:
        """And not when they wait for blocks, of which holds keep none."""
        staged = Staged(4)
        made = staged.producer
        staged.prefill("a", 1, 2, 3)
        [copy] = made.drain().tickets
        made.sends_finished(["a"])
        made.allocation_attempted(request(40, name="other"), 0)
        assert not made.relieve_block_pressure(request_waits=True)
        assert staged.waits("b")
        assert made.relieve_block_pressure()
        silence = Silence(request=RequestId("a"), hold=copy.hold, age=GONE_SECONDS + 1)
        made.silence_reported({0: [silence]})
        made.relieve_block_pressure()
        assert made.drain().ends == (copy.hold,)

    def test_no_parts_are_published(self) -> None:
        made = Staged(8).producer
        each = request(40, PREFILL | {"transfer_id": "room"})
        made.on_new_request(each)
        made.take_on(each)
        for _ in range(2):
            made.publish_parts(step(r=20))
        assert not made.drain().watermarks
