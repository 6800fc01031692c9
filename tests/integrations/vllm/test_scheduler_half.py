"""The two roles of the scheduler half, on requests as vLLM describes them. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.security import Access, TicketKey, TicketSecrets, generate
from kvferry.core.security.proof import check
from kvferry.core.stats import Figures
from kvferry.integrations.vllm.admission import Admission
from kvferry.integrations.vllm.consumer import Consumer
from kvferry.integrations.vllm.groups import CacheGroup
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.serving import Serving
from kvferry.integrations.vllm.ticket import Sizes, read

SERVING = Serving(engine="prefill", incarnation=5, host="10.0.0.1", port=5600)
PREFILL = {"do_remote_decode": True}
SECRETS = TicketSecrets.of(["the secret of both engines"])
PEER, STRANGER = bytes([1]) * 32, bytes([2]) * 32
KEYED = Access(own=generate(), peers=frozenset({PEER}))


def request(
    tokens: int = 40,
    params: dict[str, Any] | None = None,
    *,
    computed: int | None = None,
    status: str = "FINISHED_LENGTH_CAPPED",
    name: str = "r",
) -> Any:
    """A ``Request``."""
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        prompt_embeds=None,
        prompt_is_token_ids=None,
        _all_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens if computed is None else computed,
        max_tokens=9,
        kv_transfer_params=params,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        skip_reading_prefix_cache=False,
        abort_immediately=False,
        status=SimpleNamespace(name=status),
    )


def full(groups: int = 1) -> tuple[CacheGroup, ...]:
    """Groups of full attention in pages of 16 tokens."""
    return tuple(CacheGroup(index=index, tokens=16) for index in range(groups))


def producer(
    tail: int = 0,
    groups: Sequence[CacheGroup] = full(),
    secrets: TicketSecrets | None = None,
    max_held: int | None = None,
    figures: Figures | None = None,
    ticket_key: TicketKey | None = None,
) -> Producer:
    return Producer(
        groups,
        figures=figures or Figures(driver="loopback"),
        slots=64,
        lease=30.0,
        backoff=tail,
        computed=True,
        sizes=Sizes(tp=2, pp=3),
        secrets=secrets,
        max_held=max_held,
        ticket_key=ticket_key,
    )


def consumer(groups: Sequence[CacheGroup] = full(), **settings: Any) -> Consumer:
    common: dict[str, Any] = {"engine": "decode", "may_load": True, "verify_prompt": True}
    common["figures"] = Figures(driver="loopback")
    return Consumer(groups, **({"backoff": 0} | common | settings))


def blocks(*ids: int, cached: int = 0) -> Any:
    """``KVCacheBlocks`` of one group, the first ones in the prefix cache."""
    return SimpleNamespace(blocks=[listed(*ids, cached=cached)])


def listed(*ids: int, cached: int = 0) -> list[Any]:
    """``KVCacheBlock``s."""
    hashes = [b"hash"] * cached + [None] * (len(ids) - cached)
    return [
        SimpleNamespace(block_id=each, is_null=each == 0, block_hash=known)
        for each, known in zip(ids, hashes, strict=True)
    ]


def ticket(
    tokens: int = 40, secrets: TicketSecrets | None = None, serving: Serving = SERVING
) -> dict[str, Any]:
    made = producer(secrets=secrets)
    each = request(tokens, PREFILL)
    made.take_on(each)
    params = made.finished(each, [list(range(1, 5))], serving)
    assert params is not None
    return params


class TestProducer:
    def test_ticket_lists_the_blocks_of_the_prompt(self) -> None:
        made = producer()
        each = request(40, PREFILL, computed=43)
        made.take_on(each)
        [(_, hold)] = made.drain().take_ons
        got = read(made.finished(each, [[7, 8, 9, 3]], SERVING) or {})
        assert (got.tokens, got.pages, got.first_index) == (40, ((7, 8, 9),), (0,))
        assert (got.hold, got.host, got.port) == (hold, "10.0.0.1", 5600)
        assert made.drain().ready == ((hold, 30.0),)

    def test_holes_in_front_are_counted_and_not_listed(self) -> None:
        made = producer(groups=full(2))
        each = request(40, PREFILL)
        made.take_on(each)
        got = read(made.finished(each, [[1, 2, 3], [0, 0, 6]], SERVING) or {})
        assert (got.pages, got.first_index) == (((1, 2, 3), (6,)), (0, 2))

    @pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
    def test_no_ticket_for_what_was_not_computed(self, status: str) -> None:
        made = producer()
        each = request(40, PREFILL, status=status)
        made.take_on(each)
        made.drain()
        assert made.finished(each, [[1, 2, 3]], SERVING) is None
        assert len(made.drain().drops) == 1

    def test_no_ticket_for_a_request_that_nobody_else_decodes(self) -> None:
        made = producer()
        made.take_on(request(40))
        assert made.finished(request(40), [[1, 2, 3]], SERVING) is None
        assert not made.drain()

    def test_no_ticket_for_a_state_that_went_on(self) -> None:
        """It is the one after 41 tokens, and the consumer needs the one after 40."""
        made = producer(groups=[CacheGroup(index=0, tokens=1024, is_state=True)])
        each = request(40, PREFILL, computed=41)
        made.take_on(each)
        assert made.finished(each, [[7, 8]], SERVING) is None

    def test_hold_survives_preemption(self) -> None:
        made = producer()
        each = request(40, PREFILL)
        made.take_on(each)
        made.take_on(each)
        assert len(made.drain().take_ons) == 1

    def test_id_that_is_still_held(self, caplog: pytest.LogCaptureFixture) -> None:
        """The pages of the first request stay its own; the second is served without a ticket."""
        made = producer()
        each = request(40, PREFILL)
        made.take_on(each)
        assert made.finished(each, [[1, 2, 3]], SERVING)
        made.take_on(each)
        assert "request r: no ticket is made" in caplog.text
        assert made.finished(each, [[4, 5, 6]], SERVING) is None
        made.sent(["r"])
        made.take_on(each)
        assert made.finished(each, [[4, 5, 6]], SERVING)

    def test_clients_cannot_pin_the_whole_cache(self, caplog: pytest.LogCaptureFixture) -> None:
        figures = Figures(driver="loopback")
        made = producer(max_held=4, figures=figures)
        for name, ids in (("old", [1, 2, 3]), ("new", [4, 5, 6])):
            each = request(40, PREFILL, name=name)
            made.take_on(each)
            assert made.finished(each, [ids], SERVING)
        orders = made.drain()
        assert orders.ends == (orders.take_ons[0][1],)
        made.count()
        counted = {"evicted_holds": {"loopback": 1}, "held_pages": {"loopback": 3}}
        assert figures.take() == counted
        made.count()
        assert figures.take() is None
        assert "max_held_fraction" in caplog.text
        large = request(90, PREFILL, name="large")
        made.take_on(large)
        assert made.finished(large, [[0, 7, 8, 9, 10, 11]], SERVING) is None
        assert "it has 5 blocks, and 4 may be held" in caplog.text
        assert figures.take() == {"tickets_not_made": {"loopback": {"too_large": 1}}}

    def test_state_before_the_last_token(self) -> None:
        """The prompt is shortened once, though a preempted request comes again."""
        made = producer(tail=1)
        each = request(40, dict(PREFILL))
        made.on_new_request(each)
        made.on_new_request(each)
        assert (each.num_prompt_tokens, len(each.prompt_token_ids), each.max_tokens) == (39, 39, 1)
        assert len(each._all_token_ids) == 39

    def test_requests_with_one_prompt_and_params_together(self) -> None:
        """As vLLM makes them for several samples, in an engine without a process of its own."""
        made, params, ids = producer(tail=1), dict(PREFILL), list(range(40))
        for name in ("0_r", "1_r"):
            each = request(40, params, name=name)
            each.prompt_token_ids = ids
            made.on_new_request(each)
            assert (each.num_prompt_tokens, len(each.prompt_token_ids)) == (39, 39)
        assert params == PREFILL
        assert len(ids) == 40

    def test_prompt_of_one_token_is_not_shortened(self) -> None:
        each = request(1, dict(PREFILL))
        producer(tail=1).on_new_request(each)
        assert each.num_prompt_tokens == 1


class TestConsumer:
    def test_load_of_what_is_not_cached_here(self) -> None:
        made = consumer()
        each = request(40, ticket())
        made.on_new_request(each)
        assert made.matched(each, 16) == made.matched(each, 16) == 24
        made.allocated(each, blocks(21, 22, 23, cached=1), 24)
        [load] = made.drain().loads
        assert load.ranges == ((16, 40),)
        assert (load.local[0].ids.tolist(), load.local[0].first_index) == ([22, 23], 1)
        assert load.report

    def test_state_past_the_last_token_is_not_loaded(self) -> None:
        """Prefill leaves two tokens out, and of a prompt of two it cannot."""
        state = (CacheGroup(index=0, tokens=1 << 20, is_state=True),)
        each = request(2, dict(PREFILL))
        there = producer(tail=2, groups=state)
        there.on_new_request(each)
        there.take_on(each)
        params = there.finished(each, [[7]], SERVING)
        assert params is not None
        assert params["remote_num_tokens"] == 2
        made = consumer(state, backoff=2)
        each = request(2, params)
        made.on_new_request(each)
        assert made.matched(each, 0) == 0
        made.allocated(each, blocks(21), 0)
        [load] = made.drain().loads
        assert (load.reads, load.report) == (False, False)

    def test_second_allocation_loads_nothing(self) -> None:
        made = consumer()
        each = request(40, ticket())
        made.on_new_request(each)
        made.allocated(each, blocks(21, 22, 23), 40)
        made.drain()
        made.received(["r"])
        made.allocated(each, blocks(21, 22, 23), 0)
        assert made.drain().loads == ()
        assert made.matched(each, 0) == 0

    def test_loads_are_counted_once(self) -> None:
        """However many ranks take part, and whatever else was received."""
        figures = Figures(driver="loopback")
        made = consumer(figures=figures)
        for name in ("good", "bad"):
            each = request(40, ticket())
            each.request_id = name
            made.on_new_request(each)
            made.allocated(each, blocks(21, 22, 23), 40)
        made.received(["good", "bad", "another connector's"], failed={"bad"})
        once = {"loopback": 1}
        counted = {"loads": once, "tokens": {"loopback": 40}, "failed_loads": once}
        assert figures.take() == counted
        assert figures.take() is None

    def test_full_local_hit_only_tells_the_producer(self) -> None:
        made = consumer()
        each = request(48, ticket(48))
        made.on_new_request(each)
        assert made.matched(each, 48) == 0
        made.allocated(each, blocks(21, 22, 23), 0)
        [load] = made.drain().loads
        assert (load.ranges, load.report) == ((None,), False)
        made.finished(each)
        assert made.drain().aborted == ()

    def test_end_before_allocation_tells_the_producer(self) -> None:
        made = consumer()
        each = request(40, ticket())
        made.on_new_request(each)
        made.finished(each)
        [load] = made.drain().loads
        assert (load.reads, load.report) == (False, False)

    def test_end_during_the_load_is_told_to_the_workers(self) -> None:
        made = consumer()
        each = request(40, ticket())
        made.on_new_request(each)
        made.allocated(each, blocks(21, 22, 23), 40)
        made.finished(each)
        assert made.drain().aborted == ("r",)

    def test_refused_ticket_goes_the_way_of_a_good_one(self) -> None:
        figures = Figures(driver="loopback")
        made = consumer(figures=figures)
        each = request(40, ticket() | {"kvferry": {}})
        made.on_new_request(each)
        assert made.matched(each, 16) == 24
        made.allocated(each, blocks(21, 22, 23), 24)
        arrivals = made.drain()
        assert not arrivals.loads
        assert not arrivals.prepare
        [(name, reason)] = arrivals.refused
        assert name == "r"
        assert "version" in reason
        made.received(["r"], failed=["r"])
        assert figures.take() == {"refused_tickets": {"loopback": {"malformed": 1}}}

    def test_refused_ticket_where_nothing_is_pulled(self) -> None:
        made = consumer()
        each = request(40, ticket() | {"kvferry": {}})
        made.on_new_request(each)
        made.allocated(each, blocks(21, 22, 23), 0)
        assert made.drain().refused == ()

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"may_load": False}, 'this engine\'s kv_role is "kv_producer"'),
            ({"engine": "prefill"}, "it was made by this very engine"),
        ],
    )
    def test_refused_here(
        self, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        made = consumer(**settings)
        made.on_new_request(request(40, ticket()))
        assert f"request r: ticket refused: {reason}" in caplog.text

    def test_signed_ticket(self) -> None:
        made = consumer(admission=Admission(secrets=SECRETS))
        made.on_new_request(request(40, ticket(secrets=SECRETS)))
        assert len(made.drain().prepare) == 1

    @pytest.mark.parametrize(
        ("params", "ours", "reason"),
        [
            (ticket(), SECRETS, "not signed"),
            (ticket(secrets=SECRETS), None, "no ticket_secrets to check it with"),
            (ticket(secrets=SECRETS) | {"remote_block_ids": [[9, 2, 3]]}, SECRETS, "altered"),
        ],
    )
    def test_ticket_that_is_not_signed_as_it_should_be(
        self, params: dict[str, Any], ours: TicketSecrets | None, reason: str
    ) -> None:
        """It is refused like any other: nothing is raised, and nothing is asked for or read."""
        made = consumer(admission=Admission(secrets=ours))
        each = request(40, params)
        made.on_new_request(each)
        assert made.matched(each, 16) == 24
        made.allocated(each, blocks(21, 22, 23), 24)
        arrivals = made.drain()
        assert (arrivals.prepare, arrivals.loads) == ((), ())
        [(_, why)] = arrivals.refused
        assert reason in why

    def test_every_ticket_of_a_producer_with_a_key_is_proved(self) -> None:
        key = TicketKey()
        made, each = producer(ticket_key=key), request(40, PREFILL)
        made.take_on(each)
        params = made.finished(each, [list(range(1, 5))], SERVING)
        assert params is not None
        check(read(params).proof, key.public)

    def test_genuine_ticket_for_another_prompt(self, caplog: pytest.LogCaptureFixture) -> None:
        made = consumer(admission=Admission(secrets=SECRETS))
        each = request(40, ticket(secrets=SECRETS))
        each.prompt_token_ids = [*range(1, 41)]
        made.on_new_request(each)
        assert "it was made for another prompt" in caplog.text
        assert made.drain().prepare == ()

    @pytest.mark.parametrize(
        ("theirs", "ours", "reason"),
        [
            (b"", KEYED, "its tickets name no key, and this engine has keys"),
            (PEER, Access(), "its side channel is encrypted, and this engine has no keys"),
            (STRANGER, KEYED, f"its key is {STRANGER.hex()}, which is not listed here"),
        ],
    )
    def test_engine_that_would_not_be_asked(
        self, theirs: bytes, ours: Access, reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        made = consumer(admission=Admission(access=ours))
        made.on_new_request(request(40, ticket(serving=replace(SERVING, key=theirs))))
        assert f"ticket refused: engine 'prefill': {reason}" in caplog.text
        assert made.drain().prepare == ()

    def test_engine_whose_key_is_listed(self) -> None:
        made = consumer(admission=Admission(access=KEYED))
        made.on_new_request(request(40, ticket(serving=replace(SERVING, key=PEER))))
        [prepared] = made.drain().prepare
        assert prepared.key == PEER

    def test_what_a_prompt_depends_on(self, caplog: pytest.LogCaptureFixture) -> None:
        """Each of these makes it another prompt."""
        made = consumer()
        changes: list[dict[str, Any]] = [
            {"prompt_token_ids": [*range(39), 99]},
            {"cache_salt": "salt"},
            {"lora_request": SimpleNamespace(lora_name="adapter")},
            {
                "mm_features": [
                    SimpleNamespace(
                        identifier="image", mm_position=SimpleNamespace(offset=3, length=2)
                    )
                ]
            },
        ]
        for number, change in enumerate(changes):
            each = request(40, ticket(), name=f"r{number}")
            each.__dict__.update(change)
            made.on_new_request(each)
            assert f"request r{number}: ticket refused: it was made for another" in caplog.text

    def test_unverified_prompt(self) -> None:
        made = consumer(verify_prompt=False)
        each = request(40, ticket())
        each.prompt_token_ids = [7] * 40
        made.on_new_request(each)
        [prepared] = made.drain().prepare
        assert isinstance(prepared, Ticket)
