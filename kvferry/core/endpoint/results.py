"""The identity of an endpoint, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import EndedHold, Incarnation, RequestId
from kvferry.core.messages import Coordinates
from kvferry.core.metrics import LoadRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of one rank of an engine.

    Attributes:
        engine: the engine's id.
        incarnation: the random number that identifies this start of the engine; the same on all
            ranks.
        rank: index of this rank among the engine's ranks.
        coordinates: position in the engine's pipeline, tensor and context parallelism.
        agreement: name to value, for everything that must be equal on two engines that exchange
            pages (model, cache dtype, ...).
    """

    engine: str
    incarnation: Incarnation
    rank: int = 0
    coordinates: Coordinates = field(default_factory=Coordinates)
    agreement: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What ``Endpoint.results`` returns: the loads and holds that have ended since its last call.

    Over all calls, a request for which this engine made a ticket is in ``sent`` exactly once, and
    one that it loads with ``Load.report`` set is in ``received`` exactly once. Of several loads
    with one request id, each has a call of its own, in the order in which they ended.

    Attributes:
        sent: requests whose pages this rank no longer holds for other engines. The engine may free
            them once all its ranks have returned the request here. Where the cache is staged, these
            are the
            blocks: they are free when they were copied.
        ended: how the hold of each of these requests ended on this rank. Where the cache is staged,
            these are requests that are over, each once: their host pages, and the slot of their
                hold, are free once all ranks have returned the request here.
        received: requests whose load is over, successfully or not, or that ``Endpoint.refuse`` was
            called for: no byte lands in their pages any more.
        failed: request to the reason, for those of ``received`` whose pages must not be used.
        loads: figures of every load that is over, also of loads without ``Load.report``.
    """

    sent: frozenset[RequestId] = frozenset()
    ended: tuple[EndedHold, ...] = ()
    received: frozenset[RequestId] = frozenset()
    failed: Mapping[RequestId, KVFerryError] = field(default_factory=dict)
    loads: tuple[LoadRecord, ...] = ()
