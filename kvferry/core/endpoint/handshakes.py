"""Handshakes with producers: concurrent, each on a thread of its own, with pauses after failures.

``Handshakes`` starts them, on the endpoint's thread. ``HandshakeWorker`` performs one: it fetches
what a producer publishes from its side channel, or takes it from the replies that the engine's
scheduler half relays, checks that the two engines are compatible, and plans the reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.endpoint.peer_key import PeerKey
from kvferry.core.endpoint.relayed_replies import EncodedReply, RelayedReplies
from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import HandshakeError, KVFerryError, PlanError
from kvferry.core.handshake import agree
from kvferry.core.handshake.client import EngineReply, fetching
from kvferry.core.handshake.compatibility import answer_info, differing_software
from kvferry.core.handshake.dialer import Dialer
from kvferry.core.handshake.exchange import explained
from kvferry.core.handshake.reply_limits import ReplyLimits
from kvferry.core.messages import RankPayload
from kvferry.core.planner.plan import Plan
from kvferry.core.planner.plan_cache import PlanCache
from kvferry.core.security.proof import load_library

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 64
"""The most handshakes that run at once. The number is high because clients choose which hosts
tickets name, and hosts that never answer must not delay others. It is limited because each
handshake may receive a reply of ``MAX_SHORT_REPLY_BYTES``, which is in memory two or three times
while it is received."""
FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 5.0
"""The pause after a failed handshake with an engine doubles with each failure, from
``FIRST_BACKOFF_SECONDS`` to ``LONGEST_BACKOFF_SECONDS``."""
MAX_REMEMBERED = 1 << 12
"""The most engines whose failures are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """The result of a handshake that succeeded.

    Attributes:
        payloads: what the producer's ranks publish, in rank order.
        plan: how this rank reads from the producer's ranks.
        overridden: a text for each difference between the two engines that the operator allows.
        begun: when the handshake began, by ``time.perf_counter``.
        place: the address that answered, one of ``PeerKey.places``; ``None`` if not recorded.
        ticket_key: the public key that the producer publishes for the proofs of its tickets; empty
            if it publishes none.
        numeric: the IP address of the side channel.
        memory: the objects to keep for the producer: ``id(object)`` to estimated bytes; see
            ``memory_of``.
        watch: the number of the scheduler half's watch of the producer, see ``EncodedReply``;
            ``None`` if this rank must ping the producer itself.
    """

    payloads: tuple[RankPayload, ...]
    plan: Plan
    overridden: tuple[str, ...] = ()
    begun: float = 0.0
    place: PeerKey | None = None
    ticket_key: bytes = b""
    numeric: str = ""
    memory: Mapping[int, int] = field(default_factory=dict)
    watch: int | None = None


DECODED = 5
"""The fields of a decoded payload take at most this many times the bytes of the encoded payload."""
RANK_BYTES, REGION_BYTES, FACT_BYTES, CUT_BYTES = 2000, 200, 200, 100
"""Estimated bytes of memory of, in this order: a payload without its regions, entries of
``agreement`` and fields; a region; an entry; and an entry of a plan's ``StripBatch.cuts``."""

T = TypeVar("T")
"""The result of a handshake: a ``HandshakeResult``, or the reply where it is only passed on."""


@dataclass(slots=True, kw_only=True)
class _Backoff:
    """The pause before the next handshake with a producer, after handshakes that failed.

    Attributes:
        failures: how many pauses the producer has had since it was last connected. Each is longer
            than the last, up to ``LONGEST_BACKOFF_SECONDS``.
        until: when the next handshake may begin.
    """

    failures: int = 0
    until: float = 0.0


