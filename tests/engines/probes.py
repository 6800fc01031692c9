"""What tests do inside an engine's process, between two of its steps (`engines.Engine.run`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def source(engine: Any) -> str:
    """Where the kvferry of an engine's process is."""
    import kvferry

    return str(Path(kvferry.__file__).resolve())


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
    free: int = scheduler(engine).kv_cache_manager.block_pool.get_num_free_blocks()
    return free


def host_pages(engine: Any) -> tuple[int, int]:
    """How many host pages are in use: for holds, and for loads."""
    half = connector(engine)._scheduler
    return half._producer._pages.host.used, half._consumer.pages.host.used


def kept(engine: Any) -> int:
    """How many conversations the scheduler half holds."""
    return len(connector(engine)._scheduler._producer._holds._conversations)


def statuses(engine: Any) -> list[str]:
    """The status of every request that the scheduler knows."""
    return [request.status.name for request in scheduler(engine).requests.values()]


def status(engine: Any, request_id: str) -> str:
    """The status of a request; empty if the scheduler does not know it."""
    found = request(engine, request_id)
    return found.status.name if found is not None else ""


def request(engine: Any, request_id: str) -> Any:
    """The scheduler's request; vLLM appends something of its own to the id."""
    requests = scheduler(engine).requests.values()
    named = (each for each in requests if f"{each.request_id}-".startswith(f"{request_id}-"))
    return next(named, None)


def end_holds(engine: Any) -> None:
    """End all that the connector holds; what other connectors keep elsewhere stays."""
    connector(engine).reset_cache()


def forget_prefixes(engine: Any) -> bool:
    """End all holds and empty vLLM's own prefix cache; false while a request has blocks."""
    end_holds(engine)
    done: bool = engine.reset_prefix_cache()
    return done


def scheduler(engine: Any) -> Any:
    return engine.engine_core.engine_core.scheduler


def connector(engine: Any) -> Any:
    """The scheduler's, also of an engine that has several."""
    return ours(scheduler(engine).connector)


def ours(connector: Any) -> Any:
    """A connector, or that of kvferry below a MultiConnector."""
    children = getattr(connector, "_connectors", [connector])
    [found] = [each for each in children if type(each).__name__ == "KVFerryConnector"]
    return found
