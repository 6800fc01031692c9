"""Handshakes with producers: side by side, each on a thread of its own, and not too often."""

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
"""How many run at once: a client chooses whom a ticket names, and mute hosts must not make the
others wait. Each may have a reply of ``wire.MAX_SHORT_REPLY_BYTES`` on its way, which is in memory
two or three times while it is passed on."""
FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 5.0
"""Between a handshake that failed and the next one with the same engine, doubling."""
MAX_REMEMBERED = 1 << 12
"""Engines whose handshakes failed."""


class PeerKey(NamedTuple):
    """Where a ticket says that its producer is."""

    engine: str
    host: str
    port: int
    key: bytes = b""
    """Public, of the side channel: a forged ticket must not make a genuine one wait for it."""
    routed: tuple[str, int] | None = None
    """Host and port that are asked where those do not answer."""
    ticket_key: bytes = b""
    """By which the ticket is proved; empty without a proof."""

    @property
    def places(self) -> tuple[PeerKey, ...]:
        """The places to ask, one after the other."""
        if self.routed is None:
            return (self,)
        host, port = self.routed
        return self._replace(routed=None), self._replace(host=host, port=port, routed=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """What a handshake gave: the producer's ranks, and this rank's plan of them.

    Attributes:
        overridden: differences that an operator has judged to mean nothing.
        begun: when it was, by ``time.perf_counter``.
        place: which of the places answered; ``None`` for the only one.
        ticket_key: the key by which the producer proves its tickets; empty if it proves none.
        numeric: the address at which the side channel was found.
        memory: how many bytes it takes, by what takes them (``keeping.memory_of``).
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
    """Used by the endpoint's thread only, but for the handshakes themselves.

    A failure is not remembered, but it makes the next handshake with that engine wait a little:
    an engine that is starting again is used again soon, and one that is gone costs little.

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
        """How many are asked for and not over."""
        return len(self._asked)

    def ask(self, key: PeerKey, heard: Heard) -> None:
        """Shake hands, once for all who ask meanwhile, and tell them how it went."""
        asked = self._asked.setdefault(key, [])
        asked.append(heard)
        if len(asked) == 1:
            backoff = self._backoffs.get(key)
            self._delayed[key] = backoff.until if backoff is not None else 0.0
            self.progress(self._clock())

    def progress(self, now: float) -> None:
        """Start what is due."""
        for key in [key for key, due in self._delayed.items() if due <= now]:
            del self._delayed[key]
            self._queued.append(key)
        while self._queued and self._running < MAX_HANDSHAKES:
            self._start(self._take())

    def failed(self, key: PeerKey) -> None:
        """The engine could not be reached, or was lost: the next handshake waits longer."""
        now = self._clock()
        if key not in self._backoffs and len(self._backoffs) >= MAX_REMEMBERED:
            del self._backoffs[next(iter(self._backoffs))]
        backoff = self._backoffs.setdefault(key, _Backoff())
        if now >= backoff.until:
            seconds = FIRST_BACKOFF_SECONDS * 2.0 ** min(backoff.failures, 16)
            backoff.failures += 1
            backoff.until = now + min(seconds, LONGEST_BACKOFF_SECONDS)

    def succeeded(self, key: PeerKey) -> None:
        """The engine is connected."""
        self._backoffs.pop(key, None)

    def close(self) -> None:
        """Start no more; wait for none."""
        self._queued.clear()
        self._delayed.clear()

    def _take(self) -> PeerKey:
        """By turns who has failed least and who has waited longest.

        Those that never answer must not make others wait that might; and names that nobody has
        asked for yet, of which tickets may bring any number, must not make others wait for ever.
        """
        oldest, self._is_turn_of_oldest = self._is_turn_of_oldest, not self._is_turn_of_oldest
        key = self._queued[0] if oldest else min(self._queued, key=self._failures)
        self._queued.remove(key)
        return key

    def _failures(self, key: PeerKey) -> int:
        backoff = self._backoffs.get(key)
        return backoff.failures if backoff is not None else 0

    def _start(self, key: PeerKey) -> None:
        """Daemon threads: a host that never answers must not keep the process from ending."""
        self._running += 1
        name = f"kvferry-handshake-{key.engine[:16]}"
        try:
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
        """On the endpoint's thread again."""
        self._running -= 1
        if isinstance(result, KVFerryError):
            self.failed(key)
        else:
            self._used(result)
        self.progress(self._clock())
        for heard in self._asked.pop(key):
            heard(result)


def _forget_frames(error: BaseException | None) -> None:
    """It is kept until its requests are reported, and its frames have all that was decoded."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class HandshakeWorker:
    """Make handshakes for one rank of an engine; ``perform`` runs on threads of its own.

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
        """Take all ranks of the own engine, and which one this is: the plan needs them all."""
        self._own, self._rank = tuple(own), rank
        self._planner = PlanCache([payload.layout for payload in own], rank)

    def used(self, result: HandshakeResult) -> None:
        """Count a result no more as one that waits to be used."""
        self._reply_limits.used(sum(result.memory.values()))

    def perform(self, key: PeerKey) -> HandshakeResult:
        """On a thread of its own: everything that needs no transport."""
        if not self._own:
            raise HandshakeError("this endpoint has not joined its engine: call join() first")
        begun, options = time.perf_counter(), self._options
        with ExitStack() as turn:
            place, fetched = self._fetch(key, turn)
            info, mine = fetched.info, self._own[self._rank]
            if info.ticket_key:
                load_library()
            agreed = [agree(mine, theirs, options.judgements) for theirs in info.ranks]
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

        All share the handshake's time, so one that is silent leaves some for the next.

        Args:
            key: says where to ask.
            turn: keeps the turn to read the answer, until it is closed.

        Raises:
            HandshakeError: none did; says why not of each.
        """
        deadline = time.monotonic() + self._options.handshake_timeout
        places, failures = list(key.places), list[HandshakeError]()
        while True:
            place, left = places.pop(0), max(deadline - time.monotonic(), 0.0)
            call = self._call(place, left / (1 + len(places)))
            try:
                with ExitStack() as attempt:
                    fetched = attempt.enter_context(
                        fetching(call, place.engine, self._reply_limits)
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

    def _call(self, place: PeerKey, timeout: float) -> Dialer:
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
    """Estimate what keeping a producer takes.

    Args:
        payloads: of its ranks, and ``sizes``: in bytes, as they came.
        plan: of it.

    Returns:
        Bytes, by the ``id`` of what takes them: for as long as the producer is kept nothing else
        has that.
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
    """What no other producer shares."""
    facts = sum(len(name) + len(value) for name, value in payload.agreement.items())
    return (
        RANK_BYTES
        + REGION_BYTES * len(payload.layout.regions)
        + FACT_BYTES * len(payload.agreement)
        + facts
        + len(payload.address)
    )
