"""What one request costs in Python: µs of CPU in each stage, on both engines.

    python benchmarks/request_profile.py [--requests 400] [--tokens 1024] [--top N] [--quick]
                                         [--json FILE]

Both halves of two connectors, called as vLLM calls them, hand request after request from one to the
other over the driver loopback, in one process: so nothing is copied between processes, and what is
left is Python's. A stage is a hook of vLLM's on the engine's thread, or a kind of call on the
endpoint's thread; what it takes is that thread's CPU time, summed over a request, and the median of
all requests. A producer has three steps for a request (computed, ticket, sent), a consumer two
(load, loaded); what a step costs in which nothing happens is measured by ``steps.py``.

``--top`` prints the functions in which most time is spent, by cProfile, which slows short functions
down more than long ones.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import functools
import io
import itertools
import os
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import common
import engines
import numpy as np
import rows
import steps
import vllm_worker
from engines import Shape

from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.transport import registry

LAYERS, SLOTS = 4, 512
WARM_UP = 20
"""Requests that are not counted: the first shakes hands, and the next fill caches."""
SECONDS = 5.0
"""How long a load may take."""
STEP_SECONDS = 0.02
"""How long a step may wait for a result."""

SECTION = "what a request costs in Python"
SCHEDULER, WORKER, THREAD = "scheduler half", "worker half", "endpoint's thread"
HOOKS = {
    SCHEDULER: (
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "request_finished_all_groups",
        "build_connector_meta",
        "update_connector_output",
    ),
    WORKER: (
        "bind_connector_metadata",
        "get_transfer_results",
        "build_connector_worker_meta",
    ),
}
DRIVER = ("read", "poll", "forget", "notifications")


class Stages:
    """CPU seconds by stage of one request, on any thread."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, with its CPU time counted for ``stage``."""

        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            before = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[stage] += time.thread_time() - before

        return counted

    def add(self, stage: str, seconds: float) -> None:
        """Count time that was measured otherwise."""
        self._seconds[stage] += seconds

    def take(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        found, self._seconds = self._seconds, defaultdict(float)
        return found


class Engine:
    """Both halves of one connector, over loopback.

    Args:
        name: ``prefill`` or ``decode``.
        stages: where its time is counted.
        profile: of its endpoint's thread; none to measure without one.
    """

    def __init__(self, name: str, stages: Stages, profile: cProfile.Profile | None) -> None:
        self._name, self._stages, self._profile = name, stages, profile
        self._memory = vllm_worker.room(
            engines.ELEMENT * 2 * engines.DIM * engines.HEADS * engines.BLOCK * LAYERS * SLOTS
        )
        self.scheduler, self.worker = steps.connector(
            self._endpoint, SLOTS, LAYERS, engine=name, driver="loopback", verify_prompt=True
        )
        self.endpoint: Endpoint = self.worker._worker._endpoint
        self.scheduler.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.worker.get_handshake_metadata()}
        )
        for half, found in ((SCHEDULER, self.scheduler), (WORKER, self.worker)):
            for hook in HOOKS[half]:
                setattr(found, hook, stages.timed(self._stage(half, hook), getattr(found, hook)))
        self.step()

    def _stage(self, half: str, what: str) -> str:
        return f"{self._name}, {half}: {what}"

    def _endpoint(self) -> Endpoint:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        [layout] = [engines.rank_layout(Shape(), LAYERS, SLOTS, (0, engines.HEADS), address)]
        transport = registry.create("loopback")
        for call in DRIVER:
            stage = self._stage(THREAD, f"driver's {call}")
            setattr(transport, call, self._stages.timed(stage, getattr(transport, call)))
        return Endpoint(
            identity=Identity(engine=self._name, incarnation=Incarnation(len(self._name))),
            driver="loopback",
            transport=transport,
            layout=layout,
            slots=SLOTS,
            options=EndpointOptions(load_timeout=steps.LONG),
            zero=lambda spans: None,
            enter=self._profile.enable if self._profile else lambda: None,
        )

    def thread_seconds(self) -> float:
        """Return the CPU time of the endpoint's thread."""
        clock = time.pthread_getcpuclockid(self.endpoint._thread.ident or 0)
        return time.clock_gettime(clock)

    def arrive(self, request: Any, blocks: Sequence[int]) -> None:
        """A request comes and gets blocks."""
        self.scheduler.on_new_request(request)
        tokens, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, steps.make_blocks(blocks), tokens)

    def step(self) -> Any:
        """One step of an engine; what its worker reported."""
        return steps.step(self.scheduler, self.worker)

    def until(self, request: str, what: str) -> None:
        """Wait until a request is among what a step reports."""
        end = time.monotonic() + SECONDS
        while True:
            # Not for long: what the scheduler half asks for its workers comes with steps.
            self.endpoint.wait(STEP_SECONDS)
            if request in (getattr(self.step(), what) or ()):
                return
            if time.monotonic() > end:
                raise SystemExit(f"{request} was not in {what} after {SECONDS:g} s")

    def close(self) -> None:
        """Let go of everything."""
        self.worker.shutdown()
        self.scheduler.shutdown()


