"""Messages between the scheduler half and the worker halves, as vLLM transports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.core.directory import ProducerNews
from kvferry.core.lifecycle.holds import EndedHold
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.silent_holds import Silence
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.metrics import LoadRecord
from kvferry.integrations.vllm.adapter_hashes import AdapterReport
from kvferry.integrations.vllm.consumer import LoadMessages

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """What a rank has published on the side channel: its encoded ``RankPayload``.

    ``library`` is its transport's, for the log. ``host_pages`` is how many it has, the hole
    included.
    """

    payload: bytes
    library: str = ""
    host_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport(KVConnectorWorkerMetadata):
    """What ranks report to the scheduler half in a step, apart from requests sent and loads ended.

    Attributes:
        problems: The current problems of each rank whose problems have changed.
        silent: Of each rank, if ``StepMetadata.asks_silent``, its holds, among those that tickets
            name, whose consumer seems to be gone, the longest silent first.
        failed: The requests whose load failed; vLLM 0.29 does not pass them on (``compat_029``).
        loads: The figures of the loads that succeeded in this step, by request. If nothing is
            logged or traced by request, only of those whose pages may lack tokens.
        ended: How holds ended in this step, by request, unless the scheduler half had ordered it.
            If nothing is logged or traced by request, holds that were read are left out.
        over: Of each rank, the requests whose host pages it no longer uses for other engines.
        wanted: Which engines the ranks lack (``Directory.ask_again``).
    """

    problems: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    silent: Mapping[int, tuple[Silence, ...]] = field(default_factory=dict)
    adapters: AdapterReport = AdapterReport()  # noqa: RUF009 - frozen
    failed: frozenset[str] = frozenset()
    loads: Mapping[str, LoadRecord] = field(default_factory=dict)
    ended: Mapping[str, EndedHold] = field(default_factory=dict)
    over: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    wanted: frozenset[tuple[PeerKey, int]] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """Return these reports merged with those of other ranks; ignore another connector's."""
        if not isinstance(other, RankReport):
            return self
        return RankReport(
            problems={**self.problems, **other.problems},
            silent={**self.silent, **other.silent},
            adapters=self.adapters.aggregate(other.adapters),
            failed=self.failed | other.failed,
            loads=_combine(self.loads, other.loads, LoadRecord.combine),
            ended=_combine(self.ended, other.ended, EndedHold.combine),
            over={**self.over, **other.over},
            wanted=self.wanted | other.wanted,
        )


def _combine(
    mine: Mapping[str, Value],
    theirs: Mapping[str, Value],
    together: Callable[[Value, Value], Value],
) -> dict[str, Value]:
    """Return two mappings as one; values of the same key are put together."""
    both = {key: together(mine[key], theirs[key]) for key in mine.keys() & theirs.keys()}
    return {**mine, **theirs, **both}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata(LoadMessages, KVConnectorMetadata):
    """The scheduler half's messages to the workers in one step.

    Workers apply ``ticket_key`` first, then ``ranks`` and ``orders``, then those about loads.

    Attributes:
        ranks: The encoded payloads of all ranks of this engine; sent once, before the first load.
        ticket_key: The public key with which peers verify tickets; sent with ``ranks``.
        producers: What the directory has learnt about the engines that made tickets.
        asks_silent: Whether ranks are to report ``RankReport.silent``.
        asks_adapters: The number of this step if ranks are to report which LoRA adapters they
            loaded, because requests wait for that; otherwise 0.
        idle: Whether the engine runs no token in this step, so that workers may wait for loads.
        follows: Whether requests wait for the engines that prefill them, or for a LoRA adapter.
    """

    ranks: tuple[bytes, ...] = ()
    ticket_key: bytes = b""
    orders: HoldOrders = HoldOrders()  # noqa: RUF009 - frozen
    producers: ProducerNews = ProducerNews()  # noqa: RUF009 - frozen
    asks_silent: bool = False
    asks_adapters: int = 0
    idle: bool = False
    follows: bool = False
