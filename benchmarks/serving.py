"""Real vLLM engines as a server has them: a front end, and the engine's core in another process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import harness
from tests.engines.engines import CONNECTOR, ENVIRONMENT, START_SECONDS, run_apart
from tests.engines.engines import PREFILL as PREFILL

ROOT = Path(__file__).parent.parent
ANSWER_SECONDS = 120.0
SIDE_CHANNELS = itertools.count(int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "15600")))
"""Ports for NixlConnector, one for each engine."""

Ticket = dict[str, Any]


def kvferry(driver: str, **extra: Any) -> dict[str, Any]:
    """Return a ``kv_transfer_config`` without a role; what cannot be loaded is an error."""
    settings = {"driver": driver, **extra}
    return CONNECTOR | {"kv_load_failure_policy": "fail", "kv_connector_extra_config": settings}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of one request: seconds to its first token, all tokens, why it ended, and its ticket."""

    first: float
    tokens: list[int]
    reason: str
    ticket: Ticket | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Of some requests, all of which took ``seconds``; ``pulled``: prompt tokens that came from
    another engine meanwhile, as vLLM counts them."""

    each: list[Answer]
    seconds: float
    pulled: float

    def check(self, prompts: Sequence[list[int]]) -> None:
        """End the benchmark unless all prompts came from the other engine, and were answered."""
        wanted, reasons = sum(map(len, prompts)), {answer.reason for answer in self.each}
        if reasons != {"length"} or self.pulled < wanted:
            raise SystemExit(f"{self.pulled:.0f} of {wanted} tokens were pulled; ended: {reasons}")


class Fleet:
    """Engines of one model, whose checkpoint is made here; they end with ``stack``."""

    def __init__(
        self, stack: contextlib.ExitStack, shape: dict[str, int], arguments: dict[str, Any]
    ) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-"))
        prepare(folder)
        self._folder, self._stack = Path(folder), stack
        model = self._folder / "model"
        run_apart(build_llama, model, max_tokens=arguments["max_model_len"], **shape)
        tokens = arguments["num_gpu_blocks_override"] * arguments["block_size"]
        self._arguments = {
            "model": str(model),
            "disable_log_stats": False,
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": tokens * token_nbytes(shape),
            **arguments,
        }

    def engine(self, name: str, transfer: dict[str, Any], **options: Any) -> Engine:
        """Start an engine; ``options`` are those of ``Engine``, or further arguments of vLLM's."""
        own = {key: options.pop(key) for key in ("patient", "cores") if key in options}
        arguments = self._arguments | {"kv_transfer_config": transfer} | options
        engine = Engine(name, self._folder, arguments, **own)
        self._stack.callback(engine.close)
        return engine

    def pair(
        self,
        name: str,
        prefill: dict[str, Any],
        decode: dict[str, Any],
        *,
        caches: bool = False,
        **options: Any,
    ) -> Pair:
        """Start two engines, and let them stand still; prefill may keep prompts that come again."""
        harness.say(f"starting two engines: {name}")
        short = name.replace(" ", "-")
        own = {"enable_prefix_caching": True} if caches else {}
        pair = Pair(
            name=name,
            prefill=self.engine(f"{short}-prefill", prefill, **options | own),
            decode=self.engine(f"{short}-decode", decode, **options),
        )
        with pair.turn():
            pair.prefill.started()
            pair.decode.started()
        return pair


def token_nbytes(shape: dict[str, int]) -> int:
    """Return the bytes of a token: K and V in float32, on all layers."""
    return 2 * 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def build_llama(folder: Path, **shape: int) -> None:
    """Write a checkpoint; in a process of its own."""
    from examples.tiny_llama import build

    build(folder, **shape)


def prepare(folder: str) -> None:
    """Let engines be forked from a process that has imported vLLM; before the first one."""
    os.chdir(ROOT)  # where the process that engines are forked from looks for modules
    own = {"VLLM_CACHE_ROOT": folder, "TMPDIR": folder, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    os.environ.update(ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "WARNING"} | own)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engines.engine_process"])
    with open(Path(folder) / "forkserver.log", "wb") as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)  # when it ends, some of what vLLM imports has much to say
        forkserver.ensure_running()
        os.dup2(kept, 2)
        os.close(kept)


