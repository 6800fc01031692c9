"""A real Prometheus, and ``kvferry top``, read the metrics of two real servers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.cli.command import run_kvferry
from tests.engines.engines import CONNECTOR, PATIENT
from tests.engines.http_server import HttpServer
from tests.engines.steps import eventually
from tests.long.routers.deployment import free_port
from tests.monitoring import example

pytestmark = pytest.mark.timeout(300)

TARGETS = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""The servers, which have these names and roles."""
LENGTH, LONGER = 100, 900
"""Tokens of the prompts that are handed over with a ticket, and early."""
CHUNK = 64
"""Tokens of a step of prefill: an early prompt takes many."""
MAY_BE_EMPTY = {
    "Copies between device and host",
    "Failures by stage and cause",
    "Host pages in use",
    "Peers",
    "Quarantined pages",
    "Lost peers and unsent releases",
    "Stale reads and late readers",
    "Waits for host pages",
}
"""Panels of metrics that appear with their first value, which these servers do not have: nothing
fails, and no cache is staged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Prefill and decode."""

    prefill: HttpServer
    decode: HttpServer

    def targets(self) -> dict[str, str]:
        """Return host and port of each server by its role."""
        return {
            "prefill": self.prefill.address.removeprefix("http://"),
            "decode": self.decode.address.removeprefix("http://"),
        }

    def hand_over(self, seed: int) -> dict[str, Any]:
        """Do what a router does; return the ticket."""
        asked = prompt(LENGTH, seed=seed)
        wanted = {"do_remote_decode": True}
        status, answer = self.prefill.complete(
            self.prefill.model, asked, max_tokens=1, params=wanted
        )
        assert status == 200, answer
        params = answer["kv_transfer_params"]
        status, answer = self.decode.complete(self.decode.model, asked, params=params)
        assert status == 200, self.decode.log()[-3000:]
        return dict(params)

    def hand_over_early(self, ticket: dict[str, Any], seed: int) -> None:
        """Do what a router does that sends both legs at once.

        Args:
            ticket: an earlier one, for where prefill is.
            seed: of the prompt.
        """
        asked, room = prompt(LONGER, seed=seed), {"transfer_id": f"monitored-{seed}"}
        there = {
            "do_remote_prefill": True,
            "remote_engine_id": ticket["remote_engine_id"],
            "remote_bootstrap_addr": f"http://{ticket['remote_host']}:{ticket['remote_port']}",
        }
        with ThreadPoolExecutor(1) as beside:
            leg = beside.submit(self.decode.complete, self.decode.model, asked, params=there | room)
            status, answer = self.prefill.complete(
                self.prefill.model, asked, max_tokens=1, params={"do_remote_decode": True} | room
            )
            assert status == 200, answer
            status, answer = leg.result()
        assert status == 200, self.decode.log()[-3000:]


class Prometheus:
    """A real Prometheus with the example's rules. Closing it twice is fine."""

    def __init__(self, folder: Path, program: str, targets: dict[str, str]) -> None:
        self._address = f"http://127.0.0.1:{(port := free_port())}"
        self._log = folder / "prometheus.log"
        (folder / "prometheus.yml").write_text(json.dumps(config(targets)))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def ready(self) -> bool:
        """Return whether it has started."""
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=60):
                return True
        except OSError:
            assert self._process.poll() is None, self._log.read_text()
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the value of an expression now: a list of series."""
        found = self.get(f"query?{urllib.parse.urlencode({'query': expression})}")
        assert not found.get("warnings"), expression
        series: list[dict[str, Any]] = found["data"]["result"]
        return series

    def number(self, expression: str) -> float | None:
        """Return the value of an expression of one series; ``None`` if there is none yet."""
        return next((float(series["value"][1]) for series in self.query(expression)), None)

    def get(self, path: str) -> dict[str, Any]:
        """Return an answer of Prometheus's HTTP API, without an error."""
        try:
            with urllib.request.urlopen(f"{self._address}/api/v1/{path}", timeout=60) as answer:
                found: dict[str, Any] = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                pytest.fail(f"{urllib.parse.unquote(path)}: {error.read().decode()}")
        assert found["status"] == "success"
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def config(targets: dict[str, str]) -> dict[str, Any]:
    """Return the example's configuration with other targets, and read as often as possible.

    Args:
        targets: The address of the server of each role.
    """
    found: dict[str, Any] = example.yaml(example.CONFIG)
    found["global"] = dict.fromkeys(found["global"], "1s")
    found["rule_files"] = [str(example.RULES)]
    found["scrape_configs"][0]["static_configs"] = [
        {"targets": [address], "labels": {"role": role}} for role, address in targets.items()
    ]
    return found


