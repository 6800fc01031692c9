"""Both legs of a request at once, as a router sends them that names a room.

Functions that take an ``LLMEngine`` are for `engines.Engine.run`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import PREFILL, Engine, Prompt
from tests.engines.steps import counted, texts
from tests.waiting import eventually

ROOMS = itertools.count()


class Legs:
    """Prompts that one engine computes for another, each in a room of its own."""

    def __init__(
        self,
        prefill: Engine,
        decode: Engine,
        *prompts: Prompt,
        there: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self._prompts, self._options = prompts, options
        self._options_there = there or {}
        self._rooms = [f"room-{next(ROOMS)}" for _ in prompts]
        self._producer = prefill.run(side_channel)
        self.there: list[str] = []
        self.here: list[str] = []

    def begin_prefill(self) -> None:
        """Hand the requests to prefill."""
        params = [PREFILL | {"transfer_id": room} for room in self._rooms]
        self.there = self.prefill.submit(
            *self._prompts, params=params, max_tokens=1, **self._options_there
        )

    def begin_decode(self) -> None:
        """Hand the requests to decode."""
        params = [
            {"do_remote_prefill": True, "transfer_id": room, **self._producer}
            for room in self._rooms
        ]
        self.here = self.decode.submit(*self._prompts, params=params, **self._options)

    def begin(self, steps: int, preempts: bool = False) -> None:
        """Hand the requests to both, and let a load begin after so many steps of prefill.

        With ``preempts``, prefill then preempts what it computes.
        """
        with self.prefill.paused():
            self.begin_prefill()
            self.begin_decode()
            self.prefill.step(steps)
            self.wait_begun()
            if preempts:
                self.prefill.run(preempt)

    def texts(self) -> list[str]:
        """Wait for both legs; the texts, and none where a request failed."""
        texts = self.decoded()
        self.prefill.results(self.there)
        return texts

    def decoded(self) -> list[str]:
        """Wait for decode alone; the texts, and none where a request failed."""
        completions = self.decode.results(self.here)
        return [c.text if c.finish_reason == "length" else "" for c in completions]

    def wait_begun(self) -> None:
        """Wait until decode has begun to load the first prompt, or is already through."""
        eventually(lambda: self.decode.run(probes.status, self.here[0]) != "WAITING")


def hand_over_early(prefill: Engine, decode: Engine, *prompts: Prompt, **options: Any) -> list[str]:
    """The texts of decode, which gets each request when prefill gets it."""
    legs = Legs(prefill, decode, *prompts, **options)
    legs.begin_prefill()
    legs.begin_decode()
    return legs.texts()


def check_early(
    ordinary: Engine, prefill: Engine, decode: Engine, chunk: int, seed: int = 40, **options: Any
) -> None:
    """Hand prompts over while prefill computes them, alone and together, and preempt one."""
    begun = early_loads(decode)
    prompts = [prompt(length, seed) for length in (1, chunk, chunk + 1, 3 * chunk, 5 * chunk + 7)]
    wanted = texts(ordinary, *prompts, **options)
    for each, text in zip(prompts, wanted, strict=True):
        assert hand_over_early(prefill, decode, each, **options) == [text]
    assert hand_over_early(prefill, decode, *prompts, **options) == wanted
    preempted = prompt(5 * chunk + 7, seed + 1000)  # of which no prefix is cached
    legs = Legs(prefill, decode, preempted, **options)
    legs.begin(3, preempts=True)
    assert legs.texts() == texts(ordinary, preempted, **options)
    assert early_loads(decode) > begun


def early_loads(engine: Engine) -> float:
    """How many loads of an engine began while prefill was computing."""
    return counted(engine, "vllm:kvferry_early_loads")


def side_channel(engine: Any) -> dict[str, str]:
    """What a router says of this engine to decode."""
    serving = probes.connector(engine)._scheduler._producer.serving
    return {
        "remote_engine_id": serving.engine,
        "remote_bootstrap_addr": f"http://{serving.host}:{serving.port}",
    }


def preempt(engine: Any) -> None:
    """Preempt all requests that run, as vLLM does before it changes weights."""
    with contextlib.suppress(RuntimeError):  # that the cache was not reset, which may be held
        probes.scheduler(engine).reset_prefix_cache(reset_running_requests=True)
