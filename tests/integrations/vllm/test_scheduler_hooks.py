"""The connector of the scheduler's role, hook by hook; neither vLLM nor an engine is needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core import messages as wire
from kvferry.core.errors import HandshakeError
from kvferry.core.lifecycle.holds import EndedHold, HoldEnd, RequestId
from kvferry.core.security import generate
from kvferry.core.security.ticket_proof import check
from kvferry.core.side_channel.client import fetch, ping
from kvferry.core.side_channel.connection import health, revoke
from kvferry.integrations.vllm.ticket_format import read_ticket
from tests.core.messages import encoded, payload
from tests.integrations.vllm import without_vllm
from tests.integrations.vllm.halves import (
    PREFILL,
    RECORD,
    WINDOW,
    Follower,
    answered,
    blocks,
    engine,
    full,
    request,
    ticket,
)
from tests.integrations.vllm.test_adapter_hashes import write
from tests.integrations.vllm.test_early_half import DECODE, Prefilling
from tests.waiting import eventually

OUTPUT = SimpleNamespace(total_num_scheduled_tokens=3)
IDLE = SimpleNamespace(total_num_scheduled_tokens=0)
RANKS = tuple(payload(rank, engine="decode", incarnation=9) for rank in range(3))


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    """Our modules with stand-ins for vLLM's."""
    names = (
        "connector",
        "scheduler",
        "metadata",
        "adapter_hashes",
        "engine_facts",
    )
    with without_vllm.modules(*names) as modules:
        yield SimpleNamespace(**dict(zip(names, modules, strict=True)))


def configured(role: str = "kv_both", **extra: Any) -> Any:
    """An engine with prefix caching; ``extra`` is its ``kv_connector_extra_config``."""
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    return engine(role, kv_connector_extra_config=extra, enable_prefix_caching=True, **parallel)


class Half:
    """The connector of an engine with 100 blocks of 16 tokens, and its scheduler half."""

    def __init__(self, vllm: Any, **settings: Any) -> None:
        self.vllm = vllm
        caches = SimpleNamespace(num_blocks=100)
        role = without_vllm.Role.SCHEDULER
        self.made = vllm.connector.KVFerryConnector(configured(**settings), role, caches)
        self.half = self.made._scheduler

    def serve(self, *ranks: wire.RankPayload) -> int:
        """Open the side channel; its port."""
        make = self.vllm.metadata.RankHandshake
        self.made.set_xfer_handshake_metadata_pp_aware(
            {
                (0, tp): make(payload=data, library="nixl 1.5, UCX")
                for tp, data in reversed([*enumerate(encoded(*ranks or RANKS))])
            }
        )
        return int(self.half._producer.serving.port)

    def step(self, output: Any = OUTPUT) -> Any:
        return self.made.build_connector_meta(output)

    def hear(
        self, sending: Any = None, recving: Any = None, failed: Any = None, **said: Any
    ) -> None:
        """Let the workers report; vLLM has ``None`` for what nobody reported."""
        output = SimpleNamespace(
            finished_sending=sending,
            finished_recving=recving,
            failed_recving=failed,
            kv_connector_worker_meta=self.vllm.metadata.RankReport(**said) if said else None,
        )
        self.made.update_connector_output(output)

    def adapters(self, *loads: Any, step: int = 0) -> Any:
        return self.vllm.adapter_hashes.AdapterReport(loads=loads, step=step)

    def doomed(self, *loads: Any, nested: bool = False) -> Any:
        """Which requests must fail, by what the workers report before a step is used."""
        report = self.vllm.metadata.RankReport(adapters=self.adapters(*loads))
        around = SimpleNamespace(metadata=(None, report)) if nested else report
        return self.made.hooks.doomed(SimpleNamespace(kv_connector_worker_meta=around))

    def load_of(self, path: str, content: bytes) -> Any:
        """A load of an adapter's files by a worker."""
        make = self.vllm.adapter_hashes.AdapterLoad
        return make(rank=0, adapter=1, name="adapter", path=path, content=content)

    def counted(self) -> dict[str, Any]:
        stats = self.made.get_kv_connector_stats()
        data = stats.data if stats is not None else {}
        return {name: by_driver["loopback"] for name, by_driver in data.items()}

    def matched(self, each: Any, computed: int = 0) -> Any:
        return self.made.get_num_new_matched_tokens(each, computed)

    def allocate(self, each: Any, *ids: int, external: int = 0) -> None:
        self.made.update_state_after_alloc(each, blocks(*ids or (1, 2, 3)), external)

    def finish(self, each: Any, *ids: int) -> Any:
        return self.made.request_finished_all_groups(each, [list(ids or (1, 2, 3))])

    def prefill(self, *ids: int, name: str = "r") -> Any:
        """Compute a request in these blocks; what vLLM is told at its end."""
        each = request(40, dict(PREFILL), name=name)
        self.made.on_new_request(each)
        self.allocate(each, *ids)
        return self.finish(each, *ids)

    def adapted(self, path: str, params: Any, *, waits: bool = True, name: str = "r") -> Any:
        """Let a request with a LoRA adapter come, until the adapter's content is known."""
        each = request(40, params, name=name)
        each.lora_request = SimpleNamespace(lora_name="adapter", lora_int_id=1, lora_path=path)
        each.num_output_tokens = 0
        self.made.on_new_request(each)
        assert self.matched(each) == (None, False)
        if waits:
            self.hear(adapters=self.adapters(step=self.step().asks_adapters))
            eventually(lambda: self.matched(each) != (None, False))
        return each

    def prefill_adapted(self, path: str, *loads: Any) -> Any:
        """Prefill a request with an adapter; ``loads`` are reported of its last step."""
        each = self.adapted(path, dict(PREFILL))
        assert self.matched(each) == (0, False)
        self.allocate(each)
        self.step()
        _, params = self.finish(each)
        self.hear(adapters=self.adapters(*loads))
        return params


