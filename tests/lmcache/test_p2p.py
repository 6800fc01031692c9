"""LMCache's peer-to-peer cache over our channel: two of its servers, each with a vLLM engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.free_port import free_port
from tests.lmcache.engine import PROMPT

LMCACHE = [str(Path(sys.executable).with_name("lmcache"))]
CHUNK = 32
START_SECONDS = 300.0

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start processes of LMCache, which are stopped after the test."""
    with ExitStack() as stack:

        def run(name: str, *options: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((tmp_path / f"{name}.log").open("w"))
            process = subprocess.Popen([*LMCACHE, *options], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        yield run


def asked(port: int, path: str) -> Any:
    """Return what a server answers, as JSON; ``None`` if it does not listen yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return json.load(answer)
    except OSError:
        return None


def wait_for_peer(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a server has found its peer, which it does in a round of its heartbeat."""
    end = time.monotonic() + START_SECONDS
    while (asked(port, "/status") or {}).get("p2p_peer_count") != 1:
        assert server.poll() is None, f"{server.args!r} has ended: see its log"
        assert time.monotonic() < end
        time.sleep(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model."""
    from examples.tiny_llama import build

    return str(build(tmp_path_factory.mktemp("model")))


def answer(model: str, port: int) -> Any:
    """Return what an engine beside the cache server at a port has answered."""
    command = [sys.executable, "-m", "tests.lmcache.engine", model, str(port)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.strip().rpartition("\n")[2])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("driver", ["loopback", "ucx", "nixl"])
def test_a_prefix_that_one_engine_has_computed_is_read_for_another(
    start: Start, model: str, driver: str
) -> None:
    coordinator, first, second = (free_port(4) for _ in range(3))
    start("coordinator", "coordinator", "--host", "127.0.0.1", "--port", str(coordinator))
    plugin = {
        "type": "plugin",
        "module_path": "kvferry.integrations.lmcache",
        "class_name": "KVFerryPlugin",
        "adapter_params": {"driver": driver},
    }
    servers: dict[subprocess.Popen[bytes], int] = {}
    for name, port in (("first", first), ("second", second)):
        options = {
            "host": "127.0.0.1",
            "port": port,
            "http-port": port + 1,
            "p2p-advertise-url": f"127.0.0.1:{port + 2}",
            "p2p-transfer-engine": "kvferry",
            "l2-adapter": json.dumps(plugin),
            "coordinator-url": f"http://127.0.0.1:{coordinator}",
            "coordinator-advertise-ip": "127.0.0.1",
            "instance-id": name,
            "l1-size-gb": 0.25,
            "l1-align-bytes": 65536,
            "eviction-policy": "LRU",
            "chunk-size": CHUNK,
            "supported-transfer-mode": "engine_driven",
        }
        flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        servers[start(name, "server", *flags)] = port + 1
    for server, port in servers.items():
        wait_for_peer(server, port)
    alone = answer(model, 0)
    assert answer(model, first) == {"tokens": alone["tokens"], "cached": 0}
    stored = asked(first + 1, "/status")["storage_manager"]["l1_manager"]["total_object_count"]
    assert stored == len(PROMPT) // CHUNK
    # Nothing was computed on the second server: it has what it found from its peer.
    cached = len(PROMPT) // CHUNK * CHUNK
    assert answer(model, second) == {"tokens": alone["tokens"], "cached": cached}
