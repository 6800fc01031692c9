"""Both legs of a request at once, as a router sends them that names a room.

Functions that take an ``LLMEngine`` are for `engines.Engine.run`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.conversations import forget
from tests.engines.engines import PREFILL, Engine
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import eventually, texts

ROOMS = itertools.count()
SENTINEL = 7.5
"""What no cache holds."""


class Legs:
    """Prompts that one engine computes for another, each in a room of its own."""

    def __init__(
        self,
        prefill: Engine,
        decode: Engine,
        *prompts: Sequence[int],
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
        """Wait until decode has begun to load the first prompt."""
        eventually(lambda: self.decode.run(status, self.here[0]) == "WAITING_FOR_REMOTE_KVS")

    def wait_read(self, tokens: int) -> None:
        """Wait until decode has read the blocks of so many tokens of the first prompt.

        Its cache must have been filled with `SENTINEL`.
        """
        eventually(lambda: bool(self.decode.run(read_tokens, self.here[0]) >= tokens))


def hand_over_early(
    prefill: Engine, decode: Engine, *prompts: Sequence[int], **options: Any
) -> list[str]:
    """The texts of decode, which gets each request when prefill gets it."""
    legs = Legs(prefill, decode, *prompts, **options)
    legs.begin_prefill()
    legs.begin_decode()
    return legs.texts()


def hand_over_preempted(
    prefill: Engine, decode: Engine, asked: Sequence[int], steps: int, **options: Any
) -> list[str]:
    """The text of decode, where prefill preempts the request after some steps, read in part."""
    legs = Legs(prefill, decode, asked, **options)
    with prefill.paused():
        legs.begin_prefill()
        legs.begin_decode()
        prefill.step(steps)
        legs.wait_begun()
        prefill.run(preempt)
    return legs.texts()


def check_early(
    ordinary: Engine, prefill: Engine, decode: Engine, chunk: int, seed: int = 40
) -> None:
    """Hand prompts over while prefill computes them, and preempt one."""
    rest, begun = at_rest(prefill, decode), early_loads(decode)
    prompts = [prompt(length, seed) for length in (1, chunk, chunk + 1, 3 * chunk, 5 * chunk + 7)]
    wanted = texts(ordinary, *prompts)
    assert [hand_over_early(prefill, decode, each)[0] for each in prompts] == wanted
    assert hand_over_early(prefill, decode, *prompts) == wanted
    assert hand_over_preempted(prefill, decode, prompts[-1], 3) == wanted[-1:]
    assert early_loads(decode) > begun
    forget(prefill, decode)
    come_to(rest, prefill, decode)


def early_loads(engine: Engine) -> float:
    """How many loads of an engine began while prefill was computing."""
    counters: dict[str, float] = engine.run(probes.metrics)
    return counters.get("vllm:kvferry_early_loads", 0.0)


def side_channel(engine: Any) -> dict[str, str]:
    """What a router says of this engine to decode."""
    serving = probes.connector(engine)._scheduler._serving
    return {
        "remote_engine_id": serving.engine,
        "remote_bootstrap_addr": f"http://{serving.host}:{serving.port}",
    }


def preempt(engine: Any) -> None:
    """Preempt all requests that run, as vLLM does before it changes weights."""
    scheduler = engine.engine_core.engine_core.scheduler
    with contextlib.suppress(RuntimeError):  # that the cache was not reset, which may be held
        scheduler.reset_prefix_cache(reset_running_requests=True)


def status(engine: Any, request_id: str) -> str:
    """The status of a request; empty if the scheduler does not know it."""
    found = _request(engine, request_id)
    return found.status.name if found is not None else ""


def computed_tokens(engine: Any, request_id: str) -> int:
    """How many tokens of a request are computed or scheduled; 0 if it is not known."""
    found = _request(engine, request_id)
    return found.num_computed_tokens if found is not None else 0


def read_tokens(engine: Any, request_id: str) -> int:
    """How many first tokens of a request are in blocks that have no `SENTINEL`."""
    found = _request(engine, request_id)
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
    blocks = manager.get_block_ids(found.request_id)[0] if found is not None else []
    caches = probes._caches(engine)
    whole = [all(bool((cache[block] != SENTINEL).all()) for cache in caches) for block in blocks]
    size: int = engine.vllm_config.cache_config.block_size
    return size * sum(1 for _ in itertools.takewhile(bool, whole))


def _request(engine: Any, request_id: str) -> Any:
    """The scheduler's request; vLLM appends something of its own to the id."""
    requests = engine.engine_core.engine_core.scheduler.requests.values()
    named = (each for each in requests if f"{each.request_id}-".startswith(f"{request_id}-"))
    return next(named, None)