class Engine:
    """One engine, on some cores, if given. It serves when ``started`` has returned.

    With ``patient``, threads of NIXL's that NixlConnector starts sleep while nothing arrives.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        arguments: dict[str, Any],
        *,
        patient: bool = False,
        cores: Collection[int] = (),
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._log = folder / f"{name}.log"
        self._log.touch()
        self._connection, theirs = context.Pipe()
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(SIDE_CHANNELS))}
        self._process = context.Process(
            target=_main,
            args=(theirs, str(self._log), environment, arguments, patient, cores),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        # Should this process be killed while the engine stands still, the pipe ends, and the
        # engine goes on to learn of it.
        self._waker = subprocess.Popen(
            ["sh", "-c", f"read _; kill -CONT -{self._process.pid}"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def started(self) -> None:
        """Wait until it serves."""
        self._receive(START_SECONDS)

    def prefill(self, prompts: Sequence[list[int]]) -> list[Ticket]:
        """Compute the prompts' cache for another engine; the tickets."""
        found = self.ask(prompts, [PREFILL] * len(prompts), len(prompts), 1)
        return [answer.ticket or {} for answer in found.each]

    def ask(
        self, prompts: Sequence[list[int]], tickets: Sequence[Ticket], at_once: int, max_tokens: int
    ) -> Answers:
        """Requests, of which so many are under way at a time."""
        self.begin(prompts, tickets, at_once, max_tokens)
        return self.answers()

    def begin(
        self, prompts: Sequence[list[int]], tickets: Sequence[Ticket], at_once: int, max_tokens: int
    ) -> None:
        """The same without waiting; ``answers`` has to be called once then."""
        self._connection.send((prompts, tickets, at_once, max_tokens))

    def answers(self) -> Answers:
        """Wait for the answers to ``begin``."""
        answers: Answers = self._receive(ANSWER_SECONDS)
        return answers

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """It goes on, and stands still with all its processes at the end."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        # They are a group of their own.
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(10)
        self._process.kill()
        self._process.join()
        self._waker.communicate()

    def _receive(self, seconds: float) -> Any:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            pass
        end = self._log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"an engine ended, or is silent for {seconds:.0f} s; its log:\n{end}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An engine that prefills, and one that decodes."""

    name: str
    prefill: Engine
    decode: Engine

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Both go on, and stand still again at the end."""
        with self.prefill.turn(), self.decode.turn():
            yield

    def close(self) -> None:
        """End both."""
        self.prefill.close()
        self.decode.close()


# In the engine's process.


def _main(
    connection: Connection,
    log: str,
    environment: dict[str, str],
    arguments: dict[str, Any],
    patient: bool,
    cores: Collection[int],
) -> None:
    os.setpgid(0, 0)
    if cores:
        os.sched_setaffinity(0, cores)  # before the first further thread
    from tests.engines import engine_process, frugal

    engine_process.log_to(log)
    os.environ.update(environment)
    frugal.adapt()
    with _nixl_connector_helped(patient):
        asyncio.run(_serve(connection, arguments))


@contextlib.contextmanager
def _nixl_connector_helped(patient: bool) -> Iterator[None]:
    """vLLM's NixlConnector takes any package of NIXL's, and is not kept to one core.

    It knows only the package ``nixl``. And on a CPU it moves two engines to the same core, the
    last.
    """
    from vllm.platforms.cpu import CpuPlatform

    from benchmarks import nixl_api
    from kvferry.core.errors import DriverError
    from kvferry.drivers.nixl import library

    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(DriverError):
            found = library.load()
            for part in ("", "._api", "._bindings"):
                sys.modules[f"nixl{part}"] = importlib.import_module(f"{found.package}{part}")
            if patient:
                stack.enter_context(nixl_api.patient())
        yield


async def _serve(connection: Connection, arguments: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = KVTransferConfig(**arguments.pop("kv_transfer_config"))
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, kv_transfer_config=transfer))
    connection.send("started")
    loop = asyncio.get_running_loop()
    try:
        while (message := await loop.run_in_executor(None, _received, connection)) is not None:
            connection.send(await _answers(engine, *message))
    finally:
        engine.shutdown()


def _received(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return None


async def _answers(
    engine: Any, prompts: list[list[int]], tickets: list[Ticket], at_once: int, max_tokens: int
) -> Answers:
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: list[int], ticket: Ticket) -> Answer:
        async with gate:
            return await _answer(engine, prompt, ticket, max_tokens)

    before, start = _pulled(), time.perf_counter()
    each = await asyncio.gather(*map(one, prompts, tickets))
    seconds = time.perf_counter() - start
    return Answers(each=each, seconds=seconds, pulled=_pulled() - before)


_numbers = itertools.count()


async def _answer(engine: Any, prompt: list[int], ticket: Ticket, max_tokens: int) -> Answer:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": ticket},
    )
    first, last, start = 0.0, None, time.perf_counter()
    async for output in engine.generate(
        {"prompt_token_ids": prompt}, sampling, f"{os.getpid()}-{next(_numbers)}"
    ):
        if not first and output.outputs and output.outputs[0].token_ids:
            first = time.perf_counter() - start
        last = output
    if last is None:
        raise RuntimeError("vLLM answered nothing")
    [sample] = last.outputs
    return Answer(
        first=first,
        tokens=list(sample.token_ids),
        reason=str(sample.finish_reason),
        ticket=last.kv_transfer_params,
    )


def _pulled() -> float:
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    return sum(
        float(metric.value)
        for metric in get_metrics_snapshot()
        if isinstance(metric, Counter)
        and metric.name == "vllm:prompt_tokens_by_source"
        and metric.labels["source"] == "external_kv_transfer"
    )
