"""Hooks that vLLM lacks: resets of its prefix cache, versions of weights, and a step's tokens.

Each wraps a method of vLLM that is the same from 0.29 to 0.33.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

RESET = "reset_prefix_cache"
OUTPUT = "update_from_output"
WEIGHTS = "set_weight_version"
# What is to be called is an attribute of an engine's block pool: a hook of the scheduler's role
# reaches neither the scheduler nor the core, and several engines may live in one process.
DOOMED = "_kvferry_doomed"
"""The attribute with what returns the requests that must fail."""
VERSIONED = "_kvferry_weights"
"""The attribute with what is called with the version of new weights."""


def before_reset(pool: BlockPool, end_holds: Callable[[], bool]) -> None:
    """Call ``end_holds`` before vLLM counts a pool's free blocks to reset its prefix cache.

    The reset fails if that returns ``True``: something is still held.
    """
    reset: Callable[[], bool] = getattr(pool, RESET)

    @functools.wraps(reset)
    def reset_prefix_cache() -> bool:
        is_holding = end_holds()
        return reset() and not is_holding

    setattr(pool, RESET, reset_prefix_cache)


def after_weight_version(pool: BlockPool, changed: Callable[[object], None]) -> None:
    """Call ``changed`` with each version of an engine's weights that vLLM's core is told."""
    from vllm.v1.engine.core import EngineCore

    setattr(pool, VERSIONED, changed)
    original = getattr(EngineCore, WEIGHTS)
    if hasattr(original, VERSIONED):
        return

    @functools.wraps(original)
    def set_weight_version(self: EngineCore, weight_version: str) -> None:
        original(self, weight_version)
        scheduler: Any = self.scheduler
        found = getattr(scheduler.kv_cache_manager.block_pool, VERSIONED, None)
        if found is not None:
            found(weight_version)

    setattr(set_weight_version, VERSIONED, True)
    setattr(EngineCore, WEIGHTS, set_weight_version)


def before_output(
    scheduler: type[SchedulerInterface],
    pool: BlockPool,
    doomed: Callable[[KVConnectorOutput], Collection[str]],
) -> None:
    """Fail the requests that ``doomed`` returns before vLLM uses what a step has computed of them.

    They end with an error, whatever ``kv_load_failure_policy``, and their blocks leave the prefix
    cache. ADR 17 says why vLLM cannot be told of such requests.

    Args:
        scheduler: The class of the engine's scheduler.
        pool: The engine's blocks.
        doomed: Called with the workers' merged reports of each step.
    """
    setattr(pool, DOOMED, doomed)
    original = getattr(scheduler, OUTPUT)
    if hasattr(original, DOOMED):
        return

    @functools.wraps(original)
    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        find = getattr(self.kv_cache_manager.block_pool, DOOMED, None)
        report = model_runner_output.kv_connector_output
        names = set(find(report)) if find is not None and report is not None else set[str]()
        update = functools.partial(original, self, scheduler_output, model_runner_output)
        return _fail(self, names, update) if names else update()

    setattr(update_from_output, DOOMED, True)
    setattr(scheduler, OUTPUT, update_from_output)


def _fail(
    scheduler: Scheduler, names: set[str], update: Callable[[], dict[int, EngineCoreOutputs]]
) -> dict[int, EngineCoreOutputs]:
    """End requests as vLLM ends those whose load failed, and then update the others."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    for name in names:
        manager.evict_blocks({each for ids in manager.get_block_ids(name) for each in ids})
    ended = scheduler.finish_requests(names, RequestStatus.FINISHED_ERROR)
    outputs = update()
    for request in ended:
        error = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(error)
    return outputs
