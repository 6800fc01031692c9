"""Handshakes with producers: side by side, each on a thread of its own, and not too often.

``Handshakes`` decides when, on the endpoint's thread; ``HandshakeWorker`` makes one: it asks a
producer's side channel what the producer publishes, checks that the two engines fit, and plans.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import HandshakeError, KVFerryError
from kvferry.core.handshake import agree
from kvferry.core.handshake.client import EngineReply, fetching
from kvferry.core.handshake.dialer import Dialer
from kvferry.core.handshake.reply_limits import ReplyLimits
from kvferry.core.messages import RankPayload
from kvferry.core.planner.plan import Plan
from kvferry.core.planner.plan_cache import PlanCache
from kvferry.core.security.proof import load_library

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 64
"""How many run at once: a client chooses whom a ticket names, and hosts that never answer must not
make the others wait. Each may have a reply of ``MAX_SHORT_REPLY_BYTES`` on its way, which is in
memory two or three times while it is passed on."""
FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 5.0
"""Pause between a handshake that failed and the next one with the same engine; it doubles."""
MAX_REMEMBERED = 1 << 12
"""Engines whose failures are remembered."""


class PeerKey(NamedTuple):
    """Where a ticket says that its producer is.

    The keys belong to it so that a forged ticket does not make a genuine one wait.

    Attributes:
        engine: the producer's id.
        host, port: of its side channel.
        key: public key of the side channel; empty without encryption.
        routed: host and port that are asked where those do not answer; ``None`` for none.
        ticket_key: the key by which the ticket is proved; empty without a proof.
    """

    engine: str
    host: str
    port: int
    key: bytes = b""
    routed: tuple[str, int] | None = None
    ticket_key: bytes = b""

    @property
    def places(self) -> tuple[PeerKey, ...]:
        """Return the places to ask, one after the other."""
        if self.routed is None:
            return (self,)
        host, port = self.routed
        return self._replace(routed=None), self._replace(host=host, port=port, routed=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """The result of a handshake that succeeded.

    Attributes:
        payloads: what the producer's ranks publish, in rank order.
        plan: how this rank reads from them.
        overridden: differences that an operator has judged to mean nothing.
        begun: when the handshake began, by ``time.perf_counter``.
        place: which of the places answered; ``None`` for the only one.
        ticket_key: the key by which the producer proves its tickets; empty if it proves none.
        numeric: the address of the side channel, without a name to look up.
        memory: the bytes that keeping it takes, by what takes them (``memory_of``).
    """

    payloads: tuple[RankPayload, ...]
    plan: Plan
    overridden: tuple[str, ...] = ()
    begun: float = 0.0
    place: PeerKey | None = None
    ticket_key: bytes = b""
    numeric: str = ""
    memory: Mapping[int, int] = field(default_factory=dict)


DECODED = 5
"""A payload takes so many times as much when it is decoded, at most."""
RANK_BYTES, REGION_BYTES, FACT_BYTES, CUT_BYTES = 2000, 200, 200, 100

Heard = Callable[[HandshakeResult | KVFerryError], None]


@dataclass(slots=True, kw_only=True)
class _Backoff:
    failures: int = 0
    until: float = 0.0


class Handshakes:
    """Start handshakes, once for all who ask for one, and not too many at once.

    A failure is not kept as an answer, but makes the next handshake with that engine wait a little:
    an engine that is starting again is used again soon, and one that is gone costs little. Used by
    the endpoint's thread only; the handshakes run on threads of their own.

    Args:
        shake: the handshake, on a thread of its own; may block, and raise.
        post: runs a callable on the endpoint's thread, soon.
        clock: seconds, monotonic.
        used: told of each handshake that succeeded, before those who asked for it.
    """

    def __init__(
        self,
        shake: Callable[[PeerKey], HandshakeResult],
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        used: Callable[[HandshakeResult], None] = lambda _: None,
    ) -> None:
        self._used = used
        self._shake = shake
        self._post = post
        self._clock = clock
        self._asked: dict[PeerKey, list[Heard]] = {}
        self._queued: deque[PeerKey] = deque()
        self._delayed: dict[PeerKey, float] = {}
        self._backoffs: dict[PeerKey, _Backoff] = {}
        self._running = 0
        self._is_turn_of_oldest = False

    def __len__(self) -> int:
        """Return how many handshakes are asked for and not over."""
        return len(self._asked)

    def ask(self, key: PeerKey, heard: Heard) -> None:
        """Shake hands, once for all who ask meanwhile.

        Args:
            key: with whom.
            heard: called with the result, or with why there is none.
        """
        asked = self._asked.setdefault(key, [])
        asked.append(heard)
        if len(asked) == 1:
            backoff = self._backoffs.get(key)
            self._delayed[key] = backoff.until if backoff is not None else 0.0
            self.progress(self._clock())

    def progress(self, now: float) -> None:
        """Start the handshakes that are due."""
        for key in [key for key, due in self._delayed.items() if due <= now]:
            del self._delayed[key]
            self._queued.append(key)
        while self._queued and self._running < MAX_HANDSHAKES:
            self._start(self._take())

    def failed(self, key: PeerKey) -> None:
        """Make the next handshake with an engine wait longer: it could not be reached or used."""
        now = self._clock()
        if key not in self._backoffs and len(self._backoffs) >= MAX_REMEMBERED:
            del self._backoffs[next(iter(self._backoffs))]
        backoff = self._backoffs.setdefault(key, _Backoff())
        if now >= backoff.until:
            seconds = FIRST_BACKOFF_SECONDS * 2.0 ** min(backoff.failures, 16)
            backoff.failures += 1
            backoff.until = now + min(seconds, LONGEST_BACKOFF_SECONDS)

    def succeeded(self, key: PeerKey) -> None:
        """Let the next handshake with an engine begin at once: it is connected."""
        self._backoffs.pop(key, None)

    def close(self) -> None:
        """Start no more handshakes; wait for none."""
        self._queued.clear()
        self._delayed.clear()

    def _take(self) -> PeerKey:
        """Remove from the queue the engine that is next: by turns the oldest and the most hopeful.

        Engines that never answer must not make others wait, so one turn goes to the engine that has
        failed least; and new names, of which tickets may bring any number, must not make others
        wait for ever, so the other turn goes to the engine that has waited longest.
        """
        oldest, self._is_turn_of_oldest = self._is_turn_of_oldest, not self._is_turn_of_oldest
        key = self._queued[0] if oldest else min(self._queued, key=self._failures)
        self._queued.remove(key)
        return key

    def _failures(self, key: PeerKey) -> int:
        backoff = self._backoffs.get(key)
        return backoff.failures if backoff is not None else 0

    def _start(self, key: PeerKey) -> None:
        """Start a handshake's thread."""
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
            result: HandshakeResult | KVFerryError = self._shake(key)
        except Exception as exc:  # noqa: BLE001  whoever waits must hear of any failure
            result = exc if isinstance(exc, KVFerryError) else HandshakeError(f"failed: {exc!r}")
            _forget_frames(result)
        self._post(lambda: self._over(key, result))

    def _over(self, key: PeerKey, result: HandshakeResult | KVFerryError) -> None:
        """Take the outcome of a handshake, on the endpoint's thread again."""
        self._running -= 1
        if isinstance(result, KVFerryError):
            self.failed(key)
        else:
            self._used(result)
        self.progress(self._clock())
        for heard in self._asked.pop(key):
            heard(result)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error: their frames keep everything that was decoded.

    The error itself is kept until its requests are reported.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class HandshakeWorker:
    """Make handshakes for one rank of an engine.

    ``perform`` runs on many threads at once; all else is used by the endpoint's thread.

    Args:
        options: whom to connect to, how long it may take, and which differences are accepted.
    """

    def __init__(self, options: EndpointOptions) -> None:
        self._options = options
        self._own: tuple[RankPayload, ...] = ()
        self._rank = 0
        self._planner = PlanCache((), 0)
        self._reply_limits = ReplyLimits()

    def join(self, own: Sequence[RankPayload], rank: int) -> None:
        """Make all ranks of the own engine known, and which one this is."""
        self._planner, self._rank = PlanCache([payload.layout for payload in own], rank), rank
        self._own = tuple(own)  # last: with it, other threads begin to use the rest

    def used(self, result: HandshakeResult) -> None:
        """Count a result no more as one that has yet to be used by the endpoint's thread."""
        self._reply_limits.used(sum(result.memory.values()))

    def perform(self, key: PeerKey) -> HandshakeResult:
        """Make one handshake: everything that needs no transport. Blocks.

        Args:
            key: with whom.

        Returns:
            What the producer publishes, and the plan.

        Raises:
            HandshakeError: the producer cannot be reached, or does not fit this engine.
            KVFerryError: any other error of what it publishes.
        """
        if not self._own:
            raise HandshakeError("this endpoint has not joined its engine: call join() first")
        begun, options = time.perf_counter(), self._options
        with ExitStack() as turn:
            place, fetched = self._fetch(key, turn)
            info, own = fetched.info, self._own[self._rank]
            if info.ticket_key:
                load_library()
            agreed = [agree(own, rank, options.judgements) for rank in info.ranks]
            plan = self._planner.plan([payload.layout for payload in info.ranks])
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
        )

    def _fetch(self, key: PeerKey, turn: ExitStack) -> tuple[PeerKey, EngineReply]:
        """Ask at each place until one answers as the engine of the ticket.

        They share the handshake's time, so that one that is silent leaves some for the next.

        Args:
            key: says where to ask.
            turn: keeps the right to have the answer in memory, until it is closed.

        Returns:
            The place that answered, and the answer.

        Raises:
            HandshakeError: none of them did; the message says why, for each.
        """
        deadline = time.monotonic() + self._options.handshake_timeout
        places, failures = list(key.places), list[HandshakeError]()
        while True:
            place, left = places.pop(0), max(deadline - time.monotonic(), 0.0)
            dialer = self._dialer(place, left / (1 + len(places)))
            try:
                with ExitStack() as attempt:
                    fetched = attempt.enter_context(
                        fetching(dialer, place.engine, self._reply_limits)
                    )
                    # Where another key is published, an engine of the same name may listen: every
                    # host has a loopback address of its own.
                    if fetched.info.ticket_key == key.ticket_key or not places:
                        turn.push(attempt.pop_all())
                        return place, fetched
            except HandshakeError as exc:
                failures.append(exc)
                if not places:
                    raise type(exc)("; and ".join(map(str, failures))) from exc

    def _dialer(self, place: PeerKey, timeout: float) -> Dialer:
        return Dialer(
            host=place.host,
            port=place.port,
            timeout=timeout,
            context=None,
            access=self._options.access,
            key=place.key,
        )


def memory_of(
    payloads: Sequence[RankPayload], sizes: Sequence[int], plan: Plan
) -> Mapping[int, int]:
    """Estimate the memory that keeping a producer takes.

    Args:
        payloads: of its ranks.
        sizes: in bytes, of the payloads as they came.
        plan: of reads from it.

    Returns:
        Bytes, by the ``id`` of what takes them, which nothing else has as long as it is kept.
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
    """Return the bytes of a payload that it shares with no other."""
    texts = sum(len(name) + len(value) for name, value in payload.agreement.items())
    return (
        RANK_BYTES
        + REGION_BYTES * len(payload.layout.regions)
        + FACT_BYTES * len(payload.agreement)
        + texts
        + len(payload.address)
    )
