"""Follow the rooms of producers, for the scheduler half of a consumer engine.

A room names a request that a router sends to both engines at once. ``RoomFollower`` asks the
producer about it until the ticket has come or there will be none.

A request may name a producer that is not there, or a room that never opens. So where a limit is
reached, the host goes short of which most requests or engines wait in vain.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable

from kvferry.core.directory.room_questions import FollowedProducer, FollowedRequest, RoomInbox
from kvferry.core.errors import DeadlineError, HandshakeError, KVFerryError, kept
from kvferry.core.lifecycle.rooms import RoomId
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.options import EndpointOptions
from kvferry.core.side_channel.sockets import port_at
from kvferry.core.side_channel_messages import RoomNews

MAX_PRODUCERS = 1 << 8
"""The most producers whose rooms are followed at once."""
MAX_AT_HOST = MAX_PRODUCERS // 2
"""The most of these at one host."""
MAX_REQUESTS = 1 << 10
"""The most requests whose rooms are followed at once."""


class RoomFollower:
    """Follow rooms of producers. No method blocks. Used by one thread only.

    A room that its producer does not know fails after ``load_timeout``, as does one that has not
    changed for that time after its first part; rooms of a silent producer after
    ``handshake_timeout``.
    """

    def __init__(
        self, options: EndpointOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._inbox = RoomInbox(clock)
        self._lock = self._inbox.lock
        self._producers: dict[PeerKey, FollowedProducer] = {}
        self._requests: dict[Hashable, FollowedRequest] = {}
        self._due = math.inf
        """No request is late before this time."""

    @property
    def pending(self) -> bool:
        """Return whether a request has news that ``news`` has not returned."""
        self._fail_late()
        return bool(self._inbox.changed)

    def follow(self, request: Hashable, room: RoomId, producer: PeerKey) -> None:
        """Follow a request's room until ``end``; raise ``ValueError`` if it follows one already."""
        if request in self._requests:
            raise ValueError(f"request {request!r} follows a room already: call end() first")
        made = FollowedRequest(id=request, room=room, key=producer, since=self._clock())
        with self._lock:
            try:
                self._followed(producer).enter(made)
            except HandshakeError as exc:
                self._inbox.fail([made], kept(exc))
            self._due = min(self._due, self._late_at(made))
            self._requests[request] = made

    def news(self, request: Hashable) -> RoomNews | KVFerryError | None:
        """Return what is new of a request's room, or why it is not followed; else ``None``."""
        self._fail_late()
        if request not in self._inbox.changed:
            return None
        followed = self._requests[request]
        with self._lock:
            news = followed.news
            followed.news = None
            if followed.error is None:
                self._inbox.changed.discard(request)
            self._due = min(self._due, self._late_at(followed))
            return news or followed.error

    def end(self, request: Hashable) -> None:
        """Follow a request's room no more; ignored if it follows none."""
        followed = self._requests.pop(request, None)
        if followed is not None:
            with self._lock:
                self._inbox.changed.discard(request)
                if followed.producer is not None:
                    del followed.producer.requests[request]

    def close(self) -> None:
        """Follow nothing any more; return at once."""
        with self._lock:
            producers = list(self._producers.values())
            self._producers.clear()
        for producer in producers:
            producer.end()

    # With the lock held.

    def _late_at(self, request: FollowedRequest) -> float:
        """Return when a request is late if nothing is heard of its room."""
        if request.is_over or request.news is not None:
            return math.inf
        if not request.version:
            return request.since + self._options.load_timeout
        return request.changed + self._options.load_timeout if request.has_part else math.inf

    def _fail_late(self) -> None:
        now = self._clock()
        if now < self._due:
            return
        self._due = math.inf
        seconds = self._options.load_timeout
        with self._lock:
            for request in self._requests.values():
                late_at = self._late_at(request)
                if late_at > now:
                    self._due = min(self._due, late_at)
                else:
                    why = _stalled(seconds) if request.version else _unknown(seconds)
                    self._inbox.fail([request], why)

    def _followed(self, key: PeerKey) -> FollowedProducer:
        """Return what follows a producer's rooms; raise ``HandshakeError`` if nothing can."""
        if len(self._requests) >= MAX_REQUESTS:
            self._make_way_for_request()
        if key not in self._producers:
            self._make_way_for_producer(key)
            made = FollowedProducer(key, self._options, self._inbox, self._forget)
            self._producers[key] = made
        return self._producers[key]

    def _make_way_for_request(self) -> None:
        """Fail one request if there are too many; raise ``HandshakeError`` if none may go."""
        # The one fails that has waited longest for a room that its producer does not know, at the
        # host with most of them.
        followed = [each for each in self._requests.values() if each.error is None]
        if len(followed) < MAX_REQUESTS:
            return
        unknown = defaultdict[str, list[FollowedRequest]](list)
        for request in followed:
            if not request.version:
                unknown[request.key.host].append(request)
        if not unknown:
            raise HandshakeError(
                f"{MAX_REQUESTS} requests wait here while they are computed by prefill engines, "
                "which is the most: use more decode engines"
            )
        oldest = max(unknown.values(), key=len)[0]
        self._inbox.fail([oldest], _displaced(oldest.key, self._clock() - oldest.since))

    def _make_way_for_producer(self, key: PeerKey) -> None:
        """Let one producer go if there are too many, or raise ``HandshakeError``."""
        # An idle one goes; else, of the host with most, the oldest of those that never answered.
        at_host = [each for each in self._producers if each.host == key.host]
        is_crowded = len(at_host) >= MAX_AT_HOST
        if not is_crowded and len(self._producers) < MAX_PRODUCERS:
            return
        among = at_host if is_crowded else list(self._producers)
        idle = [each for each in among if not self._producers[each].requests]
        silent = [each for each in among if not self._inbox.answered.get(each)]
        if not idle and not silent:
            where = f" at {key.host}" if is_crowded else ""
            raise HandshakeError(
                f"requests of {len(among)} prefill engines{where} wait here, which is the most: "
                "use more decode engines"
            )
        at = Counter(each.host for each in silent)
        silent.sort(key=lambda each: -at[each.host])
        producer = self._producers.pop((idle or silent)[0])
        self._inbox.fail(producer.requests.values(), _crowded_out(producer.key))
        producer.end()

    def _forget(self, producer: FollowedProducer) -> None:
        if self._producers.get(producer.key) is producer:
            del self._producers[producer.key]


