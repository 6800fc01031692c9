"""Handshakes with producers: concurrent, with pauses after failures."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import msgspec

from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.endpoint.relayed_replies import EncodedReply, RelayedReplies
from kvferry.core.errors import HandshakeError, KVFerryError, PlanError, WireError
from kvferry.core.handshake import agree
from kvferry.core.handshake.client import payloads
from kvferry.core.handshake.compatibility import answer_info, differing_software
from kvferry.core.handshake.dialer import Dialer
from kvferry.core.handshake.exchange import explained
from kvferry.core.handshake.poller import Steps, Task, on_thread, start
from kvferry.core.handshake.reply_limits import ReplyLimits
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.messages import RankPayload
from kvferry.core.planner.plan import Plan
from kvferry.core.planner.plan_cache import PlanCache
from kvferry.core.security.proof import load_library
from kvferry.core.side_channel_messages import MAX_PAYLOAD_BYTES, RandomBits, decode

logger = logging.getLogger(__name__)

# High, because clients choose which hosts tickets name, and hosts that never answer must not delay
# others. Limited, because each handshake may receive a reply of ``MAX_SHORT_REPLY_BYTES``, which is
# in memory two or three times meanwhile.
MAX_HANDSHAKES = 64
"""The most handshakes that run at once."""
FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 5.0
"""The pause after a failed handshake doubles with each failure up to this."""
MAX_REMEMBERED = 1 << 12
"""The most engines whose failures are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """The result of a handshake that succeeded.

    Attributes:
        overridden: a text for each difference between the two engines that the operator allows.
        begun: when the handshake began, by ``time.perf_counter``.
        place: the address that answered, one of ``PeerKey.places``; ``None`` if not recorded.
        memory: what to keep for the producer, see ``memory_of``.
        watch: number of the scheduler half's watch (``EncodedReply``); ``None`` if this rank pings.
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
"""Decoded fields take at most this many times the bytes of the encoded payload."""
RANK_BYTES, REGION_BYTES, FACT_BYTES, CUT_BYTES = 2000, 200, 200, 100
"""Estimated bytes of a payload's rest, a region, an ``agreement`` entry, a ``StripBatch`` cut."""

T = TypeVar("T")
"""What a handshake results in: ``HandshakeResult``, or the reply where it is only passed on."""


@dataclass(slots=True, kw_only=True)
class _Backoff:
    """The pause before the next handshake with a producer, after ``failures`` pauses."""

    failures: int = 0
    until: float = 0.0


