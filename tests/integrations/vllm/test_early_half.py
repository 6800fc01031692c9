"""Early tickets in both roles of the scheduler half. Needs no vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.errors import KVFerryError, PeerLostError
from kvferry.core.lifecycle.holds import EndedHold, HoldEnd, RequestId
from kvferry.core.lifecycle.rooms import Rooms, room_id
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.metrics import Metrics
from kvferry.core.security import TicketSecrets, generate
from kvferry.core.side_channel_messages import RoomNews
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.consumer import Consumer, LoadMessages
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.prompts import prompt_digest
from kvferry.integrations.vllm.security import SecuritySettings
from kvferry.integrations.vllm.ticket_params import Part, read_part
from tests.integrations.vllm.halves import (
    KEYED,
    SECRETS,
    SERVING,
    Follower,
    blocks,
    consumer,
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
PREFILL_ENGINE = PeerKey("prefill", "10.0.0.1", 5600)
WINDOWS = (CacheGroup(index=0, tokens=16), CacheGroup(index=1, tokens=16, window=20))
STATES = (CacheGroup(index=0, tokens=16), CacheGroup(index=1, tokens=16, is_state=True))


def planned(
    scheduled: dict[str, int],
    *,
    placed: dict[str, list[list[int]]] | None = None,
    added: dict[str, list[int]] | None = None,
    resumed: bool = False,
) -> Any:
    """A ``SchedulerOutput``; requests are ``placed`` in all these blocks, or get some of a group.

    Where a request was preempted before, vLLM's older model runner gets it as ``resumed``.
    """
    new, lists = placed or {}, {name: (ids,) for name, ids in (added or {}).items()}
    if resumed:
        new, lists = {}, lists | {name: tuple(ids) for name, ids in new.items()}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=tuple(ids)) for name, ids in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(lists),
            new_block_ids=list(lists.values()),
            resumed_req_ids=set(placed or {}) if resumed else set(),
        ),
    )


class Prefilling:
    """A producer, and one request of it."""

    def __init__(self, tokens: int = 100, name: str = "r", **settings: Any) -> None:
        self.rooms = Rooms()
        self.producer: Producer = producer(rooms=self.rooms, **settings)
        self.request = request(tokens, PREFILL, name=name)
        self.request.num_computed_tokens = 0
        self.placed: list[list[int]] | None = None
        self.producer.on_new_request(self.request)

    @property
    def name(self) -> str:
        return str(self.request.request_id)

    def place(self, *ids: int, groups: list[list[int]] | None = None) -> None:
        """Let the request have blocks, as in the beginning and after a preemption."""
        self.placed = [list(ids)] if groups is None else groups
        self.producer.take_on(self.request)

    def step(self, tokens: int = 0, *added: int) -> Any:
        """Schedule a chunk; return the orders for the workers."""
        output = planned(
            {self.name: tokens} if tokens else {},
            placed={self.name: self.placed} if tokens and self.placed else None,
            added={self.name: list(added)} if added else None,
            resumed=self.request.num_preemptions > 0,
        )
        self.placed = None if tokens else self.placed
        self.producer.publish_parts(output, SERVING)
        orders = self.producer.drain()
        self.request.num_computed_tokens += tokens
        return orders

    def publish(self, tokens: int = 0, *added: int) -> Any:
        """Schedule a chunk, and the step after it, which publishes the chunk."""
        self.step(tokens, *added)
        return self.step()

    def preempt(self) -> None:
        self.request.num_computed_tokens = 0
        self.request.num_preemptions += 1

    def finish(self, *ids: int, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
        self.request.status = SimpleNamespace(name=status)
        return self.producer.request_finished(self.request, [list(ids)], SERVING)

    def news(self) -> RoomNews:
        [news] = self.rooms.news([(ROOM, 0)])
        return news

    def part(self, **settings: Any) -> Part:
        return read_part(self.news().part, is_last=self.news().is_last, **settings)


class TestProducer:
    def test_the_room_is_open_before_anything_is_computed(self) -> None:
        assert (Prefilling().news().part, Prefilling().news().is_last) == (b"", False)

    def test_a_part_follows_each_chunk_and_the_ticket_the_last_one(self) -> None:
        prefill = Prefilling(100)
        prefill.place(1, 2, 3)
        [(_, hold)] = prefill.step(40).take_ons
        assert not prefill.news().part
        assert prefill.step(40, 4, 5).watermarks == ((hold, 40),)
        part = prefill.part()
        assert (part.total, part.is_last) == (100, False)
        assert (part.ticket.tokens, part.ticket.pages, part.ticket.hold) == (40, ((1, 2, 3),), hold)
        assert prefill.step(20, 6, 7).watermarks == ((hold, 80),)
        assert prefill.part().ticket.pages == ((1, 2, 3, 4, 5),)
        assert not prefill.step().watermarks  # the ticket is for the last chunk
        prefill.finish(1, 2, 3, 4, 5, 6, 7)
        assert prefill.part() == Part(
            ticket=replace(prefill.part().ticket, tokens=100, hold=hold), total=100, is_last=True
        )

    def test_a_prompt_of_one_chunk_has_no_part(self) -> None:
        prefill = Prefilling(40)
        prefill.place(1, 2, 3)
        assert not prefill.publish(40).watermarks
        assert not prefill.news().part

    def test_a_step_for_others_publishes_what_was_computed_once(self) -> None:
        prefill = Prefilling(100)
        prefill.place(1, 2, 3)
        assert prefill.publish(40).watermarks
        assert not prefill.step().watermarks

    def test_blocks_of_the_prefix_cache_wait_for_the_first_chunk(self) -> None:
        """Another request of the same step may be computing them."""
        prefill = Prefilling(100)
        prefill.request.num_computed_tokens = 32
        prefill.place(1, 2, 3)
        assert not prefill.step(8).watermarks
        assert [tokens for _, tokens in prefill.step().watermarks] == [40]

    def test_preempted_request_has_a_new_hold_and_publishes_nothing_that_it_lost(self) -> None:
        prefill = Prefilling(100)
        prefill.place(1, 2, 3)
        [(_, old)] = prefill.step(40).take_ons
        prefill.preempt()
        assert not prefill.step().watermarks
        prefill.producer.on_new_request(prefill.request)
        prefill.place(7, 8)
        orders = prefill.step(20)
        [(_, new)] = orders.take_ons
        assert (orders.drops, orders.watermarks) == ((old,), ())
        assert (new.slot, new.generation == old.generation) == (old.slot, False)
        assert prefill.step(20).watermarks == ((new, 20),)
        assert (prefill.part().ticket.hold, prefill.part().ticket.pages) == (new, ((7, 8),))

    def test_preempted_and_placed_in_one_step(self) -> None:
        prefill = Prefilling(100)
        prefill.place(1, 2, 3)
        prefill.step(40)
        prefill.preempt()
        prefill.request.num_computed_tokens = 16  # its first block was in the prefix cache
        prefill.place(1, 8)
        assert not prefill.step(16).watermarks
        assert [tokens for _, tokens in prefill.step().watermarks] == [32]

    def test_request_that_goes_on_after_a_load_keeps_its_hold(self) -> None:
        prefill = Prefilling(100)
        prefill.place(1, 2, 3)
        assert prefill.step().take_ons
        prefill.place(1, 2, 3)
        orders = prefill.step(40)
        assert (orders.take_ons, orders.drops) == ((), ())

    @pytest.mark.parametrize("groups", [WINDOWS, STATES])
    def test_windows_and_states_wait_for_the_ticket(self, groups: tuple[CacheGroup, ...]) -> None:
        prefill = Prefilling(100, groups=groups)
        prefill.place(groups=[[1, 2, 3], [0, 5, 6]])
        prefill.publish(40)
        assert prefill.part().ticket.pages == ((1, 2, 3), ())
        assert prefill.part().ticket.first_index == (0, 0)

    @pytest.mark.parametrize(
        ("settings", "change"),
        [
            ({"groups": (CacheGroup(index=0, tokens=16, window=20),)}, {}),
            ({}, {"lora_request": object()}),
            ({}, {"prompt_embeds": object()}),
        ],
        ids=["windows alone", "adapter", "embeddings"],
    )
    def test_what_has_no_part(self, settings: dict[str, Any], change: dict[str, Any]) -> None:
        prefill = Prefilling(100, **settings)
        vars(prefill.request).update(change)
        prefill.place(1, 2, 3)
        assert not prefill.publish(40).watermarks

    def test_drafts_behind_a_chunk_are_left_to_the_next_part(self) -> None:
        prefill = Prefilling(100, lookahead=3)
        prefill.place(1, 2, 3)
        assert [tokens for _, tokens in prefill.publish(40).watermarks] == [37]
        assert prefill.part().ticket.tokens == 37

    def test_aborted_request_ends_its_room(self) -> None:
        prefill = Prefilling(100)
        prefill.place(1, 2, 3)
        prefill.step(40)
        assert prefill.finish(status="FINISHED_ABORTED") is None
        news = prefill.news()
        assert (news.part, news.is_last) == (b"", True)
        assert "FINISHED_ABORTED" in news.error

    @pytest.mark.parametrize("end", [HoldEnd.READ, HoldEnd.ABANDONED, HoldEnd.EXPIRED])
    def test_room_of_a_ticket_that_decode_is_through_with_is_forgotten(self, end: HoldEnd) -> None:
        """Who names it again would get a ticket that is used up."""
        prefill = finished(computed(40))
        ended = EndedHold(request=RequestId("r"), end=end)
        prefill.producer.holds_ended({"r": ended})
        prefill.producer.sends_finished(["r"])
        assert len(prefill.rooms.news([(ROOM, 0)])) == int(end is HoldEnd.EXPIRED)

    def test_room_of_another_request_with_its_name_and_prompt_is_not_forgotten(self) -> None:
        prefill = finished(computed(40))
        again = request(100, PREFILL, name="again")
        prefill.producer.on_new_request(again)
        prefill.producer.take_on(again)
        assert prefill.producer.request_finished(again, [[1, 2, 3, 4, 5, 6, 7]], SERVING)
        prefill.producer.sends_finished(["r"])
        assert prefill.part().ticket.request == "again"

    def test_second_request_of_a_room_is_computed_without_it(self) -> None:
        prefill = Prefilling(100)
        second = request(100, PREFILL, name="second")
        prefill.producer.on_new_request(second)
        prefill.producer.take_on(second)
        assert prefill.producer.request_finished(second, [[1]], SERVING) is not None
        assert not prefill.news().is_last

    @pytest.mark.parametrize(
        ("name", "hands_over", "why"),
        [("cmpl-a-1-89b15765", True, "prompt 2 of"), ("r", False, "kv_role")],
        ids=["list", "role"],
    )
    def test_request_that_gets_no_ticket_says_so_in_its_room_at_once(
        self, name: str, hands_over: bool, why: str
    ) -> None:
        """Decode would wait for ``load_timeout``."""
        news = Prefilling(name=name, role="kv_both" if hands_over else "kv_consumer").news()
        assert (news.part, news.is_last) == (b"", True)
        assert why in news.error

    def test_later_prompt_leaves_the_room_of_a_first_one_that_is_equal(self) -> None:
        prefill = Prefilling(40, name="cmpl-a-0-89b15765")
        later = request(40, PREFILL, name="cmpl-a-1-89b15765")
        prefill.producer.on_new_request(later)
        assert not prefill.news().is_last

    @pytest.mark.parametrize("name", [None, "", 7, "x" * 2000], ids=["none", "empty", "7", "long"])
    def test_no_room_without_a_name(self, name: object) -> None:
        rooms = Rooms()
        made = producer(rooms=rooms)
        each = request(40, {"do_remote_decode": True, "transfer_id": name})
        made.on_new_request(each)
        made.take_on(each)
        assert len(rooms) == 0
        assert made.request_finished(each, [[1, 2, 3]], SERVING) is not None

    def test_parts_are_signed(self) -> None:
        prefill = computed(40, secrets=SECRETS)
        assert prefill.part(secrets=SECRETS).ticket.tokens == 40
        with pytest.raises(KVFerryError, match="signed"):
            prefill.part()


class Decoding:
    """A consumer with requests whose prompts are computed elsewhere."""

    def __init__(self, *names: str, tokens: int = 100, **settings: Any) -> None:
        self.follower = Follower()
        self.metrics = Metrics(driver="loopback")
        common: dict[str, Any] = {"blocks": 64, "metrics": self.metrics}
        self.consumer: Consumer = consumer(**(common | settings), follower=self.follower)
        self.requests: dict[str, Any] = {}
        for name in names or ("r",):
            self.add(DECODE, name, tokens)

    def add(self, params: dict[str, Any], name: str = "second", tokens: int = 100) -> None:
        """Let another request come."""
        self.requests[name] = request(tokens, params, name=name)
        self.consumer.on_new_request(self.requests[name])

    def counted(self) -> dict[str, Any]:
        return self.metrics.take() or {}

    def tokens_of_parts(self) -> list[tuple[int, bool]]:
        """Of each part that the workers get: how many tokens it covers, and if it is the last."""
        parts = self.consumer.drain().parts.values()
        return [(part.ticket.tokens, part.is_last) for part in parts]

    def matched(self, computed: int = 0, name: str = "r") -> int | None:
        return self.consumer.num_matched_tokens(self.requests[name], computed)

    def place(self, *ids: int, external: int, name: str = "r", cached: int = 0) -> LoadMessages:
        given = blocks(*ids, cached=cached)
        self.consumer.blocks_allocated(self.requests[name], given, external)
        return self.consumer.drain()

    def hear(self, prefill: Prefilling, name: str = "r") -> None:
        self.follower.hear(prefill.news(), name)

    def begin(self, prefill: Prefilling) -> LoadMessages:
        """Begin the load of the only request with what prefill has published."""
        self.hear(prefill)
        external = self.matched()
        assert external
        return self.place(*range(1, 8), external=external)


def computed(*chunks: int, tokens: int = 100, **settings: Any) -> Prefilling:
    """A prefill that has computed and published some chunks."""
    prefill = Prefilling(tokens, **settings)
    prefill.place(*range(11, 11 + -(-tokens // 16)))
    for chunk in (*chunks, 0):
        prefill.step(chunk)
    return prefill


def computed_of_another_prompt(tokens: int) -> Prefilling:
    prefill = Prefilling(100)
    prefill.request.prompt_token_ids = [7] * 100
    prefill.place(*range(11, 18))
    prefill.publish(tokens)
    return prefill


def finished(prefill: Prefilling) -> Prefilling:
    tokens = prefill.request.num_prompt_tokens
    prefill.request.num_computed_tokens = tokens
    prefill.finish(*range(11, 11 + -(-tokens // 16)))
    return prefill


class TestConsumer:
    def test_waits_without_blocks_until_prefill_has_begun(self) -> None:
        decode = Decoding()
        [(room, producer)] = decode.follower.followed.values()
        assert (room.name, producer) == (ROOM.name, PREFILL_ENGINE)
        assert room.prompt == prompt_digest(decode.requests["r"], 100)
        assert decode.matched() is None
        decode.hear(Prefilling())
        assert decode.matched() is None
        decode.hear(computed(40))
        assert decode.matched() == 100
        assert decode.matched(32) == 68

    def test_early_load_has_the_whole_prompt_and_gets_the_parts(self) -> None:
        decode, prefill = Decoding(), computed(40)
        [load] = decode.begin(prefill).loads
        assert (load.is_early, load.shared, load.ticket.tokens) == (True, False, 40)
        assert load.ranges == ((0, 100),)
        prefill.publish(40)
        decode.hear(prefill)
        assert decode.consumer.pending
        assert decode.tokens_of_parts() == [(80, False)]
        decode.hear(finished(prefill))
        assert decode.tokens_of_parts() == [(100, True)]
        assert not decode.follower.followed
        decode.consumer.loads_finished(["r"])
        counted = decode.counted()
        assert counted["early_loads"] == counted["loads"] == {"loopback": 1}
        assert decode.consumer.drain() == LoadMessages()

    def test_only_the_newest_part_is_sent(self) -> None:
        decode, prefill = Decoding(), computed(40)
        decode.begin(prefill)
        for _ in range(2):
            prefill.publish(20)
            decode.hear(prefill)
            decode.matched()
        assert decode.tokens_of_parts() == [(80, False)]

    def test_other_prompt_is_refused_before_and_after_the_load_has_begun(self) -> None:
        other = computed_of_another_prompt(40)
        decode = Decoding()
        decode.hear(other)
        assert decode.matched() == 100
        [(name, reason)] = decode.place(*range(1, 8), external=100).refused
        assert name == "r"
        assert "another prompt" in reason
        decode = Decoding()
        decode.begin(computed(40))
        decode.hear(other)
        assert decode.consumer.drain().aborted == ["r"]
        decode.consumer.loads_finished(["r"], ["r"])
        assert decode.consumer.drain() == LoadMessages()

    def test_prefill_that_makes_no_ticket(self, caplog: pytest.LogCaptureFixture) -> None:
        error = PeerLostError("engine prefill: it has no ticket")
        decode = Decoding()
        decode.follower.hear(error)
        assert decode.matched() == 100
        assert decode.place(*range(1, 8), external=100).refused == [("r", str(error))]
        assert "cause peer_lost" in caplog.text
        decode = Decoding()
        decode.begin(computed(40))
        decode.follower.hear(error)
        assert decode.consumer.drain().aborted == ["r"]
        decode.consumer.loads_finished(["r"], ["r"])
        assert not decode.follower.followed
        assert decode.counted()["failed_loads"] == {"loopback": 1}

    def test_half_of_the_cache_may_wait_for_prefill(self) -> None:
        decode, prefill = Decoding(blocks=27), computed(40)
        decode.add(DECODE | {"transfer_id": "other"})
        decode.begin(prefill)
        decode.hear(prefill, "second")
        assert decode.matched(name="second") is None
        assert decode.matched(16, name="second") == 84
        decode.hear(finished(prefill))
        decode.consumer.drain()
        assert decode.matched(name="second") == 100

    def test_requests_of_one_room_wait_for_the_ticket(self) -> None:
        decode, prefill = Decoding("r", "second"), computed(40)
        for name in ("r", "second"):
            decode.hear(prefill, name)
            assert decode.matched(name=name) is None
        finished(prefill)
        for name in ("r", "second"):
            decode.hear(prefill, name)
            assert decode.matched(name=name) == 100

    def test_samples_wait_for_the_ticket(self) -> None:
        decode = Decoding("0_r")
        decode.hear(computed(40), "0_r")
        assert decode.matched(name="0_r") is None

    def test_states_need_the_tokens_that_they_were_computed_for(self) -> None:
        prefill = Prefilling(100, groups=STATES, lookahead=2)
        prefill.place(groups=[[11, 12, 13], [14, 15, 16]])
        prefill.publish(40)
        decode = Decoding(groups=STATES, lookahead=2)
        decode.hear(prefill)
        assert decode.matched() == 99
        decode = Decoding(groups=STATES, lookahead=3)
        decode.hear(prefill)
        decode.matched()
        assert decode.counted()["refused_tickets"] == {"loopback": {"tokens": 1}}

    def test_longer_prompt_loads_its_front(self) -> None:
        decode = Decoding(tokens=130)
        [load] = decode.begin(computed(40)).loads
        assert load.ranges == ((0, 100),)

    def test_ticket_for_other_tokens_than_its_parts(self) -> None:
        decode, prefill = Decoding(), computed(40)
        decode.begin(prefill)
        decode.hear(finished(computed(40, tokens=90)))
        assert decode.consumer.drain().aborted == ["r"]

    def test_part_of_another_engine_is_refused(self) -> None:
        decode = Decoding()
        decode.add(DECODE | {"remote_engine_id": "another"})
        decode.hear(computed(40), "second")
        decode.matched(name="second")
        [(_, reason)] = decode.place(1, external=100, name="second").refused
        assert "engine 'prefill'" in reason

    def test_ticket_where_a_part_is_expected_and_the_reverse(self) -> None:
        for prefill in (computed(40), finished(computed(100))):
            news = prefill.news()
            swapped = RoomNews(
                room=news.room, version=1, part=news.part, is_last=not news.is_last, error=""
            )
            decode = Decoding()
            decode.follower.hear(swapped)
            decode.matched()
            assert decode.place(1, external=100).refused

    @pytest.mark.parametrize("secrets", [None, SECRETS], ids=["unsigned", "signed"])
    def test_unsigned_part_is_refused(self, secrets: TicketSecrets | None) -> None:
        decode = Decoding(security=SecuritySettings(secrets=SECRETS))
        decode.hear(computed(40, secrets=secrets))
        assert decode.matched() == 100
        assert bool(decode.place(1, external=100).refused) == (secrets is None)

    @pytest.mark.parametrize(
        ("secrets", "routed"), [(None, ("proxy", 7)), (SECRETS, None)], ids=["unsigned", "signed"]
    )
    def test_address_of_the_router_is_tried_too_unless_parts_are_signed(
        self, secrets: TicketSecrets | None, routed: tuple[str, int] | None
    ) -> None:
        decode = Decoding("another", security=SecuritySettings(secrets=secrets))
        decode.consumer.request_finished(decode.requests["another"])
        decode.add(DECODE | {"remote_bootstrap_addr": "proxy:7"}, "r")
        decode.hear(computed(40, secrets=secrets))
        decode.matched()
        [load] = decode.place(*range(1, 8), external=100).loads
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
        ],
        ids=["port", "brackets", "range", "none", "engine", "own", "room", "key"],
    )
    def test_malformed_params_are_refused(self, changed: dict[str, Any], reason: str) -> None:
        decode = Decoding()
        decode.add(DECODE | changed)
        assert "second" not in decode.follower.followed
        [(_, said)] = decode.place(1, external=100, name="second").refused
        assert reason in said

    def test_side_channel_whose_key_is_not_admitted(self) -> None:
        decode = Decoding(security=SecuritySettings(access=KEYED))
        assert not decode.follower.followed  # without a key
        decode.add(DECODE | {"remote_bootstrap_key": generate().public.hex()})
        assert not decode.follower.followed

    def test_request_with_a_ticket_is_not_followed(self) -> None:
        decode = Decoding()
        decode.add(DECODE | {"remote_block_ids": [[1]]})
        assert "second" not in decode.follower.followed


class TestReusedTransferId:
    """Two requests with one ``transfer_id`` and prompts of one length, one after the other.

    The hold of the first one stands, because nobody has come for it.
    """

    @pytest.fixture(params=[True, False], ids=["verified", "not verified"])
    def decode(self, request: pytest.FixtureRequest) -> Decoding:
        decode = Decoding("r", verify_prompt=request.param)
        second = self.second(DECODE)
        decode.requests["second"] = second
        decode.consumer.on_new_request(second)
        return decode

    def second(self, params: dict[str, Any]) -> Any:
        made = request(100, params, name="second")
        made.prompt_token_ids = [7] * 100
        return made

    def test_older_prefill_that_knows_names_only_is_refused(self, decode: Decoding) -> None:
        decode.hear(finished(computed(40)), "second")
        assert decode.matched(name="second") == 100
        messages = decode.place(*range(1, 8), external=100, name="second")
        [(name, reason)] = messages.refused
        assert (name, messages.loads) == ("second", [])
        assert "another prompt" in reason

    def test_older_prefill_is_refused_after_the_load_has_begun(self, decode: Decoding) -> None:
        decode.begin(computed(40))
        decode.hear(computed_of_another_prompt(80))
        assert decode.consumer.drain().aborted == ["r"]
