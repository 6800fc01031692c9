"""The scheduler half, hook by hook, as vLLM calls it; neither vLLM nor an engine is needed."""

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
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.silent_holds import Silence
from kvferry.core.memory import Region
from kvferry.core.security import generate
from kvferry.core.security.ticket_proof import FINGERPRINT_BYTES, check
from kvferry.core.side_channel import fetch, health, ping
from kvferry.integrations.vllm.ticket_params import read_ticket
from tests.core.messages import encoded, payload
from tests.engines.steps import eventually
from tests.integrations.vllm import without_vllm
from tests.integrations.vllm.halves import PREFILL, blocks, engine, full, request, ticket
from tests.integrations.vllm.test_adapter_files import write

OUTPUT = SimpleNamespace(total_num_scheduled_tokens=3)
IDLE = SimpleNamespace(total_num_scheduled_tokens=0)


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    """``scheduler``, ``metadata``, ``metrics`` and ``adapter_loads``."""
    names = ("scheduler", "metadata", "metrics", "adapter_loads", "engine_facts")
    with without_vllm.modules(*names) as modules:
        yield SimpleNamespace(**dict(zip(names, modules, strict=True)))


def configured(role: str = "kv_both", **extra: Any) -> Any:
    """An engine with prefix caching; ``extra`` is its ``kv_connector_extra_config``."""
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    return engine(role, kv_connector_extra_config=extra, enable_prefix_caching=True, **parallel)


