"""LoRA adapters that an operator loads over HTTP, and requests that a router hands over."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.engines import CONNECTOR, PATIENT
from tests.engines.http_server import HttpServer
from tests.engines.lora import RANK, write_adapter
from tests.engines.steps import eventually

pytestmark = pytest.mark.timeout(300)

OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "enable_prefix_caching": True,
    "max_cpu_loras": 4,
    "max_lora_rank": RANK,
    "max_loras": 2,
}
LENGTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Two engines that prefill and decode; for a ticket that is refused, ``failing`` answers with
    an error, and ``recomputing`` computes the prompt itself."""

    failing: HttpServer
    recomputing: HttpServer


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("http")
    with contextlib.ExitStack() as stack:
        started = {}
        for name, policy in (("failing", "fail"), ("recomputing", "recompute")):
            transfer = CONNECTOR | {
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": PATIENT,
            }
            server = HttpServer(name, checkpoint, folder, kv_transfer_config=transfer, **OPTIONS)
            stack.callback(server.close)
            started[name] = server
        yield Servers(**{name: server.wait_started() for name, server in started.items()})


def load(server: HttpServer, name: str, path: Path, **more: Any) -> int:
    """Load an adapter; return the status of the answer."""
    body = {"lora_name": name, "lora_path": str(path), **more}
    return server.post("/v1/load_lora_adapter", body)[0]


def text(server: HttpServer, model: str, asked: list[int]) -> str:
    """What an engine answers that computes the prompt itself."""
    status, answer = server.complete(model, asked)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def hand_over(
    prefill: HttpServer, decode: HttpServer, asked: list[int], there: str, here: str
) -> tuple[int, str]:
    """Do what a router does; return the status of decode's answer, and the text."""
    wanted = {"do_remote_decode": True}
    status, answer = prefill.complete(there, asked, max_tokens=1, params=wanted)
    assert status == 200, answer
    assert "kvferry" in answer["kv_transfer_params"], prefill.log()[-3000:]
    status, answer = decode.complete(here, asked, params=answer["kv_transfer_params"])
    return status, answer["choices"][0]["text"] if status == 200 else ""


def pulled(server: HttpServer) -> float:
    """How many tokens of prompts came from another engine."""
    return server.counter("vllm:prompt_tokens_by_source", 'source="external_kv_transfer"')


def refusals(server: HttpServer) -> float:
    """How many tickets were refused because they were for another prompt or adapter."""
    return server.counter("vllm:kvferry_refused_tickets", 'reason="prompt"')


def pulls(prefill: HttpServer, decode: HttpServer, asked: list[int], adapter: str) -> None:
    """Hand over, and see that the whole prompt was pulled, and that the text is the adapter's."""
    before = pulled(decode)
    status, got = hand_over(prefill, decode, asked, adapter, adapter)
    assert status == 200, decode.log()[-3000:]
    assert pulled(decode) - before == len(asked)
    assert got == text(prefill, adapter, asked)


def refuses(
    prefill: HttpServer, decode: HttpServer, asked: list[int], there: str, here: str
) -> tuple[int, str]:
    """Hand over, and see that decode refuses the ticket and pulls nothing."""
    before, tokens = refusals(decode), pulled(decode)
    got = hand_over(prefill, decode, asked, there, here)
    eventually(lambda: refusals(decode) == before + 1)
    assert pulled(decode) == tokens
    return got


def test_loaded_at_run_time(servers: Servers, tmp_path: Path) -> None:
    """The same files in another folder, as on another host."""
    path = write_adapter(tmp_path / "one", seed=1)
    assert load(servers.failing, "loaded", path) == 200
    copy = shutil.copytree(path, tmp_path / "copy")
    assert load(servers.recomputing, "loaded", copy) == 200
    asked = prompt(LENGTH, seed=1)
    pulls(servers.failing, servers.recomputing, asked, "loaded")
    assert text(servers.failing, "loaded", asked) != text(
        servers.failing, servers.failing.model, asked
    )
    pulls(servers.recomputing, servers.failing, prompt(LENGTH, seed=2), "loaded")


def test_other_weights_under_the_same_name(servers: Servers, tmp_path: Path) -> None:
    """One engine has them first: tickets are refused until the other one has them, too."""
    failing, recomputing, name = servers.failing, servers.recomputing, "moving"
    old, new = (write_adapter(tmp_path / str(seed), seed=seed) for seed in (3, 4))

    def replace(server: HttpServer) -> None:
        assert load(server, name, new) == 400  # vLLM wants to be told that this is on purpose
        server.post("/v1/unload_lora_adapter", {"lora_name": name})
        assert load(server, name, new) == 200

    for server in (failing, recomputing):
        assert load(server, name, old) == 200
    assert load(failing, "new", new) == 200
    pulls(failing, recomputing, prompt(LENGTH, seed=3), name)
    replace(recomputing)
    asked = prompt(LENGTH, seed=4)
    expected = text(failing, "new", asked)
    assert refuses(failing, recomputing, asked, name, name) == (200, expected)
    assert refuses(recomputing, failing, prompt(LENGTH, seed=5), name, name) == (500, "")
    replace(failing)
    pulls(failing, recomputing, prompt(LENGTH, seed=6), name)
    pulls(recomputing, failing, prompt(LENGTH, seed=7), name)


def test_paths_that_are_gone(servers: Servers, tmp_path: Path) -> None:
    """vLLM answers with an error, and keeps the adapter that it has under this name."""
    path = write_adapter(tmp_path / "one", seed=10)
    incomplete = write_adapter(tmp_path / "incomplete", seed=10)
    (incomplete / "adapter_model.safetensors").unlink()
    for server in (servers.failing, servers.recomputing):
        assert load(server, "missing", tmp_path / "nowhere") == 404
        assert load(server, "missing", incomplete) == 500
        assert server.complete("missing", prompt(5))[0] == 404
        assert load(server, "kept", path) == 200
        assert load(server, "kept", tmp_path / "nowhere", load_inplace=True) == 404
    pulls(servers.failing, servers.recomputing, prompt(LENGTH, seed=10), "kept")
    pulls(servers.recomputing, servers.failing, prompt(LENGTH, seed=11), "kept")
