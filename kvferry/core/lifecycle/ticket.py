"""The ticket that a producer hands to a consumer, through the router, for one request.

It passes through a client's hands, so it is checked before it is trusted: first its form, then its
digest by the consumer's scheduler, then the rest against the producer's handshake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.core.errors import TicketError, TicketReason
from kvferry.core.layout import HOLE, MAX_GROUPS
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.prompt_digest import (
    DIGEST_BYTES,
    MAX_BLOCK_DIGESTS,
    SALT_BYTES,
    BlockDigests,
)
from kvferry.core.messages import RankPayload
from kvferry.core.security import KEY_BYTES, Proof, ticket_proof
from kvferry.core.side_channel_messages import GENERATION_LIMIT

MAX_TICKET_PAGES = 1 << 20
"""The most page ids in one ticket."""
MAX_PAGE = 1 << 40
"""The highest page id."""
MAX_TOKENS = 1 << 32
"""The most tokens of one request."""
MAX_TEXT = 256
"""The longest text in a ticket, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketFields:
    """What a producer says in its ticket for one request, and a consumer reads there.

    Attributes:
        engine, incarnation: id of the producer engine, and which start of it made the ticket.
        request: the producer's id of the request; for logs only.
        host, port: the address of the producer's side channel; where there is a proof, as the
            producer wrote it, whatever a router says (see ``Ticket.routed``).
        hold: stands for the pages in the producer's slot tables.
        pages: for each group of the producer, page ids in the sequence of the request's blocks; 0
            is a hole, a block without a page.
        first_index: for each group, the request's block index of the first entry of ``pages``.
        tokens: how many tokens the pages cover; a state page holds the state after all of them.
        digest: of everything that the content of the pages depends on (``prompt_digest``).
        computed: whether the pages were complete when the ticket was made, so that the slot word
            need not be read before them.
        tp_size: the producer's tensor-parallel size, which is compared with the handshake.
        key: the public key of the side channel, 32 bytes; empty if it is not encrypted.
        blocks: in a conversation's ticket, digests to find the tokens that the next turn shares.
        missing: for each group, how many of its first tokens the first page lacks; empty if none
            lacks any. See ``planner.build_copies.Pages``.
        weights: version of the weights that the pages were computed with; empty if not known.
    """

    engine: str
    incarnation: int
    request: str
    host: str
    port: int
    hold: Hold
    pages: tuple[tuple[int, ...], ...]
    first_index: tuple[int, ...]
    tokens: int
    digest: bytes
    computed: bool
    tp_size: int = 1
    key: bytes = b""
    blocks: BlockDigests | None = None
    missing: tuple[int, ...] = ()
    weights: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket(TicketFields):
    """What a consumer needs to know to load one request's pages from one producer engine.

    Attributes:
        routed: (host, port) as a router gave it, tried if ``host`` and ``port`` do not answer;
            ``None`` if it gave none or the same.
        proof: that the producer made the ticket; ``None`` if the producer makes no proofs.

    Raises:
        TicketError: a value is out of bounds, or a page occurs twice in a group.
    """

    routed: tuple[str, int] | None = None
    proof: Proof | None = None

    @property
    def producer(self) -> ProducerName:
        """The name of the engine that made the ticket, if the ticket is genuine."""
        return self.engine, self.incarnation, self.ticket_key

    @property
    def ticket_key(self) -> bytes:
        """The public key that verifies the ticket's proof; empty if the ticket has no proof."""
        return self.proof.key if self.proof is not None else b""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise TicketError(problem)


# Without the key, the first process that claims an engine's id would be taken for that engine.
ProducerName = tuple[str, int, bytes]
"""Engine id, incarnation and ticket key of a producer."""


class PeerKey(NamedTuple):
    """The producer that a ticket names, and where to ask it; fields are those of ``Ticket``."""

    # With both keys, so that failed handshakes for a forged ticket do not delay a genuine one.
    engine: str
    host: str
    port: int
    key: bytes = b""
    routed: tuple[str, int] | None = None
    ticket_key: bytes = b""

    @property
    def addresses(self) -> tuple[PeerKey, ...]:
        """Return the addresses to ask, in order, each as a ``PeerKey`` without ``routed``."""
        if self.routed is None:
            return (self,)
        host, port = self.routed
        return self._replace(routed=None), self._replace(host=host, port=port, routed=None)

    @classmethod
    def of(cls, ticket: Ticket) -> PeerKey:
        """Return the producer that a ticket names."""
        return cls(
            ticket.engine,
            ticket.host,
            ticket.port,
            ticket.key,
            routed=ticket.routed,
            ticket_key=ticket.ticket_key,
        )