@pytest.fixture
def make(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds halves of an engine with 100 blocks of 16 tokens, and closes them."""
    made: list[Any] = []
    monkeypatch.setattr(vllm.engine_facts, "cache_groups", lambda *_: full())

    def build(*, drafts: bool = False, **settings: Any) -> Any:
        config = configured(**settings)
        config.speculative_config = object() if drafts else None
        config.num_prefill_lookahead_tokens = 3 if drafts else 0
        made.append(vllm.scheduler.FerryScheduler(config, SimpleNamespace(num_blocks=100)))
        return made[-1]

    yield build
    for each in made:
        each.shutdown()
        each.shutdown()


@pytest.fixture
def producer(vllm: Any, make: Any) -> Any:
    """A half that serves, as another engine than that of ``make``'s other halves."""
    half = make()
    serving(vllm, half, *RANKS)
    half._serving = replace(half._serving, engine="prefill")
    return half


def serving(vllm: Any, half: Any, *ranks: wire.RankPayload) -> None:
    published = [
        vllm.metadata.RankHandshake(payload=data, library="nixl 1.5, UCX")
        for data in encoded(*ranks)
    ]
    half.set_xfer_handshake_metadata_pp_aware(
        {(0, tp): each for tp, each in reversed([*enumerate(published)])}
    )


FINGERPRINT = Region(address=1 << 20, nbytes=FINGERPRINT_BYTES, kind="cpu", device=0)
RANKS = tuple(
    payload(rank, engine="decode", incarnation=9, fingerprint=FINGERPRINT) for rank in range(3)
)


class TestSideChannel:
    def test_it_serves_what_the_ranks_published(self, vllm: Any, make: Any) -> None:
        half = make()
        serving(vllm, half, *RANKS)
        port = half._serving.port
        assert ping("127.0.0.1", port, "decode", timeout=60) == 9
        info = fetch("127.0.0.1", port, "decode", timeout=60)
        assert [one.rank for one in info.ranks] == [0, 1, 2]
        step = half.build_connector_meta(OUTPUT)
        assert (step.ranks, step.ticket_key) == (tuple(encoded(*RANKS)), info.ticket_key)
        step = half.build_connector_meta(OUTPUT)
        assert (step.ranks, step.ticket_key) == ((), b"")

    @pytest.mark.parametrize(
        ("role", "settings", "told"),
        [
            ("kv_producer", {}, True),
            ("kv_both", {}, True),
            ("kv_consumer", {}, False),
            ("kv_both", {"side_channel_host": "127.0.0.1"}, False),
        ],
    )
    def test_a_producer_on_loopback_only_is_warned_of(
        self,
        make: Any,
        caplog: pytest.LogCaptureFixture,
        role: str,
        settings: dict[str, Any],
        told: bool,
    ) -> None:
        make(role=role, driver="nixl", **settings)
        assert ("only engines on this host can load from this one" in caplog.text) is told

    @pytest.mark.parametrize(
        ("role", "secured"), [("kv_producer", False), ("kv_both", True), ("kv_consumer", False)]
    )
    def test_one_line_says_how_an_engine_is_set_up(
        self,
        vllm: Any,
        make: Any,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        role: str,
        secured: bool,
    ) -> None:
        settings: dict[str, object] = {}
        if secured:
            monkeypatch.setenv("SECRET", "s" * 64)
            monkeypatch.setenv("KEY", generate().secret.hex())
            settings = {"ticket_secrets": ["env:SECRET"], "curve_secret_key": "env:KEY"}
            settings["curve_peers"] = [generate().public.hex()]
        half = make(role=role, **settings)
        with caplog.at_level(logging.INFO):
            serving(vllm, half, *RANKS)
        [line] = [text for text in caplog.messages if "serves engine" in text]
        assert f"serves engine decode as {role}: driver " in line
        assert "(nixl 1.5, UCX)" in line
        assert f"127.0.0.1 port {half._serving.port}" in line
        negated = "" if secured else "not "
        assert f"side channel {negated}encrypted at" in line
        assert f"tickets {negated}signed" in line

    def test_it_says_what_is_wrong(self, vllm: Any, make: Any) -> None:
        half = make()
        serving(vllm, half, *RANKS)
        half.update_connector_output(heard(vllm, problems={1: ("b", "c"), 0: ("a",)}))
        condition = health("127.0.0.1", half._serving.port, timeout=60)
        assert condition.problems == ["rank 0: a", "rank 1: b", "rank 1: c"]
        half.update_connector_output(heard(vllm, problems={1: ()}))
        condition = health("127.0.0.1", half._serving.port, timeout=60)
        assert condition.problems == ["rank 0: a"]

    def test_it_ends_with_the_half(self, vllm: Any, make: Any) -> None:
        half = make()
        serving(vllm, half, *RANKS)
        half.shutdown()
        with pytest.raises(HandshakeError):
            ping("127.0.0.1", half._serving.port, "decode", timeout=60)

    def test_an_engine_that_is_woken_up_serves_on_at_its_address(
        self, vllm: Any, make: Any
    ) -> None:
        """vLLM 0.33 then passes on once more what the ranks published; tickets name the port."""
        half = make()
        serving(vllm, half, *RANKS)
        before, server = half._serving, half._server
        half.build_connector_meta(OUTPUT)
        serving(vllm, half, *RANKS)
        assert (half._serving, half._server) == (before, server)
        assert half.build_connector_meta(OUTPUT).ranks == ()
        assert ping("127.0.0.1", before.port, "decode", timeout=60) == 9

    def test_a_second_one_takes_the_first_ones_place(self, vllm: Any, make: Any) -> None:
        half = make()
        serving(vllm, half, *RANKS)
        first = half._serving.port
        serving(vllm, half, *RANKS[:2])
        assert half._serving.port != first
        with pytest.raises(HandshakeError):
            ping("127.0.0.1", first, "decode", timeout=60)

    def test_what_is_not_ours_is_ignored(
        self, vllm: Any, make: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        half = make()
        half.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
        assert "no rank of this engine published anything" in caplog.text
        assert half.build_connector_meta(OUTPUT).ranks == ()
        ours, *_ = encoded(*RANKS)
        half.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): object(), (0, 1): vllm.metadata.RankHandshake(payload=ours)}
        )
        assert half.build_connector_meta(OUTPUT).ranks == (ours,)


def heard(
    vllm: Any,
    sending: set[str] | None = None,
    recving: set[str] | None = None,
    failed: set[str] | None = None,
    problems: dict[int, tuple[str, ...]] | None = None,
    silent: dict[int, tuple[Silence, ...]] | None = None,
) -> Any:
    """A ``KVConnectorOutput``; vLLM has ``None`` for what nobody reported."""
    report = vllm.metadata.RankReport(problems=problems or {}, silent=silent or {})
    return SimpleNamespace(
        finished_sending=sending,
        finished_recving=recving,
        failed_recving=failed,
        kv_connector_worker_meta=report if problems or silent else None,
    )


