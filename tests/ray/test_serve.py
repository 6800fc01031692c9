"""A cluster of three nodes on this machine, with real engines behind Ray Serve's HTTP.

Ray takes each of the addresses 127.0.0.2 and 127.0.0.3 for a machine: prefill runs on one, decode
on the other.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from examples.ray_serve import local
from kvferry.integrations.ray import build_pd_openai_app
from tests.free_port import free_port

SECONDS = 400.0

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(2 * SECONDS),
]

PREFILL, DECODE = "127.0.0.2", "127.0.0.3"


class Deployment:
    """One ordinary engine, two prefill replicas, and decode replicas that scale from one to two."""

    def __init__(self, model: Path) -> None:
        self._port, self._metrics = free_port(), free_port()
        self._model = model

    def __enter__(self) -> Self:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster
        from ray.serve.llm import build_openai_app

        quick = {"metrics_report_interval_ms": 1000}
        self._cluster = Cluster(True, head_node_args={"num_cpus": 8, "_system_config": quick})
        for node, role in ((PREFILL, "prefill"), (DECODE, "decode")):
            resources = {"num_cpus": 8, "resources": {role: 8}}
            metrics = {"metrics_export_port": self._metrics} if role == "decode" else {}
            self._cluster.add_node(node_ip_address=node, **resources, **metrics)
        ray.init(self._cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": self._port})
        args = self._arguments()
        single = build_openai_app(local.single_engine(local.arguments(self._model)))
        serve.run_many(
            [
                serve.RunTarget(single, name="single", route_prefix="/single"),
                serve.RunTarget(build_pd_openai_app(args), name="llm", route_prefix="/"),
            ]
        )
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def ask(self, path: str, body: dict[str, Any]) -> str:
        """Return the answer's text."""
        return local.ask(path, body, self._port)

    def is_right(self, length: int, seed: int) -> bool:
        """Return whether a prompt gets the text of the ordinary engine; on an error, ``False``."""
        _, (path, body), *_ = local.every_way(length, seed)
        with suppress(urllib.error.HTTPError):
            return self.ask(path, body) == self.ask(f"/single{path}", body)
        return False

    def pulled(self) -> dict[str, float]:
        """Return how many prompt tokens each decode replica got from prefill."""
        page = urllib.request.urlopen(f"http://{DECODE}:{self._metrics}/metrics", timeout=30)
        found: dict[str, float] = {}
        for line in page.read().decode().splitlines():
            if line.startswith("ray_vllm_kvferry_tokens_total{"):
                replica = line.partition('ReplicaId="')[2].partition('"')[0]
                found[replica] = found.get(replica, 0) + float(line.rpartition(" ")[2])
        return found

    def running(self, deployment: str) -> int:
        """Return how many replicas of a deployment serve requests."""
        from ray import serve

        states = serve.status().applications["llm"].deployments[deployment].replica_states
        return int(states.get("RUNNING", 0))

    def replicas(self, deployment: str) -> set[str]:
        """Return the names of the actors that are replicas of a deployment."""
        import ray

        actors = ray.util.list_named_actors(all_namespaces=True)
        return {actor["name"] for actor in actors if f"#{deployment}#" in actor["name"]}

    def kill(self, replica: str) -> None:
        """End a replica's process at once."""
        import ray

        ray.kill(ray.get_actor(replica, namespace="serve"))

    def _arguments(self) -> dict[str, Any]:
        args = local.arguments(self._model)
        for role in ("prefill", "decode"):
            config = args[f"{role}_config"]
            config["placement_group_config"] = {"bundles": [{"CPU": 1, role: 1}]}
            config["deployment_config"] = {"num_replicas": 2, "health_check_period_s": 1}
        scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
        scaling |= {"upscale_delay_s": 1, "downscale_delay_s": 3600}
        args["decode_config"]["deployment_config"] = {"autoscaling_config": scaling}
        return args


def wait(condition: Callable[[], bool]) -> None:
    """Return when a condition holds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    model = local.make_model(tmp_path_factory.mktemp("tiny"))
    with Deployment(model) as deployed:
        yield deployed


def test_every_text_is_that_of_one_engine_and_every_prompt_was_pulled(
    deployment: Deployment,
) -> None:
    for length in local.LENGTHS:
        for path, body in local.every_way(length):
            assert deployment.ask(path, body) == deployment.ask(f"/single{path}", body)
    # A word of the prompt is a token, and each prompt came in four ways.
    wait(lambda: sum(deployment.pulled().values()) == 4 * sum(local.LENGTHS))


def test_a_minimum_of_tokens_is_kept(deployment: Deployment) -> None:
    _, (path, body), *_ = local.every_way(40)
    body |= {"stream": False, "min_tokens": 12, "ignore_eos": False}
    assert len(deployment.ask(path, body).split()) == 12


def test_decode_scales_while_requests_run(deployment: Deployment) -> None:
    with ThreadPoolExecutor(8) as clients:
        path, body = local.every_way(40)[0]
        long = body | {"max_tokens": 700}
        while deployment.running("Decode:tiny") < 2:
            list(clients.map(lambda _: deployment.ask(path, long), range(8)))
        assert all(clients.map(lambda seed: deployment.is_right(64, seed), range(100, 140)))
    wait(lambda: len(deployment.pulled()) == 2)


def test_a_killed_prefill_replica_comes_back_and_requests_go_on(deployment: Deployment) -> None:
    before = deployment.replicas("Prefill:tiny")
    deployment.kill(min(before))
    during = [deployment.is_right(64, seed) for seed in range(200, 230)]
    wait(lambda: len(deployment.replicas("Prefill:tiny") - before) == 1)
    wait(lambda: deployment.running("Prefill:tiny") == 2)
    after = [deployment.is_right(64, seed) for seed in range(300, 330)]
    assert all(after)
    # Those that were sent to the dead replica before Ray noticed.
    assert during.count(False) <= 5, f"{during.count(False)} of 30 requests were lost"
