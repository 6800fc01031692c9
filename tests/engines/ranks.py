"""What tests ask of an engine's ranks, and do to them, be it one or many.

Functions that take an ``LLMEngine`` are for `engines.Engine.run`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.engines import probes

if TYPE_CHECKING:
    from kvferry.core.endpoint import Endpoint
    from kvferry.core.transport import PeerId, Status, TransferId
    from kvferry.core.transport.copies import Copies

GATE_SECONDS = 0.002


def at_rest(engine: Any) -> dict[str, Any]:
    """What must be the same before and after hand-overs, whatever happened in between.

    vLLM counts how many ranks have yet to report a request; a rank that reports one twice, or that
    no other rank reports, leaves a number behind.
    """
    counts = engine.model_executor.kv_output_aggregator
    return {
        "free blocks": probes.free_blocks(engine),
        "requests": probes.statuses(engine),
        "holds": holds(engine),
        "host pages": probes.host_pages(engine),
        "half reported sent": dict(counts._send_remaining_count) if counts else {},
        "half reported received": dict(counts._recv_remaining_count) if counts else {},
    }


def only_holds(engine: Any) -> bool:
    """Whether no request is left, but for those whose pages are held for other engines."""
    found = probes.statuses(engine)
    ended = all(status.startswith("FINISHED") for status in found)
    return ended and len(found) <= holds(engine)[0]


def holds(engine: Any) -> list[int]:
    """How many requests each rank holds for other engines."""
    return on_each(engine, _held)


def claimed(engine: Any) -> int:
    """How many holds some consumer engine claims."""
    keeper = endpoint()._hold_server._holds
    return sum(bool(held.claimants) for held in list(keeper._held.values()))


def half_reported(engine: Any) -> list[int]:
    """Of each load that some ranks have reported, how many have yet to."""
    return list(engine.model_executor.kv_output_aggregator._recv_remaining_count.values())


def pids(engine: Any) -> list[int]:
    """The processes of the engine and of its ranks."""
    return sorted({os.getpid(), *on_each(engine, _pid)})


def words(engine: Any, slot: int) -> list[int]:
    """Each rank's word of a slot."""
    return on_each(engine, _word, slot)


Disturbance = Literal["stuck", "slow", "failing", "deadly"]


def disturb_reads(
    engine: Any,
    how: Disturbance,
    gate: str,
    rank: int | None = None,
    victims: Sequence[int] = (),
) -> None:
    """Disturb reads of pages, but not of single words, until the file ``gate`` exists.

    A read that was disturbed makes a file with the suffix ``.reached``.

    Args:
        engine: Whose reads.
        how: ``stuck`` reads have landed, and do not return, so that no lease is renewed. ``slow``
            ones seem to be under way, while the endpoint's thread goes on. ``failing`` ones raise.
            A ``deadly`` one kills ``victims`` once it is posted, and is the only one.
        gate: A path.
        rank: The only one whose reads are disturbed; all if there is none.
        victims: Processes.
    """
    on_each(engine, _disturb, how, gate, rank, victims)


def on_each(engine: Any, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(worker, *arguments)`` on each rank, in vLLM's order."""
    answers: list[Any] = engine.collective_rpc(function, args=arguments)
    return answers


def _pid(worker: Any) -> int:
    return os.getpid()


def _held(worker: Any) -> int:
    return endpoint().held


def _word(worker: Any, slot: int) -> int:
    return int(endpoint()._slot_table.words[slot])


def _disturb(
    worker: Any, how: Disturbance, gate: str, rank: int | None, victims: Sequence[int]
) -> None:
    from kvferry.core.errors import TransportError
    from kvferry.core.transport import State, Status
    from kvferry.core.transport.procfs import start_time

    if rank not in (None, worker.rank):
        return
    transport: Any = endpoint()._transport
    real_read, real_poll = transport.read, transport.poll
    path = Path(gate)
    slow: set[TransferId] = set()

    def read(peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        disturbed = copies.total > 8 * len(copies) and not path.exists()
        if disturbed:
            path.with_suffix(".reached").touch()
        if disturbed and how == "failing":
            raise TransportError(f"rank {worker.rank} was told to fail")
        transfer: TransferId = real_read(peer, copies, notify)
        if disturbed and how == "slow":
            slow.add(transfer)
        if disturbed and how == "deadly":
            path.touch()
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            while any(start_time(pid) is not None for pid in victims):  # the fence comes later
                time.sleep(GATE_SECONDS)
        while disturbed and how == "stuck" and not path.exists():
            time.sleep(GATE_SECONDS)
        return transfer

    def poll(transfers: Sequence[TransferId]) -> list[Status]:
        if path.exists():
            slow.clear()
        found = zip(transfers, real_poll(transfers), strict=True)
        return [Status(state=State.PENDING) if each in slow else status for each, status in found]

    transport.read, transport.poll = read, poll


def endpoint() -> Endpoint:
    """Of this process' rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found: Endpoint = probes.ours(get_kv_transfer_group())._worker._endpoint
    return found
