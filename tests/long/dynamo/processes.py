"""Dynamo's frontend, a prefill worker and a decode worker, as processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.engines.engines import CONNECTOR, ENVIRONMENT, OPTIONS, PATIENT, ROOT, excerpt
from tests.engines.http_server import _command_line

MODEL = "tiny"
STAND_INS = Path(__file__).parent / "stand_ins"
START_SECONDS = 280.0
"""A worker imports vLLM in three processes, one after the other."""
ANSWER_SECONDS = 60.0
END_SECONDS = 20.0
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class DynamoError(Exception):
    """A process ended, or does not answer; the message has the end of its output."""


class Deployment:
    """The three processes. They find each other by files, and no server of etcd or NATS runs.

    The frontend routes by prefix: the workers publish what they cache.
    """

    def __init__(self, python: Path, site: Path, model: Path, folder: Path) -> None:
        self._python = python
        self._folder = folder
        self._environment = _environment(site, folder)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {name: _free_port() for name in ("frontend", *ROLES)}
        port = str(self._ports["frontend"])
        frontend = ["-m", "dynamo.frontend", "--http-port", port, "--router-mode", "kv"]
        self._start("frontend", frontend)
        for name, role in ROLES.items():
            self._start(name, _worker(name, role, model), DYN_SYSTEM_PORT=str(self._ports[name]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait_started(self) -> None:
        """Return when the frontend serves the model and has found both workers."""
        deadline = time.monotonic() + START_SECONDS
        while not self._serves():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise DynamoError(f"{name} ended\n{self._logs()}")
            if time.monotonic() > deadline:
                raise DynamoError(f"not started within {START_SECONDS:.0f} s\n{self._logs()}")
            time.sleep(0.5)

    def post(self, path: str, body: dict[str, Any]) -> str:
        """Send a request to the frontend; return the answer's body."""
        request = urllib.request.Request(
            self._url("frontend", path),
            json.dumps({"model": MODEL, "temperature": 0, "ignore_eos": True} | body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError as exc:
            with exc:
                said = f"{path}: {exc.code} {exc.read().decode()}"
            raise DynamoError(f"{said}\n{self._logs()}") from exc

    def counter(self, name: str, label: str = "") -> float:
        """Return the value of one of decode's counters, on the page that Dynamo serves."""
        lines = self._get("decode", "/metrics").splitlines()
        found = [line for line in lines if line.startswith(f"{name}_total{{") and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def _start(self, name: str, arguments: list[str], **environment: str) -> None:
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [self._python, *arguments],
                cwd=self._folder,
                env=self._environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _serves(self) -> bool:
        try:
            models = self._get("frontend", "/v1/models")
            health = self._get("frontend", "/health")
        except OSError:
            return False
        return f'"{MODEL}"' in models and "dynamo.prefill.generate" in health

    def _get(self, name: str, path: str) -> str:
        with urllib.request.urlopen(self._url(name, path), timeout=ANSWER_SECONDS) as answer:
            text: str = answer.read().decode()
            return text

    def _url(self, name: str, path: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}{path}"

    def _logs(self) -> str:
        """Return what the processes wrote: the first error of each, and the last lines."""
        texts = {name: self._log(name).read_text(errors="replace") for name in self._processes}
        return "\n".join(f"{name}:\n{excerpt(text)}" for name, text in texts.items())

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def _worker(name: str, role: str, model: Path) -> list[str]:
    """Return the arguments of a worker, those of ``vllm serve`` among them."""
    transfer = CONNECTOR | {
        "kv_role": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": PATIENT,
    }
    options = OPTIONS | {
        "model": str(model),
        "served_model_name": MODEL,
        "enable_prefix_caching": True,
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{_free_port()}",
        },
        "kv_transfer_config": transfer,
    }
    arguments = _command_line(options)
    ours = [each for each in arguments if not each.startswith(("--host=", "--port="))]
    return ["-m", "dynamo.vllm", "--disaggregation-mode", name, *ours]


def _environment(site: Path, folder: Path) -> dict[str, str]:
    path = os.pathsep.join(str(each) for each in (STAND_INS, site.resolve(), ROOT))
    return (
        os.environ
        | ENVIRONMENT
        | {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "PYTHONPATH": path,
            "TMPDIR": str(folder),
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
    )


def _free_port() -> int:
    """Return a port below 32,768, as Dynamo reads ``DYN_SYSTEM_PORT``: 16 bits, one the sign."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
