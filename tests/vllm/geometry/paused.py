"""Pauses and updates of an engine's weights by vLLM's own core, without its processes."""

from __future__ import annotations

import functools
import queue
from types import SimpleNamespace
from typing import Any

from tests.vllm.geometry.scheduled import Server


class Core:
    """vLLM's core around an engine's scheduler, as far as pauses go."""

    def __init__(self, server: Server, *, in_process: bool = False) -> None:
        """Without a process of its own, the core steps the engine itself."""
        self._server = server
        self.vllms = _core_class(in_process)(server.scheduler)
        self.vllms.step_fn = self._step

    def _step(self) -> tuple[Any, bool]:
        return self._server.scheduler.update_from_output(*self._server.begin()), True

    def pause(self, mode: str, *, clears: bool = True, steps: int = 20) -> int:
        """Pause, in no more than so many steps; how many it took."""
        future = self.vllms.pause_scheduler(mode, clears)
        taken = 0
        while future is not None and not future.done():
            if self.vllms.has_work():
                assert taken < steps, list(self._server.scheduler.requests)
                self._server.step()
                taken += 1
            else:
                self.vllms._notify_idle_state_callbacks()
        if future is not None:
            future.result()
        return taken

    def resume(self) -> None:
        self.vllms.resume_scheduler()

    def update(self, version: str, mode: str = "abort", *, names_it: bool = True) -> None:
        """Pause, load other weights, and go on with these."""
        self.pause(mode, steps=1000)
        self._server.weights = version
        self.vllms.collective_rpc("reload_weights")
        if names_it:
            self.name(version)
        self.resume()

    def name(self, version: str) -> None:
        """Tell vLLM which weights it has."""
        self.vllms.set_weight_version(version)


@functools.cache
def _core_class(in_process: bool) -> Any:
    from vllm.v1.engine import core

    base: Any = core.EngineCore if in_process else core.EngineCoreProc

    class EngineCore(base):
        def __init__(self, scheduler: Any) -> None:
            calls = ("collective_rpc", "reset_mm_cache", "reset_encoder_cache")
            nothing: Any = SimpleNamespace(**dict.fromkeys(calls, lambda *_: None))
            self.scheduler, self.model_executor = scheduler, nothing
            self.engines_running, self.batch_queue = False, None
            self.mm_receiver_cache = None
            self.output_queue: queue.Queue[Any] = queue.Queue()
            self._idle_state_callbacks: list[Any] = []

    return EngineCore
