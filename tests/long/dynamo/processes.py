"""Dynamo's frontend, a prefill worker and a decode worker, as processes of this machine."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any, Self

from tests.engines.engines import CONNECTOR, ENVIRONMENT, OPTIONS, PATIENT, ROOT
from tests.engines.http_server import Program, command_line, get, metric, post
from tests.free_port import free_port

MODEL = "tiny"
STAND_INS = Path(__file__).parent / "stand_ins"
START_SECONDS = 280.0
"""A worker imports vLLM in three processes, one after the other."""
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class DynamoError(Exception):
    """The processes did not start in time, or one answers with an error."""


class Deployment:
    """The three processes. They find each other by files, and no server of etcd or NATS runs.

    The frontend routes by prefix: the workers publish what they cache.
    """

    def __init__(self, python: Path, site: Path, model: Path, folder: Path) -> None:
        path = os.pathsep.join(str(each) for each in (STAND_INS, site.resolve(), ROOT))
        common = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "PYTHONPATH": path,
            "TMPDIR": str(folder),
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        common = os.environ | ENVIRONMENT | common

        def start(name: str, *arguments: str) -> Program:
            port = _any_port()
            own = {"DYN_SYSTEM_PORT": str(port)}
            if name == "frontend":
                own, arguments = {}, (*arguments, "--http-port", str(port))
            command: list[str | Path] = [python, "-m", *arguments]
            return Program(name, command, port, "/health", folder, common | own)

        self._frontend = start("frontend", "dynamo.frontend", "--router-mode", "kv")
        self._workers = {
            name: start(name, *_worker(name, role, model)) for name, role in ROLES.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for each in (self._frontend, *self._workers.values()):
            each.close()

    def wait_started(self) -> None:
        """Return when the frontend serves the model and has found both workers."""
        deadline = time.monotonic() + START_SECONDS
        while not self._serves():
            for each in self._workers.values():
                each.answers()  # raises if it has ended
            if time.monotonic() > deadline:
                raise DynamoError(f"not started in time\n{self.logs()}")
            time.sleep(0.5)

    def post(self, path: str, body: dict[str, Any]) -> str:
        """Send a request to the frontend; return the answer's body."""
        asked = {"model": MODEL, "temperature": 0, "ignore_eos": True} | body
        status, text = post(self._frontend.address + path, asked)
        if status != 200:
            raise DynamoError(f"{path}: {status} {text}\n{self.logs()}")
        return text

    def counter(self, name: str, label: str = "") -> float:
        """Return the value of one of decode's counters, on the page that Dynamo serves."""
        return metric(self._workers["decode"].address, f"{name}_total", label)

    def logs(self) -> str:
        """Return the ends of what the processes wrote."""
        return "\n\n".join(each.log()[-3000:] for each in (self._frontend, *self._workers.values()))

    def _serves(self) -> bool:
        if not self._frontend.answers():
            return False
        address = self._frontend.address
        found = "dynamo.prefill.generate" in get(address + "/health")
        return found and f'"{MODEL}"' in get(address + "/v1/models")


def _worker(name: str, role: str, model: Path) -> list[str]:
    """Return the arguments of a worker, those of ``vllm serve`` among them."""
    transfer = CONNECTOR | {"kv_role": role, "kv_connector_extra_config": PATIENT}
    transfer |= {"kv_load_failure_policy": "fail"}
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"tcp://*:{_any_port()}"}
    options = OPTIONS | {
        "model": str(model),
        "served_model_name": MODEL,
        "enable_prefix_caching": True,
        "kv_events_config": events,
        "kv_transfer_config": transfer,
    }
    arguments = command_line(options)
    ours = [each for each in arguments if not each.startswith(("--host=", "--port="))]
    return ["dynamo.vllm", "--disaggregation-mode", name, *ours]


def _any_port() -> int:
    """Return a free port below 32,768: Dynamo reads ``DYN_SYSTEM_PORT`` as 16 bits with a sign."""
    return free_port(random.randrange(20_000, 32_000))
