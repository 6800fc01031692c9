"""A real Prometheus, and ``kvferry top``, read the metrics of two real servers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.cli.command import run_kvferry
from tests.engines.engines import transfer_config
from tests.engines.http_server import HttpServer, Program, get, serving
from tests.free_port import free_port
from tests.monitoring import example
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""The servers, which have these names and roles."""
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

Servers = dict[str, HttpServer]


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    transfers = {name: transfer_config(role, engine_id=f"{name}-0") for name, role in ROLES.items()}
    options = {name: {"kv_transfer_config": each} for name, each in transfers.items()}
    folder = tmp_path_factory.mktemp("monitored")
    with serving(checkpoint, folder, options, max_num_batched_tokens=64) as servers:
        yield servers


def targets(servers: Servers) -> dict[str, str]:
    """Return host and port of each server by its role."""
    return {name: each.address.removeprefix("http://") for name, each in servers.items()}


def hand_over(servers: Servers, seed: int) -> dict[str, Any]:
    """Do what a router does; return the ticket."""
    asked = prompt(100, seed=seed)
    ticket = servers["prefill"].prefill(asked)
    servers["decode"].texts(asked, params=ticket)
    return ticket


def hand_over_early(servers: Servers, ticket: dict[str, Any], seed: int) -> None:
    """Do what a router does that sends both legs at once; an earlier ticket says where prefill is.

    Prefill computes the prompt in many steps.
    """
    asked, room = prompt(900, seed=seed), {"transfer_id": f"monitored-{seed}"}
    there = room | {
        "do_remote_prefill": True,
        "remote_engine_id": ticket["remote_engine_id"],
        "remote_bootstrap_addr": f"http://{ticket['remote_host']}:{ticket['remote_port']}",
    }
    with ThreadPoolExecutor(1) as beside:
        leg = beside.submit(servers["decode"].texts, asked, params=there)
        servers["prefill"].prefill(asked, **room)
        leg.result()


class Prometheus:
    """A real Prometheus with the example's rules."""

    def __init__(self, folder: Path, servers: Servers) -> None:
        port = free_port()
        settings: dict[str, Any] = example.yaml(example.CONFIG)
        settings["global"] = dict.fromkeys(settings["global"], "1s")
        settings["rule_files"] = [str(example.RULES)]
        settings["scrape_configs"][0]["static_configs"] = [
            {"targets": [address], "labels": {"role": role}}
            for role, address in targets(servers).items()
        ]
        (folder / "prometheus.yml").write_text(json.dumps(settings))
        command = [
            example.program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self.program = Program("prometheus", command, port, "/-/ready", folder)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the value of an expression now: a list of series."""
        found = self.get(f"query?{urllib.parse.urlencode({'query': expression})}")
        assert not found.get("warnings"), expression
        series: list[dict[str, Any]] = found["data"]["result"]
        return series

    def get(self, path: str) -> dict[str, Any]:
        """Return an answer of Prometheus's HTTP API, without an error."""
        found: dict[str, Any] = json.loads(get(f"{self.program.address}/api/v1/{path}"))
        assert found["status"] == "success"
        return found

    def rules(self) -> list[dict[str, Any]]:
        groups = self.get("rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def prometheus(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus that has seen hand-overs, some before its second reading and some after it."""
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), servers)
    with contextlib.closing(running.program.wait_started()):
        for round_of, name in enumerate(
            ("vllm:kvferry_loads_total", "rate(vllm:kvferry_loads_total[5m])")
        ):
            ticket = hand_over(servers, seed=2 * round_of)
            hand_over_early(servers, ticket, seed=2 * round_of + 1)
            eventually(lambda name=name: bool(running.query(f"{name} > 0")))  # type: ignore[misc]
        for counter in ("early_loads", "early_bytes"):
            rate = f"rate(vllm:kvferry_{counter}_total[5m])"
            eventually(lambda rate=rate: bool(running.query(rate)))  # type: ignore[misc]
        yield running


def test_every_panel_has_values_and_every_label_of_a_legend(prometheus: Prometheus) -> None:
    empty = set()
    for title, expression, legend in example.panel_expressions():
        variables = r"\$(model|instance)\b"
        expanded = re.sub(variables, ".*", expression.replace("$__rate_interval", "5m"))
        found = prometheus.query(expanded)
        labels = set(re.findall(r"\{\{(\w+)\}\}", legend))
        for series in found:
            assert labels <= {label for label, value in series["metric"].items() if value}, title
        if not found:
            empty.add(title)
    assert empty <= MAY_BE_EMPTY


def test_every_rule_is_evaluated_and_nothing_is_wrong(prometheus: Prometheus) -> None:
    eventually(lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()))
    found = {rule["name"]: rule.get("lastError", "") for rule in prometheus.rules()}
    assert found == {rule["alert"]: "" for rule in example.rules()}
    assert prometheus.get("alerts")["data"]["alerts"] == []


def test_both_servers_are_scraped_and_metrics_of_vllm_exist(prometheus: Prometheus) -> None:
    roles = {series["metric"]["role"]: series["value"][1] for series in prometheus.query("up")}
    assert roles == dict.fromkeys(ROLES, "1")
    for name, labels in example.VLLM_METRICS.items():
        found = prometheus.query(name)
        assert found, name
        for series in found:
            assert labels | example.VLLM_LABELS <= set(series["metric"]), name


def test_top_shows_who_pulls_from_whom(servers: Servers) -> None:
    hand_over(servers, seed=11)
    addresses = tuple(targets(servers).values())
    arguments = ("top", *addresses, "--once", "--interval", "0.5")
    result = run_kvferry(dict(os.environ), *arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    prefill, decode = json.loads(result.stdout)["engines"]
    assert (prefill["name"], decode["name"]) == addresses
    assert (decode["peers_up"], decode["failed_loads"]["total"]) == (1, 0)
    [pull] = decode["pulls"]
    assert (pull["peer"], pull["paths"]) == ("prefill-0", ["process_vm"])
    assert (prefill["running"], prefill["pulls"], prefill["problems"]) == (0, [], [])
