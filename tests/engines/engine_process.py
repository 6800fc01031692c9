"""The child's side of `engines.Engine`: one real vLLM engine, stepped like a server steps it."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engines import frugal
from tests.engines.engines import Completion, Request

PRELOADED = (
    "kvferry.drivers.loopback",
    "kvferry.integrations.vllm.connector",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.renderers.hf",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
)
"""What every engine, or each of its ranks, would import by itself, in two seconds."""

for module in PRELOADED:
    importlib.import_module(module)
frugal.prepare()
gc.freeze()  # what has been imported is not walked again by each engine that is forked from here


class Server:
    """Answers the parent's calls and steps the engine in between, idle or not."""

    IDLE_SECONDS = 0.05
    """Pause of an engine without requests, which may still hold pages for others."""
    WAITING_SECONDS = 0.001
    """Pause after a step that gave nothing, as vLLM's own loop has, for the connector's thread."""

    def __init__(self, connection: Connection, engine: LLMEngine) -> None:
        self._connection = connection
        self._engine = engine
        self._stepping = True
        self._open = True

    def serve(self) -> None:
        while self._open:
            pause = 0 if self._busy() else self.IDLE_SECONDS
            while self._connection.poll(pause):
                self._answer(*self._connection.recv())
                pause = 0
            if self._stepping:
                self._step()

    def _busy(self) -> bool:
        return self._stepping and bool(self._engine.has_unfinished_requests())

    def _step(self) -> None:
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                self._connection.send(("finished", _completion(output)))
        if not outputs:
            time.sleep(self.WAITING_SECONDS)

    def _answer(self, method: str, *arguments: Any) -> None:
        try:
            answer = ("answered", getattr(self, method)(*arguments))
        except Exception as error:  # noqa: BLE001  whatever it is, the parent raises it
            answer = ("raised", (f"{type(error).__name__}: {error}", traceback.format_exc()))
        self._connection.send(answer)

    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            extra = {"kv_transfer_params": request.params} if request.params is not None else None
            options: dict[str, Any] = {"temperature": 0, **request.options}
            lora = options.pop("lora", None)
            trace_headers = options.pop("trace_headers", None)
            if "n" in options:  # all samples are told together, when the last one has ended
                options["output_kind"] = RequestOutputKind.FINAL_ONLY
            sampling = SamplingParams(
                max_tokens=request.max_tokens, ignore_eos=True, extra_args=extra, **options
            )
            given = request.prompt
            asked = given(self._engine) if callable(given) else {"prompt_token_ids": list(given)}
            self._engine.add_request(
                request.id,
                asked,
                sampling,
                lora_request=LoRARequest(**lora) if lora else None,
                trace_headers=trace_headers,
            )

    def abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])

    def stepping(self, on: bool) -> None:
        self._stepping = on

    def step(self, times: int) -> None:
        for _ in range(times):
            self._step()

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return function(self._engine, *arguments)

    def close(self) -> None:
        self._open = False


def main(connection: Connection, log: str, arguments: dict[str, Any]) -> None:
    """Start the engine, say how that went, and serve until told to close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    log_to(log)
    os.environ.update(arguments.pop("environment", {}))
    frugal.adapt(async_scheduling=arguments.get("async_scheduling", False))
    if isinstance(transfer := arguments.get("kv_transfer_config"), dict):
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    except BaseException as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        raise
    if arguments.get("pipeline_parallel_size", 1) > 1:
        engine.collective_rpc(frugal.make_room_between_stages)
    connection.send(("started", os.getpid()))
    Server(connection, engine).serve()
    engine.engine_core.shutdown()


def run() -> None:
    """Serve a parent in another environment; the arguments are a file descriptor and a log."""
    connection = Connection(int(sys.argv[1]))
    main(connection, sys.argv[2], connection.recv())


def log_to(path: str) -> None:
    """Let this process, and what it forks, write to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())


def _completion(output: Any) -> Completion:
    sequence = output.outputs[0]
    return Completion(
        id=output.request_id,
        text=sequence.text,
        tokens=list(sequence.token_ids),
        finish_reason=sequence.finish_reason,
        params=output.kv_transfer_params,
        samples=[each.text for each in output.outputs],
    )
