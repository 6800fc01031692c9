"""vLLM as a test machine can bear it: no import done twice, and ranks that wait for each other
asleep, since there are more of them than cores. What is computed stays the same.

And asynchronous scheduling where a test asks for it: vLLM turns it off on a CPU, where it gains
nothing, but it works."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import vllm.config
import vllm.logger
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine import coordinator
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.multiproc_executor import WorkerProc

PR_SET_PDEATHSIG = 1
PAUSE_SECONDS = 0.0002


def adapt(*, async_scheduling: bool = False) -> None:
    """Change vLLM in this process and in those that it forks."""
    if async_scheduling:
        _keep_async_scheduling()
    _fork_workers()
    _wait_asleep()
    gc.unfreeze = lambda: None  # an engine that ends would walk all that was ever imported
    registry._run_in_subprocess = lambda inspect: inspect()  # a new one would import everything


def prepare() -> None:
    """Do once what each engine would do for most of a second: its first walks over all modules.

    Versions of vLLM before 0.32 do not.
    """
    if register := getattr(CpuPlatform, "register_triton_kernel_overrides", None):
        register()
        CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    if configure := getattr(vllm.logger, "configure_logging_if_needed", None):
        configure(vllm.config.LoggingConfig())


def _keep_async_scheduling() -> None:
    update = CpuPlatform.check_and_update_config

    def keep(cls: type[CpuPlatform], config: Any) -> None:
        update(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(keep)


def _fork_workers() -> None:
    """Workers and engine cores are forked from here, and end with this process, however it ends.

    vLLM's CPU platform spawns them, and each one then imports for ten seconds.
    """
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    context = multiprocessing.get_context("fork")
    for module in (multiproc_executor, engine_utils, coordinator):
        module.get_mp_context = lambda: context
    WorkerProc.worker_main = staticmethod(_mortal(WorkerProc.worker_main))
    EngineCoreProc.run_engine_core = staticmethod(_mortal(EngineCoreProc.run_engine_core))


def _mortal(main: Callable[..., None]) -> Callable[..., None]:
    """``main``, in a process that ends with its parent."""

    def run(*args: Any, **kwargs: Any) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() == parent.pid:
            main(*args, **kwargs)

    return run


def _wait_asleep() -> None:
    """Both ways in which ranks talk spin: gloo's does not, so they fall back to it."""
    shm_broadcast.sched_yield = lambda: time.sleep(PAUSE_SECONDS)
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def make_room_between_stages(worker: Any) -> None:
    """For what a pipeline stage receives. vLLM allocates it in a warm-up that CPU engines skip."""
    if parallel_state.get_pp_group().is_first_rank:
        return
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
    )