class Pair:
    """An engine that prefills and one that decodes, and the stages of a request."""

    def __init__(self, tokens: int, profiles: Sequence[cProfile.Profile] = ()) -> None:
        self._tokens, self._stages = tokens, Stages()
        endpoints = profiles or (None, None)
        self._prefill = Engine("prefill", self._stages, endpoints[0])
        self._decode = Engine("decode", self._stages, endpoints[1])
        self._numbers = itertools.count()

    def hand_over(self) -> dict[str, float]:
        """Hand over one request; CPU seconds by stage."""
        number = next(self._numbers)
        count = self._tokens // engines.BLOCK
        blocks = [1 + (number * count + index) % (SLOTS - 1) for index in range(count)]
        both = (self._prefill, self._decode)
        before = [engine.thread_seconds() for engine in both]
        self._stages.take()
        prefilled = steps.make_request(f"there-{number}", {"do_remote_decode": True}, self._tokens)
        self._prefill.arrive(prefilled, blocks)
        self._prefill.step()
        prefilled.num_computed_tokens = self._tokens
        _, ticket = self._prefill.scheduler.request_finished_all_groups(prefilled, [blocks])
        self._prefill.step()
        decoded = steps.make_request(f"here-{number}", ticket, self._tokens)
        self._decode.arrive(decoded, blocks)
        self._decode.step()
        self._decode.until(decoded.request_id, "finished_recving")
        self._prefill.until(prefilled.request_id, "finished_sending")
        self._decode.scheduler.request_finished_all_groups(decoded, [blocks])
        found = self._stages.take()
        for engine, start in zip(both, before, strict=True):
            stage = engine._stage(THREAD, "")
            driver = sum(seconds for key, seconds in found.items() if key.startswith(stage))
            found[f"{stage}all else"] = max(0.0, engine.thread_seconds() - start - driver)
        return dict(found)

    def close(self) -> None:
        """Let go of both engines."""
        self._decode.close()
        self._prefill.close()


def measured(requests: int, tokens: int) -> list[rows.Row]:
    """A row for each stage, and one for each thread of each engine."""
    with _pair(tokens) as pair:
        found = [pair.hand_over() for _ in range(WARM_UP + requests)][WARM_UP:]
    stages = sorted({stage for each in found for stage in each}, key=_order)
    times = np.array([[each.get(stage, 0.0) for stage in stages] for each in found])
    wholes = times.sum(axis=1)
    made = [_row("all", wholes, wholes)]
    for group in dict.fromkeys(stage.partition(": ")[0] for stage in stages):
        own = [index for index, stage in enumerate(stages) if stage.startswith(group)]
        made.append(_row(f"{group}: all", times[:, own].sum(axis=1), wholes))
        made += [_row(stages[index], times[:, index], wholes) for index in own]
    return made


def _order(stage: str) -> tuple[bool, int, str]:
    halves = (SCHEDULER, WORKER, THREAD)
    half = next(index for index, each in enumerate(halves) if each in stage)
    return not stage.startswith("prefill"), half, stage


def _row(case: str, times: common.Times, wholes: common.Times) -> rows.Row:
    return rows.compared(
        common.ratio(times, wholes),
        section=SECTION,
        case=case,
        measured=float(f"{np.median(times) * 1e6:.3g}"),
        unit="µs CPU",
        of="all stages",
    )


@contextmanager
def _pair(tokens: int, profiles: Sequence[cProfile.Profile] = ()) -> Iterator[Pair]:
    pair = Pair(tokens, profiles)
    try:
        yield pair
    finally:
        pair.close()


def top(requests: int, tokens: int, count: int) -> str:
    """Return the functions in which most time is spent, by thread."""
    profiles = [cProfile.Profile(time.thread_time) for _ in range(3)]
    with _pair(tokens, profiles[1:]) as pair:
        for _ in range(WARM_UP):
            pair.hand_over()
        profiles[0].enable()
        for _ in range(requests):
            pair.hand_over()
        profiles[0].disable()
    names = ("both engines' threads", "prefill's endpoint", "decode's endpoint")
    return "\n".join(
        f"{name}, {requests} requests\n{_text(profile, count)}"
        for name, profile in zip(names, profiles, strict=True)
    )


def _text(profile: cProfile.Profile, count: int) -> str:
    said = io.StringIO()
    pstats.Stats(profile, stream=said).sort_stats("tottime").print_stats(count)
    return said.getvalue()


def main() -> None:
    options = _options()
    if not vllm_worker.available():
        rows.nothing("there is no vLLM here, whose connector this is")
    vllm_worker.quiet()
    if options.top:
        print(top(options.requests, options.tokens, options.top))
        return
    found = measured(options.requests, options.tokens)
    rows.show(found)
    rows.write(options.json, found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--requests", type=int, help="how many; default 400")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--top", type=int, default=0, help="print so many functions of a profile")
    parser.add_argument("--quick", action="store_true", help="20 requests")
    options = parser.parse_args()
    options.requests = options.requests or (20 if options.quick else 400)
    return options


if __name__ == "__main__":
    main()
    os._exit(0)
