"""All steps, in order, with their time limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .defaults import SUITE_SECONDS
from .devices import load_torch
from .outcome import Settings
from .runner import Step

ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
"""Whether UCX may read GPU memory of another process by CUDA IPC; ``auto``: over NVLink only."""

SECONDS = {
    "environment": (40.0, 90.0),
    "loads": (35.0, 75.0),
    "quiescence": (45.0, 110.0),
    "zeroing": (20.0, 60.0),
    "staging": (20.0, 60.0),
    "pieces": (25.0, 60.0),
    "bench": (35.0, 75.0),
    "staged": (120.0, 500.0),
}
"""How many seconds a step may need if nothing hangs, and after how many it is ended, by module; see
``_suites`` for the suite."""

REHEARSED_SUITE_SECONDS = 3.0
REHEARSAL_PATIENCE = 4
"""How many times longer a step may take in a rehearsal, which may share its two cores."""

SUITE_START = 5.0
"""What the suite's step takes beyond its budget if no test hangs."""
SUITE_GRACE = 45.0
"""What the suite's step may take beyond its budget: start, and a test that hangs."""


def all_steps(
    *, rehearse: bool, drivers: Sequence[str], suite_seconds: float = SUITE_SECONDS
) -> list[Step]:
    """Return all steps.

    With the default drivers and budget, they fit into ``TOTAL_SECONDS`` if nothing hangs. Their
    limits together are more: after a step that hangs, those that do not fit any more are skipped.

    Args:
        rehearse: whether they run on CPU memory and with small sizes.
        drivers: the drivers to check.
        suite_seconds: after how many seconds no further test of the suite begins.
    """
    near, far = ("cpu", "cpu") if rehearse else _devices()
    seconds = REHEARSED_SUITE_SECONDS if rehearse else suite_seconds
    steps = [
        Step(
            name="environment",
            title="versions, doctor, CUDA IPC between two processes",
            module="environment",
            needs=SECONDS["environment"][0],
            limit=SECONDS["environment"][1],
            settings=Settings(near=near, far=far),
        ),
        *_each(drivers, "loads", "loads under load, checked on the device", near, far),
        *_each(drivers, "quiescence", "no byte lands after FAILED", near, far),
        Step(
            name="zeroing",
            title="zeroes at the right places, without a wait for the default stream",
            module="zeroing",
            needs=SECONDS["zeroing"][0],
            limit=SECONDS["zeroing"][1],
            settings=Settings(near=near, far=far),
        ),
        Step(
            name="staging",
            title="copies between the cache and host pages",
            module="staging",
            needs=SECONDS["staging"][0],
            limit=SECONDS["staging"][1],
            settings=Settings(near=near, far=far),
        ),
        *_each(drivers, "pieces", "many small copies against few large ones", near, far),
        *(step for driver in drivers for step in _suites(near, far, driver, seconds)),
        *_each(drivers, "bench", "benchmarks/gpu.py: speed beside a plain copy", near, far),
    ]
    patience = REHEARSAL_PATIENCE if rehearse else 1
    return [replace(step, limit=patience * step.limit) for step in steps]


def named_steps(*, rehearse: bool, drivers: Sequence[str]) -> list[Step]:
    """Return the steps that run only if they are named: there is no time for them among all.

    Args:
        rehearse: whether they run on CPU memory and with small sizes.
        drivers: the drivers to check; they must read GPU memory over tcp.
    """
    near, far = ("cpu", "cpu") if rehearse else _devices()
    return list(_each(drivers, "staged", "over tcp, staged beside direct", near, far))


def _devices() -> tuple[str, str]:
    """Return the device that reads and that of the other process: the last one."""
    return "cuda:0", f"cuda:{load_torch().cuda.device_count() - 1}"


def _suites(near: str, far: str, driver: str, seconds: float) -> Iterator[Step]:
    for value, name in (("auto", "auto"), ("y", "on")):
        yield Step(
            name=f"suite-{driver}-{name}",
            title=f"the conformance suite of {driver}, zcopy {name}",
            module="conformance",
            needs=seconds + SUITE_START,
            limit=seconds + SUITE_GRACE,
            settings=Settings(near=near, far=far, driver=driver, seconds=seconds),
            environment={ZCOPY: value},
        )


def _each(drivers: Sequence[str], module: str, title: str, near: str, far: str) -> Iterator[Step]:
    for driver in drivers:
        yield Step(
            name=f"{module}-{driver}",
            title=f"{driver}: {title}",
            module=module,
            needs=SECONDS[module][0],
            limit=SECONDS[module][1],
            settings=Settings(near=near, far=far, driver=driver),
        )