def adapters_heard(vllm: Any, load: Any = None, step: int = 0) -> Any:
    """A ``KVConnectorOutput`` with a report about LoRA adapters."""
    loads = () if load is None else (load,)
    output = heard(vllm)
    report = vllm.adapter_loads.AdapterReport(loads=loads, step=step)
    output.kv_connector_worker_meta = vllm.metadata.RankReport(adapters=report)
    return output


def prefilled(half: Any, *ids: int, name: str = "r") -> Any:
    """Compute a request in these blocks; what vLLM is told at its end."""
    each = request(40, dict(PREFILL), name=name)
    half.on_new_request(each)
    half.update_state_after_alloc(each, blocks(*ids or (1, 2, 3)), 0)
    return half.request_finished_all_groups(each, [list(ids or (1, 2, 3))])


def loading(half: Any, **changes: Any) -> Any:
    """A request with a ticket, which has blocks to load into."""
    each = request(40, ticket())
    vars(each).update(changes)
    half.on_new_request(each)
    half.update_state_after_alloc(each, blocks(21, 22, 23), 40)
    return each


def adapted(path: str, params: Any) -> Any:
    """A request with a LoRA adapter."""
    each = request(40, params)
    each.lora_request = SimpleNamespace(lora_name="adapter", lora_int_id=1, lora_path=path)
    return each


def wait(vllm: Any, half: Any, each: Any) -> None:
    """Let a request come, and wait until the content of its adapter is known or refused."""
    half.on_new_request(each)
    assert half.get_num_new_matched_tokens(each, 0) == (None, False)
    half.update_connector_output(
        adapters_heard(vllm, step=half.build_connector_meta(OUTPUT).asks_adapters)
    )
    eventually(lambda: half.get_num_new_matched_tokens(each, 0) != (None, False))


class TestProducing:
    def test_a_request_from_its_arrival_to_its_end(self, vllm: Any, make: Any) -> None:
        half = make()
        serving(vllm, half, *RANKS)
        each = request(40, dict(PREFILL))
        half.on_new_request(each)
        assert half.get_num_new_matched_tokens(each, 0) == (0, False)
        half.update_state_after_alloc(each, blocks(1, 2, 3), 0)
        [(_, hold)] = half.build_connector_meta(OUTPUT).orders.take_ons
        held, params = half.request_finished_all_groups(each, [[1, 2, 3]])
        assert held
        assert params["remote_engine_id"] == "decode"
        assert params["remote_port"] == half._serving.port
        assert params["tp_size"] == 2
        assert params["kvferry"]["computed"] is True
        info = fetch("127.0.0.1", half._serving.port, "decode", timeout=60)
        check(read_ticket(params).proof, info.ticket_key)
        [(ready, lease)] = half.build_connector_meta(OUTPUT).orders.ready
        assert (ready, lease) == (hold, 30.0)
        stats = half.get_kv_connector_stats().data
        assert stats["held_pages"] == {"loopback": 3}
        assert 0 < stats["held_fraction"]["loopback"] < 1
        half.update_connector_output(heard(vllm, sending={"r"}))
        stats = half.get_kv_connector_stats().data
        assert (stats["held_pages"], stats["held_fraction"]) == ({"loopback": 0}, {"loopback": 0})

    def test_a_drafter_writes_after_the_last_token(self, make: Any) -> None:
        """The last two tokens are left to decode, which drafts, too."""
        _, params = prefilled(make(drafts=True))
        assert (params["remote_num_tokens"], params["kvferry"]["computed"]) == (38, False)

    def test_settings_reach_it(self, make: Any) -> None:
        half = make(kv_lease_duration=7, max_held_fraction=0.02)
        assert prefilled(half, 1, 2, 3) == (False, None)
        held, _ = prefilled(half, 4, 5, name="small")
        assert held
        [(_, lease)] = half.build_connector_meta(OUTPUT).orders.ready
        assert lease == 7.0

    def test_settings_of_conversations_reach_it(self, make: Any) -> None:
        half = make(bidirectional_kv_xfer=True, decoder_kv_blocks_ttl=7)
        each = request(40, {"do_remote_prefill": True})
        each.all_token_ids = each.prompt_token_ids
        half.update_state_after_alloc(each, blocks(1, 2, 3), 0)
        assert half.request_finished_all_groups(each, [[1, 2, 3]])[0]
        [(_, ttl)] = half.build_connector_meta(OUTPUT).orders.ttls
        assert ttl == 7.0

    def test_a_reset_gives_up_what_is_held(self, make: Any) -> None:
        half = make()
        prefilled(half)
        half.build_connector_meta(OUTPUT)
        half.reset_cache()
        assert len(half.build_connector_meta(OUTPUT).orders.ends) == 1

    def test_a_hold_that_no_rank_hears_of_makes_room(self, vllm: Any, make: Any) -> None:
        half = make()
        serving(vllm, half, *RANKS)
        prefilled(half)
        [(_, hold)] = half.build_connector_meta(OUTPUT).orders.take_ons
        waits = request(40, name="waits")
        half.get_num_new_matched_tokens(waits, 0)
        half.update_state_after_alloc(waits, blocks(4, 5, 6), 0)
        assert not half.build_connector_meta(OUTPUT).asks_silent
        half.get_num_new_matched_tokens(waits, 0)
        assert half.build_connector_meta(OUTPUT).asks_silent
        silence = Silence(request=RequestId("r"), hold=hold, age=4.0)
        half.update_connector_output(
            heard(vllm, silent=dict.fromkeys(range(len(RANKS)), (silence,)))
        )
        half.get_num_new_matched_tokens(waits, 0)
        assert not half.has_pending_block_frees()
        assert half.build_connector_meta(OUTPUT).orders.ends == (hold,)
        assert half.has_pending_block_frees()
        half.update_connector_output(heard(vllm, sending={"r"}))
        assert half.get_kv_connector_stats().data["holds"] == {
            "loopback": {"made": 1, "orphaned": 1}
        }

    def test_an_engine_that_only_loads_makes_no_tickets(self, make: Any) -> None:
        half = make(role="kv_consumer")
        assert prefilled(half) == (False, None)
        assert half.get_kv_connector_stats().data["tickets_not_made"] == {"loopback": {"role": 1}}


