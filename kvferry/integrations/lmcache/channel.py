"""The transfer channel of type ``kvferry``: LMCache's interface over a ``RegionExchange``."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel.abstract import (
    TransferChannelClient,
    TransferChannelContext,
    TransferChannelServer,
)
from lmcache.v1.distributed.transfer_channel.api import (
    TransferChannelAddress,
    TransferChannelReadResult,
)

from kvferry import RegionExchange, RegionRead, RemoteRegion, create_transport
from kvferry.core.memory import ADDRESS_LIMIT, I64Array, Region
from kvferry.core.security import SecurityFiles
from kvferry.integrations.lmcache.settings import settings

logger = logging.getLogger(__name__)
NAME = "lmcache"
"""The name by which all these exchanges ask for each other; ``kvferry health`` shows it."""
CLOSE_SECONDS = 10.0
"""How long closing a client waits for its reads to end."""


class KVFerryContext(TransferChannelContext):
    """This process's exchange, and a client for each peer. Thread-safe.

    Peers read ``l1_memory_desc``, and it is read into. Urls are ``host:port``; other options are
    those of LMCache's other channels.
    """

    def __init__(
        self, l1_memory_desc: L1MemoryDesc, listen_url: str, advertise_url: str, **_: object
    ) -> None:
        configured, (host, port) = settings(), _address(listen_url)
        options = configured.options(host)
        self.l1 = l1_memory_desc
        self.advertise_url = advertise_url
        self.exchange = RegionExchange(
            NAME,
            Region(address=l1_memory_desc.ptr, nbytes=l1_memory_desc.size),
            driver=configured.driver,
            transport=create_transport(configured.driver, configured.driver_options),
            host=host,
            port=port,
            options=options,
        )
        self._files = SecurityFiles(configured.curve_peers, options.access, who=NAME)
        self._server = KVFerryServer(self.exchange)
        self._clients: dict[str, KVFerryClient] = {}
        # Clients of processes that have restarted, which LMCache has not removed yet.
        self._superseded: dict[str, list[KVFerryClient]] = {}
        self._lock = threading.Lock()

    def get_transfer_channel_server(self) -> KVFerryServer:
        """Return the server, which listens from the beginning."""
        return self._server

    def get_transfer_channel_client(self, peer_advertise_url: str) -> KVFerryClient:
        """Return the client for the process that listens at a url. Blocks.

        If it is another process than last time, LMCache gets a new client. The old one stays, and
        fails: addresses that the old process has given out mean nothing in the new one.
        """
        remote = self.exchange.connect(*_address(peer_advertise_url))
        with self._lock:
            known = self._clients.get(peer_advertise_url)
            if known is not None and known.remote.incarnation == remote.incarnation:
                self.exchange.disconnect(remote)
                return known
            if known is not None:
                self._superseded.setdefault(peer_advertise_url, []).append(known)
            client = self._clients[peer_advertise_url] = KVFerryClient(self, remote)
            return client

    def remove_transfer_channel_client(self, peer_advertise_url: str) -> None:
        """Close the client for a url: the oldest, if there are several."""
        with self._lock:
            old = self._superseded.get(peer_advertise_url)
            client = old.pop(0) if old else self._clients.pop(peer_advertise_url, None)
        if client is not None:
            client.close()

    def get_transfer_channel_address(
        self, lmcache_addresses: list[tuple[int, int]]
    ) -> list[TransferChannelAddress]:
        """Return (offset, size) pairs as addresses; ``ValueError`` if one leaves the memory."""
        for offset, size in lmcache_addresses:
            if offset < 0 or size < 0 or offset + size > self.l1.size:
                raise ValueError(
                    f"an object of {size} bytes at {offset} is not within the {self.l1.size} "
                    "bytes of registered memory"
                )
        return [TransferChannelAddress(*each) for each in lmcache_addresses]

    def get_num_connected_clients(self) -> int:
        """Return the number of peers that there is a client for."""
        with self._lock:
            return len(self._clients)

    def close(self) -> None:
        """End all reads, also those of peers. ``TransportError`` if bytes may still land."""
        with self._lock:
            self._clients.clear()
            self._superseded.clear()
        self._files.close()
        self.exchange.close()


class KVFerryServer(TransferChannelServer):
    """The side channel of an exchange, which owns it."""

    def __init__(self, exchange: RegionExchange) -> None:
        self.port = exchange.port

    def close(self) -> None:
        """Do nothing: the context closes it with the exchange."""


class KVFerryClient(TransferChannelClient):
    """Reads from one process. Thread-safe."""

    def __init__(self, context: KVFerryContext, remote: RemoteRegion) -> None:
        self.remote = remote
        self._context = context
        self._ids = itertools.count()
        self._tasks: dict[int, tuple[RegionRead, list[bool]]] = {}

    def submit_read(
        self,
        local_addresses: list[TransferChannelAddress],
        remote_addresses: list[TransferChannelAddress],
    ) -> int:
        """Begin to read objects, but none that the peer's memory cannot have, or in another size.

        ``ValueError`` if the lists differ in length, or a local address is outside of the memory.
        """
        local, remote = _table(local_addresses), _table(remote_addresses)
        if local.shape != remote.shape:
            raise ValueError("local_addresses and remote_addresses differ in number")
        if not _within(local, self._context.l1.size).all():
            raise ValueError("a local address is outside of the registered memory")
        good = _within(remote, self.remote.nbytes) & (local[1] == remote[1])
        offsets, nbytes = local[:, good].astype(np.uint64)
        read = self._context.exchange.read(
            self.remote, offsets, remote[0, good].astype(np.uint64), nbytes
        )
        task = next(self._ids)
        self._tasks[task] = read, good.tolist()
        return task

    def query_read_status(self, task_id: int) -> TransferChannelReadResult:
        """Return whether a read is over, and which objects were read."""
        read, good = self._tasks[task_id]
        if not self._context.exchange.poll(read):
            return TransferChannelReadResult(finished=False)
        del self._tasks[task_id]
        if read.error is not None:
            good = [False] * len(good)
        return TransferChannelReadResult(finished=True, succeeded_mask=good)

    def close(self) -> None:
        """End the reads, and wait until no byte of them can land, or say that some may."""
        self._context.exchange.disconnect(self.remote)
        until = time.monotonic() + CLOSE_SECONDS
        for read, _ in self._tasks.values():
            if not self._context.exchange.wait(read, max(0.0, until - time.monotonic())):
                logger.error("a read from %s does not end: bytes may still land", self.remote)
        self._tasks.clear()


def _address(url: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``tcp://host:port``, or raise ``ValueError``."""
    host, _, port = url.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{url!r} is no address of a transfer channel: write host:port")
    return host.strip("[]"), int(port)


def _table(addresses: Sequence[TransferChannelAddress]) -> I64Array:
    """Return offsets and sizes as (2, n); what no 64 bits hold, which a peer may say, as -1."""
    pairs = [(each.offset, each.size) for each in addresses]
    try:
        table = np.array(pairs, np.int64)
    except OverflowError:
        table = np.array(
            [each if 0 <= min(each) <= max(each) < ADDRESS_LIMIT else (-1, -1) for each in pairs]
        )
    return table.reshape(-1, 2).T


def _within(table: I64Array, nbytes: int) -> npt.NDArray[np.bool_]:
    """Return which objects lie in memory of so many bytes."""
    offsets, sizes = table
    inside: npt.NDArray[np.bool_] = (offsets >= 0) & (sizes > 0) & (offsets <= nbytes - sizes)
    return inside
