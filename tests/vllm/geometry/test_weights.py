"""What vLLM's scheduler does where weights change: resets of prefix caches, and LoRA adapters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.directory.news import ProducerNews
from kvferry.core.side_channel.connection import revoke
from kvferry.integrations.vllm.adapter_hashes import AdapterContents, AdapterLoad
from tests.integrations.vllm.test_adapter_hashes import write
from tests.vllm.geometry.engine_of_ranks import Shape
from tests.vllm.geometry.model import Layer, attention, hybrid
from tests.vllm.geometry.paused import Core
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


def prefilled(prefill: Server, lora: Any = None, family: int = 0) -> dict[str, Any]:
    """The ticket of a request for 100 tokens."""
    name = prefill.add(family, 100, dict(PREFILL), lora=lora)
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


@contextmanager
def under_way(decode: Server, params: dict[str, Any]) -> Iterator[str]:
    """A request for 100 tokens whose load cannot read before the block ends."""
    half = decode.scheduler.connector._scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half._directory, "take", ProducerNews)  # no handshake
        name = decode.add(0, 100, params, 30)
        decode.step()
        assert name in decode.pulled
        yield name


def is_loaded(server: Server, name: str) -> bool:
    """Whether all ranks have reported a request's load, of which vLLM has computed no token yet."""
    return name in server.scheduler.finished_recving_kv_req_ids


class TestResets:
    """Tickets of before a reset are stale from the next step on, whether or not it succeeds."""

    @pytest.mark.parametrize("host_pages", [0, 64])
    @pytest.mark.parametrize("asks", [{}, {"reset_connector": True}, ALL, None])
    def test_a_ticket(self, asks: dict[str, bool] | None, host_pages: int) -> None:
        """Or it is revoked by request."""
        with engines(attention(2), host_pages=host_pages) as (prefill, decode):
            params, pool = prefilled(prefill), prefill.scheduler.kv_cache_manager.block_pool
            if host_pages:  # copied, so that no block is held
                wait(lambda: pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, prefill)
            if asks is not None:
                assert not resets(prefill, **asks)
            else:
                place = params["remote_host"], params["remote_port"]
                assert revoke(*place, timeout=60.0).tickets == 1
            assert prefill.scheduler.has_requests()  # so that vLLM runs the next step
            prefill.step()
            name = decode.add(0, 100, params, 3)
            with pytest.raises(AssertionError, match=FAILS):
                wait(lambda: name in decode.params, decode)
            wait(lambda: resets(prefill, **(asks or {})), prefill)
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


class TestPauses:
    """A pause takes a few steps, whatever is held, and leaves no ticket of before."""

    @pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
    @pytest.mark.parametrize("host_pages", [0, 64])
    def test_a_ticket(self, mode: str, host_pages: int) -> None:
        with engines(attention(2), host_pages=host_pages) as (prefill, decode):
            decode.scheduler.recompute_kv_load_failures = True
            params, core = prefilled(prefill), Core(prefill)
            core.pause(mode)
            core.resume()
            name = decode.add(0, 100, params, 3)
            wait(lambda: name in decode.params, decode)
            assert decode.computed[name] == 100 + 2
            again = decode.add(0, 70, prefilled(prefill), 3)
            wait(lambda: again in decode.params, prefill, decode)

    @pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
    @pytest.mark.parametrize("host_pages", [0, 64])
    def test_a_ticket_where_no_cache_is_cleared(self, mode: str, host_pages: int) -> None:
        """It stays valid, and does not hold up the pause."""
        with engines(attention(2), host_pages=host_pages) as (prefill, decode):
            params, core = prefilled(prefill), Core(prefill)
            assert core.pause(mode, clears=False) <= 1
            name = decode.add(0, 100, params, 3)
            wait(lambda: is_loaded(decode, name) or name in decode.params, decode)
            core.resume()
            wait(lambda: name in decode.params, prefill, decode)
            prefill.run_dry()

    def test_a_ticket_that_is_made_meanwhile(self) -> None:
        with engines(attention(2)) as (prefill, _):
            name = prefill.add(0, 300, dict(PREFILL))
            prefill.step()
            Core(prefill).pause("wait")
            assert prefill.params[name] is not None
            assert not prefill.scheduler.requests

    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_a_load_under_way(self, policy: str) -> None:
        """It fails, and the request with it, or computes its prompt itself."""
        with engines(attention(2)) as (prefill, decode):
            decode.scheduler.recompute_kv_load_failures = policy == "recompute"
            core = Core(decode)
            with under_way(decode, prefilled(prefill)) as name:
                if policy == "fail":
                    with pytest.raises(AssertionError, match=FAILS):
                        core.pause("keep")
                    return
                core.pause("keep")
            core.resume()
            wait(lambda: name in decode.params, decode)
            assert decode.computed[name] == 100 + 29

    def test_a_load_that_is_over(self) -> None:
        with engines(attention(2)) as (prefill, decode):
            name, core = decode.add(0, 100, prefilled(prefill), 30), Core(decode)
            wait(lambda: is_loaded(decode, name), prefill, decode)
            core.pause("keep")
            core.resume()
            wait(lambda: name in decode.params, decode)
            assert decode.computed[name] == 100 + 29

    def test_a_load_of_a_request_that_is_aborted(self) -> None:
        with engines(attention(2)) as (prefill, decode):
            with under_way(decode, prefilled(prefill)):
                Core(decode).pause("abort")
            assert not decode.scheduler.requests

    def test_a_load_that_is_waited_for(self) -> None:
        with engines(attention(2)) as (prefill, decode):
            if "kv_holding" not in inspect.getsource(decode.scheduler.get_num_unfinished_requests):
                pytest.skip("before 0.32, vLLM waits for no load: its request is computed anew")
            name = decode.add(0, 100, prefilled(prefill), 30)
            decode.step()
            Core(decode).pause("wait", steps=10_000)
            assert not decode.scheduler.requests
            assert decode.computed[name] == 30

    @pytest.mark.parametrize("mode", ["abort", "keep"])
    def test_in_the_callers_process(self, mode: str) -> None:
        """Nobody else steps the engine; what its steps say is said by the next one."""
        with engines(attention(2)) as (prefill, decode):
            params, ticket = prefilled(prefill), prefilled(prefill, family=1)
            core = Core(decode, in_process=True)
            with under_way(decode, params) as name:
                core.pause(mode)
            assert not decode.scheduler.has_requests()
            core.resume()
            said = [
                each for outputs in core.vllms.step_fn()[0].values() for each in outputs.outputs
            ]
            fails = [each.request_id for each in said if str(each.finish_reason) == "error"]
            assert fails == ([name] if mode == "keep" else [])
            Core(prefill, in_process=True).pause(mode)
            assert not prefill.scheduler.requests
            Core(prefill).resume()
            decode.scheduler.recompute_kv_load_failures = True
            late = decode.add(1, 100, ticket, 3)
            wait(lambda: late in decode.params, prefill, decode)
            assert decode.computed[late] == 100 + 2