@pytest.fixture
def make(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds halves, and closes them."""
    made: list[Half] = []
    monkeypatch.setattr(vllm.engine_facts, "cache_groups", lambda *_: full())

    def build(**settings: Any) -> Half:
        made.append(Half(vllm, **settings))
        return made[-1]

    yield build
    for each in made:
        each.made.shutdown()
        each.made.shutdown()


@pytest.fixture
def half(make: Any) -> Half:
    found: Half = make()
    return found


@pytest.fixture
def prefill(make: Any) -> Half:
    """A half that serves, as another engine."""
    found: Half = make()
    found.serve()
    found.half._producer.serving = replace(found.half._producer.serving, engine="prefill")
    return found


class TestSideChannel:
    def test_it_serves_what_the_ranks_published(self, half: Half) -> None:
        port = half.serve()
        assert ping("127.0.0.1", port, "decode", timeout=60) == 9
        info = fetch("127.0.0.1", port, "decode", timeout=60)
        assert [one.rank for one in info.ranks] == [0, 1, 2]
        step = half.step()
        assert (step.ranks, step.ticket_key) == (tuple(encoded(*RANKS)), info.ticket_key)
        step = half.step()
        assert (step.ranks, step.ticket_key) == ((), b"")
        half.made.shutdown()
        with pytest.raises(HandshakeError):
            ping("127.0.0.1", port, "decode", timeout=60)

    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            ({"role": "kv_producer"}, True),
            ({"role": "kv_consumer"}, False),
            ({"driver": "loopback"}, False),
            ({"side_channel_host": "127.0.0.1"}, False),
            ({"side_channel_host": "10.0.0.7"}, False),
        ],
    )
    def test_a_producer_on_loopback_only_is_warned_of(
        self, make: Any, caplog: pytest.LogCaptureFixture, settings: dict[str, str], told: bool
    ) -> None:
        """With the address to set, unless loopback was chosen."""
        make(**({"driver": "nixl"} | settings))
        assert ("only engines on this host can load from this one" in caplog.text) is told
        assert ("set side_channel_host to " in caplog.text) is told

    def test_one_line_says_how_an_engine_is_set_up(
        self, make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET", "s" * 64)
        monkeypatch.setenv("KEY", generate().secret.hex())
        secured = {"ticket_secrets": ["env:SECRET"], "curve_secret_key": "env:KEY"}
        secured["curve_peers"] = [generate().public.hex()]
        for settings, negated in (({}, "not "), (secured, "")):
            with caplog.at_level(logging.INFO):
                port = make(**settings).serve()
            [line] = [text for text in caplog.messages if "serves engine" in text]
            assert "serves engine decode as kv_both: driver " in line
            assert "(nixl 1.5, UCX)" in line
            assert f"side channel {negated}encrypted at 127.0.0.1 port {port}" in line
            assert f"tickets {negated}signed" in line
            caplog.clear()

    def test_it_says_what_is_wrong(self, half: Half) -> None:
        port = half.serve()
        half.hear(problems={1: ("b", "c"), 0: ("a",)})
        problems = health("127.0.0.1", port, timeout=60).problems
        assert problems == ["rank 0: a", "rank 1: b", "rank 1: c"]
        half.hear(problems={1: ()})
        assert health("127.0.0.1", port, timeout=60).problems == ["rank 0: a"]

    def test_an_engine_that_is_woken_up_serves_on_at_its_address(self, half: Half) -> None:
        """vLLM 0.33 then passes on once more what the ranks published; tickets name the port."""
        first = half.serve()
        half.step()
        assert half.serve() == first
        assert half.step().ranks == ()
        assert ping("127.0.0.1", first, "decode", timeout=60) == 9

    def test_what_is_not_ours_is_ignored(
        self, half: Half, caplog: pytest.LogCaptureFixture
    ) -> None:
        half.made.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
        assert "no rank of this engine published anything" in caplog.text
        assert half.step().ranks == ()
        ours, *_ = encoded(*RANKS)
        handshake = half.vllm.metadata.RankHandshake(payload=ours)
        half.made.set_xfer_handshake_metadata_pp_aware({(0, 0): object(), (0, 1): handshake})
        assert half.step().ranks == (ours,)


class TestProducing:
    def test_a_request_from_its_arrival_to_its_end(self, half: Half) -> None:
        port = half.serve()
        each = request(40, dict(PREFILL))
        half.made.on_new_request(each)
        assert half.matched(each) == (0, False)
        half.allocate(each)
        [(_, hold)] = half.step().orders.take_ons
        held, params = half.made.request_finished(each, [1, 2, 3])
        assert held
        assert (params["remote_engine_id"], params["remote_port"]) == ("decode", port)
        assert (params["tp_size"], params["pp_size"]) == (2, 3)
        assert params["kvferry"]["computed"] is True
        info = fetch("127.0.0.1", port, "decode", timeout=60)
        check(read_ticket(params).proof, info.ticket_key)
        assert [(each.hold, each.lease) for each in half.step().orders.tickets] == [(hold, 30.0)]
        stats = half.counted()
        assert stats["held_pages"] == 3
        assert 0 < stats["held_fraction"] < 1
        ended = EndedHold(request=RequestId("r"), end=HoldEnd.EXPIRED)
        half.hear(sending={"r"}, ended={"r": ended})
        stats = half.counted()
        assert (stats["held_pages"], stats["holds"]) == (0, {"expired": 1})

    def test_a_drafter_writes_after_the_last_token(self, vllm: Any, half: Half) -> None:
        """Decode, which drafts too, computes the last two; the slot word has to be waited for."""
        config = configured()
        config.speculative_config, config.num_prefill_lookahead_tokens = object(), 3
        caches: Any = SimpleNamespace(num_blocks=9)
        facts = vllm.engine_facts.engine_facts(config, caches, lambda request: None)
        assert (facts.drafts, facts.backoff) == (True, 2)

    @pytest.mark.parametrize("conversations", [False, True])
    def test_the_side_channel_ends_what_is_held(self, make: Any, conversations: bool) -> None:
        half = make(bidirectional_kv_xfer=True)
        port = half.serve()
        half.prefill(name="prompt")
        half.allocate(each := answered(20))
        assert half.finish(each, 6, 7)[0]
        half.step()
        asked = revoke("127.0.0.1", port, conversations=conversations, timeout=60.0)
        assert asked.tickets == 2 - conversations
        assert half.made.has_pending_push_work()
        assert len(half.step().orders.ends) == 2 - conversations
        assert not half.made.has_pending_push_work()
        half.hear(sending={each.request_id})
        assert half.counted()["conversation_holds"]["revoked"] == 1


class TestAdapters:
    """Requests with a LoRA adapter, from prefill to decode."""

    @pytest.mark.parametrize(
        ("weights", "refused"), [(b"weights", None), (b"others", "prompt"), (None, "adapter")]
    )
    def test_a_ticket_is_for_the_content(
        self,
        half: Half,
        tmp_path: Path,
        prefill: Half,
        weights: bytes | None,
        refused: str | None,
    ) -> None:
        params = prefill.prefill_adapted(write(tmp_path / "there"))
        assert params["kvferry"]["computed"] is False  # it may still be revoked
        here = tmp_path / "here"
        each = half.adapted(str(here) if weights is None else write(here, weights), params)
        assert half.matched(each, 16) == (24, True)
        assert len(half.step().prepare) == (refused is None)
        assert half.counted().get("refused_tickets") == ({refused: 1} if refused else None)

    @pytest.mark.parametrize("nested", [False, True], ids=["alone", "under MultiConnector"])
    def test_other_weights_are_loaded_after_the_check(
        self, half: Half, tmp_path: Path, prefill: Half, nested: bool
    ) -> None:
        """A request must fail that loads, or has loaded, until its first token is computed."""
        params = prefill.prefill_adapted(write(tmp_path / "there"))
        path = write(tmp_path / "here")
        each = half.adapted(path, params)
        load = half.load_of(path, b"others")
        half.allocate(each, 21, 22, 23, external=40)
        assert half.doomed(load, nested=nested) == ["r"]
        half.hear(recving={"r"})
        assert half.doomed(load, nested=nested) == ["r"]
        each.num_output_tokens = 1
        assert half.doomed(load, nested=nested) == []
        each.num_output_tokens = 0
        half.finish(each)
        assert half.doomed(load, nested=nested) == []

    @pytest.mark.parametrize("failed", [True, False])
    def test_other_weights_for_a_request_that_computes_its_prompt(
        self, half: Half, tmp_path: Path, prefill: Half, failed: bool
    ) -> None:
        """Its load failed, or its ticket is refused now."""
        params = prefill.prefill_adapted(write(tmp_path / "there"))
        path = write(tmp_path / "here")
        each = half.adapted(path, params)
        if failed:
            half.allocate(each, 21, 22, 23, external=40)
            half.hear(recving={"r"}, failed={"r"})
        assert half.doomed(half.load_of(path, b"")) == []
        if not failed:
            half.allocate(each, 21, 22, 23, external=40)
            step = half.step()
            assert [name for name, _ in step.refused] == ["r"]
            assert [load.reads for load in step.loads] == [False]  # only "done"

    def test_a_ticket_is_given_up_if_its_last_step_loaded_other_files(
        self, tmp_path: Path, prefill: Half
    ) -> None:
        path, other = write(tmp_path / "adapter"), write(tmp_path / "other", weights=b"others")
        assert prefill.prefill_adapted(path, prefill.load_of(other, b"others")) is not None
        orders = prefill.step().orders
        assert orders.ends == tuple(each.hold for each in orders.tickets)
        assert len(orders.ends) == 1
        assert prefill.counted()["tickets_not_made"] == {"adapter": 1}

    @pytest.mark.parametrize("is_loading", [False, True])
    def test_a_request_that_ends_before_its_content_is_known(
        self, half: Half, tmp_path: Path, is_loading: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing is asked for any more; the lease ends the hold of a ticket."""
        params = ticket() if is_loading else dict(PREFILL)
        each = half.adapted(write(tmp_path), params, waits=False)
        assert half.step().follows
        assert half.finish(each) == (False, None)
        step = half.step()
        assert (step.asks_adapters, step.follows, step.loads) == (0, False, [])
        assert "ticket refused" not in caplog.text
        assert not half.made.has_pending_push_work()

    def test_a_request_that_vllm_does_not_let_wait(
        self, half: Half, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It asks for ``prompt_logprobs``."""
        path = write(tmp_path)
        loads = half.adapted(path, ticket(), waits=False)
        half.allocate(loads)
        half.hear(adapters=half.adapters(step=half.step().asks_adapters))
        eventually(lambda: not half.half._adapters.waits(loads))
        assert half.step().prepare == half.step().loads == []
        half.finish(loads)
        each = half.adapted(path, dict(PREFILL), waits=False, name="prefilled")
        half.allocate(each)
        assert half.finish(each) == (False, None)
        assert "its content was not known when the request began" in caplog.text

    def test_a_ticket_that_comes_when_its_request_has_ended(
        self, vllm: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The content is not known any more, so the lease ends the hold."""
        follower = Follower()
        monkeypatch.setattr(vllm.scheduler, "RoomFollower", lambda _: follower)
        half = make()
        each = half.adapted(write(tmp_path), DECODE, waits=False)
        half.hear(adapters=half.adapters(step=half.step().asks_adapters))
        eventually(lambda: half.step() and "r" in follower.followed)
        half.finish(each)
        follower.hear(Prefilling(40).finish().news())
        step = half.step()
        assert (step.prepare, step.loads, step.follows) == ([], [], False)
        assert not half.made.has_pending_push_work()

    def test_a_request_of_this_engine_alone_does_not_wait(self, half: Half, tmp_path: Path) -> None:
        each = request(40)
        each.lora_request = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path))
        half.made.on_new_request(each)
        assert half.matched(each) == (0, False)
        assert half.step().asks_adapters == 0


