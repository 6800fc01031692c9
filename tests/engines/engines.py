"""Real vLLM engines in processes of their own: alike, quick to start, and steerable."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "NUMBA_DISABLE_JIT": "1",  # drafts from a prompt need no compiler, which takes five seconds
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
}
"""What vLLM's CPU build needs; the engine's core lives in the process that asks for it."""

OPTIONS: dict[str, Any] = {
    "block_size": 32,
    "disable_log_stats": False,
    "dtype": "float32",
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 512,
}

PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_block_ids": None,
    "remote_engine_id": None,
    "remote_host": None,
    "remote_port": None,
}
"""The ``kv_transfer_params`` with which a router asks an engine to prefill for another one."""

CONNECTOR = {
    "kv_connector": "KVFerryConnector",
    "kv_connector_module_path": "kvferry.integrations.vllm",
}

PATIENT = {"handshake_timeout": 50.0, "drain_timeout": 0.0}
"""Options of the test engines: many share a few cores, where a handshake may take long, and none
that ends waits until somebody has read what it holds."""


def transfer_config(role: str, extra: Mapping[str, Any] = PATIENT, **rest: Any) -> dict[str, Any]:
    """Return a ``kv_transfer_config``; ``extra`` is its ``kv_connector_extra_config``."""
    return CONNECTOR | {"kv_role": role, "kv_connector_extra_config": dict(extra)} | rest


ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from tests.engines import engine_process; engine_process.run()"

EXCERPT = 3000
"""How many characters of a log an error has, twice."""

START_SECONDS = 120.0
ANSWER_SECONDS = 90.0


Prompt = Sequence[int] | Callable[[Any], dict[str, Any]]
"""Token ids, or what makes vLLM's own form of a prompt of the ``LLMEngine``; it can be pickled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an engine's process is asked for: one prompt, decoded greedily."""

    id: str
    prompt: Prompt
    max_tokens: int
    params: dict[str, Any] | None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How a request ended; of several samples, the text of each."""

    id: str
    text: str
    tokens: list[int]
    finish_reason: str | None
    params: dict[str, Any] | None
    samples: list[str] = field(default_factory=list)


class EngineError(RuntimeError):
    """The engine did not start, raised, or ended; the message says what its log says."""


class Child:
    """A process with a log, and a connection to it. Closing it twice is fine."""

    name: str
    _log: Path
    _process: _Process
    _connection: Connection

    def log(self) -> str:
        """All that it has written so far."""
        return self._log.read_text(errors="replace")

    def begin_close(self) -> None:
        """Tell it to end, without waiting for that."""
        with contextlib.suppress(OSError, EOFError):
            self._connection.send(("close",))

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        """End it."""
        self.begin_close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _receive(self, seconds: float) -> Any:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineError(f"{self.name} ended: {self._tail()}") from error
        raise EngineError(f"{self.name} is silent for {seconds} s: {self._tail()}")

    def _tail(self) -> str:
        return excerpt(self.log())


