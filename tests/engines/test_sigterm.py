"""SIGTERM to an engine's own processes while pages are held: what vLLM makes of it."""

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
from tests.engines.deployment import Deployment
from tests.engines.engines import CONNECTOR, PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import texts

pytestmark = pytest.mark.timeout(300)


@contextlib.contextmanager
def producer(checkpoint: Path, folder: Path, **extra: Any) -> Iterator[Deployment]:
    """One engine in a process of its own, as ``vllm serve`` has it."""
    transfer = CONNECTOR | {"kv_role": "kv_producer", "kv_connector_extra_config": extra}
    deployment = Deployment(checkpoint, folder, kv_transfer_config=transfer)
    try:
        yield deployment.wait_started()
    finally:
        deployment.close()


def held(deployment: Deployment, given: list[int]) -> dict[str, Any]:
    """A ticket whose pages stay held."""
    params = deployment.generate(0, given, max_tokens=1, params=PREFILL).params
    assert deployment.holds() == [1]
    return params or {}


def test_what_is_held_is_still_served(
    reference: Engine, decode: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    """The engine runs on until somebody has read it, and then ends by itself."""
    given = prompt(100)
    with producer(checkpoint, tmp_path, kv_lease_duration=250.0) as deployment:
        params = held(deployment, given)
        deployment.terminate()
        [completion] = decode.generate(given, params=params)
        assert completion.text == texts(reference, given)[0]
        assert deployment.ended() == [0]
        assert "nobody read its pages" not in deployment.log()


def test_what_nobody_reads_ends_with_its_lease(checkpoint: Path, tmp_path: Path) -> None:
    with producer(checkpoint, tmp_path, kv_lease_duration=1.0) as deployment:
        held(deployment, prompt(100))
        deployment.terminate()
        assert deployment.ended() == [0]
        assert "nobody read its pages within the lease" in deployment.log()


def test_workers_that_get_it_themselves_serve_what_they_hold(
    reference: Engine, decode: Engine, start_engine: StartEngine
) -> None:
    """As from a service manager, which signals every process."""
    prefill = start_engine(
        "signalled", "kv_producer", extra={"drain_timeout": 200.0}, tensor_parallel_size=2
    )
    given, pids = prompt(100), prefill.run(ranks.pids)
    [ticket] = prefill.prefill(given)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    [completion] = decode.generate(given, params=ticket)
    assert completion.text == texts(reference, given)[0]
    prefill.kill()