class Handshakes(Generic[T]):
    """Start handshakes, at most ``MAX_HANDSHAKES`` at once.

    All callers that ask for a handshake with the same producer share one. After a failure, the next
    handshake with that producer waits. The wait begins short, so that an engine that restarts is
    soon used again, and grows, so that an engine that is gone costs little. Used by the endpoint's
    thread only; the handshakes run on threads of their own.

    Args:
        shake: performs a handshake; called on a thread of its own, may block and may raise.
        post: runs a callable on the endpoint's thread, soon.
        clock: seconds, monotonic.
        used: called with the result of each handshake that succeeded, before the callbacks that
            were passed to ``ask``.
    """

    def __init__(
        self,
        shake: Callable[[PeerKey], T],
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        used: Callable[[T], None] = lambda _: None,
    ) -> None:
        self._used = used
        self._shake = shake
        self._post = post
        self._clock = clock
        self._asked: dict[PeerKey, list[Callable[[T | KVFerryError], None]]] = {}
        self._expected: dict[PeerKey, float] = {}
        """Producer whose reply will be relayed to when the handshake begins without it."""
        self._queued: deque[PeerKey] = deque()
        self._delayed: dict[PeerKey, float] = {}
        self._backoffs: dict[PeerKey, _Backoff] = {}
        self._running = 0
        self._is_turn_of_oldest = False

    def __len__(self) -> int:
        """Return the number of handshakes that were asked for and are not over."""
        return len(self._asked)

    def ask(self, key: PeerKey, heard: Callable[[T | KVFerryError], None]) -> None:
        """Ask for a handshake with a producer, or share one that is waiting or under way already.

        Args:
            key: the producer.
            heard: called once, on the endpoint's thread, with the outcome of the handshake.
        """
        asked = self._asked.setdefault(key, [])
        asked.append(heard)
        if len(asked) == 1:
            backoff = self._backoffs.get(key)
            self._delayed[key] = backoff.until if backoff is not None else 0.0
            self.progress(self._clock())

    def progress(self, now: float) -> None:
        """Start the handshakes whose pause is over, as far as ``MAX_HANDSHAKES`` allows.

        Args:
            now: seconds, on this object's clock.
        """
        for key in [key for key, until in self._expected.items() if until <= now]:
            del self._expected[key]
        due_keys = [key for key, due in self._delayed.items() if due <= now]
        for key in [key for key in due_keys if key not in self._expected]:
            del self._delayed[key]
            self._queued.append(key)
        while self._queued and self._running < MAX_HANDSHAKES:
            self._start(self._take())

    def expect(self, key: PeerKey, until: float) -> None:
        """Delay handshakes with a producer until its reply has been relayed (see ``arrived``).

        Args:
            key: the producer; ignored if too many are expected.
            until: when a handshake begins without the reply, on this object's clock.
        """
        if len(self._expected) < MAX_REMEMBERED:
            self._expected[key] = until

    def arrived(self, key: PeerKey) -> None:
        """Start a handshake that waits for the relayed reply of its producer, if there is one."""
        self._expected.pop(key, None)
        self.progress(self._clock())

    def failed(self, key: PeerKey) -> None:
        """Delay the next handshake with a producer that could not be reached or used."""
        now = self._clock()
        if key not in self._backoffs and len(self._backoffs) >= MAX_REMEMBERED:
            del self._backoffs[next(iter(self._backoffs))]
        backoff = self._backoffs.setdefault(key, _Backoff())
        if now >= backoff.until:
            seconds = FIRST_BACKOFF_SECONDS * 2.0 ** min(backoff.failures, 16)
            backoff.failures += 1
            backoff.until = now + min(seconds, LONGEST_BACKOFF_SECONDS)

    def succeeded(self, key: PeerKey) -> None:
        """Forget the failures of a producer that is connected, so that no pause delays it."""
        self._backoffs.pop(key, None)

    def cancel(self, keys: Set[PeerKey]) -> Set[PeerKey]:
        """Cancel handshakes that have not begun; who asked for them is not called.

        Args:
            keys: the producers.

        Returns:
            Those whose handshake was cancelled.
        """
        cancelled = (self._delayed.keys() | set(self._queued)) & keys
        self._queued = deque(key for key in self._queued if key not in cancelled)
        for key in cancelled:
            self._delayed.pop(key, None)
            del self._asked[key]
        return cancelled

    def close(self) -> None:
        """Start no more handshakes. Return without waiting for the handshakes under way."""
        self._queued.clear()
        self._delayed.clear()

    def _take(self) -> PeerKey:
        """Remove the next producer from the queue and return it.

        Every second call returns the producer with the fewest failures, so that producers that
        never answer do not delay others. The other calls return the producer that has waited
        longest, so that tickets with ever new engine names do not delay it for ever.
        """
        oldest, self._is_turn_of_oldest = self._is_turn_of_oldest, not self._is_turn_of_oldest
        key = self._queued[0] if oldest else min(self._queued, key=self._failures)
        self._queued.remove(key)
        return key

    def _failures(self, key: PeerKey) -> int:
        """Return how many pauses a producer has had since it was last connected."""
        backoff = self._backoffs.get(key)
        return backoff.failures if backoff is not None else 0

    def _start(self, key: PeerKey) -> None:
        """Start a handshake on a new thread; if the thread cannot start, the handshake fails."""
        self._running += 1
        name = f"kvferry-handshake-{key.engine[:16]}"
        try:
            # A daemon: a host that never answers must not keep the process from ending.
            threading.Thread(target=self._run, args=(key,), name=name, daemon=True).start()
        except RuntimeError as exc:
            error = HandshakeError(f"{exc}; {RAISE_LIMITS}")
            self._post(lambda: self._over(key, error))

    def _run(self, key: PeerKey) -> None:
        try:
            result: T | KVFerryError = self._shake(key)
        except Exception as exc:  # noqa: BLE001  whoever waits must hear of any failure
            result = exc if isinstance(exc, KVFerryError) else HandshakeError(f"failed: {exc!r}")
            forget_frames(result)
        self._post(lambda: self._over(key, result))

    def _over(self, key: PeerKey, result: T | KVFerryError) -> None:
        """Process the outcome of a handshake, on the endpoint's thread."""
        self._running -= 1
        if isinstance(result, KVFerryError):
            self.failed(key)
        else:
            self._used(result)
        self.progress(self._clock())
        for heard in self._asked.pop(key):
            heard(result)


