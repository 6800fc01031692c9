"""Early tickets in both roles of the scheduler half. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.errors import KVFerryError, PeerLostError
from kvferry.core.lifecycle.rooms import Rooms, room_id
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.security import TicketSecrets, generate
from kvferry.core.side_channel_messages import RoomNews
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.consumer import Consumer, LoadMessages
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.prompts import prompt_digest
from kvferry.integrations.vllm.ticket_format import Part, read_part
from tests.integrations.vllm.halves import (
    KEYS,
    PEER,
    SECRETS,
    STRANGER,
    WINDOW,
    Follower,
    blocks,
    consumer,
    full,
    producer,
    request,
)

ROOM = room_id("room")
PREFILL = {"do_remote_decode": True, "transfer_id": "room"}
DECODE = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "transfer_id": "room",
    "remote_engine_id": "prefill",
    "remote_bootstrap_addr": "http://10.0.0.1:5600",
}
STATES = (*full(), CacheGroup(index=1, tokens=16, is_state=True))


class Prefilling:
    """A producer, and a request of it that has computed some chunks, in blocks from 11 on."""

    def __init__(self, *chunks: int, tokens: int = 100, name: str = "r", **settings: Any) -> None:
        self.rooms = Rooms()
        self.producer: Producer = producer(rooms=self.rooms, **settings)
        self.request = request(tokens, PREFILL, name=name, computed=0)
        self.placed: list[list[int]] = []
        self.producer.on_new_request(self.request)
        if chunks:
            self.place(*range(11, 11 + -(-tokens // 16)))
            for chunk in (*chunks, 0):
                self.step(chunk)

    def place(self, *ids: int, cached: int = 0, preempted: bool = False) -> None:
        """Let the request have blocks in each group, as in the beginning and after a preemption."""
        self.placed = [[*ids]] * len(self.producer._facts.groups)
        self.request.num_computed_tokens = cached
        self.request.num_preemptions += preempted
        self.producer.take_on(self.request)

    def step(self, tokens: int = 0, *added: int) -> Any:
        """Schedule a chunk; return the orders for the workers.

        vLLM's older model runner gets a request that was preempted as a cached one.
        """
        name, placed = self.request.request_id, self.placed if tokens else []
        is_resumed = bool(placed) and self.request.num_preemptions % 2 == 1
        new = [] if is_resumed or not placed else [SimpleNamespace(req_id=name, block_ids=placed)]
        more = placed if is_resumed else [[*added]]
        output: Any = SimpleNamespace(
            num_scheduled_tokens={name: tokens} if tokens else {},
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name, "another"],
                new_block_ids=[more if is_resumed or added else None, [[99]]],
                resumed_req_ids={name} if is_resumed else set(),
            ),
        )
        self.placed = [] if tokens else self.placed
        self.producer.publish_parts(output)
        self.request.num_computed_tokens += tokens
        return self.producer.drain()

    def marked(self, tokens: int = 0, *added: int) -> list[int]:
        """Schedule a chunk; return which watermarks the workers are to write."""
        return [watermark for _, watermark in self.step(tokens, *added).watermarks]

    def finish(self, status: str = "FINISHED_LENGTH_CAPPED") -> Prefilling:
        self.request.status = SimpleNamespace(name=status)
        tokens = self.request.num_prompt_tokens
        if status == "FINISHED_LENGTH_CAPPED":
            self.request.num_computed_tokens = tokens
        ids = [*range(11, 11 + -(-tokens // 16))]
        self.producer.request_finished(self.request, [ids])
        return self

    def second(self, tokens: int = 100, name: str = "second") -> Any:
        """Prefill another request that names the room; its ticket."""
        made = request(tokens, PREFILL, name=name)
        self.producer.on_new_request(made)
        self.producer.take_on(made)
        return self.producer.request_finished(made, [[*range(21, 28)]])

    def news(self) -> RoomNews:
        [news] = self.rooms.news([(ROOM, 0)])
        return news

    def part(self, **settings: Any) -> Part:
        return read_part(self.news().part, is_last=self.news().is_last, **settings)


def of_another_prompt(tokens: int) -> Prefilling:
    prefill = Prefilling()
    prefill.request.prompt_token_ids = [7] * 100
    prefill.place(*range(11, 18))
    prefill.step(tokens)
    prefill.step()
    return prefill


class TestProducer:
    def test_a_part_follows_each_chunk_and_the_ticket_the_last_one(self) -> None:
        prefill = Prefilling()
        assert (prefill.news().part, prefill.news().is_last) == (b"", False)
        prefill.place(1, 2, 3)
        [(_, hold)] = prefill.step(40).take_ons
        assert not prefill.news().part
        assert prefill.step(40, 4, 5).watermarks == ((hold, 40),)
        part = prefill.part()
        assert (part.total, part.is_last) == (100, False)
        assert (part.ticket.tokens, part.ticket.pages, part.ticket.hold) == (40, ((1, 2, 3),), hold)
        assert prefill.marked() == [80]
        assert prefill.part().ticket.pages == ((1, 2, 3, 4, 5),)
        assert prefill.marked(20, 6, 7) == []  # a step for others publishes nothing again
        assert prefill.marked() == []  # the ticket is for the last chunk
        part = prefill.finish().part()
        assert part == Part(
            ticket=replace(part.ticket, tokens=100, hold=hold), total=100, is_last=True
        )

    @pytest.mark.parametrize("times", [1, 2], ids=["resumed", "new again"])
    def test_preempted_request_has_a_new_hold_and_publishes_nothing_that_it_lost(
        self, times: int
    ) -> None:
        prefill = Prefilling()
        prefill.place(1, 2, 3)
        prefill.request.num_preemptions += times - 1
        [(_, old)] = prefill.step(40).take_ons
        prefill.request.num_computed_tokens = 0
        assert prefill.marked() == []
        prefill.producer.on_new_request(prefill.request)
        prefill.place(7, 8, preempted=True)
        orders = prefill.step(20)
        [(_, new)] = orders.take_ons
        assert (orders.drops, orders.watermarks) == ((old,), ())
        assert (new.slot, new.generation == old.generation) == (old.slot, False)
        assert prefill.step(20).watermarks == ((new, 20),)
        assert (prefill.part().ticket.hold, prefill.part().ticket.pages) == (new, ((7, 8),))

    @pytest.mark.parametrize("cached", [16, 48])
    def test_preempted_and_placed_in_one_step(self, cached: int) -> None:
        """Its first blocks were in the prefix cache, where another request may compute them."""
        prefill = Prefilling()
        prefill.place(1, 2, 3)
        prefill.step(40)
        prefill.place(1, 8, 9, 10, cached=cached, preempted=True)
        assert prefill.marked(16) == []
        assert prefill.marked() == [cached + 16]

    def test_request_that_goes_on_after_a_load_keeps_its_hold(self) -> None:
        prefill = Prefilling()
        prefill.place(1, 2, 3)
        assert prefill.step().take_ons
        prefill.place(1, 2, 3)
        orders = prefill.step(40)
        assert (orders.take_ons, orders.drops) == ((), ())

    @pytest.mark.parametrize(
        ("settings", "change"),
        [
            ({"groups": (replace(WINDOW, index=0),)}, {}),
            ({}, {"lora_request": object()}),
            ({}, {"prompt_embeds": object()}),
        ],
        ids=["windows alone", "adapter", "embeddings"],
    )
    def test_what_has_no_part(self, settings: dict[str, Any], change: dict[str, Any]) -> None:
        prefill = Prefilling(**settings)
        vars(prefill.request).update(change)
        prefill.place(1, 2, 3)
        assert prefill.marked(40) == prefill.marked() == []

    def test_nothing_is_published_of_a_request_that_no_hold_was_free_for(self) -> None:
        prefill = Prefilling(blocks=1)
        prefill.producer.take_on(request(16, PREFILL, name="other"))
        prefill.place(1, 2, 3)
        assert prefill.marked(20) == prefill.marked() == []
        assert not prefill.news().part

    def test_drafts_behind_a_chunk_are_left_to_the_next_part(self) -> None:
        assert Prefilling(40, lookahead=3).part().ticket.tokens == 37

    def test_others_leave_the_room_of_a_request_that_is_under_way(self) -> None:
        prefill = Prefilling()
        assert prefill.second() is not None
        assert prefill.second(name="cmpl-a-1-89b15765") is None  # a later prompt of a list
        assert not prefill.news().is_last

    @pytest.mark.parametrize(
        ("settings", "why"),
        [({"name": "cmpl-a-1-89b15765"}, "prompt 2 of"), ({"role": "kv_consumer"}, "kv_role")],
        ids=["list", "role"],
    )
    def test_request_that_gets_no_ticket_says_so_in_its_room_at_once(
        self, settings: dict[str, Any], why: str
    ) -> None:
        """Decode would wait for ``load_timeout``."""
        news = Prefilling(**settings).news()
        assert (news.part, news.is_last) == (b"", True)
        assert why in news.error

    @pytest.mark.parametrize("name", [None, "", 7, "x" * 2000], ids=["none", "empty", "7", "long"])
    def test_no_room_without_a_name(self, name: object) -> None:
        rooms = Rooms()
        each = request(40, {"do_remote_decode": True, "transfer_id": name})
        producer(rooms=rooms).on_new_request(each)
        assert len(rooms) == 0


class Decoding:
    """A consumer with requests whose prompts are computed elsewhere."""

    def __init__(
        self, *names: str, tokens: int = 100, params: Any = DECODE, **settings: Any
    ) -> None:
        self.follower = Follower()
        self.consumer: Consumer = consumer(**settings, follower=self.follower)
        self.requests: dict[str, Any] = {}
        for name in names or ("r",):
            self.add(params, name, tokens)

    def add(
        self, params: dict[str, Any], name: str = "second", tokens: int = 100, **changes: Any
    ) -> None:
        """Let another request come."""
        made = self.requests[name] = request(tokens, params, name=name)
        vars(made).update(changes)
        self.consumer.on_new_request(made)

    def counted(self) -> dict[str, Any]:
        return self.consumer._facts.metrics.take() or {}

    def matched(self, computed: int = 0, name: str = "r") -> int | None:
        return self.consumer.num_matched_tokens(self.requests[name], computed)

    def place(self, external: int = 100, name: str = "r") -> LoadMessages:
        given = blocks(*range(1, 8))
        self.consumer.blocks_allocated(self.requests[name], given, external)
        return self.consumer.drain()

    def refusal(self, name: str = "r") -> str:
        """Why a request fails that vLLM lets wait for its load."""
        assert self.matched(name=name) == 100
        messages = self.place(name=name)
        [(refused, reason)] = messages.refused
        assert (refused, messages.loads) == (name, [])
        return reason

    def hear(self, prefill: Prefilling, name: str = "r") -> None:
        self.follower.hear(prefill.news(), name)

    def begin(self, prefill: Prefilling) -> LoadMessages:
        """Begin the load of the only request with what prefill has published."""
        self.hear(prefill)
        external = self.matched()
        assert external
        return self.place(external)

    def tokens_of_parts(self) -> list[tuple[int, bool]]:
        """Of each part that the workers get: how many tokens it covers, and if it is the last."""
        parts = self.consumer.drain().parts.values()
        return [(part.ticket.tokens, part.is_last) for part in parts]

    def is_aborted(self) -> None:
        """Check that the workers end the load, and that nothing is left when they have."""
        assert self.consumer.drain().aborted == ["r"]
        self.consumer.loads_finished(["r"], ["r"])
        assert self.consumer.drain() == LoadMessages()
        assert "r" not in self.follower.followed


class TestConsumer:
    def test_waits_without_blocks_until_prefill_has_begun(self) -> None:
        decode = Decoding()
        [(room, asked)] = decode.follower.followed.values()
        assert (room.name, asked) == (ROOM.name, PeerKey("prefill", "10.0.0.1", 5600))
        assert room.prompt == prompt_digest(decode.requests["r"], 100)
        assert decode.matched() is None
        decode.hear(Prefilling())
        assert decode.matched() is None
        decode.hear(Prefilling(40))
        assert decode.matched() == 100
        assert decode.matched(32) == 68

    def test_early_load_has_the_whole_prompt_and_gets_the_newest_part(self) -> None:
        decode, prefill = Decoding(), Prefilling(40)
        [load] = decode.begin(prefill).loads
        assert (load.is_early, load.shared, load.ticket.tokens) == (True, False, 40)
        assert load.ranges == ((0, 100),)
        for _ in range(2):
            prefill.step(20)
            prefill.step()
            decode.hear(prefill)
            decode.matched()
        assert decode.consumer.pending
        assert decode.tokens_of_parts() == [(80, False)]
        decode.hear(prefill.finish())
        assert decode.tokens_of_parts() == [(100, True)]
        assert not decode.follower.followed
        decode.consumer.loads_finished(["r"])
        counted = decode.counted()
        assert counted["early_loads"] == counted["loads"] == {"loopback": 1}
        assert decode.consumer.drain() == LoadMessages()

    @pytest.mark.parametrize(
        ("news", "settings", "words"),
        [
            (of_another_prompt(80), {}, "another prompt"),
            (of_another_prompt(80), {"verify_prompt": False}, "another prompt"),
            (Prefilling(80), {"secrets": SECRETS}, "not signed"),
            (PeerLostError("engine prefill: it has no ticket"), {}, "it has no ticket"),
        ],
        ids=["another prompt", "not verified", "not signed", "no ticket"],
    )
    def test_fails_before_and_after_the_load_has_begun(
        self, news: Any, settings: Any, words: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An older prefill, which knows rooms by name only, may say what another prompt has."""
        for begins in (False, True):
            caplog.clear()
            decode = Decoding(**settings)
            if begins:
                decode.begin(Prefilling(40, **settings))
            decode.follower.hear(news.news() if isinstance(news, Prefilling) else news)
            if begins:
                decode.is_aborted()
            else:
                assert words in decode.refusal()
            counted = decode.counted()
            assert ("failed_loads" in counted) is (begins or isinstance(news, KVFerryError))
            assert words in caplog.messages[-1]

    def test_half_of_the_cache_may_wait_for_prefill(self) -> None:
        decode, prefill = Decoding(blocks=27), Prefilling(40)
        decode.add(DECODE | {"transfer_id": "other"})
        decode.begin(prefill)
        decode.hear(prefill, "second")
        assert decode.matched(name="second") is None
        assert decode.matched(16, name="second") == 84
        decode.hear(prefill.finish())
        decode.consumer.drain()
        assert decode.matched(name="second") == 100

    def test_requests_of_one_room_wait_for_the_ticket(self) -> None:
        decode, prefill = Decoding("r", "second"), Prefilling(40)
        for name in ("r", "second"):
            decode.hear(prefill, name)
            assert decode.matched(name=name) is None
        prefill.finish()
        for name in ("r", "second"):
            decode.hear(prefill, name)
            assert decode.matched(name=name) == 100

    def test_samples_wait_for_the_ticket(self) -> None:
        decode = Decoding("0_r")
        decode.hear(Prefilling(40), "0_r")
        assert decode.matched(name="0_r") is None

    @pytest.mark.parametrize(("lookahead", "reason"), [(0, {}), (3, {"tokens": 1})])
    def test_states_need_the_tokens_that_they_were_computed_for(
        self, lookahead: int, reason: dict[str, int]
    ) -> None:
        decode = Decoding(groups=STATES, lookahead=lookahead)
        decode.hear(Prefilling(40, groups=STATES))
        assert decode.matched() == 99 - max(0, lookahead - 2)
        assert decode.counted().get("refused_tickets", {}).get("loopback", {}) == reason

    @pytest.mark.parametrize(
        "later",
        [lambda: Prefilling(40, tokens=90).finish(), lambda: Prefilling(40, 40, tokens=110)],
        ids=["a ticket", "a part"],
    )
    def test_ticket_for_other_tokens_than_its_parts(self, later: Callable[[], Prefilling]) -> None:
        decode = Decoding(tokens=130)
        decode.begin(Prefilling(40))
        decode.hear(later())
        decode.is_aborted()

    def test_part_of_another_engine_is_refused(self) -> None:
        decode = Decoding()
        decode.add(DECODE | {"remote_engine_id": "another"})
        decode.hear(Prefilling(40), "second")
        assert "engine 'prefill'" in decode.refusal("second")

    @pytest.mark.parametrize(
        ("secrets", "routed"), [(None, ("proxy", 7)), (SECRETS, None)], ids=["unsigned", "signed"]
    )
    def test_address_of_the_router_is_tried_too_unless_parts_are_signed(
        self, secrets: TicketSecrets | None, routed: tuple[str, int] | None
    ) -> None:
        params = DECODE | {"remote_bootstrap_addr": "proxy:7"}
        decode = Decoding(params=params, secrets=secrets)
        [load] = decode.begin(Prefilling(40, secrets=secrets)).loads
        assert load.ticket.routed == routed

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"remote_bootstrap_addr": "no-port"}, "HOST:PORT"),
            ({"remote_bootstrap_addr": "http://[::1:7"}, "HOST:PORT"),
            ({"remote_bootstrap_addr": "h:99999"}, "HOST:PORT"),
            ({"remote_bootstrap_addr": None}, "remote_bootstrap_addr"),
            ({"remote_engine_id": 7}, "remote_engine_id"),
            ({"remote_engine_id": "decode"}, "very engine"),
            ({"transfer_id": ["room"]}, "transfer_id"),
            ({"remote_bootstrap_key": "00"}, "bytes"),
            ({"remote_bootstrap_key": generate().public.hex()}, "no keys"),
        ],
        ids=["port", "brackets", "range", "none", "engine", "own", "room", "key", "encrypted"],
    )
    def test_malformed_params_are_refused(self, changed: dict[str, Any], reason: str) -> None:
        decode = Decoding()
        decode.add(DECODE | changed)
        assert "second" not in decode.follower.followed
        assert reason in decode.refusal("second")

    @pytest.mark.parametrize(("key", "follows"), [(STRANGER, False), (PEER, True)])
    def test_keys_that_are_not_admitted(self, key: bytes, follows: bool) -> None:
        """That of the side channel, and that in a part of the ticket."""
        params = DECODE | {"remote_bootstrap_key": key.hex()}
        decode = Decoding(params=params, security=KEYS["security"])
        assert ("r" in decode.follower.followed) is follows
        if follows:
            decode.hear(Prefilling(40))
            assert "its tickets name no key" in decode.refusal()
