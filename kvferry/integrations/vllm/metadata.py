"""What the scheduler half tells the worker half in each step, and what it hears at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.core.endpoint import Load
from kvferry.core.lifecycle.reclamation import Silence
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.ticket import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """A rank's payload (``wire.RankPayload``), encoded; goes to the scheduler half at start."""

    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport(KVConnectorWorkerMetadata):
    """What some ranks tell the scheduler half in a step, beside what is over.

    Attributes:
        problems: what is wrong, by rank, where that has changed; none for one that is well again.
        silent: ticketed holds whose consumer seems to be gone, the oldest first, by rank; only of
            ranks that were asked in this step.
    """

    problems: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    silent: Mapping[int, tuple[Silence, ...]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """These and those of other ranks."""
        if not isinstance(other, RankReport):
            return self
        return RankReport(
            problems={**self.problems, **other.problems}, silent={**self.silent, **other.silent}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata(KVConnectorMetadata):
    """One engine step's messages, applied by the worker in the order of the attributes.

    Attributes:
        ranks: the payloads of all ranks of this engine, once, before the first load.
        ticket_key: the public key that proves this engine's tickets, with ``ranks``.
        orders: about requests that this engine computes for others.
        prepare: tickets that came in: their engines can be shaken hands with already.
        loads: what to pull, or only to say "done" about.
        refused: requests whose ticket was refused, with the reason.
        aborted: requests that were given up while their load was under way.
        asks_silent: requests wait for blocks: every rank is to report holds whose consumer seems to
            be gone.
        idle: the engine runs no token in this step, and may wait for a load instead.
    """

    ranks: tuple[bytes, ...] = ()
    ticket_key: bytes = b""
    orders: HoldOrders = HoldOrders()  # noqa: RUF009 - frozen
    prepare: tuple[Ticket, ...] = ()
    loads: tuple[Load, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    aborted: tuple[str, ...] = ()
    asks_silent: bool = False
    idle: bool = False
