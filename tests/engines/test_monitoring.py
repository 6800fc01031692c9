"""The page of metrics of two real servers: what the example's files take from it, and ``top``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.cli.command import run_kvferry
from tests.engines.engines import transfer_config
from tests.engines.http_server import HttpServer, get, serving
from tests.monitoring import example

pytestmark = pytest.mark.timeout(300)

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""The servers, which have these names and roles."""

Servers = dict[str, HttpServer]


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Prefill, and decode that has loaded a prompt."""
    transfers = {name: transfer_config(role, engine_id=f"{name}-0") for name, role in ROLES.items()}
    options = {name: {"kv_transfer_config": each} for name, each in transfers.items()}
    with serving(checkpoint, tmp_path_factory.mktemp("monitored"), options) as servers:
        servers["decode"].texts(prompt(100), params=servers["prefill"].prefill(prompt(100)))
        yield servers


def test_metrics_have_the_names_and_labels_that_the_example_takes(servers: Servers) -> None:
    page = "".join(get(each.address + "/metrics") for each in servers.values())
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(vllm:\w+)\{(.*)\} \S+$", page, re.MULTILINE):
        found.setdefault(name, set(re.findall(r'(\w+)="', labels)))
    assert set(example.VLLM_METRICS) <= set(found)
    assert any("kvferry" in name for name in found)
    known = example.own() | example.VLLM_METRICS
    for name in found.keys() & known:
        assert known[name] | example.VLLM_LABELS <= found[name], name


def test_top_shows_who_pulls_from_whom(servers: Servers) -> None:
    addresses = tuple(each.address.removeprefix("http://") for each in servers.values())
    arguments = ("top", *addresses, "--once", "--interval", "0.5")
    result = run_kvferry(dict(os.environ), *arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    prefill, decode = json.loads(result.stdout)["engines"]
    assert (prefill["name"], decode["name"]) == addresses
    assert (decode["peers_up"], decode["failed_loads"]["total"]) == (1, 0)
    [pull] = decode["pulls"]
    assert (pull["peer"], pull["paths"]) == ("prefill-0", ["process_vm"])
    assert (prefill["running"], prefill["pulls"], prefill["problems"]) == (0, [], [])
