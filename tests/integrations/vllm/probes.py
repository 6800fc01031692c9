"""What tests do inside an engine's process, between two of its steps (`engines.Engine.run`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.core.copies import Copies
    from kvferry.core.transport import PeerId, TransferId
    from kvferry.drivers.loopback import LoopbackTransport

GATE_SECONDS = 0.002


def metrics(engine: Any) -> dict[str, float]:
    """vLLM's counters, ``name`` or ``name[source]`` to value."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    counters = [m for m in get_metrics_snapshot() if isinstance(m, Counter)]
    return {
        f"{m.name}[{m.labels['source']}]" if "source" in m.labels else m.name: m.value
        for m in counters
    }


def free_blocks(engine: Any) -> int:
    """Blocks that vLLM could give out now."""
    scheduler = engine.engine_core.engine_core.scheduler
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free


def preemptions(engine: Any) -> int:
    """How often requests that the scheduler knows were preempted; metrics lag behind."""
    scheduler = engine.engine_core.engine_core.scheduler
    return sum(request.num_preemptions for request in scheduler.requests.values())


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


def refusal(engine: Any, arguments: dict[str, Any]) -> str:
    """What a worker says at start to an engine with these arguments; empty if nothing."""
    from vllm.engine.arg_utils import EngineArgs

    from kvferry.integrations.vllm.config import ConfigError
    from kvferry.integrations.vllm.support import check_engine

    try:
        check_engine(EngineArgs(**arguments).create_engine_config())
    except ConfigError as error:
        return str(error)
    return ""


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

    LoopbackTransport.read = read  # type: ignore[method-assign]


def _wait_for(gate: str) -> None:
    path = Path(gate)
    path.with_suffix(".reached").touch()
    while not path.exists():
        time.sleep(GATE_SECONDS)


def _caches(engine: Any) -> list[Any]:
    context = engine.vllm_config.compilation_config.static_forward_context
    return [layer.kv_cache for layer in context.values()]


def cache_written_by_kernel(engine: Any, dtype: str, block: int, head: int) -> list[str]:
    """Let vLLM's CPU kernel fill a cache, and compare each element with what the layout says.

    Returns the elements that stand elsewhere, at most a few.
    """
    import itertools

    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    heads, pages, tokens = 2, 4, 2 * block
    cache = torch.zeros((pages, heads, block, 2 * head), dtype=getattr(torch, dtype))
    isa = _get_attn_isa(cache.dtype, block, head, "auto")
    # Small integers: exact in every type, different for neighbours along each axis.
    key = torch.arange(tokens * heads * head).reshape(tokens, heads, head).remainder(251)
    written = {"k": key.to(cache.dtype), "v": (key + 1).to(cache.dtype)}
    slots = torch.cat([torch.arange(block) + page * block for page in (3, 1)])
    halves = cache.view(pages, heads, 2 * block, head).chunk(2, dim=2)
    scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
    ops.cpu_attn_reshape_and_cache(written["k"], written["v"], *halves, slots, isa, **scales)
    flat, wrong = cache.flatten(), []
    for field in _fields_of(cache, f"CPU_ATTN/{isa}"):
        values = written[field.key[-1]]
        for t, h, d in itertools.product(range(tokens), range(heads), range(head)):
            page, row = int(slots[t]) // block, int(slots[t]) % block
            place = field.offset + page * field.page_stride + row * field.tokens[0].stride
            place += h * field.shard[0].stride
            place += d * (field.inner[0][0].stride if field.inner else cache.element_size())
            if flat[place // cache.element_size()] != values[t, h, d]:
                wrong.append(f"{field.key}[token {t}, head {h}, element {d}]")
    return wrong[:5]


def _fields_of(cache: Any, backend: str) -> Any:
    from types import SimpleNamespace

    from kvferry.integrations.vllm.caches import describe

    config: Any = SimpleNamespace(transfer_groups=[SimpleNamespace(layer_names=["layer"])])
    heads = (0, cache.shape[1])
    return describe({"layer": cache}, config, backends={"layer": backend}, heads=heads).fields