class TestUpdates:
    """Engines whose weights change one after the other, while requests come all the time."""

    @pytest.mark.parametrize("mode", ["abort", "keep"])
    @pytest.mark.parametrize("first", ["prefill", "decode"])
    @pytest.mark.parametrize("names_it", [True, False])
    def test_in_turn(self, mode: str, first: str, names_it: bool) -> None:
        """Every value that is read was computed with the weights that compute with it."""
        with engines(attention(2), two_way=True) as (prefill, decode):
            for server in (prefill, decode):
                server.scheduler.recompute_kv_load_failures = True
            cores = {"prefill": Core(prefill), "decode": Core(decode)}

            def answer(family: int, ticket: dict[str, Any]) -> str:
                name = decode.add(family, 100, ticket, 5)
                wait(lambda: name in decode.params, prefill, decode)
                return name

            for version in range(1, 5):
                before = prefilled(prefill)
                decode.add(1, 100, prefilled(prefill, family=1), 40)
                decode.step()  # so that its load is under way
                cores.pop(first).update(f"v{version}", mode, names_it=names_it)
                assert answer(version, prefilled(prefill, family=version)) not in decode.pulled
                [other] = cores.values()
                other.update(f"v{version}", mode, names_it=names_it)
                answer(0, before)
                last = answer(version, prefilled(prefill, family=version))
                assert last in decode.pulled
                ticket = decode.params[last]
                assert ticket is not None
                turn = prefill.add(version, 130, {**ticket, "do_remote_decode": True})
                wait(lambda turn=turn: turn in prefill.params, prefill, decode)  # type: ignore[misc]
                cores = {"prefill": Core(prefill), "decode": Core(decode)}


class TestVersions:
    """Pages of one version of the weights are not decoded with another."""

    @pytest.mark.parametrize(("there", "here"), [("v2", None), (None, "v2"), ("v1", "v2")])
    def test_engines_with_unlike_weights(self, there: str | None, here: str | None) -> None:
        with engines(attention(2)) as (prefill, decode):
            for server, version in ((prefill, there), (decode, here)):
                if version is not None:
                    Core(server).name(version)
            name = decode.add(0, 100, prefilled(prefill), 3)
            with pytest.raises(AssertionError, match=FAILS):
                wait(lambda: name in decode.params, prefill, decode)
            assert not decode.pulled
            Core(prefill).name("v3")
            Core(decode).name("v3")
            name = decode.add(0, 100, prefilled(prefill), 3)
            wait(lambda: name in decode.params, prefill, decode)
            assert name in decode.pulled

    def test_a_ticket_that_was_accepted(self) -> None:
        """The request waits for blocks when the engine gets other weights."""
        with engines(attention(2)) as (prefill, decode):
            half = decode.scheduler.connector._scheduler
            own = decode.add(1, 900, {}, 200)
            wait(lambda: own in decode.computed, decode)
            name = decode.add(0, 700, prefilled(prefill), 3)
            wait(lambda: name in half._consumer._pulls, decode)
            Core(decode).name("v2")
            with pytest.raises(AssertionError, match=FAILS):
                wait(lambda: name in decode.params, decode)
            assert name not in decode.pulled

    def test_a_load_under_way(self) -> None:
        with engines(attention(2)) as (prefill, decode):
            fails = pytest.raises(AssertionError, match=FAILS)
            with under_way(decode, prefilled(prefill)) as name, fails:
                Core(decode).name("v2")
                wait(lambda: name in decode.params, decode)

    @pytest.mark.parametrize(("version", "pulls"), [("default", True), ("v2", False)])
    def test_next_turn(self, version: str, pulls: bool) -> None:
        """With new weights, it is computed whole."""
        with engines(attention(2), two_way=True) as (prefill, decode):
            name = decode.add(0, 100, prefilled(prefill), 30)
            wait(lambda: name in decode.params, prefill, decode)
            answer = decode.params[name]
            assert answer is not None
            Core(prefill).name(version)
            turn = prefill.add(0, 150, {**answer, "do_remote_decode": True})
            wait(lambda: turn in prefill.params, prefill, decode)
            assert (turn in prefill.pulled) == pulls


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
        server.adapters.append(AdapterLoad(rank=0, version=version, content=content, **named))

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
