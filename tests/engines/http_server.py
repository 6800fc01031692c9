"""vLLM's HTTP server, as ``vllm serve`` starts it, and what a router or an operator asks of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.engines.engines import (
    ANSWER_SECONDS,
    OPTIONS,
    START_SECONDS,
    EngineError,
    excerpt,
)


class HttpServer:
    """One engine behind vLLM's HTTP server, on a free port unless ``port`` is one of the options.

    Closing it twice is fine. A killed one needs closing, too.
    """

    def __init__(self, name: str, model: Path, folder: Path, **options: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self.model = str(model)
        self._log = folder / f"{name}.log"
        self._log.touch()
        self._connection, theirs = context.Pipe()
        arguments = _command_line(OPTIONS | {"model": str(model)} | options)
        self._process = context.Process(
            target=_main, args=(theirs, str(self._log), arguments), name=name, daemon=True
        )
        self._process.start()
        theirs.close()

    def wait_started(self) -> Self:
        """Return when the server answers requests."""
        try:
            self.address = f"http://127.0.0.1:{self._connection.recv()}"
            self._get("/health", START_SECONDS)
        except (EOFError, OSError) as error:
            raise EngineError(f"the server did not start: {excerpt(self.log())}") from error
        return self

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Post a JSON object; return the status and the body of the answer."""
        return post(self.address + path, body)

    def complete(
        self, model: str, prompt: Sequence[int], *, max_tokens: int = 12, params: Any = None
    ) -> tuple[int, dict[str, Any]]:
        """Ask for a completion by a model or an adapter; return the status and the answer."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        if params is not None:
            body["kv_transfer_params"] = params
        status, answer = self.post("/v1/completions", body)
        return status, json.loads(answer)

    def counter(self, name: str, label: str) -> float:
        """Return the value of a counter on the page of metrics, where it has a label."""
        return self._metric(f"{name}_total", label)

    def gauge(self, name: str) -> float:
        """Return the value of a gauge on the page of metrics, summed over its labels."""
        return self._metric(name, "")

    def log(self) -> str:
        """All that the server and the engine have written so far."""
        return self._log.read_text(errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and to the engine, which are one process group."""
        assert self._process.pid is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End the server and the engine at once, as a crash would."""
        self.send_signal(signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        """End the server and the engine."""
        self._process.terminate()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _metric(self, name: str, label: str) -> float:
        lines = self._get("/metrics").splitlines()
        found = [line for line in lines if line.startswith(f"{name}{{") and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def _get(self, path: str, seconds: float = ANSWER_SECONDS) -> str:
        with urllib.request.urlopen(self.address + path, timeout=seconds) as answer:
            text: str = answer.read().decode()
            return text


def post(address: str, body: dict[str, Any]) -> tuple[int, str]:
    """Post a JSON object to a server; return the status and the body of the answer."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _command_line(options: dict[str, Any]) -> list[str]:
    """Return the arguments of ``vllm serve`` for options as ``EngineArgs`` has them."""
    arguments = ["--host=127.0.0.1", "--port=0"]
    for name, value in options.items():
        if name == "disable_log_stats":  # has no form that says no, which is the default
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else value
            arguments.append(f"--{flag}={text}")
    return arguments


def _main(connection: Connection, log: str, arguments: list[str]) -> None:
    import uvloop

    from tests.engines import engine_process, frugal

    os.setpgid(0, 0)
    engine_process.log_to(log)
    frugal.adapt()
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    uvloop.run(_serve(connection, arguments))


async def _serve(connection: Connection, arguments: list[str]) -> None:
    """Do what vLLM's ``run_server`` does, but tell the parent the port."""
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    address, listener = setup_server(parsed, reuse_port=False)
    listener.listen()  # the first request waits until the engine has started
    connection.send(listener.getsockname()[1])
    await run_server_worker(address, listener, parsed)
