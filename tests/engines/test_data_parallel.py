"""Several data-parallel engines in one deployment: each has an id and a side channel of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.deployment import Deployment
from tests.engines.engines import CONNECTOR, PREFILL, Engine
from tests.engines.steps import SAMPLES, eventually, idle_blocks, texts
from tests.free_port import free_port

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def port() -> int:
    """Free, and so is the next one."""
    return free_port(21000, 2)


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Two engines that were given one port."""
    transfer = CONNECTOR | {
        "kv_role": "kv_both",
        "engine_id": "deployment",
        "kv_connector_extra_config": {"side_channel_port": port},
    }
    folder = tmp_path_factory.mktemp("deployment")
    deployment = Deployment(checkpoint, folder, data_parallel_size=2, kv_transfer_config=transfer)
    yield deployment.wait_started()
    deployment.close()


def test_both_prefill(reference: Engine, decode: Engine, deployment: Deployment, port: int) -> None:
    """A ticket says which of them made it."""
    for rank in (0, 1):
        given = prompt(150, seed=rank)
        params = deployment.generate(rank, given, max_tokens=1, params=PREFILL).params or {}
        assert params["remote_engine_id"] == f"deployment_dp{rank}"
        assert params["remote_port"] == port + rank
        assert deployment.holds()[rank] == 1
        [completion] = decode.generate(given, params=params)
        assert completion.text == texts(reference, given)[0]
    eventually(lambda: deployment.holds() == [0, 0])


def test_both_decode(reference: Engine, prefill: Engine, deployment: Deployment) -> None:
    """Each pulls for itself."""
    for rank in (0, 1):
        given, before = prompt(151, seed=rank), deployment.pulled()
        [params] = prefill.prefill(given)
        assert deployment.generate(rank, given, params=params).text == texts(reference, given)[0]
        assert deployment.pulled() - before == 151


def test_one_decodes_what_the_other_prefilled(reference: Engine, deployment: Deployment) -> None:
    """They are as strange to each other as any two engines."""
    given = prompt(152)
    params = deployment.generate(0, given, max_tokens=1, params=PREFILL).params
    before = deployment.pulled()
    assert deployment.generate(1, given, params=params).text == texts(reference, given)[0]
    assert deployment.pulled() - before == 152
    eventually(lambda: deployment.holds() == [0, 0])


def test_samples_of_one_prompt(reference: Engine, prefill: Engine, deployment: Deployment) -> None:
    """They come to an engine's process in a message each."""
    free = idle_blocks(prefill)
    for seed in range(2):
        given, before = prompt(153, seed=seed), deployment.pulled()
        [params] = prefill.prefill(given)
        completion = deployment.generate(seed % 2, given, params=params, **SAMPLES)
        assert completion.samples == texts(reference, given) * 2
        assert deployment.pulled() - before == 153 * 2
    eventually(lambda: prefill.run(probes.free_blocks) == free)
