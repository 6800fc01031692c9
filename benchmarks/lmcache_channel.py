"""kvferry's transfer channel for LMCache beside LMCache's own, over NIXL, by turns.

    build/lmcache/bin/python -W ignore -m benchmarks.lmcache_channel [--quick] [--json FILE]

Each channel has two processes. One reads objects from the other as LMCache's benchmark does: it
asks until the read is over. The memory is allocated by LMCache, and every byte is compared once.
Objects are multiples of the 64 KiB to which LMCache advises to align them; ``make lmcache`` makes
the environment.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec

import numpy as np

from benchmarks.harness import Row, WorkerProcess, by_turns, main, nothing, row, say

ALIGN = 64 << 10
SIZES = {64 << 10: 100, 1 << 20: 32, 10 << 20: 8}
"""The size of an object in bytes, and how many objects a read has."""
NBYTES = max(size * count for size, count in SIZES.items())
CHANNELS: dict[str, tuple[str, dict[str, object]]] = {
    "LMCache's nixl": ("nixl", {}),
    "nixl": ("kvferry", {"driver": "nixl", "driver_options": {"progress_milliseconds": 100}}),
    "ucx": ("kvferry", {"driver": "ucx"}),
    "loopback": ("kvferry", {"driver": "loopback"}),
}
"""LMCache's type of a channel, and kvferry's settings, as docs/lmcache.md advises."""
READS = 20
"""How many reads of a channel follow each other; the median counts."""


def content() -> np.ndarray:
    """Return what a serving node has."""
    return np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)


class Node:
    """A context of a channel over memory, both as LMCache makes them."""

    def __init__(self, kind: str, settings: dict[str, object], *, serves: bool) -> None:
        from lmcache.v1.distributed.config import L1MemoryManagerConfig
        from lmcache.v1.distributed.memory_manager import L1MemoryManager
        from lmcache.v1.distributed.transfer_channel.factory import create_transfer_channel_context

        from kvferry.integrations.lmcache import configure
        from tests.free_port import free_port

        configure(settings)
        manager = L1MemoryManager(
            L1MemoryManagerConfig(
                size_in_bytes=NBYTES, use_lazy=False, init_size_in_bytes=NBYTES, align_bytes=ALIGN
            )
        )
        described = manager.get_l1_memory_desc()
        array = (ctypes.c_uint8 * NBYTES).from_address(described.ptr)
        self._owner, self.memory = manager, np.ctypeslib.as_array(array)
        self.memory[:] = content() if serves else 0
        self._url = f"127.0.0.1:{free_port()}"
        self._context = create_transfer_channel_context(
            kind,
            described,
            listen_url=self._url,
            advertise_url=self._url,
        )

    def url(self) -> str:
        """Return where it listens."""
        return self._url

    def connect(self, url: str) -> None:
        """Connect to another."""
        self._client = self._context.get_transfer_channel_client(url)

    def read(self, size: int) -> list[float]:
        """Return the median of the seconds of some reads, of objects from all over the peer."""
        from lmcache.v1.distributed.transfer_channel import TransferChannelAddress as Address

        places = np.random.default_rng(size).permutation(NBYTES // size)[: SIZES[size]].tolist()
        local = [Address(offset=n * size, size=size) for n in range(len(places))]
        remote = [Address(offset=n * size, size=size) for n in places]
        seconds = []
        for _ in range(READS):
            start = time.perf_counter()
            task = self._client.submit_read(local, remote)
            while not (found := self._client.query_read_status(task)).is_finished():
                pass
            seconds.append(time.perf_counter() - start)
            if not all(found.succeeded_mask):
                raise SystemExit("a read has failed")
        return [float(np.median(seconds))]

    def check(self, size: int) -> None:
        """Read, and end the benchmark if a byte is another."""
        places = np.random.default_rng(size).permutation(NBYTES // size)[: SIZES[size]]
        self.memory[:] = 0
        self.read(size)
        wanted = content()[: NBYTES // size * size].reshape(-1, size)[places].ravel()
        if not np.array_equal(self.memory[: len(wanted)], wanted):
            raise SystemExit("other bytes were read")


def measure(chosen: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each size and driver."""
    if not find_spec("lmcache"):
        nothing("LMCache is not here: make lmcache makes an environment with it")
    with ExitStack() as stack:
        readers = []
        for name, (kind, settings) in CHANNELS.items():
            say(f"starting two processes: {name}")
            server, reader = (
                stack.enter_context(WorkerProcess(partial(Node, kind, settings, serves=serves)))
                for serves in (True, False)
            )
            reader.ask("connect", server.ask("url"))
            readers.append(reader)
        for size, count in SIZES.items():
            for reader in readers:
                reader.ask("check", size)
            ways = [reader.way("read", size) for reader in readers]
            found = by_turns(ways, 3 if chosen.quick else 60, 90.0)[:, :, 0]
            for which, name in list(enumerate(CHANNELS))[1:]:
                yield row(
                    "LMCache's transfer channel",
                    f"{count} objects of {size >> 10:,} KiB, {name}",
                    "kvferry's time of LMCache's own NIXL channel's",
                    found[which],
                    found[0],
                    unit="GB/s",
                    measured=size * count / float(np.median(found[which])),
                    target="≤ 1.0" if name == "nixl" else None,
                )


if __name__ == "__main__":
    main(measure, __doc__)
