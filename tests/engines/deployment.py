"""A real vLLM deployment of several data-parallel engines, as a server has it: a process each."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.engines.engines import ANSWER_SECONDS, OPTIONS, START_SECONDS, Child
from tests.engines.messages import Completion


class Deployment(Child):
    """Some engines behind one front end. Closing it twice is fine."""

    name = "the deployment"

    def __init__(self, model: Path, folder: Path, **options: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self._log = folder / "deployment.log"
        self._connection, theirs = context.Pipe()
        arguments = OPTIONS | {"model": str(model)} | options
        self._process = context.Process(
            target=_main, args=(theirs, str(self._log), arguments), daemon=True
        )
        self._process.start()
        theirs.close()

    def wait_started(self) -> Self:
        """Return when all engines serve."""
        self._receive(START_SECONDS)
        return self

    def generate(
        self,
        rank: int,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        params: Any = None,
        **options: Any,
    ) -> Completion:
        """What one of the engines answers."""
        arguments = (rank, list(prompt), max_tokens, params, options)
        completion: Completion = self._call("generate", *arguments)
        return completion

    def pulled(self) -> float:
        """See `steps.pulled`; of all engines."""
        return float(self._call("pulled"))

    def holds(self) -> list[int]:
        """How many requests each engine holds for others."""
        return list(self._call("holds"))

    def terminate(self) -> None:
        """Send SIGTERM to the engines' processes, as a front end does that is to end."""
        self._call("terminate")

    def ended(self) -> list[int | None]:
        """Wait until the engines' processes have ended; their exit codes."""
        return list(self._call("ended"))

    def _call(self, *message: Any) -> Any:
        self._connection.send(message)
        return self._receive(ANSWER_SECONDS)


class _FrontEnd:
    """The child's side."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        transfer = KVTransferConfig(**arguments.pop("kv_transfer_config"))
        self._engines = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments, kv_transfer_config=transfer)
        )
        self._requests = 0
        self._processes = list(self._engines.engine_core.resources.engine_manager.processes)

    async def serve(self, connection: Connection) -> None:
        """Answer until told to close."""
        loop = asyncio.get_running_loop()
        while (message := await loop.run_in_executor(None, connection.recv)) != ("close",):
            method, *arguments = message
            connection.send(await getattr(self, method)(*arguments))
        self._engines.shutdown()

    async def generate(
        self, rank: int, prompt: list[int], max_tokens: int, params: Any, options: dict[str, Any]
    ) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params is not None else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **({"temperature": 0} | options),
        )
        outputs = self._engines.generate(
            {"prompt_token_ids": prompt}, sampling, str(self._requests), data_parallel_rank=rank
        )
        last: Any = [output async for output in outputs][-1]
        return Completion(
            id=last.request_id,
            text=last.outputs[0].text,
            tokens=list(last.outputs[0].token_ids),
            finish_reason=last.outputs[0].finish_reason,
            params=last.kv_transfer_params,
            samples=[output.text for output in last.outputs],
        )

    async def terminate(self) -> None:
        for process in self._processes:
            process.terminate()

    async def ended(self) -> list[int | None]:
        """Asked again and again: a thread of the front end's waits for the same processes, and
        whichever of the two is told by the kernel, it takes a moment until the other knows."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while None in (codes := [process.exitcode for process in self._processes]):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.05)
        return codes

    async def pulled(self) -> float:
        from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

        return sum(
            float(metric.value)
            for metric in get_metrics_snapshot()
            if isinstance(metric, Counter)
            and metric.name == "vllm:prompt_tokens_by_source"
            and metric.labels["source"] == "external_kv_transfer"
        )

    async def holds(self) -> list[int]:
        from tests.engines.ranks import held

        answers = await self._engines.engine_core.call_utility_all_async(
            "collective_rpc", held, None, (), None
        )
        return [ranks[0] for ranks in answers]


def _main(connection: Connection, log: str, arguments: dict[str, Any]) -> None:
    from tests.engines import engine_process, frugal

    engine_process.log_to(log)
    frugal.adapt()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a test's functions, for `holds`

    async def serve() -> None:
        front_end = _FrontEnd(arguments)
        connection.send("started")
        await front_end.serve(connection)

    asyncio.run(serve())
