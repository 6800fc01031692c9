"""The scheduler half where the cache is staged: host pages, tickets and loads. Needs no vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.layout import Layout
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.layout.paged_layout import paged_layout
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.host_pages import HostPages
from kvferry.core.lifecycle.page_copy import PageCopy
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS, Silence
from kvferry.core.metrics import Metrics
from kvferry.integrations.vllm import staging
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.checks import check_engine, check_siblings
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.consumer import Consumer
from kvferry.integrations.vllm.page_source import most_pages
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.ticket_params import read_ticket
from tests.integrations.vllm.halves import (
    PREFILL,
    SERVING,
    arrive,
    blocks,
    consumer,
    engine,
    facts,
    full,
    producer,
    request,
    step,
)

PATIENCE = 10.0


def pages(count: int, now: list[float]) -> HostPages:
    """So many host pages, from 1 on; requests wait for them by a clock that a test sets."""
    return HostPages(range(1, count + 1), patience=PATIENCE, clock=lambda: now[0])


def staged_producer(
    count: int = 8, ranks: int = 1, **settings: Any
) -> tuple[Producer, list[float]]:
    now = [0.0]
    made, host = producer(is_staged=True, clock=lambda: now[0], **settings), pages(count, now)
    host.ranks = ranks
    made.set_ranks(1, host)
    return made, now


def staged_consumer(count: int = 8, **settings: Any) -> tuple[Consumer, list[float]]:
    now = [0.0]
    made = consumer(is_staged=True, **settings)
    made.set_host_pages(pages(count, now))
    return made, now


def two_requests(
    **settings: Any,
) -> tuple[Consumer, Any, Any, list[float]]:
    """An engine with four host pages, of which the first of two requests has got three."""
    made, now = staged_consumer(count=4, **settings)
    first, second = (arrive(made, name=name) for name in ("first", "second"))
    assert made.num_matched_tokens(first, 0) == 40
    return made, first, second, now


def prefill(made: Producer, name: str, *ids: int, tokens: int = 40) -> Any:
    """Prefill a request in these blocks; its ticket."""
    each = request(tokens, PREFILL, name=name)
    assert not made.waits_for_host_pages(each)
    made.take_on(each)
    return made.request_finished(each, [list(ids)], SERVING)


class TestProducer:
    def test_ticket_names_host_pages_and_the_order_their_blocks(self) -> None:
        made, _ = staged_producer()
        got = read_ticket(prefill(made, "a", 7, 3, 9))
        orders = made.drain()
        [copy] = orders.copies
        assert copy.copy.blocks == (7, 3, 9)
        assert got.pages == (copy.copy.pages,)
        assert set(copy.copy.pages) <= set(range(1, 9))
        assert orders.ready == ((copy.hold, 30.0),)
        assert not got.computed

    def test_holes_stay_holes(self) -> None:
        made, _ = staged_producer(groups=full(2))
        each = request(40, PREFILL)
        assert not made.waits_for_host_pages(each)
        made.take_on(each)
        got = read_ticket(made.request_finished(each, [[1, 2, 3], [0, 5, 6]], SERVING) or {})
        assert list(map(len, got.pages)) == [3, 2]
        assert got.first_index == (0, 1)
        assert len({page for some in got.pages for page in some}) == 5

    def test_host_pages_return_when_all_ranks_say_over(self) -> None:
        made, _ = staged_producer(count=4, ranks=2)
        prefill(made, "a", 7, 3, 9)
        waiting = request(40, PREFILL, name="b")
        assert made.waits_for_host_pages(waiting)
        assert made.has_pending_block_frees()
        made.sends_finished(["a"])
        assert not made.has_pending_block_frees()
        assert made.pending
        made.holds_over({0: ["a"]})
        assert made.waits_for_host_pages(waiting)
        made.holds_over({1: ["a"]})
        assert not made.waits_for_host_pages(waiting)
        assert not made.pending

    def test_slot_and_id_return_when_it_is_over(self, caplog: pytest.LogCaptureFixture) -> None:
        made, _ = staged_producer(count=8, blocks=1)
        assert prefill(made, "a", 1, 2, 3) is not None
        made.sends_finished(["a"])
        assert prefill(made, "b", 4, 5, 6) is None
        assert prefill(made, "a", 4, 5, 6) is None
        assert "give requests ids of their own" in caplog.messages[-1]
        made.holds_over({0: ["a"]})
        assert prefill(made, "b", 4, 5, 6) is not None

    def test_a_wait_ends_without_a_ticket(self, caplog: pytest.LogCaptureFixture) -> None:
        metrics = Metrics(driver="loopback")
        made, now = staged_producer(count=4, metrics=metrics)
        prefill(made, "a", 1, 2, 3)
        late = request(40, PREFILL, name="late")
        assert made.waits_for_host_pages(late)
        now[0] = PATIENCE
        assert not made.waits_for_host_pages(late)
        made.take_on(late)
        made.drain()
        assert made.request_finished(late, [[4, 5, 6]], SERVING) is None
        assert len(made.drain().drops) == 1
        assert "cause host_pages" in caplog.text
        within = f"within {PATIENCE:g} s (staging_timeout): raise staging_bytes"
        assert f"it did not get 3 of 4 host pages {within}" in caplog.text
        made.update_metrics()
        found = metrics.take() or {}
        assert found["tickets_not_made"] == {"loopback": {"host_pages": 1}}
        assert found["host_pages"] == {"loopback": {"holds": 4}}
        assert found["host_pages_used"] == {"loopback": {"holds": 3}}
        waits = found["host_page_wait_seconds"]["loopback"]["holds"]
        assert waits == {"granted": [0.0], "refused": [PATIENCE]}

    def test_a_request_that_never_fits_does_not_wait(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        made, _ = staged_producer(count=2)
        assert prefill(made, "large", 1, 2, 3) is None
        why = "it may need 3 host pages, and there are 2: raise staging_bytes"
        assert why in caplog.text
        assert prefill(made, "small", 1, 2, tokens=20) is not None

    def test_a_request_that_ends_early_gives_its_host_pages_back(self) -> None:
        made, _ = staged_producer(count=4)
        for status in ("FINISHED_ABORTED", "FINISHED_ERROR"):
            each = request(40, PREFILL, name=status, status=status)
            assert not made.waits_for_host_pages(each)
            made.take_on(each)
            assert made.request_finished(each, [[1, 2, 3]], SERVING) is None
        assert prefill(made, "a", 1, 2, 3) is not None

    def test_silent_holds_go_when_requests_wait_for_host_pages(self) -> None:
        """And not when they wait for blocks, of which holds keep none."""
        made, _ = staged_producer(count=4)
        prefill(made, "a", 1, 2, 3)
        [copy] = made.drain().copies
        made.allocation_attempted(request(40, name="other"), 0)
        assert not made.relieve_block_pressure(request_waits=True)
        assert made.waits_for_host_pages(request(40, PREFILL, name="b"))
        assert made.relieve_block_pressure()
        silence = Silence(request=RequestId("a"), hold=copy.hold, age=GONE_SECONDS + 1)
        made.silence_reported({0: [silence]})
        made.relieve_block_pressure()
        assert made.drain().ends == (copy.hold,)

    def test_reset_ends_host_holds(self) -> None:
        made, _ = staged_producer()
        prefill(made, "a", 1, 2, 3)
        [copy] = made.drain().copies
        made.sends_finished(["a"])
        made.reset()
        assert made.drain().ends == (copy.hold,)

    def test_no_parts_are_published(self) -> None:
        made, _ = staged_producer()
        each = request(40, PREFILL | {"transfer_id": "room"})
        made.on_new_request(each)
        made.take_on(each)
        made.publish_parts(step(r=20), SERVING)
        made.publish_parts(step(r=20), SERVING)
        assert not made.drain().watermarks


class TestConsumer:
    @pytest.mark.parametrize("cached", [0, 1])
    def test_load_fills_host_pages_for_the_blocks_that_are_not_cached(self, cached: int) -> None:
        made, _ = staged_consumer()
        each = arrive(made)
        assert made.num_matched_tokens(each, 16 * cached) == 40 - 16 * cached
        made.blocks_allocated(each, blocks(21, 5, 17, cached=cached), 40 - 16 * cached)
        [load] = made.drain().loads
        [pages] = load.local
        assert load.copy == PageCopy(blocks=(21, 5, 17)[cached:], pages=tuple(pages.ids))
        assert pages.first_index == cached

    def test_a_wait_ends_as_a_refused_ticket(self, caplog: pytest.LogCaptureFixture) -> None:
        """Prefill is told that nobody will come."""
        metrics = Metrics(driver="loopback")
        made, _, late, now = two_requests(metrics=metrics)
        assert made.num_matched_tokens(late, 0) is None
        now[0] = PATIENCE
        assert made.num_matched_tokens(late, 0) == 40
        made.blocks_allocated(late, blocks(4, 5, 6), 40)
        messages = made.drain()
        assert [request for request, _ in messages.refused] == ["second"]
        [release] = messages.loads
        assert (release.request, release.report, release.copy) == ("second", False, None)
        assert "cause host_pages" in caplog.text
        assert (metrics.take() or {})["refused_tickets"] == {"loopback": {"host_pages": 1}}

    def test_more_blocks_than_reserved_fail_the_load(self) -> None:
        """vLLM may give a request more than its tokens need."""
        made, first, second, _ = two_requests()
        made.blocks_allocated(first, blocks(1, 2, 3, 4, 5), 40)
        messages = made.drain()
        assert [request for request, _ in messages.refused] == ["first"]
        [release] = messages.loads
        assert not release.report
        made.loads_finished(["first"], ["first"])
        assert made.num_matched_tokens(second, 0) == 40


def transfer(role: str = "kv_both", device: str = "cpu") -> Any:
    return engine(role, kv_buffer_device=device).kv_transfer_config


@pytest.mark.parametrize(
    ("configured", "actual", "forced", "staged"),
    [
        ("cpu", "cpu", False, False),
        ("cpu", "cpu", True, True),
        ("cpu", "xpu", False, True),
        ("xpu", "xpu", False, False),
        ("xpu", "xpu", True, True),
    ],
)
def test_when_a_cache_is_staged(configured: str, actual: str, forced: bool, staged: bool) -> None:
    config = Config(staging=forced)
    assert staging.is_staged(transfer(device=configured), config, actual) == staged


def test_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cuda' and the cache is in 'cpu' memory: remove"):
        staging.is_staged(transfer(device="cuda"), Config(), "cpu")


@pytest.mark.parametrize(
    ("role", "holds", "loads"),
    [("kv_producer", 10, 0), ("kv_consumer", 0, 10), ("kv_both", 5, 5)],
)
def test_host_pages_are_for_holds_and_for_loads(role: str, holds: int, loads: int) -> None:
    """Ranks may have different numbers: their pages have different sizes."""
    found = staging.host_pages([11, 12, staging.NO_LIMIT], facts(role=role))
    assert [each.total for each in found] == [holds, loads]
    ids = [each.take(RequestId("r"), each.total) or () for each in found]
    assert sorted(ids[0] + ids[1]) == list(range(1, 11))


def test_turns_are_refused() -> None:
    turns = {"bidirectional_kv_xfer": True}
    with pytest.raises(ConfigError, match="bidirectional_kv_xfer with kv_buffer_device 'cpu'"):
        check_engine(engine(device_type="xpu", kv_connector_extra_config=turns))
    check_engine(engine(kv_connector_extra_config=turns))
    own = transfer()
    own.kv_connector_extra_config = {**turns, "staging": True}
    with pytest.raises(ConfigError, match=r"bidirectional_kv_xfer with staging: .* remove one"):
        check_siblings(own, own)


GROUPS = (
    CacheGroup(index=0, tokens=16),
    CacheGroup(index=1, tokens=16, window=32),
    CacheGroup(index=2, tokens=64, is_state=True),
)


@pytest.mark.parametrize(("tokens", "most"), [(1, 1 + 1 + 1), (32, 2 + 2 + 1), (160, 10 + 3 + 1)])
def test_how_many_pages_a_request_has_at_most(tokens: int, most: int) -> None:
    assert most_pages(GROUPS, tokens) == most


class TestSize:
    """Of a rank's pool, by its settings."""

    @pytest.fixture
    def form(self) -> HostPageFormat:
        import numpy as np

        self.cache = np.zeros((64, 16, 64), dtype=np.uint8)
        layout: Layout = paged_layout({"k": self.cache}, ("page", "token", "element"))
        return HostPageFormat.of(layout)

    @pytest.mark.parametrize(
        ("default", "uses", "largest", "count"),
        [
            (0, 1, 20, 20),
            (0, 2, 20, 40),
            (30 << 10, 1, 20, 30),
            (1 << 30, 1, 20, 63),
            (0, 2, 60, 120),
            (1 << 30, 2, 20, 126),
        ],
    )
    def test_by_default(
        self,
        form: HostPageFormat,
        monkeypatch: pytest.MonkeyPatch,
        default: int,
        uses: int,
        largest: int,
        count: int,
    ) -> None:
        """Enough for a request, and for each use no more than the cache."""
        monkeypatch.setattr(staging, "DEFAULT_BYTES", default)
        found = staging.page_count(form, Config(), pages=64, largest=largest, uses=uses)
        assert found == 1 + count

    def test_as_set(self, form: HostPageFormat, caplog: pytest.LogCaptureFixture) -> None:
        config = Config(staging_bytes=10_500)
        assert staging.page_count(form, config, pages=64, largest=9, uses=1) == 10
        assert not caplog.text
        assert staging.page_count(form, config, pages=64, largest=10, uses=1) == 10
        assert "may need 10; larger requests are not handed over; set 11264 or more" in caplog.text

    def test_too_little(self, form: HostPageFormat) -> None:
        with pytest.raises(
            ConfigError,
            match=r"staging_bytes is 2500: a host page .* has 1024 bytes .* 3 are needed; set 3072",
        ):
            staging.page_count(form, Config(staging_bytes=2500), pages=64, largest=9, uses=2)

    def test_a_rank_without_a_cache_sets_no_limit(self) -> None:
        form = HostPageFormat.of(Layout(regions=(), groups=(), fields=()))
        assert staging.page_count(form, Config(), pages=4, largest=2, uses=1) > 1 << 20
