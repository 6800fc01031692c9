"""Hooks that vLLM lacks: for pauses, resets of its prefix cache, new weights, and a step's tokens.

Each wraps a method of vLLM's scheduler or engine core that is the same from 0.29 to 0.33.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import ModelRunnerOutput

    from kvferry.integrations.vllm.scheduler import FerryScheduler

# Hooks of the scheduler's role reach neither scheduler nor core, whose classes are wrapped, and
# several engines may live in one process. Who is to be called is found by way of the engine's pool.
HOOKS = "_kvferry_hooks"
"""The attribute of an engine's block pool with its ``FerryScheduler``; and of a wrapped method."""

LOADING = frozenset({"finish_weight_update", "reload_weights", "reset_weights"})
"""The methods of vLLM's workers after which they have other weights.

Methods and functions of users may load some, too; then only the version tells.
"""

STEP_SECONDS = 1e-3
"""How long a paused core without a loop of its own waits between two steps, as vLLM's loop does."""


def install(pool: BlockPool, scheduler: type[SchedulerInterface], hooks: FerryScheduler) -> None:
    """Have vLLM call an engine's hooks from now on; ``scheduler`` is the class of its scheduler."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    setattr(pool, HOOKS, hooks)
    _wrap(EngineCore, "pause_scheduler", _pause_in_process)
    _wrap(EngineCoreProc, "pause_scheduler", _pause)
    _wrap(EngineCore, "collective_rpc", _collective_rpc)
    _wrap(EngineCore, "set_weight_version", _set_weight_version)
    _wrap(scheduler, "has_requests", _has_requests)
    _wrap(scheduler, "reset_prefix_cache", _reset)
    _wrap(scheduler, "update_from_output", _update)


def _wrap(owner: type, name: str, around: Callable[..., object]) -> None:
    """Have a method call ``around`` for engines with hooks.

    Its arguments are the method, the hooks, and what the method is called on and with.
    """
    original = getattr(owner, name)
    if hasattr(original, HOOKS):
        return

    @functools.wraps(original)
    def method(self: object, *args: object, **kwargs: object) -> object:
        if (hooks := _hooks(self)) is None:
            return original(self, *args, **kwargs)
        return around(functools.partial(original, self), hooks, self, *args, **kwargs)

    setattr(method, HOOKS, True)
    setattr(owner, name, method)


def _hooks(owner: Any) -> FerryScheduler | None:  # noqa: ANN401
    """Return the hooks of a scheduler's or core's engine; ``None`` with another connector."""
    try:
        pool = getattr(owner, "scheduler", owner).kv_cache_manager.block_pool
    except AttributeError:  # the core has no scheduler yet
        return None
    found: FerryScheduler | None = getattr(pool, HOOKS, None)
    return found


def _pause(
    original: Callable[..., object],
    hooks: FerryScheduler,
    _: EngineCore,
    mode: str = "abort",
    clear_cache: bool = True,
) -> object:
    if mode in ("abort", "wait", "keep"):  # vLLM refuses others
        hooks.before_pause(keeps=mode == "keep", clears=clear_cache)
    return original(mode, clear_cache)


def _pause_in_process(
    original: Callable[..., object],
    hooks: FerryScheduler,
    core: EngineCore,
    mode: str = "abort",
    clear_cache: bool = True,
) -> object:
    """A core in its caller's process has no loop of its own: run the steps that a pause needs."""

    def pause(mode: str, clear_cache: bool) -> object:
        original(mode, False)
        step, done = core.step_fn, list[Any]()

        def deliver() -> object:
            if done:
                return done.pop(0)
            core.step_fn = step
            return step()

        while core.scheduler.has_requests():
            if (found := step())[0]:
                done.append(found)
            time.sleep(STEP_SECONDS)
        if done:
            core.step_fn = deliver
        return original(mode, clear_cache)

    return _pause(pause, hooks, core, mode, clear_cache)


def _collective_rpc(
    original: Callable[..., object],
    hooks: FerryScheduler,
    _: EngineCore,
    method: str | Callable[..., object],
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> object:
    found = original(method, *args, **kwargs)
    if method in LOADING:
        hooks.weights_loaded()
    return found


def _set_weight_version(
    original: Callable[[str], None], hooks: FerryScheduler, _: EngineCore, weight_version: str
) -> None:
    original(weight_version)
    hooks.weights_named(weight_version)


def _has_requests(
    original: Callable[[], bool], hooks: FerryScheduler, scheduler: Scheduler
) -> bool:
    """Requests that have ended, and whose blocks are held, are no work for a paused engine."""
    is_alone = getattr(scheduler.connector, "hooks", None) is hooks  # not under MultiConnector
    if scheduler.pause_state.name == "UNPAUSED" or not is_alone:
        return original()
    if scheduler.has_unfinished_requests() or scheduler.finished_req_ids:
        return True
    return hooks.holds_up_pause()


def _reset(
    original: Callable[[bool, bool], bool],
    hooks: FerryScheduler,
    scheduler: Scheduler,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> bool:
    is_held = hooks.before_reset(preempts=reset_running_requests)
    if reset_running_requests:
        _release_loaded(scheduler)
    return original(reset_running_requests, reset_connector) and not is_held


def _release_loaded(scheduler: Scheduler) -> None:
    """Free the blocks of requests whose load is over and that do not run, as of failed loads.

    vLLM preempts only what runs. These begin again, without anything loaded.
    """
    from vllm.v1.request import RequestStatus

    for name, request in scheduler.requests.items():
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if name not in scheduler.finished_recving_kv_req_ids:
                continue  # bytes may still land
            scheduler.failed_recving_kv_req_ids.add(name)
        elif request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            continue
        scheduler.kv_cache_manager.free(request)
        request.num_computed_tokens = 0


def _update(
    original: Callable[..., dict[int, EngineCoreOutputs]],
    hooks: FerryScheduler,
    scheduler: Scheduler,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
) -> dict[int, EngineCoreOutputs]:
    """End requests as vLLM ends those whose load failed, and then update the others."""
    report = model_runner_output.kv_connector_output
    names = set() if report is None else set(hooks.doomed(report))
    if report is not None and (blocks := hooks.failed_blocks(report)):
        report.invalid_block_ids = report.invalid_block_ids | blocks  # vLLM 0.29
    if not names:
        return original(scheduler_output, model_runner_output)
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    for name in names:
        manager.evict_blocks({each for ids in manager.get_block_ids(name) for each in ids})
    ended = scheduler.finish_requests(names, RequestStatus.FINISHED_ERROR)
    outputs = original(scheduler_output, model_runner_output)
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
