"""Hooks that vLLM lacks: before it resets its prefix cache, and before it uses a step's tokens.

Each wraps a method of vLLM that is the same from 0.29 to 0.33.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

RESET = "reset_prefix_cache"
"""The method of vLLM's ``BlockPool`` that counts the free blocks, and then forgets all hashes."""

OUTPUT = "update_from_output"
"""The method of vLLM's schedulers that takes the output of a step, and makes that of the engine."""

Doomed = Callable[["KVConnectorOutput"], Collection[str]]
"""Returns, by what the workers report of a step, the requests that must not get its tokens."""

_DOOMED = WeakKeyDictionary[Any, Doomed]()
"""By the scheduler's pool of blocks."""

_WRAPPED = WeakSet[Any]()
"""The wrapped ``OUTPUT`` of each class of schedulers."""


def before_reset(pool: BlockPool, end_holds: Callable[[], bool]) -> None:
    """Call ``end_holds`` whenever vLLM is to reset the prefix cache of a pool.

    The reset fails if that returns ``True``: pages are held that are not free in this call.
    """
    reset: Callable[[], bool] = getattr(pool, RESET)

    @functools.wraps(reset)
    def reset_prefix_cache() -> bool:
        is_holding = end_holds()  # first: without holds, the blocks may be free
        return reset() and not is_holding

    setattr(pool, RESET, reset_prefix_cache)


def before_output(scheduler: type[SchedulerInterface], pool: BlockPool, doomed: Doomed) -> None:
    """Fail the requests that ``doomed`` returns before vLLM uses what they have computed.

    They end with an error, whatever ``kv_load_failure_policy``, and their blocks leave the prefix
    cache. vLLM itself fails a request for its load only while the request waits for that, or if the
    model has one cache group.

    Args:
        scheduler: The class of the engine's scheduler.
        pool: The engine's blocks, by which its scheduler is known.
        doomed: Called with the workers' reports of each step.
    """
    _DOOMED[pool] = doomed
    original = getattr(scheduler, OUTPUT)
    if original in _WRAPPED:
        return

    @functools.wraps(original)
    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        find = _DOOMED.get(self.kv_cache_manager.block_pool)
        report = model_runner_output.kv_connector_output
        names = set(find(report)) if find is not None and report is not None else set[str]()
        ended = _fail(self, names) if names else []
        outputs: dict[int, EngineCoreOutputs] = original(
            self, scheduler_output, model_runner_output
        )
        for client, each in ended:
            outputs.setdefault(client, _no_outputs()).outputs.append(each)
        return outputs

    _WRAPPED.add(update_from_output)
    setattr(scheduler, OUTPUT, update_from_output)


def _fail(scheduler: Scheduler, names: set[str]) -> list[tuple[int, Any]]:
    """End requests with an error; return what to tell each one's client."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    for name in names:
        manager.evict_blocks({each for ids in manager.get_block_ids(name) for each in ids})
    return [
        (
            request.client_index,
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            ),
        )
        for request in scheduler.finish_requests(names, RequestStatus.FINISHED_ERROR)
    ]


def _no_outputs() -> EngineCoreOutputs:
    from vllm.v1.engine import EngineCoreOutputs

    return EngineCoreOutputs()
