"""What tests ask of an engine's ranks, and do to them, be it one or many.

Functions that take an ``LLMEngine`` are for `engines.Engine.run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.engines import probes
from tests.engines.engines import Engine
from tests.engines.steps import eventually, idle_blocks

if TYPE_CHECKING:
    from kvferry.core.endpoint import Endpoint
    from kvferry.core.transport import PeerId, TransferId
    from kvferry.core.transport.copies import Copies
    from kvferry.drivers.loopback import LoopbackTransport


def at_rest(*engines: Engine) -> list[dict[str, Any]]:
    """What must be the same before and after a hand-over, whatever happened in between."""
    return [engine.run(_at_rest) for engine in engines]


def left_alone(*engines: Engine) -> list[dict[str, Any]]:
    """The same, once nothing is left of earlier tests, not all of whose tickets were used."""
    for engine in engines:
        engine.run(probes.end_holds)
        idle_blocks(engine)
    return at_rest(*engines)


def come_to(rest: list[dict[str, Any]], *engines: Engine) -> None:
    """Wait until engines are `at_rest` as they were."""
    try:
        eventually(lambda: at_rest(*engines) == rest)
    except AssertionError:
        assert at_rest(*engines) == rest, "\n".join(one.log()[-4000:] for one in engines)
        raise


def holds(engine: Any) -> list[int]:
    """How many requests each rank holds for other engines."""
    return on_each(engine, held)


def half_reported(engine: Any) -> list[int]:
    """Of each load that some ranks have reported, how many have yet to."""
    return list(_counts(engine)._recv_remaining_count.values())


def pids(engine: Any) -> list[int]:
    """The ranks' processes."""
    return on_each(engine, _pid)


def addresses(engine: Any) -> list[bytes]:
    """Where the ranks' transports are."""
    return on_each(engine, _address)


def words(engine: Any, slot: int) -> list[int]:
    """Each rank's word of a slot."""
    return on_each(engine, _word, slot)


def gate_reads(engine: Any, rank: int, gate: str) -> None:
    """See `probes.gate_reads`; on one rank, which says only then that it has read."""
    on_each(engine, _gate, rank, gate)


def fail_reads(engine: Any, rank: int, failing: bool) -> None:
    """From now on, or no more, one rank's reads of pages fail."""
    on_each(engine, _fail, rank, failing)


def on_each(engine: Any, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(worker, *arguments)`` on each rank, in vLLM's order."""
    answers: list[Any] = engine.collective_rpc(function, args=arguments)
    return answers


def _at_rest(engine: Any) -> dict[str, Any]:
    """vLLM counts how many ranks have yet to report a request; a rank that reports one twice, or
    that no other rank reports, leaves a number behind."""
    counts = _counts(engine)
    return {
        "free blocks": probes.free_blocks(engine),
        "requests": probes.statuses(engine),
        "holds": holds(engine),
        "half reported sent": dict(counts._send_remaining_count) if counts else {},
        "half reported received": dict(counts._recv_remaining_count) if counts else {},
    }


def _counts(engine: Any) -> Any:
    return engine.model_executor.kv_output_aggregator


def _pid(worker: Any) -> int:
    return os.getpid()


def held(worker: Any) -> int:
    """How many requests this rank holds for other engines."""
    return endpoint().held


def _address(worker: Any) -> bytes:
    return endpoint().payload.address


def _word(worker: Any, slot: int) -> int:
    return endpoint()._slot_table[slot]


def _gate(worker: Any, rank: int, gate: str) -> None:
    if worker.rank == rank:
        probes.gate_reads(None, gate, False)


def _fail(worker: Any, rank: int, failing: bool) -> None:
    from kvferry.core.errors import TransportError
    from kvferry.drivers.loopback import LoopbackTransport

    if worker.rank != rank:
        return
    original = getattr(LoopbackTransport.read, "original", LoopbackTransport.read)

    def read(
        self: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
    ) -> TransferId:
        if copies.total > 8 * len(copies):
            raise TransportError(f"rank {rank} was told to fail")
        transfer: TransferId = original(self, peer, copies, notify)
        return transfer

    read.original = original  # type: ignore[attr-defined]
    LoopbackTransport.read = read if failing else original  # type: ignore[assignment, method-assign]


def endpoint() -> Endpoint:
    """Of this process' rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found: Endpoint = probes.ours(get_kv_transfer_group())._worker._endpoint
    return found