def _bounds(ticket: Ticket) -> Iterator[tuple[str, Iterable[int], int, int]]:
    """Yield the name of each kind of number in a ticket, these numbers, and their bounds."""
    texts = {"engine": ticket.engine, "request": ticket.request, "host": ticket.host}
    yield "port", [ticket.port], 1, 65535
    yield "incarnation", [ticket.incarnation], 1, GENERATION_LIMIT - 1
    yield "tp_size", [ticket.tp_size], 1, 1 << 16
    if ticket.routed is not None:
        texts["remote_host"], remote_port = ticket.routed
        yield "remote_port", [remote_port], 1, 65535
    for name, text in texts.items():
        yield f"number of characters of {name}", [len(text)], 1, MAX_TEXT
    yield "number of tokens", [ticket.tokens], 1, MAX_TOKENS
    yield "number of bytes of the digest", [len(ticket.digest)], DIGEST_BYTES, DIGEST_BYTES
    if ticket.key:
        yield "number of bytes of the key", [len(ticket.key)], KEY_BYTES, KEY_BYTES
    if ticket.blocks is not None:
        yield from _chain_bounds(ticket.blocks, ticket.tokens)
    groups = len(ticket.pages)
    yield "number of groups", [groups], 0, MAX_GROUPS
    yield "number of first indices", [len(ticket.first_index)], groups, groups
    yield "first index", ticket.first_index, 0, MAX_TOKENS
    if ticket.missing:
        yield "number of groups with missing tokens", [len(ticket.missing)], groups, groups
    yield "number of missing tokens", ticket.missing, 0, MAX_TOKENS
    yield "number of block ids", [sum(map(len, ticket.pages))], 0, MAX_TICKET_PAGES
    for group, ids in enumerate(ticket.pages):
        if ids:
            yield f"block of group {group}", [min(ids), max(ids)], 0, MAX_PAGE


def _chain_bounds(
    blocks: BlockDigests, tokens: int
) -> Iterator[tuple[str, Iterable[int], int, int]]:
    yield "number of tokens of a block", [blocks.tokens], 1, MAX_TOKENS
    yield "number of bytes of the salt", [len(blocks.salt)], SALT_BYTES, SALT_BYTES
    # From here on, ``blocks.tokens`` is in its bounds.
    yield "rest of the bytes of digests", [len(blocks.digests) % DIGEST_BYTES], 0, 0
    most = min(MAX_BLOCK_DIGESTS, tokens // blocks.tokens)
    yield "number of digests of blocks", [len(blocks)], 0, most


def _problems(ticket: Ticket) -> Iterator[str]:
    """Yield a text for each value out of bounds, and each page that occurs twice."""
    for name, numbers, lowest, highest in _bounds(ticket):
        for number in numbers:
            if not lowest <= number <= highest:
                yield f"the {name} is {number}; {lowest} to {highest} are allowed"
    for group, ids in enumerate(ticket.pages):
        held = [page for page in ids if page != HOLE]
        if len(set(held)) != len(held):
            [(twice, _)] = Counter(held).most_common(1)
            yield f"group {group} names block {twice} more than once"


def page_limits(payloads: Sequence[RankPayload]) -> tuple[int, ...]:
    """Return per group what page ids must stay below on every rank; 0 if no rank has a field."""
    # Visits many fields of every rank: once per handshake, not per ticket.
    limits = [0] * len(payloads[0].layout.groups)
    for first in (some.first for payload in payloads for some in payload.layout.field_sets):
        if first.group < len(limits):
            limits[first.group] = min(limits[first.group] or first.pages, first.pages)
    return tuple(limits)


def check_against(
    ticket: Ticket,
    payloads: Sequence[RankPayload],
    limits: Sequence[int],
    *,
    ticket_key: bytes = b"",
) -> None:
    """Check an untrusted ticket against what its producer published, and ``page_limits`` of that.

    Raises ``TicketError`` as ``check_producer``, or if the number of groups or the tensor-parallel
    size differs, or a slot or page does not exist.
    """
    for payload in payloads:
        check_producer(ticket, payload.incarnation, ticket_key)
    for problem in _handshake_problems(ticket, payloads, limits):
        raise TicketError(problem, reason=TicketReason.MISMATCH)


def check_producer(ticket: Ticket, incarnation: int, ticket_key: bytes) -> None:
    """Raise ``TicketError`` if the engine that answered the handshake did not make a ticket.

    It has another incarnation; or a proof is missing, invalid, by another key, or there although
    the engine publishes no key (an empty ``ticket_key``).
    """
    if ticket.incarnation != incarnation:
        raise TicketError(
            f"the ticket is from another life of engine {ticket.engine!r} (incarnation "
            f"{ticket.incarnation}, now {incarnation}): it was restarted since",
            reason=TicketReason.RESTARTED,
        )
    ticket_proof.check(ticket.proof, ticket_key)


def _handshake_problems(
    ticket: Ticket, payloads: Sequence[RankPayload], limits: Sequence[int]
) -> Iterator[str]:
    tp_size = 1 + max(payload.coordinates.tp for payload in payloads)
    if ticket.tp_size != tp_size:
        yield f"the ticket says tp_size {ticket.tp_size}, the handshake {tp_size}"
    slots = min(payload.slots.nbytes // 8 for payload in payloads)
    if ticket.hold.slot >= slots:
        yield f"the ticket names slot {ticket.hold.slot}; the producer has {slots}"
    if len(ticket.pages) != len(limits):
        yield (
            f"the ticket lists blocks of {len(ticket.pages)} groups; the producer has {len(limits)}"
        )
        return
    for group, (ids, limit) in enumerate(zip(ticket.pages, limits, strict=True)):
        highest = max(ids, default=HOLE)
        if highest >= limit > 0:  # a group without a field on any rank is read by nobody
            yield f"group {group} names block {highest}; the producer has {limit}"