class TestAdapters:
    """Requests with a LoRA adapter, from prefill to decode."""

    def prefilled(self, vllm: Any, half: Any, path: str, *, last: Any = None) -> Any:
        """Prefill a request; ``last`` is the load that the workers report of its last step."""
        each = adapted(path, dict(PREFILL))
        wait(vllm, half, each)
        assert half.get_num_new_matched_tokens(each, 0) == (0, False)
        half.update_state_after_alloc(each, blocks(1, 2, 3), 0)
        half.build_connector_meta(OUTPUT)
        _, params = half.request_finished_all_groups(each, [[1, 2, 3]])
        half.update_connector_output(adapters_heard(vllm, last))
        return params

    def test_a_ticket_for_the_same_content(
        self, vllm: Any, make: Any, tmp_path: Path, producer: Any
    ) -> None:
        params = self.prefilled(vllm, producer, write(tmp_path / "there"))
        assert params["kvferry"]["computed"] is False  # it may still be revoked
        half = make()
        wait(vllm, half, each := adapted(write(tmp_path / "here"), params))
        assert half.get_num_new_matched_tokens(each, 16) == (24, True)
        assert len(half.build_connector_meta(OUTPUT).prepare) == 1

    @pytest.mark.parametrize("gone", [True, False])
    def test_a_ticket_for_other_content(
        self, vllm: Any, make: Any, tmp_path: Path, producer: Any, gone: bool
    ) -> None:
        params = self.prefilled(vllm, producer, write(tmp_path / "there"))
        half, here = make(), tmp_path / "here"
        path = str(here) if gone else write(here, weights=b"others")
        wait(vllm, half, adapted(path, params))
        assert half.build_connector_meta(OUTPUT).prepare == []
        reason = "adapter" if gone else "prompt"
        assert half.get_kv_connector_stats().data["refused_tickets"] == {"loopback": {reason: 1}}

    @pytest.mark.parametrize("nested", [False, True], ids=["alone", "under MultiConnector"])
    def test_other_weights_are_loaded_after_the_check(
        self, vllm: Any, make: Any, tmp_path: Path, producer: Any, nested: bool
    ) -> None:
        """A request must fail that loads, or has loaded, until its first token is computed."""
        params = self.prefilled(vllm, producer, write(tmp_path / "there"))
        half, path = make(), write(tmp_path / "here")
        wait(vllm, half, each := adapted(path, params))
        said = adapters_heard(
            vllm,
            vllm.adapter_loads.AdapterLoad(
                rank=0, adapter=1, name="adapter", path=path, content=b"others"
            ),
        )
        if nested:
            report = said.kv_connector_worker_meta
            said.kv_connector_worker_meta = SimpleNamespace(metadata=(None, report))
        each.num_output_tokens = 0
        half.update_state_after_alloc(each, blocks(21, 22, 23), 40)
        assert half._doomed(said) == ["r"]
        half.update_connector_output(heard(vllm, recving={"r"}))
        assert half._doomed(said) == ["r"]
        each.num_output_tokens = 1
        assert half._doomed(said) == []
        each.num_output_tokens = 0
        half.request_finished_all_groups(each, [[21, 22, 23]])
        assert half._doomed(said) == []

    @pytest.mark.parametrize("failed", [True, False])
    def test_other_weights_for_a_request_that_computes_its_prompt(
        self, vllm: Any, make: Any, tmp_path: Path, producer: Any, failed: bool
    ) -> None:
        """Its load failed, or its ticket is refused now."""
        params = self.prefilled(vllm, producer, write(tmp_path / "there"))
        half, path = make(), write(tmp_path / "here")
        wait(vllm, half, each := adapted(path, params))
        each.num_output_tokens = 0
        if failed:
            half.update_state_after_alloc(each, blocks(21, 22, 23), 40)
            half.update_connector_output(heard(vllm, recving={"r"}, failed={"r"}))
        load = vllm.adapter_loads.AdapterLoad(rank=0, adapter=1, name="adapter", path=path)
        assert half._doomed(adapters_heard(vllm, load)) == []
        if not failed:
            half.update_state_after_alloc(each, blocks(21, 22, 23), 40)
            step = half.build_connector_meta(OUTPUT)
            assert [name for name, _ in step.refused] == ["r"]
            assert [load.reads for load in step.loads] == [False]  # only "done"

    def test_no_ticket_for_unknown_content(
        self, vllm: Any, tmp_path: Path, producer: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert self.prefilled(vllm, producer, str(tmp_path / "gone")) is None
        assert producer.get_kv_connector_stats().data["tickets_not_made"] == {
            "loopback": {"adapter": 1}
        }
        assert caplog.text.count("no ticket is made (stage prefill, cause adapter)") == 1

    def test_a_ticket_is_given_up_if_its_last_step_loaded_other_files(
        self, vllm: Any, tmp_path: Path, producer: Any
    ) -> None:
        path = write(tmp_path / "adapter")
        other = write(tmp_path / "other", weights=b"others")
        load = vllm.adapter_loads.AdapterLoad(
            rank=0, adapter=1, name="adapter", path=other, content=b"others"
        )
        assert self.prefilled(vllm, producer, path, last=load) is not None
        orders = producer.build_connector_meta(OUTPUT).orders
        assert orders.ends == tuple(hold for hold, _ in orders.ready)
        assert len(orders.ends) == 1
        assert producer.get_kv_connector_stats().data["tickets_not_made"] == {
            "loopback": {"adapter": 1}
        }

    def test_a_prefill_that_ends_before_its_content_is_known(
        self, make: Any, tmp_path: Path
    ) -> None:
        half = make()
        each = adapted(write(tmp_path), dict(PREFILL))
        half.on_new_request(each)
        assert half.get_num_new_matched_tokens(each, 0) == (None, False)
        assert half.request_finished_all_groups(each, [[]]) == (False, None)
        assert half.build_connector_meta(OUTPUT).asks_adapters == 0

    def test_a_request_that_vllm_does_not_let_wait(
        self, vllm: Any, tmp_path: Path, producer: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It asks for ``prompt_logprobs``."""
        each = adapted(write(tmp_path), dict(PREFILL))
        producer.on_new_request(each)
        assert producer.get_num_new_matched_tokens(each, 0) == (None, False)
        producer.update_state_after_alloc(each, blocks(1, 2, 3), 0)
        producer.update_connector_output(
            adapters_heard(vllm, step=producer.build_connector_meta(OUTPUT).asks_adapters)
        )
        assert producer.request_finished_all_groups(each, [[1, 2, 3]]) == (False, None)
        assert "its content was not known when the request began" in caplog.text

    def test_a_request_of_this_engine_alone_does_not_wait(self, make: Any, tmp_path: Path) -> None:
        half = make()
        each = adapted(write(tmp_path), None)
        half.on_new_request(each)
        assert half.get_num_new_matched_tokens(each, 0) == (0, False)
        assert half.build_connector_meta(OUTPUT).asks_adapters == 0


class TestConsuming:
    def test_a_request_from_its_arrival_to_its_end(self, vllm: Any, make: Any) -> None:
        half = make()
        each = request(40, ticket())
        assert not half.has_pending_push_work()
        half.on_new_request(each)
        assert half.has_pending_push_work()
        assert half.get_num_new_matched_tokens(each, 16) == (24, True)
        assert half.get_num_new_matched_tokens(each, 40) == (0, False)
        half.update_state_after_alloc(each, blocks(21, 22, 23), 40)
        step = half.build_connector_meta(OUTPUT)
        assert (len(step.prepare), len(step.loads), step.idle) == (1, 1, False)
        assert step.producers.is_asking
        later = half.build_connector_meta(IDLE)
        assert later.idle
        assert later.prepare == later.loads == []
        half.update_connector_output(heard(vllm, recving={"r"}))
        assert half.get_kv_connector_stats().data == {
            "loads": {"loopback": 1},
            "tokens": {"loopback": 40},
        }

    def test_one_that_failed_where_vllm_takes_blocks(
        self, vllm: Any, make: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The workers get the load's blocks, and report the request before all of them are done."""
        monkeypatch.setattr(vllm.scheduler.compat_029, "takes_failed_requests", lambda: False)
        half = make()
        loading(half)
        assert half.build_connector_meta(OUTPUT).blocks == {"r": (21, 22, 23)}
        assert half.build_connector_meta(OUTPUT).blocks == {}
        early, late = heard(vllm), heard(vllm, recving={"r"})
        early.kv_connector_worker_meta = vllm.metadata.RankReport(failed=frozenset({"r"}))
        for output in (early, late):
            del output.failed_recving
            half.update_connector_output(output)
        assert half.get_kv_connector_stats().data["failed_loads"] == {"loopback": 1}

    def test_one_that_is_aborted_and_one_that_is_refused(self, make: Any) -> None:
        half = make()
        half.request_finished_all_groups(loading(half), [[21, 22, 23]])
        loading(half, request_id="other", prompt_token_ids=[*range(1, 41)])
        step = half.build_connector_meta(OUTPUT)
        assert step.aborted == ["r"]
        assert [name for name, _ in step.refused] == ["other"]

    @pytest.mark.parametrize(
        ("settings", "taken"), [({"role": "kv_producer"}, 0), ({"verify_prompt": False}, 1)]
    )
    def test_settings_reach_it(self, make: Any, settings: dict[str, Any], taken: int) -> None:
        half = make(**settings)
        loading(half, prompt_token_ids=[*range(1, 41)])
        assert len(half.build_connector_meta(OUTPUT).prepare) == taken


def test_an_unwell_engine_steps_on_for_a_while(
    vllm: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(vllm.scheduler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    half = make()
    half.update_connector_output(heard(vllm, problems={0: ("ill",)}))
    for seconds, pending in ((59.0, True), (2.0, False)):
        now[0] += seconds
        assert half.has_pending_push_work() == pending
    for output in (heard(vllm), heard(vllm, silent={0: ()})):
        half.update_connector_output(output)
        assert not half.has_pending_push_work()
    half.update_connector_output(heard(vllm, problems={1: ("ill, too",)}))
    assert half.has_pending_push_work()
    half.update_connector_output(heard(vllm, problems={0: (), 1: ()}))
    assert not half.has_pending_push_work()
