"""What vLLM's scheduler does where weights change: resets of prefix caches, and LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.integrations.vllm.adapter_contents import AdapterContents, AdapterLoad
from tests.integrations.vllm.test_adapter_contents import write
from tests.vllm.geometry.engine_of_ranks import Shape
from tests.vllm.geometry.model import Layer, attention, hybrid
from tests.vllm.geometry.scheduled import PREFILL, Server, serving, wait

FAILS = r"FinishReason\.ERROR"
ALL = {"reset_running_requests": True, "reset_connector": True}
"""How vLLM resets the cache when generation is paused (``pause_generation``)."""


@contextmanager
def engines(
    layers: list[Layer], *, host_pages: int = 0, **options: Any
) -> Iterator[tuple[Server, Server]]:
    there = Shape(tp=2, host_pages=host_pages)
    with (
        serving("prefill", layers, there, **options) as prefill,
        serving("decode", layers, Shape(), **options) as decode,
    ):
        yield prefill, decode


def prefilled(prefill: Server, lora: Any = None) -> dict[str, Any]:
    """The ticket of a request for 100 tokens."""
    name = prefill.add(0, 100, dict(PREFILL), lora=lora)
    wait(lambda: name in prefill.params, prefill)
    params = prefill.params[name]
    assert params is not None
    return params


def resets(server: Server, **asks: bool) -> bool:
    """Let vLLM reset its prefix cache; whether it says that it did."""
    try:
        done: bool = server.scheduler.reset_prefix_cache(**asks)
    except RuntimeError:
        assert "reset_running_requests" in asks
        return False
    return done


def is_loaded(server: Server, name: str) -> bool:
    """Whether all ranks have reported a request's load, of which vLLM has computed no token yet."""
    return name in server.scheduler.finished_recving_kv_req_ids


class TestResets:
    """Tickets of before a reset are stale from the next step on, whether or not it succeeds."""

    @pytest.mark.parametrize("host_pages", [0, 64])
    @pytest.mark.parametrize("asks", [{}, {"reset_connector": True}, ALL])
    def test_a_ticket(self, asks: dict[str, bool], host_pages: int) -> None:
        with engines(attention(2), host_pages=host_pages) as (prefill, decode):
            params, pool = prefilled(prefill), prefill.scheduler.kv_cache_manager.block_pool
            if host_pages:  # copied, so that no block is held
                wait(lambda: pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, prefill)
            assert not resets(prefill, **asks)
            assert prefill.scheduler.has_requests()  # so that vLLM runs the next step
            prefill.step()
            name = decode.add(0, 100, params, 3)
            with pytest.raises(AssertionError, match=FAILS):
                wait(lambda: name in decode.params, decode)
            wait(lambda: resets(prefill, **asks), prefill)
            decode.run_dry()
            prefill.run_dry()
            again = decode.add(0, 100, prefilled(prefill), 3)
            wait(lambda: again in decode.params, prefill, decode)

    def test_an_answer(self) -> None:
        with engines(attention(2), two_way=True) as (prefill, decode):
            name = decode.add(0, 100, prefilled(prefill), 30)
            wait(lambda: name in decode.params, prefill, decode)
            assert decode.params[name] is not None
            assert not resets(decode)
            wait(lambda: resets(decode), decode)

    def test_a_load_under_way(self) -> None:
        """vLLM cannot reset decode's cache while pages of a load are there and not computed with.

        Then it preempts the request, which loads nothing again.
        """
        with engines(attention(2)) as (prefill, decode):
            name = decode.add(0, 100, prefilled(prefill), 30)
            decode.step()
            assert not resets(decode, **ALL)
            wait(lambda: is_loaded(decode, name), prefill, decode)
            assert not resets(decode, **ALL)
            decode.step()
            assert resets(decode, **ALL)
            computed = decode.computed[name]
            wait(lambda: name in decode.params, decode)
            assert decode.computed[name] == computed + 100 + 29


class TestAdapters:
    """Files that are replaced after decode has checked a ticket, and before it computes."""

    @pytest.fixture
    def lora(self, tmp_path: Path) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest("adapter", 1, write(tmp_path / "adapter"))

    @staticmethod
    def load(server: Server, lora: Any) -> None:
        """The worker loads an adapter from its files as they are now."""
        version, content = AdapterContents().read(lora.lora_path)
        named = {"adapter": lora.lora_int_id, "name": lora.lora_name, "path": lora.lora_path}
        server.adapters.add(AdapterLoad(rank=0, version=version, content=content, **named))

    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    @pytest.mark.parametrize("ahead", [False, True])
    @pytest.mark.parametrize("layers", [attention(2), hybrid(40)], ids=["one group", "groups"])
    @pytest.mark.parametrize("replaced", [False, True])
    def test_the_first_load(
        self, lora: Any, layers: list[Layer], ahead: bool, policy: str, replaced: bool
    ) -> None:
        """Decode loads the adapter in the step that computes the first token."""
        with engines(layers, adapters=True, ahead=ahead) as (prefill, decode):
            scheduler = decode.scheduler
            scheduler.recompute_kv_load_failures = policy == "recompute"
            name = decode.add(0, 100, prefilled(prefill, lora), 3, lora)
            wait(lambda: is_loaded(decode, name), prefill, decode)
            if replaced:
                write(Path(lora.lora_path), weights=b"others")
            self.load(decode, lora)
            steps = [decode.begin() for _ in range(1 + ahead)]
            request = scheduler.requests[name]
            if replaced:
                with pytest.raises(AssertionError, match=FAILS):
                    decode.finish(*steps.pop(0))
                assert request.num_output_tokens == 0
            for step in steps:
                decode.finish(*step)
            if not replaced:
                wait(lambda: name in decode.params, decode)
            decode.run_dry()
            prefill.run_dry()
            # No block of other weights is found by a later prompt.
            later = decode.add(0, 100, None, 3, lora)
            wait(lambda: later in decode.params, decode)
            assert (decode.computed[later] >= 100) == replaced

    def test_a_request_without_blocks(self, lora: Any) -> None:
        """Its ticket is refused, and nothing is loaded."""
        with engines(attention(2), adapters=True) as (prefill, decode):
            half = decode.scheduler.connector._scheduler
            own = decode.add(1, 900, {}, 200)
            wait(lambda: own in decode.computed, decode)
            name = decode.add(0, 700, prefilled(prefill, lora), 3, lora)
            wait(lambda: name in half._consumer._pulls, decode)
            write(Path(lora.lora_path), weights=b"others")
            self.load(decode, lora)
            with pytest.raises(AssertionError, match=FAILS):
                wait(lambda: name in decode.params, decode)
            assert name not in decode.pulled
