"""Decode producers' replies, which are untrusted, and plan the reads, within a memory budget."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.core.directory.news import EncodedReply
from kvferry.core.errors import HandshakeError, PlanError
from kvferry.core.lifecycle.ticket import ProducerName, page_limits
from kvferry.core.messages import RankPayload
from kvferry.core.options import EndpointOptions
from kvferry.core.planner.plan import Plan, PlanCache
from kvferry.core.security.ticket_proof import load_library
from kvferry.core.side_channel.compatibility import agree, differing_software, engine_info
from kvferry.core.side_channel.connection import explained
from kvferry.core.side_channel.dialer import Dialer

logger = logging.getLogger(__name__)

DECODED = 5
"""Decoded fields take at most this many times the bytes of the encoded payload."""
RANK_BYTES, ENTRY_BYTES, CUT_BYTES = 2000, 200, 100
"""Estimated bytes of a payload's rest, a region or ``agreement`` entry, a cut of ``Strips``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """What is read of a producer's reply; ``payloads`` are in rank order."""

    payloads: tuple[RankPayload, ...]
    plan: Plan
    page_limits: tuple[int, ...]
    ticket_key: bytes = b""  # the public key for the proofs of its tickets; empty without proofs
    memory: Mapping[int, int] = field(default_factory=dict)
    """What this takes, see ``memory_of``."""


class ReplyDecoder:
    """Decode the replies of producers for one rank; one thread may be in ``decode`` at a time."""

    def __init__(self, options: EndpointOptions, rank: int) -> None:
        self._options = options
        self._own: tuple[RankPayload, ...] = ()
        self._rank = rank
        self._planner = PlanCache((), 0)
        self._warned: set[ProducerName] = set()

    def join(self, own: Sequence[RankPayload]) -> None:
        """Set what this engine's ranks publish, in rank order; before any ``decode``."""
        self._planner = PlanCache([payload.layout for payload in own], self._rank)
        self._own = tuple(own)  # set last: the thread that decodes uses the rest once it is set

    @property
    def has_joined(self) -> bool:
        """Return whether ``join`` was called."""
        return bool(self._own)

    def decode(self, reply: EncodedReply) -> HandshakeResult:
        """Decode and check a reply, which is untrusted, and plan the reads, within ``work_budget``.

        Raises ``HandshakeError`` if what the producer publishes is invalid, or does not fit this
        engine; another ``KVFerryError`` if nothing can be planned from it.
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
        self._warn(reply.name, dict.fromkeys(overridden))
        try:
            plan = self._planner.plan([payload.layout for payload in info.ranks])
        except PlanError as exc:
            told = differing_software(own, info.ranks[0], judgements)
            raise PlanError(f"{exc}{told}") from exc
        return HandshakeResult(
            payloads=info.ranks,
            plan=plan,
            page_limits=page_limits(info.ranks),
            ticket_key=info.ticket_key,
            memory=memory_of(info.ranks, tuple(map(len, reply.ranks)), plan),
        )

    def _warn(self, name: ProducerName, overridden: Iterable[str]) -> None:
        """Log the differences that the operator allows, once per incarnation, on rank 0 only."""
        if overridden and self._rank == 0 and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "reading from engine %s although it differs in %s: enforce_handshake_compat is "
                "false, and if the pages do not mean the same, answers will be wrong",
                name[0],
                "; ".join(overridden),
            )


def memory_of(
    payloads: Sequence[RankPayload], sizes: Sequence[int], plan: Plan
) -> Mapping[int, int]:
    """Estimate the bytes that payloads (``sizes`` when encoded) and a plan take, by object.

    Keys are ``id(object)``, valid while the objects live: what producers share can be counted once.
    """
    memory = {id(plan): 0}
    for payload, size in zip(payloads, sizes, strict=True):
        facts, regions = payload.agreement, payload.layout.regions
        memory[id(plan)] += RANK_BYTES + ENTRY_BYTES * (len(regions) + len(facts))
        memory[id(plan)] += len(payload.address) + sum(map(len, (*facts, *facts.values())))
        memory[id(payload.layout.fields)] = DECODED * size
    for source in plan.sources:
        for strips in (strips for match in source.matches for strips in match.strips):
            for side in (strips.local, strips.remote):
                memory[id(side)] = side.start.nbytes + side.within.nbytes
            memory[id(plan)] += CUT_BYTES * (1 + len(strips.segments))
    return memory


class PeerMemoryBudget:
    """Count the estimated bytes that are kept for peers, per object: peers share equal fields."""

    def __init__(self) -> None:
        # A producer chooses how much it publishes, so the total is limited.
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.nbytes = 0

    def add(self, memory: Mapping[int, int]) -> None:
        """Count the objects of one more peer, from ``memory_of``."""
        for key, nbytes in memory.items():
            self._users[key] += 1
            if self._users[key] == 1:
                self._sizes[key] = nbytes
                self.nbytes += nbytes

    def remove(self, memory: Mapping[int, int]) -> None:
        """Stop counting the objects of a peer, as passed to ``add``."""
        for key in memory:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.nbytes -= self._sizes.pop(key)
