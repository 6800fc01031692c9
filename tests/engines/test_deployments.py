"""vLLM's HTTP server: several data-parallel engines behind it, and SIGTERM while pages are held."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import ranks
from tests.engines.engines import Engine, transfer_config
from tests.engines.fixtures import StartEngine
from tests.engines.http_server import HttpServer, serving
from tests.engines.steps import SAMPLES, check_decoded, texts
from tests.free_port import free_port
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

RANK = "X-data-parallel-rank"
"""The header that names the engine that is to answer."""


@contextlib.contextmanager
def deployed(
    checkpoint: Path, folder: Path, role: str, extra: dict[str, Any], **options: Any
) -> Iterator[HttpServer]:
    options["kv_transfer_config"] = transfer_config(role, extra, engine_id="deployment")
    with serving(checkpoint, folder, {"deployment": options}) as servers:
        yield servers["deployment"]


@pytest.fixture(scope="module")
def port() -> int:
    """Free, and so is the next one."""
    return free_port(2)


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpServer]:
    """Two engines that were given one port for their side channels."""
    folder = tmp_path_factory.mktemp("deployment")
    extra = {"side_channel_port": port}
    with deployed(checkpoint, folder, "kv_both", extra, data_parallel_size=2) as server:
        yield server


@pytest.mark.parametrize("rank", [0, 1])
def test_both_prefill(
    reference: Engine, decode: Engine, deployment: HttpServer, port: int, rank: int
) -> None:
    """A ticket says which of them made it."""
    deployment.headers = {RANK: str(rank)}
    ticket = deployment.prefill(prompt(150, seed=rank))
    assert ticket["remote_engine_id"] == f"deployment_dp{rank}"
    assert ticket["remote_port"] == port + rank
    check_decoded(reference, decode, prompt(150, seed=rank), ticket)
    eventually(lambda: deployment.gauge("vllm:kvferry_held_pages") == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_both_decode(reference: Engine, prefill: Engine, deployment: HttpServer, rank: int) -> None:
    """Each pulls for itself; samples of one prompt come to its process in a message each."""
    given, before = prompt(151, seed=rank), deployment.pulled()
    [ticket] = prefill.prefill(given)
    deployment.headers = {RANK: str(rank)}
    got = deployment.texts(given, **SAMPLES, params=ticket, max_tokens=16)
    assert got == texts(reference, given) * 2
    eventually(lambda: deployment.pulled() - before == 2 * 151)


# SIGTERM.


def test_what_is_held_is_still_served(
    reference: Engine, decode: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    """The engine runs on until somebody has read it, and then ends by itself."""
    extra = {"kv_lease_duration": 250.0}
    with deployed(checkpoint, tmp_path, "kv_producer", extra, shutdown_timeout=200) as server:
        ticket = server.prefill(prompt(100))
        server.begin_close()
        check_decoded(reference, decode, prompt(100), ticket)
        assert server.ended() == 0
        assert "nobody read its pages" not in server.log()


def test_workers_that_get_it_themselves_serve_what_they_hold(
    reference: Engine, decode: Engine, start_engine: StartEngine
) -> None:
    """As from a service manager, which signals every process."""
    prefill = start_engine(
        "signalled", "kv_producer", extra={"drain_timeout": 200.0}, tensor_parallel_size=2
    )
    pids = {*prefill.run(ranks.pids)} - {prefill.run(own_pid)}
    [ticket] = prefill.prefill(prompt(100))
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    check_decoded(reference, decode, prompt(100), ticket)
    prefill.kill()


def own_pid(engine: Any) -> int:
    return os.getpid()
