"""Mooncake's engine, one for each process. No other module imports mooncake.

Transports share it, because an engine takes half a second to end, and because several engines in a
process would each have threads and sockets for the same memory.
"""

from __future__ import annotations

import os
from collections import Counter

from kvferry.core.errors import DriverError, TransportError
from kvferry.core.memory import Region

_NO_BATCH = (0, -1, (1 << 64) - 1)
"""What the engine returns instead of a batch when it refuses; asking about one of them crashes."""

_MAX_RUNNING = 512  # pieces under way with one peer. The engine queues 1024 and fails the next one


class Engine:
    """Mooncake's ``TransferEngine`` over tcp, at an address of this machine.

    The engine refuses memory that overlaps a registration. So overlapping regions are registered as
    one span, from the first to the last byte of them.

    Raises:
        DriverError: mooncake is not installed, or does not start there.
    """

    def __init__(self, host: str) -> None:
        # Its log goes to stderr, a line for every connection, unless its user wants it.
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as exc:
            raise DriverError(
                f"mooncake does not load: {exc}. On Debian: apt-get install "
                "libibverbs1 librdmacm1 libnuma1; elsewhere the libraries of these names"
            ) from exc
        self._engine = TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if code:
            raise DriverError(
                f"mooncake does not start on {host!r}, its code is {code}: set "
                "driver_options: host to an address of this machine"
            )
        self.segment = f"{host}:{self._engine.get_rpc_port()}"
        self._running: dict[int, str] = {}
        self._load: Counter[str] = Counter()
        self._users: Counter[Region] = Counter()
        self._spans: set[Region] = set()

    def register(self, region: Region) -> None:
        """Make a region reachable, until as many ``deregister``, or raise ``TransportError``.

        Regions that it overlaps, without lying within one, cannot be reached for a moment.
        """
        if not self._users[region] and not any(span.contains(region) for span in self._spans):
            touched = {span for span in self._spans if _overlap(span, region)}
            self._replace(touched, _hull([region, *touched]))
        self._users[region] += 1

    def deregister(self, region: Region) -> None:
        """Undo one ``register``; the span goes with the last region in it."""
        self._users[region] -= 1
        if self._users[region]:
            return
        del self._users[region]
        for span in [span for span in self._spans if span.contains(region)]:
            if not any(span.contains(user) for user in self._users):
                self._remove(span)

    def meet(self, segment: str) -> bool:
        """Make first contact with another engine, and return whether it answers.

        This waits for the answer. The first ``read`` would wait for it otherwise, within ``poll``.
        """
        return self._engine.batch_transfer_async_read(segment, [], [], []) not in _NO_BATCH

    def has_room(self, segment: str) -> bool:
        """Return whether one more piece may be begun with another engine."""
        return self._load[segment] < _MAX_RUNNING

    def read(self, segment: str, local: int, remote: int, nbytes: int) -> int | None:
        """Begin to read a piece from another engine, by its segment and first bytes.

        Returns: The batch to ask ``ended`` about; ``None`` if the engine refuses.
        """
        batch = self._engine.batch_transfer_async_read(segment, [local], [remote], [nbytes])
        if batch in _NO_BATCH:
            return None
        self._running[batch] = segment
        self._load[segment] += 1
        return int(batch)

    def ended(self, batch: int) -> bool | None:
        """Return, once, whether a piece has ended well; ``None`` while it has not ended.

        A batch has one piece only: of the first one, the engine answers this without waiting.
        """
        code = self._engine.transfer_check_status(batch)
        if code in (0, -2):
            return None
        self._load[self._running.pop(batch)] -= 1
        return bool(code == 1)

    def _add(self, span: Region) -> None:
        code = self._engine.register_memory(span.address, span.nbytes)
        if code:
            raise TransportError(f"mooncake does not register {span}, its code is {code}")
        self._spans.add(span)

    def _replace(self, old: set[Region], new: Region) -> None:
        for span in old:
            self._remove(span)
        try:
            self._add(new)
        except TransportError:
            for span in old:
                self._add(span)
            raise

    def _remove(self, span: Region) -> None:
        self._engine.unregister_memory(span.address)
        self._spans.discard(span)


_engines: dict[tuple[int, str], Engine] = {}


def shared(host: str) -> Engine:
    """Return the engine of this process on a host address; ``DriverError`` if there can be none."""
    # a forked child has none of the parent's threads.
    key = (os.getpid(), host)
    if key not in _engines:
        _engines[key] = Engine(host)
    return _engines[key]


def _overlap(one: Region, other: Region) -> bool:
    return one.address < other.end and other.address < one.end


def _hull(regions: list[Region]) -> Region:
    first = min(region.address for region in regions)
    return Region(address=first, nbytes=max(region.end for region in regions) - first)
