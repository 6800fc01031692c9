"""What a prefill server tells a router about held blocks, while no request comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.engines import CONNECTOR, PATIENT, PREFILL
from tests.engines.http_server import HttpServer
from tests.engines.steps import eventually

pytestmark = pytest.mark.timeout(300)

LEASE = 10.0
BLOCKS = 65
"""The null block included, which is never held."""
MAY_HOLD = 32
"""Half of the blocks."""
PROMPTS = [prompt(250, seed=seed) for seed in range(3)]
HELD = 3 * 8
"""The blocks of all prompts."""


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    extra = PATIENT | {"kv_lease_duration": LEASE, "max_held_fraction": 0.5}
    transfer = CONNECTOR | {"kv_role": "kv_producer", "kv_connector_extra_config": extra}
    folder = tmp_path_factory.mktemp("http")
    options = {"kv_transfer_config": transfer, "num_gpu_blocks_override": BLOCKS}
    started = HttpServer("prefill", checkpoint, folder, **options)
    try:
        yield started.wait_started()
    finally:
        started.close()


def prefill(server: HttpServer) -> list[dict[str, Any]]:
    """Prefill all prompts for another engine, and return the tickets."""
    answers = [
        server.complete(server.model, each, max_tokens=1, params=PREFILL) for each in PROMPTS
    ]
    assert [status for status, _ in answers] == [200] * len(PROMPTS)
    return [answer["kv_transfer_params"] for _, answer in answers]


def fraction(server: HttpServer) -> float:
    return server.gauge("vllm:kvferry_held_fraction")


def test_fraction_falls_when_leases_end_although_no_request_comes(server: HttpServer) -> None:
    assert fraction(server) == 0
    prefill(server)
    eventually(lambda: fraction(server) == HELD / MAY_HOLD)
    eventually(lambda: fraction(server) == 0)
    assert server.counter("vllm:kvferry_holds", 'outcome="expired"') == len(PROMPTS)
