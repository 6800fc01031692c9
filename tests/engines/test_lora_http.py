"""LoRA adapters that an operator loads over HTTP, and requests that a router hands over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.engines import transfer_config
from tests.engines.http_server import HttpServer, serving
from tests.engines.lora import OPTIONS, write_adapter
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

LENGTH = 100
Servers = tuple[HttpServer, HttpServer]


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two engines that prefill and decode. For a ticket that is refused, the first answers with an
    error, and the second computes the prompt itself."""
    policies = ("fail", "recompute")
    options = {
        each: {"kv_transfer_config": transfer_config("kv_both", kv_load_failure_policy=each)}
        for each in policies
    }
    with serving(checkpoint, tmp_path_factory.mktemp("http"), options, **OPTIONS) as servers:
        yield servers["fail"], servers["recompute"]


def load(server: HttpServer, name: str, path: Path, **more: Any) -> int:
    """Load an adapter; return the status of the answer."""
    body = {"lora_name": name, "lora_path": str(path), **more}
    return server.post("/v1/load_lora_adapter", body)[0]


def pulls(prefill: HttpServer, decode: HttpServer, model: str, seed: int) -> None:
    """Hand over, and see that the whole prompt was pulled, and that the text is the adapter's."""
    asked, before = prompt(LENGTH, seed=seed), decode.pulled()
    got = decode.texts(asked, model, params=prefill.prefill(asked, model))
    assert decode.pulled() - before == LENGTH
    assert got == prefill.texts(asked, model)


def refused(server: HttpServer) -> float:
    """How many tickets were refused because they were for another prompt or adapter."""
    return server.counter("vllm:kvferry_refused_tickets", 'reason="prompt"')


def test_other_weights_under_the_same_name(servers: Servers, tmp_path: Path) -> None:
    """One engine has them first: tickets are refused until the other one has them, too."""
    (failing, recomputing), name = servers, "moving"
    old, new = (write_adapter(tmp_path / str(seed), seed=seed) for seed in (3, 4))

    def replace(server: HttpServer) -> None:
        assert load(server, name, new) == 400  # vLLM wants to be told that this is on purpose
        server.post("/v1/unload_lora_adapter", {"lora_name": name})
        assert load(server, name, new) == 200

    for server in servers:
        assert load(server, name, old) == 200
    assert load(failing, "new", new) == 200
    pulls(failing, recomputing, name, seed=3)
    replace(recomputing)
    asked, before = prompt(LENGTH, seed=4), refused(recomputing)
    wanted = failing.texts(asked, "new")
    assert recomputing.texts(asked, name, params=failing.prefill(asked, name)) == wanted
    eventually(lambda: refused(recomputing) == before + 1)
    asked, before = prompt(LENGTH, seed=5), refused(failing)
    assert failing.complete(name, asked, params=recomputing.prefill(asked, name))[0] == 500
    eventually(lambda: refused(failing) == before + 1)
    replace(failing)
    pulls(failing, recomputing, name, seed=6)
    pulls(recomputing, failing, name, seed=7)
