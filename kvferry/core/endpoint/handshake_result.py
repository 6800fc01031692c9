"""What a rank makes of a producer's reply: checked payloads, and the plan of the reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.core.directory.news import EncodedReply
from kvferry.core.errors import HandshakeError, PlanError
from kvferry.core.messages import RankPayload
from kvferry.core.options import EndpointOptions
from kvferry.core.planner.plan import Plan
from kvferry.core.planner.plan_cache import PlanCache
from kvferry.core.security.proof import load_library
from kvferry.core.side_channel import agree
from kvferry.core.side_channel.compatibility import differing_software, engine_info
from kvferry.core.side_channel.connection import explained
from kvferry.core.side_channel.dialer import Dialer

DECODED = 5
"""Decoded fields take at most this many times the bytes of the encoded payload."""
RANK_BYTES, REGION_BYTES, FACT_BYTES, CUT_BYTES = 2000, 200, 200, 100
"""Estimated bytes of a payload's rest, a region, an ``agreement`` entry, a ``StripBatch`` cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """The result of a handshake that succeeded.

    Attributes:
        overridden: a text for each difference between the two engines that the operator allows.
        memory: what to keep for the producer, see ``memory_of``.
    """

    payloads: tuple[RankPayload, ...]
    plan: Plan
    overridden: tuple[str, ...] = ()
    ticket_key: bytes = b""
    memory: Mapping[int, int] = field(default_factory=dict)


class ReplyReader:
    """Read the replies of producers for one rank; one thread may be in ``read`` at a time."""

    def __init__(self, options: EndpointOptions) -> None:
        self._options = options
        self._own: tuple[RankPayload, ...] = ()
        self._rank = 0
        self._planner = PlanCache((), 0)

    def join(self, own: Sequence[RankPayload], rank: int) -> None:
        """Set what this engine's ranks publish, and this rank's index; before any ``read``."""
        self._planner, self._rank = PlanCache([payload.layout for payload in own], rank), rank
        self._own = tuple(own)  # set last: the thread that reads uses the rest once it is set

    @property
    def has_joined(self) -> bool:
        """Return whether ``join`` was called."""
        return bool(self._own)

    def read(self, reply: EncodedReply) -> HandshakeResult:
        """Decode and check a reply, which is untrusted, and plan the reads.

        Takes up to as long as ``work_budget`` allows.

        Raises:
            HandshakeError: what the producer publishes is invalid, or does not fit this engine.
            KVFerryError: nothing can be planned from it.
        """
        if not self._own:
            raise HandshakeError("this endpoint has not joined its engine: call join() first")
        dialer = Dialer.to(reply.address, self._options.handshake_timeout, self._options.access)
        dialer.numeric.append(reply.numeric)
        with explained(reply.address.engine, dialer):
            info = engine_info(reply.ranks, reply.ticket_key, engine=reply.address.engine)
        if info.ticket_key:
            load_library()
        own, judgements = self._own[self._rank], self._options.judgements
        overridden = [text for rank in info.ranks for text in agree(own, rank, judgements)]
        try:
            plan = self._planner.plan([payload.layout for payload in info.ranks])
        except PlanError as exc:
            told = differing_software(own, info.ranks[0], judgements)
            raise PlanError(f"{exc}{told}") from exc
        return HandshakeResult(
            payloads=info.ranks,
            plan=plan,
            overridden=tuple(dict.fromkeys(overridden)),
            ticket_key=info.ticket_key,
            memory=memory_of(info.ranks, tuple(map(len, reply.ranks)), plan),
        )


def memory_of(
    payloads: Sequence[RankPayload], sizes: Sequence[int], plan: Plan
) -> Mapping[int, int]:
    """Estimate the bytes that payloads (``sizes`` when encoded) and a plan take, by object.

    Keys are ``id(object)``, valid while the objects live: what producers share can be counted once.
    """
    memory = {id(plan): sum(map(_own_bytes, payloads))}
    for payload, size in zip(payloads, sizes, strict=True):
        memory[id(payload.layout.fields)] = DECODED * size
    for source in plan.sources:
        for batch in (batch for match in source.matches for batch in match.batches):
            memory[id(batch.local)] = batch.local.nbytes
            memory[id(batch.remote)] = batch.remote.nbytes
            memory[id(plan)] += CUT_BYTES * (1 + len(batch.segments))
    return memory


def _own_bytes(payload: RankPayload) -> int:
    """Estimate the bytes of a decoded payload without its fields, which payloads may share."""
    texts = sum(len(name) + len(value) for name, value in payload.agreement.items())
    return (
        RANK_BYTES
        + REGION_BYTES * len(payload.layout.regions)
        + FACT_BYTES * len(payload.agreement)
        + texts
        + len(payload.address)
    )