class Handshakes(Generic[T]):
    """Start handshakes, at most ``MAX_HANDSHAKES`` at once. Used by the endpoint's thread only.

    Callers that ask for the same producer share one. After a failure, the next one with that
    producer waits: briefly at first, since an engine may restart, and longer each time. ``shake``
    returns the steps of a handshake.
    """

    def __init__(
        self,
        shake: Callable[[PeerKey], Steps[T]],
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
        self._running: dict[PeerKey, Task | None] = {}
        self._is_turn_of_oldest = False

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, key: PeerKey, heard: Callable[[T | KVFerryError], None]) -> None:
        """Ask for a handshake, or share one; ``heard`` gets its outcome, on the same thread."""
        asked = self._asked.setdefault(key, [])
        asked.append(heard)
        if len(asked) == 1:
            backoff = self._backoffs.get(key)
            self._delayed[key] = backoff.until if backoff is not None else 0.0
            self.progress(self._clock())

    def progress(self, now: float) -> None:
        """Start the handshakes whose pause is over, as far as ``MAX_HANDSHAKES`` allows."""
        for key in [key for key, until in self._expected.items() if until <= now]:
            del self._expected[key]
        due_keys = [key for key, due in self._delayed.items() if due <= now]
        for key in [key for key in due_keys if key not in self._expected]:
            del self._delayed[key]
            self._queued.append(key)
        while self._queued and len(self._running) < MAX_HANDSHAKES:
            self._start(self._take())

    def expect(self, key: PeerKey, until: float) -> None:
        """Delay handshakes with a producer until ``arrived``, or ``until`` on the clock."""
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
        """Cancel handshakes that have not begun, without calling back; return their producers."""
        cancelled = (self._delayed.keys() | set(self._queued)) & keys
        self._queued = deque(key for key in self._queued if key not in cancelled)
        for key in cancelled:
            self._delayed.pop(key, None)
            del self._asked[key]
        return cancelled

    def close(self) -> None:
        """Start no more handshakes, and end those under way; return at once."""
        self._queued.clear()
        self._delayed.clear()
        for task in self._running.values():
            if task is not None:
                task.cancel()

    def _take(self) -> PeerKey:
        # Every second time the one with the fewest failures, so that producers that never answer do
        # not delay others; otherwise the one that has waited longest, so that tickets with ever new
        # engine names do not delay it for ever.
        oldest, self._is_turn_of_oldest = self._is_turn_of_oldest, not self._is_turn_of_oldest
        key = self._queued[0] if oldest else min(self._queued, key=self._failures)
        self._queued.remove(key)
        return key

    def _failures(self, key: PeerKey) -> int:
        backoff = self._backoffs.get(key)
        return backoff.failures if backoff is not None else 0

    def _start(self, key: PeerKey) -> None:
        self._running[key] = None

        def over(outcome: T | Exception) -> None:
            result = _contained(outcome)
            self._post(lambda: self._over(key, result))

        try:
            self._running[key] = start(self._shake(key), over)
        except HandshakeError as exc:
            over(exc)

    def _over(self, key: PeerKey, result: T | KVFerryError) -> None:
        del self._running[key]
        if isinstance(result, KVFerryError):
            self.failed(key)
        else:
            self._used(result)
        self.progress(self._clock())
        for heard in self._asked.pop(key):
            heard(result)


def _contained(outcome: T | Exception) -> T | KVFerryError:
    if not isinstance(outcome, Exception):
        return outcome
    error = outcome
    if not isinstance(error, KVFerryError):
        error = HandshakeError(f"failed: {outcome!r}")
    forget_frames(error)
    return error


def forget_frames(error: BaseException | None) -> None:
    """Remove the tracebacks from an error and its causes."""
    # The error is kept until the requests that it fails are reported, and the frames' local
    # variables would keep decoded replies in memory.
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class HandshakeWorker:
    """Perform handshakes for one rank; ``perform`` as a task, the rest on the endpoint's thread.

    ``relayed`` are replies from the scheduler half; a producer without one is asked here.
    """

    def __init__(self, options: EndpointOptions, relayed: RelayedReplies) -> None:
        self._options = options
        self._relayed = relayed
        self._own: tuple[RankPayload, ...] = ()
        self._rank = 0
        self._planner = PlanCache((), 0)
        self._reply_limits = ReplyLimits()

    def join(self, own: Sequence[RankPayload], rank: int) -> None:
        """Set what this engine's ranks publish, and this rank's index; before any ``perform``."""
        self._planner, self._rank = PlanCache([payload.layout for payload in own], rank), rank
        self._own = tuple(own)  # set last: other threads use the rest once it is set

    def used(self, result: HandshakeResult) -> None:
        """Stop counting the memory of a result, which the endpoint's thread has received."""
        # While results that wait take too much memory, no further reply is decoded
        # (``ReplyLimits``).
        self._reply_limits.used(sum(result.memory.values()))

    def perform(self, key: PeerKey) -> Steps[HandshakeResult]:
        """Fetch what a producer publishes, check it, and plan the reads.

        Raises:
            HandshakeError: the producer cannot be reached, or does not fit this engine.
            KVFerryError: what it publishes is invalid, or nothing can be planned from it.
        """
        if not self._own:
            raise HandshakeError("this endpoint has not joined its engine: call join() first")
        begun = time.perf_counter()
        reply = self._relayed.take(key)
        with ExitStack() as held:
            if reply is None:
                reply, _ = yield from fetched(key, self._options, self._reply_limits, held)
            else:
                begun -= reply.seconds
                with self._explained(reply):
                    deadline = time.monotonic() + self._options.handshake_timeout
                    yield from self._reply_limits.turn(deadline, held)
            # Not on the thread of all tasks: it takes up to as long as ``work_budget`` allows.
            result = yield from on_thread(
                partial(self._plan, key, reply, begun), "kvferry-handshake"
            )
            self._reply_limits.made(sum(result.memory.values()))
        return result

    def _explained(self, reply: EncodedReply) -> AbstractContextManager[None]:
        call = dialer(reply.place, self._options.handshake_timeout, self._options)
        call.numeric.append(reply.numeric)
        return explained(reply.place.engine, call)

    def _plan(self, key: PeerKey, reply: EncodedReply, begun: float) -> HandshakeResult:
        """Decode and check a reply, which is untrusted, and plan the reads."""
        with self._explained(reply):
            info = answer_info(reply.place.engine, reply.ranks, reply.ticket_key)
        self._relayed.used(key, reply)
        if info.ticket_key:
            load_library()
        own, options = self._own[self._rank], self._options
        agreed = [agree(own, rank, options.judgements) for rank in info.ranks]
        try:
            plan = self._planner.plan([payload.layout for payload in info.ranks])
        except PlanError as exc:
            told = differing_software(own, info.ranks[0], options.judgements)
            raise PlanError(f"{exc}{told}") from exc
        return HandshakeResult(
            payloads=info.ranks,
            plan=plan,
            overridden=tuple(dict.fromkeys(text for each in agreed for text in each.overridden)),
            begun=begun,
            place=reply.place,
            ticket_key=info.ticket_key,
            numeric=reply.numeric,
            memory=memory_of(info.ranks, tuple(map(len, reply.ranks)), plan),
            watch=reply.watch,
        )