def forget_frames(error: BaseException | None) -> None:
    """Remove the tracebacks from an error and its causes.

    The error is kept until the requests that it fails are reported. With the tracebacks, it would
    keep the decoded replies in memory that are local variables of their frames.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class HandshakeWorker:
    """Perform handshakes with producers for one rank of an engine.

    ``perform`` may run on many threads at once; the endpoint's thread calls the other methods.

    Args:
        options: the handshake timeout, this engine's keys and the networks that it may connect to,
            and the differences between engines that are accepted.
        relayed: the replies that the engine's scheduler half has fetched; a producer without one is
            asked here.
    """

    def __init__(self, options: EndpointOptions, relayed: RelayedReplies) -> None:
        self._options = options
        self._relayed = relayed
        self._own: tuple[RankPayload, ...] = ()
        self._rank = 0
        self._planner = PlanCache((), 0)
        self._reply_limits = ReplyLimits()

    def join(self, own: Sequence[RankPayload], rank: int) -> None:
        """Set what this engine publishes. Before this call, ``perform`` refuses every handshake.

        Args:
            own: the payloads of all ranks of this engine, in rank order.
            rank: index of this rank.
        """
        self._planner, self._rank = PlanCache([payload.layout for payload in own], rank), rank
        self._own = tuple(own)  # set last: other threads use the rest once it is set

    def used(self, result: HandshakeResult) -> None:
        """Stop counting the memory of a result. Called when the endpoint's thread receives it.

        While results that wait for that thread take too much memory, no further reply is decoded;
        see ``ReplyLimits``.
        """
        self._reply_limits.used(sum(result.memory.values()))

    def perform(self, key: PeerKey) -> HandshakeResult:
        """Perform one handshake: fetch what a producer publishes, check it, and plan the reads.

        Blocks. The transport is not used; the caller connects to the producer afterwards.

        Args:
            key: the producer.

        Returns:
            What the producer publishes, and the plan of reading from it.

        Raises:
            HandshakeError: the producer cannot be reached, or does not fit this engine.
            KVFerryError: what the producer publishes is invalid, or nothing can be planned from it.
        """
        if not self._own:
            raise HandshakeError("this endpoint has not joined its engine: call join() first")
        begun, options = time.perf_counter(), self._options
        relayed = self._relayed.take(key)
        with ExitStack() as turn:
            if relayed is None:
                place, fetched = self._fetch(key, turn)
            else:
                begun -= relayed.seconds
                place, fetched = relayed.place, self._decode(relayed, turn)
            info, own = fetched.info, self._own[self._rank]
            if info.ticket_key:
                load_library()
            agreed = [agree(own, rank, options.judgements) for rank in info.ranks]
            plan = self._plan(info.ranks)
            memory = memory_of(info.ranks, fetched.sizes, plan)
            self._reply_limits.made(sum(memory.values()))
        return HandshakeResult(
            payloads=info.ranks,
            plan=plan,
            overridden=tuple(dict.fromkeys(text for each in agreed for text in each.overridden)),
            begun=begun,
            place=place,
            ticket_key=info.ticket_key,
            numeric=fetched.numeric,
            memory=memory,
            watch=relayed.watch if relayed is not None else None,
        )

    def _plan(self, ranks: Sequence[RankPayload]) -> Plan:
        """Plan the reads from the ranks of another engine.

        Args:
            ranks: what they publish.

        Raises:
            PlanError: the layouts do not match, or planning would take too long; the message ends
                with the software that differs.
        """
        try:
            return self._planner.plan([payload.layout for payload in ranks])
        except PlanError as exc:
            own = self._own[self._rank]
            told = differing_software(own, ranks[0], self._options.judgements)
            raise PlanError(f"{exc}{told}") from exc

    def _decode(self, relayed: EncodedReply, turn: ExitStack) -> EngineReply:
        """Decode and check a reply that the scheduler half has relayed.

        Args:
            relayed: the reply; untrusted, because it is a peer's.
            turn: receives this handshake's turn to decode a reply (see ``ReplyLimits.turn``).

        Raises:
            HandshakeError: the reply is not valid; the message says where it came from.
        """
        place, timeout = relayed.place, self._options.handshake_timeout
        call = dialer(place, timeout, self._options)
        call.numeric.append(relayed.numeric)
        with explained(place.engine, call):
            turn.enter_context(self._reply_limits.turn(time.monotonic() + timeout))
            info = answer_info(place.engine, relayed.ranks, relayed.ticket_key)
        return EngineReply(info=info, sizes=tuple(map(len, relayed.ranks)), numeric=relayed.numeric)

    def _fetch(self, key: PeerKey, turn: ExitStack) -> tuple[PeerKey, EngineReply]:
        """Ask at the addresses of a producer in turn; see ``first_answer``.

        Args:
            key: the producer.
            turn: receives this handshake's turn to decode a reply (see ``ReplyLimits.turn``). Other
                handshakes wait for their turn until the caller closes this stack.

        Returns:
            The address that answered, and its answer.

        Raises:
            HandshakeError: see ``first_answer``.
        """

        def ask(place: PeerKey, timeout: float, attempt: ExitStack) -> tuple[bytes, EngineReply]:
            call = dialer(place, timeout, self._options)
            reply = attempt.enter_context(fetching(call, place.engine, self._reply_limits))
            return reply.info.ticket_key, reply

        return first_answer(key, self._options.handshake_timeout, ask, turn)


def first_answer(
    key: PeerKey,
    timeout: float,
    ask: Callable[[PeerKey, float, ExitStack], tuple[bytes, T]],
    turn: ExitStack,
) -> tuple[PeerKey, T]:
    """Ask at the addresses of a producer in turn, until one answers with ``key.ticket_key``.

    The last address's answer is returned whatever its key is. The addresses share the timeout, so
    that an address that does not answer leaves time for the next.

    Args:
        key: the producer.
        timeout: seconds for all addresses together.
        ask: asks at one address, within some seconds; returns the ticket key that was answered, and
            the answer. What it enters on the stack is left when the answer is not the one that is
            returned, or when ``turn`` is closed.
        turn: receives what ``ask`` entered for the answer that is returned.

    Returns:
        The address that answered, and its answer.

    Raises:
        HandshakeError: no address answered with that key, and the last one did not answer. The
            message says why, for each address that did not answer.
    """
    deadline = time.monotonic() + timeout
    places, failures = list(key.places), list[HandshakeError]()
    while True:
        place, left = places.pop(0), max(deadline - time.monotonic(), 0.0)
        try:
            with ExitStack() as attempt:
                ticket_key, reply = ask(place, left / (1 + len(places)), attempt)
                # Another key means another engine with the same id: a loopback address, for
                # instance, leads to another engine on each host.
                if ticket_key == key.ticket_key or not places:
                    turn.push(attempt.pop_all())
                    return place, reply
        except HandshakeError as exc:
            failures.append(exc)
            if not places:
                raise type(exc)("; and ".join(map(str, failures))) from exc


def dialer(place: PeerKey, timeout: float, options: EndpointOptions) -> Dialer:
    """Return a ``Dialer`` for the address of a side channel.

    Args:
        place: the address, as one of ``PeerKey.places``.
        timeout: seconds for connecting, and for each answer.
        options: this engine's keys and the networks that it may connect to.
    """
    return Dialer(
        host=place.host,
        port=place.port,
        timeout=timeout,
        context=None,
        access=options.access,
        key=place.key,
    )


def memory_of(
    payloads: Sequence[RankPayload], sizes: Sequence[int], plan: Plan
) -> Mapping[int, int]:
    """Estimate the memory that a producer's payloads and plan take while they are kept.

    Args:
        payloads: the decoded payload of each rank of the producer.
        sizes: the number of bytes of each encoded payload, in the same order.
        plan: the plan of reading from the producer.

    Returns:
        ``id(object)`` to the estimated bytes of the object; valid while the objects live. An object
        that several producers share has the same ``id`` for all, so that it can be counted once.
    """
    memory = {id(plan): sum(map(_own_bytes, payloads))}
    for payload, size in zip(payloads, sizes, strict=True):
        memory[id(payload.layout.fields)] = DECODED * size
    for source in plan.sources:
        for batch in (batch for match in source.matches for batch in match.batches):
            memory[id(batch.local)] = batch.local.nbytes
            memory[id(batch.remote)] = batch.remote.nbytes
            memory[id(plan)] += CUT_BYTES * (1 + len(batch.cuts))
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
