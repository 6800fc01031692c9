"""vLLM's HTTP server, as ``vllm serve`` starts it, and what a router or an operator asks of it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.engines.engines import (
    ANSWER_SECONDS,
    OPTIONS,
    START_SECONDS,
    Child,
    EngineError,
    excerpt,
)
from tests.waiting import eventually


class HttpServer(Child):
    """One deployment behind vLLM's HTTP server, on a free port unless ``port`` is an option.

    A killed one needs closing, too.
    """

    def __init__(self, name: str, model: Path, folder: Path, **options: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self.name, self.model = name, str(model)
        self.headers: dict[str, str] = {}  # of all requests
        self._log = folder / f"{name}.log"
        self._log.touch()
        self._connection, theirs = context.Pipe()
        arguments = command_line(OPTIONS | {"model": str(model)} | options)
        self._server = context.Process(
            target=_main, args=(theirs, str(self._log), arguments), name=name, daemon=True
        )
        self._process = self._server
        self._process.start()
        theirs.close()

    def wait_started(self) -> Self:
        """Return when the server answers requests."""
        self.address = f"http://127.0.0.1:{self._receive(START_SECONDS)}"
        try:
            get(self.address + "/health", START_SECONDS)
        except OSError as error:
            raise EngineError(f"the server did not start: {excerpt(self.log())}") from error
        return self

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Post a JSON object; return the status and the body of the answer."""
        return post(self.address + path, body, self.headers)

    def complete(
        self,
        model: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 12,
        params: Any = None,
        **options: Any,
    ) -> tuple[int, dict[str, Any]]:
        """Ask for a completion by a model or an adapter; return the status and the answer."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True} | options
        if params is not None:
            body["kv_transfer_params"] = params
        status, answer = self.post("/v1/completions", body)
        return status, json.loads(answer)

    def prefill(self, prompt: Sequence[int], model: str = "", **params: str) -> dict[str, Any]:
        """Prefill for another engine; return the ticket."""
        asked = {"do_remote_decode": True, **params}
        status, answer = self.complete(model or self.model, prompt, max_tokens=1, params=asked)
        ticket: dict[str, Any] = answer["kv_transfer_params"]
        assert (status, "kvferry" in ticket) == (200, True), self.log()[-3000:]
        return ticket

    def texts(self, prompt: Sequence[int], model: str = "", **options: Any) -> list[str]:
        """The texts of all samples of a completion that has to succeed."""
        status, answer = self.complete(model or self.model, prompt, **options)
        assert status == 200, f"{answer}\n{self.log()[-3000:]}"
        return [choice["text"] for choice in answer["choices"]]

    def counter(self, name: str, label: str = "") -> float:
        """Return the value of a counter on the page of metrics, summed where it has a label."""
        return metric(self.address, f"{name}_total", label)

    def gauge(self, name: str, label: str = "") -> float:
        """Return the value of a gauge on the page of metrics, summed where it has a label."""
        return metric(self.address, name, label)

    def pulled(self) -> float:
        """Return how many tokens of prompts came from another engine."""
        return self.counter("vllm:prompt_tokens_by_source", 'source="external_kv_transfer"')

    def kill(self) -> None:
        """End the server and the engine, which are one process group, as a crash would."""
        assert self._server.pid is not None
        os.killpg(self._server.pid, signal.SIGKILL)
        self._process.join()

    def begin_close(self) -> None:
        self._server.terminate()

    def ended(self) -> int | None:
        """Wait until the server has ended by itself; its exit code."""
        self._server.join(ANSWER_SECONDS)
        return self._server.exitcode


@contextlib.contextmanager
def serving(
    model: Path, folder: Path, servers: Mapping[str, Mapping[str, Any]], **every: Any
) -> Iterator[dict[str, HttpServer]]:
    """Servers by name, with options of their own and of every one, until the context ends."""
    with contextlib.ExitStack() as stack:
        launched = {}
        for name, options in servers.items():
            server = HttpServer(name, model, folder, **every, **options)
            launched[name] = stack.enter_context(contextlib.closing(server))
        yield {name: server.wait_started() for name, server in launched.items()}


class Program:
    """A program that answers HTTP, in a session of its own. Closing it twice is fine."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        port: int,
        health: str,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self._health = health
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_started(self) -> Self:
        """Return when the program answers."""
        eventually(self.answers)
        return self

    def log(self) -> str:
        """All that it has written so far."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """End it, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def answers(self) -> bool:
        """Return whether it answers; raise `EngineError` if it has ended."""
        if self._process.poll() is not None:
            raise EngineError(f"{self._log.stem} ended: {excerpt(self.log())}")
        try:
            get(self.address + self._health)
        except OSError:
            return False
        return True


def get(address: str, seconds: float = ANSWER_SECONDS) -> str:
    """Return what a server answers; `OSError` if that is an error."""
    with urllib.request.urlopen(address, timeout=seconds) as answer:
        text: str = answer.read().decode()
        return text


def metric(address: str, name: str, label: str) -> float:
    """Return the value of a metric on a server's page of metrics, summed where it has a label."""
    lines = get(address + "/metrics").splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def post(
    address: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Post a JSON object to a server; return the status and the body of the answer."""
    sent = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(address, json.dumps(body).encode(), sent, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def command_line(options: dict[str, Any]) -> list[str]:
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
    frugal.adapt(async_scheduling="--async-scheduling" in arguments)
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
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