def fetched(
    key: PeerKey, options: EndpointOptions, limits: ReplyLimits, held: ExitStack
) -> Steps[tuple[EncodedReply, Incarnation]]:
    """Return a producer's reply, of the first address that has ``key.ticket_key``, and its start.

    The last address's reply is returned whatever its key is; the addresses share the timeout. The
    task has its turn to decode the reply until ``held`` is closed.

    Raises:
        HandshakeError: no address has that key, and the last did not answer; says why each failed.
    """
    deadline = time.monotonic() + options.handshake_timeout
    begun = time.perf_counter()
    places, failures = list(key.places), list[HandshakeError]()
    while True:
        place, left = places.pop(0), max(deadline - time.monotonic(), 0.0)
        call = dialer(place, left / (1 + len(places)), options)
        try:
            with ExitStack() as attempt:
                found = yield from payloads(call, place.engine, limits, attempt)
                with explained(place.engine, call):
                    incarnation = _incarnation_of(found.ranks[0], place.engine)
                # Another key means another engine with the same id: a loopback address, for
                # instance, leads to another engine on each host.
                if found.ticket_key == key.ticket_key or not places:
                    held.push(attempt.pop_all())
                    reply = EncodedReply(
                        place=place,
                        ranks=tuple(found.ranks),
                        ticket_key=found.ticket_key,
                        numeric=call.found,
                        seconds=time.perf_counter() - begun,
                    )
                    return reply, incarnation
        except HandshakeError as exc:
            failures.append(exc)
            if not places:
                raise type(exc)("; and ".join(map(str, failures))) from exc


class _PayloadStart(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a rank's payload before all of it is decoded and checked."""

    engine: str
    incarnation: RandomBits


_decoder = msgspec.msgpack.Decoder(_PayloadStart)


def _incarnation_of(payload: bytes, engine: str) -> Incarnation:
    """Return the incarnation in a payload, which is untrusted, or refuse the payload."""
    try:
        start = decode(_decoder, payload, MAX_PAYLOAD_BYTES, "payload")
    except WireError as exc:
        raise HandshakeError(f"payload of rank 0: {exc}") from exc
    if start.engine != engine:
        raise HandshakeError(f"it answered with the ranks of engine {start.engine!r}")
    return Incarnation(start.incarnation)


def dialer(place: PeerKey, timeout: float, options: EndpointOptions) -> Dialer:
    """Return a ``Dialer`` for an address of ``PeerKey.places``; ``timeout`` is for each step."""
    return Dialer(
        host=place.host,
        port=place.port,
        timeout=timeout,
        access=options.access,
        key=place.key,
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