class Engine(Child):
    """One engine. It steps by itself, as a server does, until `paused`.

    A killed one needs closing, too.

    ``python`` is the interpreter of an environment with another vLLM, and ``path`` the
    ``PYTHONPATH`` there. Such an engine imports vLLM by itself; the others are forked from a
    process that has imported it.
    """

    _numbers = itertools.count()
    has_started = False

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        *,
        python: Path | None = None,
        path: str = str(ROOT),
        **options: Any,
    ) -> None:
        self.name = f"{name}-{next(self._numbers)}"
        self.model = model
        self._log = folder / f"{self.name}.log"
        self._log.touch()
        arguments = OPTIONS | {"model": str(model)} | options
        self._finished: dict[str, Completion] = {}
        self._ids = itertools.count()
        start = _fork if python is None else functools.partial(_run, python, path)
        self._process, self._connection = start(str(self._log), arguments)

    def wait_started(self) -> Self:
        """Return when the engine serves; raise `EngineError` if it refuses to start."""
        kind, what = self._receive(START_SECONDS)
        if kind != "started":
            self.close()
            raise EngineError(what)
        self.has_started = True
        return self

    def submit(
        self, *prompts: Prompt, max_tokens: int = 16, params: Any = None, **options: Any
    ) -> list[str]:
        """Hand in requests, all before one step; ``params`` is for all, or a list of each one's."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        requests = [
            Request(
                id=f"{self.name}-r{next(self._ids)}",
                prompt=prompt,
                max_tokens=max_tokens,
                params=dict(one) if one is not None else None,
                options=options,
            )
            for prompt, one in zip(prompts, each, strict=True)
        ]
        self._call("submit", requests)
        return [request.id for request in requests]

    def results(self, ids: Sequence[str]) -> list[Completion]:
        """Wait for the requests to end."""
        while not all(one in self._finished for one in ids):
            self._receive_push()
        return [self._finished.pop(one) for one in ids]

    @property
    def finished(self) -> list[str]:
        """The requests that ended and whose results nobody took yet."""
        return list(self._finished)

    def generate(self, *prompts: Prompt, **options: Any) -> list[Completion]:
        """Submit and wait."""
        return self.results(self.submit(*prompts, **options))

    def prefill(self, *prompts: Prompt, **options: Any) -> list[dict[str, Any]]:
        """Prefill for another engine; return the tickets."""
        completions = self.generate(*prompts, max_tokens=1, params=PREFILL, **options)
        return [completion.params or {} for completion in completions]

    def abort(self, request_id: str) -> None:
        self._call("abort", request_id)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function(llm_engine, *arguments)`` in the engine's process, between two steps."""
        return self._call("run", function, arguments)

    def step(self, times: int = 1) -> None:
        """Step a `paused` engine."""
        self._call("step", times)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No steps happen inside, but those asked for with `step`."""
        self._call("stepping", False)
        try:
            yield
        finally:
            self._call("stepping", True)

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self._process.kill()
        self._process.join()

    def _call(self, *message: Any) -> Any:
        self._connection.send(message)
        while (answer := self._receive_push()) is None:
            pass
        kind, what = answer
        if kind == "raised":
            raise EngineError("\n".join(what))
        return what

    def _receive_push(self) -> tuple[str, Any] | None:
        kind, what = self._receive(ANSWER_SECONDS)
        if kind != "finished":
            return kind, what
        self._finished[what.id] = what
        return None


def excerpt(log: str) -> str:
    """What a log says of an end: its first error, which is the cause, and its last lines."""
    first = re.search(r"^.*(ERROR|Traceback|Error: )", log, re.MULTILINE)
    start = min(first.start() if first else len(log), max(0, len(log) - EXCERPT))
    cause, rest = log[start : start + EXCERPT], log[start + EXCERPT :]
    return f"{cause}\n[...]\n{rest[-EXCERPT:]}" if rest else cause


def prepare(environment: dict[str, str]) -> None:
    """Set up what engines are forked from: a process that has imported vLLM, with an environment.

    The fork server keeps what it found when it started. Other tests of this run may have started
    it, without this environment, in which engines hang: there is one of it, and no public end.
    """
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    os.environ.update(ENVIRONMENT | environment)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engines.engine_process"])


def run_apart(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Call a function in a process of its own, which may import torch."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=function, args=arguments, kwargs=options)
    process.start()
    process.join()
    assert process.exitcode == 0


class _Program:
    """A process of another interpreter, with those methods of multiprocessing's that are used."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        self._popen.kill()

    def join(self, seconds: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)


_Process = _Program | BaseProcess


def _fork(log: str, arguments: dict[str, Any]) -> tuple[_Process, Connection]:
    """Start an engine from the fork server."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, log, arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _run(
    python: Path, path: str, log: str, arguments: dict[str, Any]
) -> tuple[_Process, Connection]:
    """Start an engine in another environment. It ends when its connection does."""
    ours, theirs = socket.socketpair()
    with theirs:
        popen = subprocess.Popen(
            [python, "-P", "-c", PROGRAM, str(theirs.fileno()), log],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    connection = Connection(ours.detach())
    connection.send(arguments)
    return _Program(popen), connection


def _child(connection: Connection, log: str, arguments: dict[str, Any]) -> None:
    from tests.engines import engine_process

    engine_process.main(connection, log, arguments)