class TestConsuming:
    def test_a_request_from_its_arrival_to_its_end(
        self, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        half = make(log_requests=True)
        asked: list[Any] = []
        monkeypatch.setattr(half.half._directory, "ask_again", asked.append)
        each = request(40, ticket())
        assert not half.made.has_pending_push_work()
        half.made.on_new_request(each)
        assert half.made.has_pending_push_work()
        assert half.matched(each, 16) == (24, True)
        assert half.matched(each, 40) == (0, False)
        half.allocate(each, 21, 22, 23, external=40)
        step = half.step()
        assert (len(step.prepare), len(step.loads), step.idle) == (1, 1, False)
        assert step.producers.is_asking or step.producers.outcomes
        later = half.step(IDLE)
        assert later.idle
        assert later.prepare == later.loads == []
        half.hear(wanted="those that ranks lack")
        assert asked == ["those that ranks lack"]
        with caplog.at_level(logging.INFO, "kvferry.requests"):
            half.hear(recving={"r"}, loads={"r": RECORD})
        assert half.counted() == {"loads": 1, "tokens": 40}
        assert "loaded 40 tokens, 4.0 MiB" in caplog.text

    def test_prefixes_are_not_cached_in_a_way_that_is_not_known(
        self, vllm: Any, make: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm.engine_facts, "cache_groups", lambda *_: (WINDOW,))
        with pytest.raises(Exception, match="--no-enable-prefix-caching"):
            make().serve()
        assert make(role="kv_producer").serve()

    def test_one_that_failed_where_vllm_takes_blocks(
        self, vllm: Any, make: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The ranks report the request before all of them are done."""
        monkeypatch.setattr(vllm.scheduler.compat_029, "takes_failed_requests", lambda: False)
        half = make()
        half.made.on_new_request(each := request(40, ticket()))
        half.made.update_state_after_alloc(each, blocks(21, 0, 22, 23, cached=1), 24)
        report = vllm.metadata.RankReport(failed=frozenset({"r"}))
        for recving, said, failed in ((None, report, set()), ({"r"}, None, {22, 23})):
            output = SimpleNamespace(
                finished_sending=None, finished_recving=recving, kv_connector_worker_meta=said
            )
            assert half.made.hooks.failed_blocks(output) == failed
            half.made.update_connector_output(output)
        assert half.counted()["failed_loads"] == 1


def test_an_unwell_engine_steps_on_for_a_while(
    vllm: Any, half: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(vllm.scheduler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    half.hear(problems={0: ("ill",)})
    for seconds, pending in ((59.0, True), (2.0, False)):
        now[0] += seconds
        assert half.made.has_pending_push_work() == pending
    for report in ({}, {"silent": {0: ()}}):
        half.hear(**report)
        assert not half.made.has_pending_push_work()
    half.hear(problems={1: ("ill, too",)})
    assert half.made.has_pending_push_work()
    half.hear(problems={0: (), 1: ()})
    assert not half.made.has_pending_push_work()