def expanded(expression: str) -> str:
    """Return a panel's expression with the values of the dashboard's variables."""
    return re.sub(r"\$(model|instance)\b", ".*", expression.replace("$__rate_interval", "5m"))


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("monitored")
    with contextlib.ExitStack() as stack:
        started = {}
        for name, role in TARGETS.items():
            transfer = CONNECTOR | {
                "engine_id": f"{name}-0",
                "kv_role": role,
                "kv_connector_extra_config": PATIENT,
            }
            server = HttpServer(
                name,
                checkpoint,
                folder,
                kv_transfer_config=transfer,
                max_num_batched_tokens=CHUNK,
            )
            stack.callback(server.close)
            started[name] = server
        yield Servers(**{name: server.wait_started() for name, server in started.items()})


@pytest.fixture(scope="module")
def prometheus(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus that has seen hand-overs, some before its second reading and some after it."""
    program = example.program("prometheus")
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), program, servers.targets())
    with contextlib.closing(running):
        eventually(running.ready)
        loads = 'vllm:kvferry_loads_total{role="decode"}'
        before = servers.decode.counter("vllm:kvferry_loads", "")
        ticket = servers.hand_over(seed=1)
        servers.hand_over_early(ticket, seed=5)
        eventually(lambda: running.number(loads) == before + 2)
        assert servers.decode.counter("vllm:kvferry_early_loads", "") > 0
        for seed in (2, 3, 4):
            servers.hand_over(seed=seed)
        eventually(lambda: running.number(loads) == before + 5)
        for counter in ("loads", "early_loads", "early_bytes"):
            rate = f"sum(rate(vllm:kvferry_{counter}_total[5m]))"
            eventually(partial(lambda each: running.number(each) is not None, rate))
        yield running


def test_both_servers_are_scraped(prometheus: Prometheus) -> None:
    roles = {series["metric"]["role"]: series["value"][1] for series in prometheus.query("up")}
    assert roles == dict.fromkeys(TARGETS, "1")


def test_every_panel_has_values(prometheus: Prometheus) -> None:
    empty = {
        title
        for title, expression, _ in example.panel_expressions()
        if not prometheus.query(expanded(expression))
    }
    assert empty <= MAY_BE_EMPTY


def test_every_label_of_a_legend_has_a_value(prometheus: Prometheus) -> None:
    for title, expression, legend in example.panel_expressions():
        for series in prometheus.query(expanded(expression)):
            labels = set(re.findall(r"\{\{(\w+)\}\}", legend))
            assert labels <= {label for label, value in series["metric"].items() if value}, title


def test_every_rule_is_evaluated_without_error(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        return all(rule["health"] != "unknown" for rule in found())

    def found() -> list[dict[str, Any]]:
        groups = prometheus.get("rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    eventually(evaluated)
    assert {rule["name"]: rule.get("lastError", "") for rule in found()} == {
        rule["alert"]: "" for rule in example.rules()
    }
    assert {rule["health"] for rule in found()} == {"ok"}


def test_nothing_is_wrong_with_engines_that_are_well(prometheus: Prometheus) -> None:
    assert prometheus.get("alerts")["data"]["alerts"] == []


def test_metrics_of_vllm_that_are_used_exist(prometheus: Prometheus) -> None:
    for name, labels in example.VLLM_METRICS.items():
        for series in prometheus.query(name):
            assert labels | example.VLLM_LABELS <= set(series["metric"]), name
        assert prometheus.query(name), name


def test_top_shows_who_pulls_from_whom(servers: Servers) -> None:
    servers.hand_over(seed=11)
    addresses = tuple(servers.targets().values())
    arguments = ("top", *addresses, "--once", "--interval", "0.5")
    result = run_kvferry(dict(os.environ), *arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    prefill, decode = json.loads(result.stdout)["engines"]
    assert (prefill["name"], decode["name"]) == addresses
    assert decode["peers_up"] == 1
    assert decode["failed_loads"]["total"] == 0
    [pull] = decode["pulls"]
    assert (pull["peer"], pull["paths"]) == ("prefill-0", ["process_vm"])
    assert (prefill["running"], prefill["pulls"], prefill["problems"]) == (0, [], [])
    screen = run_kvferry(dict(os.environ) | {"COLUMNS": "100"}, *arguments).stdout
    assert f"{decode['name'][:17]}" in screen
    assert "prefill-0" in screen
