"""Who an endpoint is, its times, and what it says of what is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.core.errors import KVFerryError
from kvferry.core.handshake import Judgements
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.core.messages import Coordinates
from kvferry.core.metrics import LoadRecord
from kvferry.core.security import OPEN, Access


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a rank is.

    Attributes:
        engine: the engine's id.
        incarnation: one random number for all ranks of one start of the engine.
        rank: this rank's index among the engine's.
        coordinates: where it stands.
        agreement: what two engines must agree on, name to value.
    """

    engine: str
    incarnation: Incarnation
    rank: int = 0
    coordinates: Coordinates = field(default_factory=Coordinates)
    agreement: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """Times, in seconds, and what else may be chosen.

    Attributes:
        handshake_timeout: until a producer must have answered.
        lease: what a renewal gives a hold of this rank's. (A ticket says with ``Orders`` what it
            gives at first.)
        load_timeout: a load that is not over after this fails.
        liveness_interval: between two pings of a producer; 0 for none.
        liveness_misses: so many pings without an answer mean that it is dead.
        engine_ttl: a producer from which nothing was loaded for so long is let go of.
        judgements: which differences from a producer are not refused for certain.
        access: this engine's keys, and to whom it may connect.
    """

    handshake_timeout: float = 10.0
    lease: float = 30.0
    load_timeout: float = 60.0
    liveness_interval: float = 5.0
    liveness_misses: int = 3
    engine_ttl: float = 600.0
    judgements: Judgements = Judgements()  # noqa: RUF009 - frozen
    access: Access = OPEN


DEFAULTS = EndpointOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What is over since the last call; each request exactly once per direction.

    Attributes:
        sent: requests whose pages nobody reads any more: they may be given back.
        received: requests whose pages no byte lands in any more.
        failed: those of ``received`` whose pages must not be used, and why.
        loads: figures of every load, also of those that are not reported.
    """

    sent: frozenset[RequestId] = frozenset()
    received: frozenset[RequestId] = frozenset()
    failed: Mapping[RequestId, KVFerryError] = field(default_factory=dict)
    loads: tuple[LoadRecord, ...] = ()
