"""When a cache is staged, and how many host pages there are for what. Needs no vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.core.layout import Layout
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.layout.paged_layout import paged_layout
from kvferry.core.lifecycle.holds import RequestId
from kvferry.integrations.vllm import host_pool, staging
from kvferry.integrations.vllm.checks import check_engine
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.device import make_transport
from tests.integrations.vllm.halves import STATE, WINDOW, engine, facts, full


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


def test_driver_must_reach_the_memory() -> None:
    make_transport(Config(), {"cpu"}).close()
    with pytest.raises(ConfigError, match="'loopback' cannot reach tpu memory"):
        make_transport(Config(), {"cpu", "tpu"})


@pytest.mark.parametrize(
    ("role", "holds", "loads"),
    [("kv_producer", 10, 0), ("kv_consumer", 0, 10), ("kv_both", 5, 5)],
)
def test_host_pages_are_for_holds_and_for_loads(role: str, holds: int, loads: int) -> None:
    """Ranks may have different numbers: their pages have different sizes."""
    found = staging.host_pages([11, 12, host_pool.NO_LIMIT], facts(role=role))
    assert [each.total for each in found] == [holds, loads]
    ids = [each.take(RequestId("r"), each.total) or () for each in found]
    assert sorted(ids[0] + ids[1]) == list(range(1, 11))


def test_turns_are_refused() -> None:
    turns = {"bidirectional_kv_xfer": True}

    def check(device: str, **extra: bool) -> None:
        made = engine(device_type=device, kv_connector_extra_config=turns | extra)
        check_engine(made, made.kv_transfer_config)

    check("cpu")
    with pytest.raises(ConfigError, match="bidirectional_kv_xfer with kv_buffer_device 'cpu'"):
        check("xpu")
    with pytest.raises(ConfigError, match=r"bidirectional_kv_xfer with staging: .* remove one"):
        check("cpu", staging=True)


@pytest.mark.parametrize(("tokens", "most"), [(1, 3), (32, 5), (160, 14)])
def test_how_many_pages_a_request_has_at_most(tokens: int, most: int) -> None:
    assert staging.most_pages((*full(), WINDOW, STATE), tokens) == most


CACHE = np.zeros((64, 16, 64), dtype=np.uint8)


def form(*, has_cache: bool = True) -> HostPageFormat:
    """The host pages of a rank, of 1024 bytes each."""
    if not has_cache:
        return HostPageFormat.of(Layout(regions=(), groups=(), fields=()))
    return HostPageFormat.of(paged_layout({"k": CACHE}, ("page", "token", "element")))


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
def test_size_by_default(
    monkeypatch: pytest.MonkeyPatch, default: int, uses: int, largest: int, count: int
) -> None:
    """Enough for a request, and for each use no more than the cache."""
    monkeypatch.setattr(host_pool, "DEFAULT_BYTES", default)
    assert host_pool.page_count(form(), Config(), pages=64, largest=largest, uses=uses) == 1 + count


def test_size_as_set() -> None:
    config = Config(staging_bytes=10_500)
    assert host_pool.page_count(form(), config, pages=64, largest=90, uses=1) == 10
    config = Config(staging_bytes=2500)
    with pytest.raises(
        ConfigError,
        match=r"staging_bytes is 2500: a host page .* has 1024 bytes .* 3 are needed; set 3072",
    ):
        host_pool.page_count(form(), config, pages=64, largest=9, uses=2)
    empty = form(has_cache=False)
    assert host_pool.page_count(empty, config, pages=4, largest=2, uses=1) == host_pool.NO_LIMIT
