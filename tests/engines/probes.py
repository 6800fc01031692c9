"""What tests do inside an engine's process, between two of its steps (`engines.Engine.run`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.core.transport import PeerId, Status, TransferId
    from kvferry.core.transport.copies import Copies
    from kvferry.drivers.loopback import LoopbackTransport

GATE_SECONDS = 0.002


def metrics(engine: Any) -> dict[str, float]:
    """vLLM's counters, ``name`` or ``name[source]`` to value; the sum over all other labels."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    found: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        if isinstance(metric, Counter):
            source = metric.labels.get("source")
            name = f"{metric.name}[{source}]" if source is not None else metric.name
            found[name] = found.get(name, 0) + metric.value
    return found


def exposed(engine: Any) -> dict[str, float]:
    """kvferry's samples as ``/metrics`` shows them, without vLLM's own labels, to value."""
    from prometheus_client import REGISTRY

    return samples(REGISTRY, "0")


def samples(registry: Any, engine: str) -> dict[str, float]:
    """See ``exposed``; of one engine of those behind a front end."""
    found = {}
    for metric in registry.collect():
        for sample in metric.samples:
            ours = sample.name.startswith("vllm:kvferry_")
            if ours and sample.labels["engine"] == engine and not sample.name.endswith("_created"):
                own = set(sample.labels) - {"model_name", "engine"}
                labels = ",".join(f'{name}="{sample.labels[name]}"' for name in sorted(own))
                found[f"{sample.name.removeprefix('vllm:kvferry_')}{{{labels}}}"] = sample.value
    return found


def free_blocks(engine: Any) -> int:
    """Blocks that vLLM could give out now."""
    scheduler = engine.engine_core.engine_core.scheduler
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free


def host_pages(engine: Any) -> tuple[int, int]:
    """How many host pages are in use: for holds, and for loads."""
    half = engine.engine_core.engine_core.scheduler.connector._scheduler
    return half._producer._pages.host.used, half._consumer._pages.host.used


def claimed(engine: Any) -> int:
    """How many holds some consumer engine claims."""
    from tests.engines import ranks

    keeper = ranks.endpoint()._hold_server._holds
    return sum(bool(held.claimants) for held in list(keeper._held.values()))


def has_to_step(engine: Any) -> bool:
    """Whether the connector has vLLM step an engine that has nothing else to do."""
    scheduler = engine.engine_core.engine_core.scheduler
    return bool(scheduler.connector.has_pending_push_work())


def statuses(engine: Any) -> list[str]:
    """The status of every request that the scheduler knows."""
    scheduler = engine.engine_core.engine_core.scheduler
    return [request.status.name for request in scheduler.requests.values()]


def fill_caches(engine: Any, value: float) -> None:
    """Overwrite the whole cache."""
    for cache in _caches(engine):
        cache.fill_(value)


def reset_prefix_cache(engine: Any) -> bool:
    """vLLM's reset, the connector's included."""
    done: bool = engine.reset_prefix_cache(reset_connector=True)
    return done


def end_holds(engine: Any) -> None:
    """End all that the connector holds; what other connectors keep elsewhere stays."""
    connector(engine).reset_cache()


def forget_prefixes(engine: Any) -> bool:
    """vLLM's reset of its own cache; what other connectors keep elsewhere stays."""
    end_holds(engine)
    done: bool = engine.reset_prefix_cache()
    return done


def connector(engine: Any) -> Any:
    """The scheduler's, also of an engine that has several."""
    return ours(engine.engine_core.engine_core.scheduler.connector)


def ours(connector: Any) -> Any:
    """A connector, or that of kvferry below a MultiConnector."""
    children = getattr(connector, "_connectors", [connector])
    [found] = [each for each in children if type(each).__name__ == "KVFerryConnector"]
    return found


def gate_reads(engine: Any, gate: str, before: bool) -> None:
    """From now on a read of pages waits until the file ``gate`` exists.

    With ``before`` it waits before it reads, otherwise before it says that it has. Reads of single
    words, such as the fence's, pass.
    """
    from kvferry.drivers.loopback import LoopbackTransport

    original = LoopbackTransport.read

    def read(
        self: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
    ) -> TransferId:
        gated = copies.total > 8 * len(copies)
        if gated and before:
            _wait_for(gate)
        transfer = original(self, peer, copies, notify)
        if gated and not before:
            _wait_for(gate)
        return transfer

    LoopbackTransport.read = read  # type: ignore[assignment, method-assign]


def slow_reads(engine: Any, gate: str) -> None:
    """From now on a read of pages seems to be under way until the file ``gate`` exists.

    Unlike with `gate_reads`, the endpoint's thread goes on meanwhile, so that it renews leases.
    """
    from kvferry.core.transport import State, Status
    from kvferry.drivers.loopback import LoopbackTransport

    read, poll = LoopbackTransport.read, LoopbackTransport.poll
    slow: set[TransferId] = set()

    def slow_read(
        self: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
    ) -> TransferId:
        transfer = read(self, peer, copies, notify)
        if copies.total > 8 * len(copies):
            slow.add(transfer)
            Path(gate).with_suffix(".reached").touch()
        return transfer

    def slow_poll(self: LoopbackTransport, transfers: Sequence[TransferId]) -> list[Status]:
        if Path(gate).exists():
            slow.clear()
        found = zip(transfers, poll(self, transfers), strict=True)
        return [Status(state=State.PENDING) if each in slow else status for each, status in found]

    LoopbackTransport.read = slow_read  # type: ignore[assignment, method-assign]
    LoopbackTransport.poll = slow_poll  # type: ignore[assignment, method-assign]


def _wait_for(gate: str) -> None:
    path = Path(gate)
    path.with_suffix(".reached").touch()
    while not path.exists():
        time.sleep(GATE_SECONDS)


def _caches(engine: Any) -> list[Any]:
    context = engine.vllm_config.compilation_config.static_forward_context
    return [layer.kv_cache for layer in context.values()]
