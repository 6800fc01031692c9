"""kvferry's transfer channel for LMCache beside LMCache's own, over NIXL, by turns.

    build/lmcache/bin/python -W ignore -m benchmarks.lmcache_channel [--quick] [--json FILE]

A process serves a buffer over each channel. This one reads objects from it as LMCache's benchmark
does: it asks until the read is over. Every byte is compared once. Objects are multiples of the 64
KiB to which LMCache advises to align them; ``make lmcache`` makes the environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.harness import NOTHING, Row, Way, by_turns, main, row

ALIGN = 64 << 10
SIZES = {64 << 10: 100, 1 << 20: 32, 10 << 20: 8}
"""The size of an object in bytes, and how many objects a read has."""
CHANNELS = {
    "theirs": ("nixl", ""),
    "nixl": ("kvferry", "nixl"),
    "loopback": ("kvferry", "loopback"),
}
"""LMCache's type of a channel, and kvferry's driver. Not ucx: NIXL has loaded a UCX of its own."""
NBYTES = max(size * count for size, count in SIZES.items())


class Contexts:
    """A context of each channel over one buffer, and the ports at which they listen."""

    def __init__(self, memory: np.ndarray) -> None:
        from lmcache.v1.distributed.internal_api import L1MemoryDesc
        from lmcache.v1.distributed.transfer_channel.factory import create_transfer_channel_context

        from kvferry.integrations.lmcache import configure
        from tests.free_port import free_port

        described = L1MemoryDesc(ptr=memory.ctypes.data, size=NBYTES, align_bytes=ALIGN)
        self.made, self.urls = {}, {}
        for name, (kind, driver) in CHANNELS.items():
            if driver:
                configure({"driver": driver})
            self.urls[name] = url = f"127.0.0.1:{free_port()}"
            self.made[name] = create_transfer_channel_context(kind, described, url, url)


def aligned() -> np.ndarray:
    """Return zeroed memory that begins at a multiple of ``ALIGN``."""
    memory = np.zeros(NBYTES + ALIGN, np.uint8)
    return memory[-memory.ctypes.data % ALIGN :][:NBYTES]


def content() -> np.ndarray:
    """Return what the server's buffer has."""
    return np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)


def serve(pipe: Connection) -> None:
    """Serve until the pipe closes."""
    memory = aligned()
    memory[:] = content()
    pipe.send(Contexts(memory).urls)
    pipe.poll(None)


def measure(chosen: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each size, over NIXL and over loopback."""
    if not importlib.util.find_spec("lmcache"):
        raise SystemExit(NOTHING)
    from lmcache.v1.distributed.transfer_channel import TransferChannelAddress

    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    memory = aligned()
    contexts, urls, expected = Contexts(memory).made, pipe.recv(), content()
    clients = {name: contexts[name].get_transfer_channel_client(urls[name]) for name in CHANNELS}

    def way(name: str, size: int, count: int) -> Way:
        # As LMCache's benchmark does: objects that lie elsewhere in the peer's memory.
        places = np.random.default_rng(size).permutation(NBYTES // size)[:count].tolist()
        local = [TransferChannelAddress(offset=n * size, size=size) for n in range(count)]
        remote = [TransferChannelAddress(offset=n * size, size=size) for n in places]
        client = clients[name]

        def read() -> list[float]:
            start = time.perf_counter()
            task = client.submit_read(local, remote)
            while not (found := client.query_read_status(task)).is_finished():
                pass
            seconds = time.perf_counter() - start
            if not all(found.succeeded_mask):
                raise SystemExit(f"{name} has failed to read")
            return [seconds]

        memory[:] = 0
        read()
        wanted = expected.reshape(-1, size)[places].ravel()
        if not np.array_equal(memory[: size * count], wanted):
            raise SystemExit(f"{name} has read other bytes")
        return read

    for size, count in SIZES.items():
        ways = [way(name, size, count) for name in CHANNELS]
        found = by_turns(ways, 3 if chosen.quick else 200, 60.0)[:, :, 0]
        case = f"{count} objects of {size >> 10:,} KiB"
        for which, name in enumerate(CHANNELS):
            if which:
                speed = size * count / float(np.median(found[which]))
                yield row(
                    "LMCache's transfer channel",
                    f"{case}, {name}",
                    "kvferry's time of LMCache's own NIXL channel's",
                    found[which],
                    found[0],
                    unit="GB/s",
                    measured=speed,
                    target="≤ 1.0" if name == "nixl" else None,
                )
    pipe.close()
    server.terminate()


if __name__ == "__main__":
    main(measure, __doc__)