def _crowded_out(key: PeerKey) -> HandshakeError:
    return HandshakeError(
        f"engine {key.engine!r} at {port_at(key.host, key.port)} has never answered, and makes way "
        f"for another: at most {MAX_PRODUCERS} prefill engines, {MAX_AT_HOST} of them at one host, "
        "are asked for requests that wait here. Look whether a side channel of kvferry listens "
        "wherever the router's remote_bootstrap_addr says, and with that remote_engine_id"
    )


def _displaced(key: PeerKey, seconds: float) -> DeadlineError:
    return DeadlineError(
        f"engine {key.engine!r} at {port_at(key.host, key.port)} has said nothing of a request "
        f"with this transfer_id and prompt for {seconds:.1f} s, and {MAX_REQUESTS} requests wait "
        "here, which is the most: look whether the router sends both legs of each request, or use "
        "more decode engines"
    )


def _stalled(seconds: float) -> DeadlineError:
    return DeadlineError(
        f"the prefill engine has computed nothing of this request for {seconds:g} s "
        "(load_timeout), though its side channel answers: look whether it hangs or has preempted "
        "the request, or set a longer load_timeout"
    )


def _unknown(seconds: float) -> DeadlineError:
    return DeadlineError(
        f"no request with this transfer_id and prompt came to the prefill engine within "
        f"{seconds:g} s (load_timeout): look whether the router sends the same prompt (text, "
        "media, adapter, cache_salt) to that engine, or set a longer load_timeout on the engine "
        "that decodes"
    )
